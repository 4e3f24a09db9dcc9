"""Warnings that show the line of the program that they are about."""

import pathlib
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
    while _is_between(frame):
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


def _is_between(frame):
    # AutoGraph runs a copy of a function of the program, from a temporary file
    copied = pathlib.Path(frame.f_code.co_filename).name.startswith("__autograph_generated_file")
    return copied or _module(frame).partition(".")[0] in _BETWEEN


def _module(frame):
    """Return the name of a frame's module."""
    return frame.f_globals.get("__name__") or ""
