"""The native core, or an error that says why it cannot be imported."""

import pathlib
import re
import shlex

from deepreduce_hvd.errors import NativeMissingError

_ROOT = pathlib.Path(__file__).resolve().parent.parent
#: only where the package is used in its source tree
_BINDING = _ROOT / "deepreduce_hvd" / "csrc" / "api" / "python.cc"

try:
    from deepreduce_hvd import _native as core
except ImportError as error:
    if (_ROOT / "setup.py").exists():  # Python prefers the current folder to what is installed
        advice = (
            f"{_ROOT} contains the sources; if the package is installed, run Python in another "
            f"folder, and otherwise run `pip install {shlex.quote(str(_ROOT))}`"
        )
    else:
        advice = "install the package again"
    raise NativeMissingError(
        f"deepreduce_hvd._native: expected the built extension, got {error}; {advice}"
    ) from error


def _expect_names_of(sources):
    """Raise NativeMissingError if the core lacks what its sources define: it is an older build."""
    defined = re.findall(r'module\.(?:def|attr)\(\s*"(\w+)"', sources)
    missing = [name for name in defined if not hasattr(core, name)]
    if missing:
        raise NativeMissingError(
            f"deepreduce_hvd._native: expected the extension of the sources in {_ROOT}, got an"
            f" older one without {', '.join(missing)}; run `python setup.py build_ext --inplace`"
            " there"
        )


if _BINDING.exists():
    _expect_names_of(_BINDING.read_text(encoding="utf-8"))

__all__ = ["core"]
