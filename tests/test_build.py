"""Test setup.py of a small package: the framework switches, and incremental compilation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "deepreduce_hvd/__init__.py": '__version__ = "1"\n',
    "deepreduce_hvd/csrc/one.h": "int one();\n",
    "deepreduce_hvd/csrc/one.cc": '#include "one.h"\nint one() { return 1; }\n',
    "deepreduce_hvd/csrc/index/two.cc": "int two() { return 2; }\n",
    "deepreduce_hvd/csrc/api/python.cc": (
        '#include <pybind11/pybind11.h>\n#include "one.h"\nPYBIND11_MODULE(_native, m) { '
        'm.def("one", &one); }\n'
    ),
}


@pytest.fixture
def package(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    scripts = ("find_frameworks.py", "incremental_build.py", "nvcc.py")
    for name in (
        "setup.py",
        *(f"scripts/{name}" for name in scripts),
        "pyproject.toml",
        "LICENSE",
        "README.md",
    ):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(package, *options, **environment):
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DEEPREDUCE_WITH") and name != "CXXFLAGS"
    }
    variables.update({"CXXFLAGS": "-O0", **environment})
    command = [sys.executable, "setup.py", "-q", "build_ext", *(options or ["--inplace"])]
    return subprocess.run(command, cwd=package, env=variables, capture_output=True, text=True)


def used(package):
    """Return what the module that was built prints."""
    program = "from deepreduce_hvd import _native; print(_native.one())"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=package, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
def test_only_what_changed_is_compiled_again(package):
    first = build(package)
    assert first.returncode == 0, first.stderr
    assert (
        "compiling 2 of 2 files of core" in first.stdout
        and "compiling 1 of 1 files of python" in first.stdout
    )
    assert "skipping the PyTorch ops: no PyTorch ops in this version" in first.stdout
    again = build(package)
    assert (
        again.returncode == 0 and "compiling" not in again.stdout and "linked" not in again.stdout
    )
    (package / "deepreduce_hvd/csrc/index/two.cc").write_text("int two() { return 3; }\n")
    assert "compiling 1 of 2 files of core" in build(package).stdout
    (package / "deepreduce_hvd/csrc/one.h").write_text("int one();  // changed\n")
    header = build(package).stdout
    assert (
        "compiling 1 of 2 files of core" in header and "compiling 1 of 1 files of python" in header
    )
    assert "compiling 2 of 2 files of core" in build(package, CXXFLAGS="-O1").stdout
    (package / "deepreduce_hvd/csrc/index/two.cc").unlink()
    removed = build(package, CXXFLAGS="-O1")
    assert "compiling" not in removed.stdout and "linked deepreduce_hvd._native" in removed.stdout
    assert used(package) == "1"


def test_cxxflags_cannot_change_the_arithmetic(package):
    """The difference is 0 if the product is rounded, and 2^-54 if it is contracted."""
    (package / "deepreduce_hvd/csrc/one.cc").write_text(
        """#include "one.h"
        #ifdef __FAST_MATH__
        #error "fast-math"
        #endif
        int one() {
          volatile double number = 1 + 0x1p-27;
          const double x = number;
          return x * x - (1 + 0x1p-26) == 0;
        }
        """
    )
    done = build(package, CXXFLAGS="-O2 -ffast-math -ffp-contract=fast -march=native")
    assert done.returncode == 0, done.stderr
    assert used(package) == "1"


def test_a_compile_error_is_shown_and_leaves_no_object(package):
    (package / "deepreduce_hvd/csrc/one.cc").write_text("int one() { return nonsense; }\n")
    for _ in range(2):
        done = build(package)
        assert (
            done.returncode != 0
            and "nonsense" in done.stderr
            and "expected exit status 0" in done.stderr
        )
    assert not list(package.rglob("one.cc.o"))


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"DEEPREDUCE_WITH_PYTORCH": "1"}, "no PyTorch ops in this version"),
        ({"DEEPREDUCE_WITH_TENSORFLOW": "1"}, "no TensorFlow ops in this version"),
        (
            {"DEEPREDUCE_WITH_PYTORCH": "yes"},
            "DEEPREDUCE_WITH_PYTORCH: expected 1, 0 or nothing, got 'yes'",
        ),
        (
            {"DEEPREDUCE_WITH_PYTORCH": "1", "DEEPREDUCE_WITHOUT_PYTORCH": "1"},
            "expected one of them, got both",
        ),
        ({"CXX": "no-such-compiler"}, "got no no-such-compiler on PATH; Debian package: g++"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS: expected a positive number, got 'many'"),
    ],
)
def test_what_cannot_be_built_is_refused(package, environment, words):
    done = build(package, **environment)
    assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize(
    ("options", "environment", "stays"),
    [
        ([], {}, False),
        ([], {"CXX": "false"}, True),  # the build fails
        (["--build-lib", "elsewhere"], {}, True),
    ],
)
def test_operators_of_an_earlier_build_in_place(package, options, environment, stays):
    """Only a build in place that succeeds removes them: another environment may use them."""
    earlier = package / "deepreduce_hvd/_torch_ops-2.9.0.so"
    earlier.write_bytes(b"of an earlier build")
    done = build(package, *options, **environment)
    assert (done.returncode == 0) == ("CXX" not in environment), done.stderr
    assert earlier.exists() == stays


@pytest.fixture
def without_torch(package):
    """An interpreter with the build requirements but no torch; the package has torch ops."""
    (package / "torch_ops").mkdir()
    (package / "torch_ops/ops.cc").write_text("#error never compiled here\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", package / "bare"], check=True)
    site = next((package / "bare/lib").glob("python*/site-packages"))
    for name in ("setuptools", "pybind11", "_distutils_hack"):
        module = __import__(name)
        (site / name).symlink_to(Path(module.__file__).parent)
    return package / "bare/bin/python"


@pytest.mark.slow
def test_missing_torch_is_a_printed_skip_and_an_error_when_asked_for(package, without_torch):
    def build_without_torch(**environment):
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables.update({"CXXFLAGS": "-O0", **environment})
        return subprocess.run(
            [without_torch, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=package,
            env=variables,
            capture_output=True,
            text=True,
        )

    stale = package / "deepreduce_hvd/_torch_ops-2.9.0.so"
    stale.write_bytes(b"of an earlier build")
    skipped = build_without_torch()
    assert skipped.returncode == 0, skipped.stderr
    assert (
        f"skipping the PyTorch ops: {without_torch} has no usable PyTorch (No module named 'torch')"
        in skipped.stdout
    )
    assert not stale.exists() and list((package / "deepreduce_hvd").glob("_native*.so"))
    assert (
        "DEEPREDUCE_WITHOUT_PYTORCH=1" in build_without_torch(DEEPREDUCE_WITHOUT_PYTORCH="1").stdout
    )
    asked = build_without_torch(DEEPREDUCE_WITH_PYTORCH="1")
    assert asked.returncode != 0 and "expected PyTorch in" in asked.stderr, asked.stderr


def test_a_source_distribution_has_every_source():
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    patterns = {line.split()[1]: line.split()[2:] for line in lines if "recursive-include" in line}
    for folder in ("deepreduce_hvd/csrc", "torch_ops", "tf_ops"):
        for path in (ROOT / folder).rglob("*.*"):
            assert any(path.match(pattern) for pattern in patterns[folder]), (
                f"MANIFEST.in: expected a pattern for {path.relative_to(ROOT)}, got none"
            )
