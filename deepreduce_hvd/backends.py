"""The kinds of arrays that the package takes: NumPy always, torch and TensorFlow when the user
already imported them.

The rule: nothing here imports a framework; an array's type names its module, and only then the
adapter is loaded. An adapter's ``backend`` object has encode, decode, decode_sum and
to_numpy_bytes, as :class:`_NumPy` has.
"""

import importlib

import numpy as np

from deepreduce_hvd import numpy_backend
from deepreduce_hvd.errors import InvalidArgumentError, NativeMissingError

#: the top module of an array's type -> the module of this package with its ``backend``
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
    """The backend of an array; InvalidArgumentError when there is none."""
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
    """The library of a framework's operators in ``directory``, whose name carries the version that
    it was built for.

    Another version's ABI is not the same: loaded there it would end in undefined symbols, or in
    wrong results.

    Raises:
        NativeMissingError: there is none for this version.
    """
    library = directory / f"{name}-{version}.so"
    if not library.exists():
        others = sorted(
            path.stem.removeprefix(f"{name}-") for path in directory.glob(f"{name}-*.so")
        )
        raise NativeMissingError(
            f"deepreduce_hvd: expected the {framework} operators for version {version}, got those for "
            f"{', '.join(others) or 'none'}; install the package again with this {framework} present and "
            f"DEEPREDUCE_WITH_{framework.upper()}=1"
        )
    return library
