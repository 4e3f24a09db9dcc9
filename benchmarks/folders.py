"""The folders beside benchmarks/, for what the benchmarks share with them."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def module_at(path):
    """Return the module in a file that imports no other file of its folder.

    Benchmarks are started by hand (``python benchmarks/hosts.py``), so only benchmarks/ is on their
    path.
    """
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
