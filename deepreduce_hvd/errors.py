"""The errors of the package, one class per cause.

Each message says what was expected and what was found.
"""


class DeepReduceError(Exception):
    """Base class of all errors that this package raises on purpose."""


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
