"""The errors of the package, one class per cause.

Each message says what was expected and what was found.
"""

import enum


class DeepReduceError(Exception):
    """Base class of all errors that this package raises on purpose."""

    # not that of ValueError and others: tf.function raises an error again as its own class, with
    # the place in the user's code, only if the class has exactly this constructor
    __init__ = Exception.__init__


class CorruptPayloadError(DeepReduceError, ValueError):
    """The bytes are not a valid payload: no encoder of this format writes them."""


class InvalidArgumentError(DeepReduceError, ValueError):
    """An argument, or a combination of arguments, is not valid."""


class UnknownCodecError(DeepReduceError, LookupError):
    """The name or id of a codec is not registered in this process."""


class NativeMissingError(DeepReduceError, ImportError):
    """A part of the native code was not built. The message says how to build it."""


class PeerFailedError(DeepReduceError, RuntimeError):
    """Another rank could not encode its gradient. The message names the rank and its error."""


class Status(enum.IntEnum):
    """What a function of the core returns if it fails: ``dr_status`` in csrc/api/deepreduce.h."""

    CORRUPT_PAYLOAD = 1
    INVALID_ARGUMENT = 2
    UNKNOWN_CODEC = 3
    OUT_OF_MEMORY = 4


#: {status of the core: the error that Python raises for it}
OF_STATUS: dict[int, type[Exception]] = {
    Status.CORRUPT_PAYLOAD: CorruptPayloadError,
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.UNKNOWN_CODEC: UnknownCodecError,
    Status.OUT_OF_MEMORY: MemoryError,
}
