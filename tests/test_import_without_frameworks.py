"""Test that everything below the adapters works on NumPy arrays without any framework."""

import subprocess
import sys
from pathlib import Path

import deepreduce_hvd

ROOT = Path(deepreduce_hvd.__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "horovod", "keras", "tf_keras")
#: the only folders and files that may import a framework
ADAPTERS = ("torch", "tensorflow")

BLOCK = f"""
import sys

class Blocked(ImportError):
    pass

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRAMEWORKS!r}:
            raise Blocked(f"blocked: {{name}}")

sys.meta_path.insert(0, Blocker())
"""
USE = """
import numpy as np
import deepreduce_hvd as dr
gradient = np.arange(-50, 50, dtype=np.float32)
dense = dr.decode(dr.Codec(dr.TopK(0.1)).encode(gradient))
assert np.count_nonzero(dense) == 10 and dense[0] == -50, dense
"""


def is_adapter(path):
    """Return whether a file belongs to a framework, such as torch/slot.py."""
    return path.relative_to(ROOT).parts[0] in ADAPTERS


def modules(adapters):
    for path in sorted(ROOT.rglob("*.py")):
        # an __init__ that only documents a folder imports nothing
        if is_adapter(path) == adapters and "import" in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(("deepreduce_hvd", *(part for part in parts if part != "__init__")))


def run_blocked(code):
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code], capture_output=True, text=True, cwd=ROOT.parent
    )


def test_neutral_modules_import_and_work():
    names = list(modules(adapters=False))
    assert "deepreduce_hvd" in names and "deepreduce_hvd.compressor" in names and len(names) > 15
    imports = "".join(f"import {name}\n" for name in names)
    loaded = (
        f"found = [name for name in {FRAMEWORKS!r} if name in sys.modules]\nassert not found, "
        "found\n"
    )
    done = run_blocked(imports + USE + loaded)
    assert done.returncode == 0, done.stderr


def test_adapters_do_import_a_framework():
    """No adapter can be imported while frameworks are blocked.

    An adapter that can be imported belongs among the neutral modules.
    """
    names = list(modules(adapters=True))
    assert len(names) > 20
    done = run_blocked(
        f"""
import importlib, traceback
for name in {names!r}:
    try:
        importlib.import_module(name)
    except Exception:
        assert "Blocked: blocked: " in traceback.format_exc(), name
    else:
        raise AssertionError(name)
"""
    )
    assert done.returncode == 0, done.stderr
