"""The errors of the package, few and by cause; each message says what was expected and what was
got.
"""


class DeepReduceError(Exception):
    """The base of every error that this package raises on purpose."""


class CorruptPayloadError(DeepReduceError, ValueError):
    """The bytes are not a payload that an encoder of this format writes."""


class InvalidArgumentError(DeepReduceError, ValueError):
    """The caller asked for something that cannot be done."""


class UnknownCodecError(DeepReduceError, LookupError):
    """A codec name or id that is not registered here."""


class NativeMissingError(DeepReduceError, ImportError):
    """A part of the native code was not built; the message says how to build it."""


class PeerFailedError(DeepReduceError, RuntimeError):
    """Another rank could not encode its gradient; the message names the rank and its error."""
