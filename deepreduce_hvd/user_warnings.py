"""Warnings that show the line of the program that they are about."""

import sys
import warnings

#: packages and modules through which a program calls this one
_BETWEEN = {
    "deepreduce_hvd", "horovod", "torch", "tensorflow", "keras", "tf_keras",
    "lightning", "pytorch_lightning", "accelerate", "contextlib", "threading",
}  # fmt: skip


def warn(message: str) -> None:
    """Warn at the innermost line that is neither of this package nor of a framework.

    Args:
        message: the text, without the name of the package.

    Warns:
        UserWarning: the message.
    """
    caller = sys._getframe(1)
    frame = caller
    while _module(frame).partition(".")[0] in _BETWEEN:
        if frame.f_back is None:
            frame = caller  # a thread that the program did not start
            break
        frame = frame.f_back
    warnings.warn_explicit(
        f"deepreduce_hvd: {message}",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        _module(frame),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _module(frame):
    """Return the name of a frame's module."""
    return frame.f_globals.get("__name__") or ""
