"""Test the core for callers that change memory during a call, or that have none left.

The cases are in tests/native/callers.cc. AddressSanitizer ends the program at the first access
outside of a block.
"""

import pathlib
import subprocess

import emulation_build
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path, checked = tmp_path_factory.mktemp("native") / "callers", "-fsanitize=address"
    command = [
        *emulation_build.compiler(), "-std=c++17", "-O1", "-g1", checked,
        f"-I{emulation_build.CORE}", ROOT / "tests" / "native" / "callers.cc",
        *emulation_build.compile_core("callers", checked), "-lz", "-o", path,
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True)
    return path


@pytest.mark.parametrize(
    "case",
    [
        "changing_gradient",
        "changing_values",
        "values_below_the_limit",
        "nothing_to_encode",
        "no_memory_left",
        "scratch_without_memory",
    ],
)
def test_caller(program, case):
    done = subprocess.run([program, case], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
