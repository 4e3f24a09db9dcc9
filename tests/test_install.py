"""Test installations with PyTorch before or after the package, another version, or no PyTorch."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_paths()["purelib"])


def train(package, output, python=sys.executable):
    """Train on two ranks with the package in folder ``package``; return what each rank wrote."""
    launcher = Path(sys.executable).with_name("horovodrun")
    command = [
        str(launcher),
        "--gloo",
        "-np",
        "2",
        str(python),
        str(ROOT / "tests/support/installed_training.py"),
        str(output),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(package) if package else "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=output.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def with_operators(tmp_path_factory):
    return train(ROOT, tmp_path_factory.mktemp("with") / "report")


def expect_the_same_without_operators(with_operators, without, package, built_for):
    for rank, (one, other) in enumerate(zip(with_operators, without)):
        assert one["said"] == [] and Path(other["package"]).is_relative_to(package)
        assert len(other["said"]) == 1
        assert (
            "compressed by NumPy, which is slower: expected the PyTorch operators for version"
            in other["said"][0]
        )
        got = "no version" if built_for == "none" else built_for
        assert f"got operators for {got}; install the package again" in other["said"][0]
        for what in ("digest", "payload", "decoded"):
            assert one[what] == other[what], f"rank {rank}: {what}"


@pytest.mark.parametrize("built_for", ["2.9.1", pytest.param("none", marks=pytest.mark.slow)])
def test_without_operators_training_is_the_same_bit_for_bit(with_operators, tmp_path, built_for):
    left_out = shutil.ignore_patterns("_torch_ops*", "_tf_ops*", "csrc", "__pycache__")
    shutil.copytree(ROOT / "deepreduce_hvd", tmp_path / "package/deepreduce_hvd", ignore=left_out)
    if built_for != "none":  # never loaded, because it is not a library
        (tmp_path / f"package/deepreduce_hvd/_torch_ops-{built_for}.so").write_bytes(
            b"of another PyTorch"
        )
    found = train(tmp_path / "package", tmp_path / "report")
    expect_the_same_without_operators(with_operators, found, tmp_path / "package", built_for)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip builds in an environment without any framework."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "builder")], check=True)
    source = folder / "source"
    left_out = shutil.ignore_patterns(
        "*.so", "build", ".venv", ".git", "__pycache__", "*.egg-info", "tests"
    )
    shutil.copytree(ROOT, source, ignore=left_out)
    command = [
        folder / "builder/bin/python",
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "-w",
        str(folder),
        str(source),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "CXXFLAGS": "-O1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return next(folder.glob("*.whl"))


def environment_with(folder, wheel, *others):
    """Return the Python of a new environment with the wheel and NumPy.

    ``others`` are folders from which it may also import.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "numpy", str(wheel)],
        check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text("".join(f"{other}\n" for other in others))
    return python


@pytest.mark.slow
def test_a_wheel_built_without_pytorch_trains_with_a_pytorch_that_came_later(
    with_operators, wheel, tmp_path
):
    python = environment_with(tmp_path / "environment", wheel, SITE)
    found = train(None, tmp_path / "report", python)
    expect_the_same_without_operators(with_operators, found, tmp_path / "environment", "none")
    check = subprocess.run(
        [python, "-m", "deepreduce_hvd", "--check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert check.returncode == 1
    assert (
        "works on the host, without operators" in check.stdout
        and "DEEPREDUCE_WITH_PYTORCH=1" in check.stdout
    )


@pytest.mark.slow
def test_a_wheel_without_any_framework(wheel, tmp_path):
    python = environment_with(tmp_path / "environment", wheel)
    use = (
        "import numpy as np, deepreduce_hvd as dr; a = np.arange(5, dtype=np.float32); "
        "print(dr.decode(dr.Codec(dr.TopK(1.0)).encode(a)).tolist())"
    )
    variables = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", use], cwd=tmp_path, capture_output=True, text=True, env=variables
    )
    assert done.stdout.strip() == "[0.0, 1.0, 2.0, 3.0, 4.0]", done.stderr
    check = subprocess.run(
        [python, "-m", "deepreduce_hvd", "--check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=variables,
    )
    assert check.returncode == 0 and check.stdout.count("not installed") >= 3, check.stdout
