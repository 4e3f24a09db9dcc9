"""Select the backend for an array: NumPy, PyTorch or TensorFlow.

This module never imports a framework by itself. The type of an array names its module, and the
adapter is imported only when such an array arrives. The ``backend`` object of an adapter has the
methods encode, decode, decode_sum and to_numpy_bytes, as :class:`_NumPy` has.
"""

import importlib

import numpy as np

from deepreduce_hvd import numpy_backend
from deepreduce_hvd.errors import InvalidArgumentError, NativeMissingError

#: {top-level module of an array's type: module of this package that has its ``backend``}
_ADAPTERS = {"torch": "deepreduce_hvd.torch.ops", "tensorflow": "deepreduce_hvd.tensorflow.ops"}


class _NumPy:
    def encode(self, *arguments):
        return numpy_backend.encode_numpy(*arguments)

    def decode(self, payload, max_elements):
        return numpy_backend.decode_numpy(payload, max_elements)

    def decode_sum(self, payloads, out, scale):
        return numpy_backend.decode_sum_numpy(payloads, out, scale)

    def to_numpy_bytes(self, payload):
        return numpy_backend.check_bytes(payload)


_numpy = _NumPy()


def of(array):
    """Return the backend for ``array``; raise InvalidArgumentError if there is none."""
    if isinstance(array, np.ndarray):
        return _numpy
    for kind in type(array).__mro__:
        adapter = _ADAPTERS.get(kind.__module__.partition(".")[0])
        if adapter is not None:
            return importlib.import_module(adapter).backend
    raise InvalidArgumentError(
        f"expected a NumPy array or a tensor of {', '.join(_ADAPTERS)}, got {type(array).__name__}"
    )


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
            f"{', '.join(others) or 'no version'}; install the package again with this "
            f"{framework} installed and "
            f"DEEPREDUCE_WITH_{framework.upper()}=1"
        )
    return library
