"""The native core, or an error that says why it cannot be imported."""

import pathlib

from deepreduce_hvd.errors import NativeMissingError

_ROOT = pathlib.Path(__file__).resolve().parent.parent

try:
    from deepreduce_hvd import _native as core
except ImportError as error:
    if (_ROOT / "setup.py").exists():  # Python prefers the current folder to what is installed
        advice = (
            f"{_ROOT} contains the sources; if the package is installed, run Python in another "
            f"folder, and otherwise run `pip install {_ROOT}`"
        )
    else:
        advice = "install the package again"
    raise NativeMissingError(
        f"deepreduce_hvd._native: expected the built extension, got {error}; {advice}"
    ) from error

__all__ = ["core"]
