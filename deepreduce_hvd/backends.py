"""Select the code for an array or a parameter: NumPy, PyTorch or TensorFlow.

This module never imports a framework by itself. The type of an array names its framework, and that
framework's module is imported only when such an array arrives. A ``backend`` object has the methods
encode, decode, decode_sum and to_numpy_bytes, as :class:`_NumPy` has.
"""

import functools
import importlib
from typing import NamedTuple

import numpy as np

from deepreduce_hvd import numpy_backend
from deepreduce_hvd.arrays import expect_finite, from_bytes
from deepreduce_hvd.errors import InvalidArgumentError, NativeMissingError


class _Framework(NamedTuple):
    """The modules of this package that support one framework."""

    operators: str | None  #: module with the ``backend`` for its tensors; None if it has no tensors
    adapter: str  #: "module:function" that creates the adapter for its parameters


#: {top-level module of a type: its framework}
_FRAMEWORKS = {
    "torch": _Framework("deepreduce_hvd.torch.ops", "deepreduce_hvd.torch.home:create_adapter"),
    "tensorflow": _Framework(
        "deepreduce_hvd.tensorflow.ops", "deepreduce_hvd.tensorflow.adapter:Adapter"
    ),
    "keras": _Framework(None, "deepreduce_hvd.tensorflow.adapter:Adapter"),
}
#: module whose ``register`` handles models that average gradients without Horovod; PyTorch only
_REGISTRATION = "deepreduce_hvd.torch.registration"


class _NumPy:
    def encode(self, codec, memory, gradient, state, *numbers):
        for name, part in zip(memory.state, state):
            if isinstance(part, np.ndarray) and part.dtype == np.float32:
                expect_finite(name, np.isfinite(part).all())
        return numpy_backend.encode_numpy(codec, memory, gradient, state, *numbers)

    def decode(self, payload, max_elements):
        return numpy_backend.decode_numpy(payload, max_elements)

    def decode_sum(self, payloads, out, scale):
        return numpy_backend.decode_sum_numpy(payloads, out, scale)

    def to_numpy_bytes(self, payload):
        return numpy_backend.check_bytes(payload)


_numpy = _NumPy()


def of(name, array):
    """Return the backend for the argument ``name``, an array.

    Raises:
        InvalidArgumentError: there is none.
    """
    if isinstance(array, np.ndarray):
        return _numpy
    framework = _framework_of(array)
    if framework is None or framework.operators is None:
        known = ", ".join(name for name, one in _FRAMEWORKS.items() if one.operators is not None)
        raise InvalidArgumentError(
            f"{name}: expected a NumPy array or a tensor of {known}, got {type(array).__name__}"
            f"{from_bytes(array) if name == 'payload' else ''}"
        )
    return _operators(framework.operators).backend


@functools.cache  # without it, AutoGraph would warn that it cannot convert an import
def _operators(name):
    return importlib.import_module(name)


def adapter_name(named):
    """Return the name of the function that creates the adapter, for ``pkgutil.resolve_name``.

    Args:
        named: list of (name, parameter or variable of any framework) pairs, at least one.

    Raises:
        InvalidArgumentError: no framework of this package has such parameters, they are of several
            frameworks, or a shape is not known.
    """
    found: dict[
        str, str
    ] = {}  # name of what creates an adapter -> its first parameter, for the error message
    for name, parameter in named:
        framework, got = _framework_of(parameter), f"{type(parameter).__name__} for {name!r}"
        if framework is None:
            raise InvalidArgumentError(
                f"Compressor parameters: expected parameters of {', '.join(_FRAMEWORKS)}, got {got}"
            )
        if not _is_array(parameter):
            raise InvalidArgumentError(
                f"Compressor parameters: expected parameters of known shape, got {got}"
            )
        found.setdefault(framework.adapter, got)
    if len(found) > 1:
        raise InvalidArgumentError(
            "Compressor parameters: expected parameters of one framework, got "
            f"{' and '.join(found.values())}; use one compressor for each"
        )
    return next(iter(found))


def registration():
    """Return the module that registers compressors with models of PyTorch."""
    return importlib.import_module(_REGISTRATION)


def _is_array(parameter):
    """Return whether a parameter has a dtype and a shape that is known."""
    try:
        return hasattr(parameter, "dtype") and all(size is not None for size in parameter.shape)
    # another object; a lazy module of PyTorch before its first use; an unknown rank of TensorFlow
    except (AttributeError, RuntimeError, ValueError):
        return False


def _framework_of(array):
    names = (kind.__module__.partition(".")[0] for kind in type(array).__mro__)
    return next((_FRAMEWORKS[name] for name in names if name in _FRAMEWORKS), None)


def operator_library(directory, name, framework, version):
    """Return the path of the library with the operators for one version of a framework.

    The file name contains the version of the framework. The ABI differs between versions: loading a
    library built for another version would cause undefined symbols or wrong results.

    Args:
        directory: the directory that contains the libraries.
        name: the first part of the file name, without the version.
        framework: the name of the framework, for the error message.
        version: the version of the framework that is installed.

    Raises:
        NativeMissingError: there is no library for this version.
    """
    library = directory / f"{name}-{version}.so"
    if not library.exists():
        others = sorted(
            path.stem.removeprefix(f"{name}-") for path in directory.glob(f"{name}-*.so")
        )
        raise NativeMissingError(
            f"deepreduce_hvd: expected the {framework} operators for version {version}, "
            "got operators for "
            f"{', '.join(others) or 'no version'}; run `python -m deepreduce_hvd --build`"
        )
    return library
