"""Test that the public API has type annotations."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import deepreduce_hvd as dr

ROOT = Path(__file__).resolve().parent.parent
#: classes whose methods users call or override; of other classes, only the constructor counts
WITH_METHODS = (
    dr.Codec, dr.Compressor, dr.Communicator, dr.Sparsifier, dr.IndexCodec, dr.ValueCodec,
    dr.Memory, dr.Transport
)  # fmt: skip


def functions():
    for name in dr.__all__:
        value = getattr(dr, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            if "__init__" in vars(value):
                yield f"{name}.__init__", value.__init__
            for method, found in vars(value).items() if value in WITH_METHODS else ():
                found = (
                    found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                )
                if inspect.isfunction(found) and not method.startswith("_"):
                    yield f"{name}.{method}", found


@pytest.mark.parametrize(
    "name, function", list(functions()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_public_function_has_types(name, function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty, (
        f"{name}: expected a type of what it returns"
    )
    for argument in list(signature.parameters.values()):
        if argument.name not in ("self", "cls"):
            assert argument.annotation is not argument.empty, (
                f"{name}: expected a type of {argument.name}"
            )


def test_a_type_checker_finds_the_types(tmp_path):
    assert (ROOT / "deepreduce_hvd/py.typed").exists()
    (tmp_path / "user.py").write_text(
        "import deepreduce_hvd as dr\n"
        "codec = dr.Codec(dr.TopK(0.01), index=dr.Rice())\n"
        "dr.Codec(dr.TopK(0.01), index=dr.QSGD())\n"
        "dr.TopK('1 %')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"),
               "--follow-imports", "silent", str(tmp_path / "user.py")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [
        line.split("user.py:")[1][:1]
        for line in done.stdout.splitlines()
        if "user.py:" in line and "error" in line
    ]
    assert found == ["3", "4"], done.stdout + done.stderr
