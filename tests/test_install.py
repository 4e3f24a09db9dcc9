"""Test installations with frameworks before or after the package, other versions, or none.

The environments are new. They import the frameworks of this environment, which are too large to be
installed in each test. pip sees these frameworks as installed.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

#: a C++ compiler that keeps its objects: the builds of all tests here have the same sources, and
#: find the same headers by different paths
COMPILER = """#!{python} -IS
import hashlib, os, shutil, subprocess, sys
words = sys.argv[1:]
if "-c" not in words:
    sys.exit(subprocess.call(["g++", *words]))
def known(word):
    path = word.removeprefix("-I")
    return os.path.realpath(path).rpartition("/site-packages/")[2] if path[:1] == "/" else word
target, dependencies, source = (words[words.index(name) + 1] for name in ("-o", "-MF", "-c"))
key = [known(word) for word in words if word not in (target, dependencies)]
with open(source, "rb") as file:
    key = hashlib.sha256(repr(key).encode() + file.read()).hexdigest()
kept = os.path.join(os.path.dirname(__file__), key)
if not os.path.exists(kept):
    done = subprocess.call(["g++", *words])
    if done != 0:
        sys.exit(done)
    shutil.copyfile(target, kept)
shutil.copyfile(kept, target)
with open(dependencies, "w") as file:
    file.write(f"{{target}}: {{source}}")
"""
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
            "compressed without the PyTorch operators, which takes a little longer, and those on a"
            " GPU are compressed on the host: expected the PyTorch operators for version"
            in other["said"][0]
        )
        got = "no version" if built_for == "none" else built_for
        assert (
            f"got operators for {got}; run `python -m deepreduce_hvd --build`" in other["said"][0]
        )
        for what in ("digest", "payload", "decoded"):
            assert one[what] == other[what], f"rank {rank}: {what}"


def test_without_operators_training_is_the_same_bit_for_bit(with_operators, tmp_path):
    """Here with operators for another PyTorch, and below with none."""
    left_out = shutil.ignore_patterns("_torch_ops*", "_tf_ops*", "csrc", "__pycache__")
    shutil.copytree(ROOT / "deepreduce_hvd", tmp_path / "package/deepreduce_hvd", ignore=left_out)
    operators = tmp_path / "package/deepreduce_hvd/_torch_ops-2.9.1.so"
    operators.write_bytes(b"of another PyTorch")  # never loaded, because it is not a library
    found = train(tmp_path / "package", tmp_path / "report")
    expect_the_same_without_operators(with_operators, found, tmp_path / "package", "2.9.1")


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory):
    """The source distribution. The tree that it was made from is removed."""
    folder = tmp_path_factory.mktemp("source_distribution")
    left_out = shutil.ignore_patterns("*.so", "build", ".venv", ".git", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder / "tree", ignore=left_out)
    make = "import setuptools.build_meta as backend; backend.build_sdist('..')"
    skip = {"DEEPREDUCE_WITHOUT_PYTORCH": "1", "DEEPREDUCE_WITHOUT_TENSORFLOW": "1"}
    finished = run([sys.executable, "-c", make], folder / "tree", **skip)
    assert finished.returncode == 0, finished.stderr[-3000:]
    shutil.rmtree(folder / "tree")
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Variables of the environment for a build."""
    path = tmp_path_factory.mktemp("compiler") / "g++"
    path.write_text(COMPILER.format(python=sys.executable))
    path.chmod(0o755)
    return {"CXX": str(path), "CXXFLAGS": "-O0 -g0"}


@pytest.fixture(scope="module")
def wheel(source_distribution, compiler, tmp_path_factory):
    """The wheel that pip builds in an environment without any framework."""
    folder = tmp_path_factory.mktemp("wheel")
    python = environment_with(folder / "builder")
    what = ["wheel", "--no-cache-dir", "--no-deps", "-w", folder, source_distribution]
    finished = pip(python, folder, *what, **compiler)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory):
    """A folder with links to what is installed here, without this package and pip's tools."""
    folder = tmp_path_factory.mktemp("frameworks")
    hidden = ("deepreduce", "__editable__", "pip", "setuptools", "pybind11", "_distutils")
    for path in SITE.iterdir():
        if not path.name.startswith(hidden) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def only_pytorch(tmp_path_factory):
    """A folder with links to PyTorch and what it requires, as installed here."""
    folder = tmp_path_factory.mktemp("only_pytorch")
    wanted, found = ["torch"], set()
    while wanted:
        distribution = importlib.metadata.distribution(wanted.pop())
        if distribution.name in found:
            continue
        found.add(distribution.name)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
        for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(SITE / top)
    return folder


def run(command, folder, **variables):
    """Run a command in a folder, without packages from other folders."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("DEEPREDUCE_WITH")
    }
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**inherited, "PYTHONPATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )


def environment_with(folder, *others, with_pip=False):
    """Return the Python of a new environment that also imports from the folders ``others``.

    It has no pip of its own unless asked for, because that takes seconds to install.
    """
    options = [] if with_pip else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text("".join(f"{other}\n" for other in others))
    return folder / "bin/python"


def pip(python, folder, *words, **variables):
    """Run this environment's pip for another environment."""
    return run([sys.executable, "-m", "pip", "--python", python, *words], folder, **variables)


def install(python, folder, *what, **variables):
    finished = pip(python, folder, "install", *what, **variables)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]


def expect_all_is_well(printed, package):
    """Expect the text of ``--check`` of a package in a folder, with operators for both."""
    assert "all is well" in printed and str(package) in printed, printed
    for name in ("PyTorch", "TensorFlow"):
        assert re.search(f"ok +{name} .*, operators loaded; they give the bytes", printed), printed


def test_a_wheel_built_without_pytorch_trains_with_a_pytorch_that_came_later(
    with_operators, wheel, frameworks, tmp_path
):
    python = environment_with(tmp_path / "environment", frameworks)
    install(python, tmp_path, "--no-deps", wheel)
    found = train(None, tmp_path / "report", python)
    expect_the_same_without_operators(with_operators, found, tmp_path / "environment", "none")
    check = run([python, "-m", "deepreduce_hvd", "--check"], tmp_path)
    assert check.returncode == 1 and "2 problem(s)" in check.stdout, check.stdout
    assert (
        "works on the host, without operators" in check.stdout
        and "DEEPREDUCE_WITH_PYTORCH=1 python -m deepreduce_hvd --build" in check.stdout
    )
    assert "DEEPREDUCE_WITH_TENSORFLOW=1 python -m deepreduce_hvd --build" in check.stdout
    imported = run([python, "-c", "import deepreduce_hvd.tensorflow"], tmp_path)
    assert (
        "NativeMissingError: deepreduce_hvd: expected the TensorFlow operators" in imported.stderr
    )
    assert "`python -m deepreduce_hvd --build`" in imported.stderr


def train_with_torchrun(python, folder):
    """Train with DDP on two ranks; return what each rank wrote."""
    script = ROOT / "tests/support/installed_ddp_training.py"
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*launcher, script, folder / "report"], folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(2)]


def test_ddp_trains_where_only_pytorch_is_installed(wheel, compiler, only_pytorch, tmp_path):
    python = environment_with(tmp_path / "environment", only_pytorch, with_pip=True)
    install(python, tmp_path, f"deepreduce_hvd[torch] @ {wheel.as_uri()}")
    first = train_with_torchrun(python, tmp_path)
    for report in first:
        assert report["absent"] == ["horovod", "tensorflow"]
        assert Path(report["package"]).is_relative_to(tmp_path / "environment")
        assert report["digest"] == first[0]["digest"] and report["payload_bytes"] > 0
        assert (
            len(report["said"]) == 1
            and "compressed without the PyTorch operators" in report["said"][0]
        )

    built = run([python, "-m", "deepreduce_hvd", "--build"], tmp_path, **compiler)
    assert built.returncode == 0 and "all is well" in built.stdout, built.stdout + built.stderr
    again = train_with_torchrun(python, tmp_path)
    assert again == [{**report, "said": []} for report in first]


def test_build_replaces_operators_for_other_versions(
    with_operators, wheel, compiler, frameworks, tmp_path
):
    """Build operators after an upgrade of both frameworks, without a tree of sources.

    The upgrade is pretended: the installation has libraries with the names of other versions.
    Nothing may load them.
    """
    python = environment_with(tmp_path / "environment", frameworks, with_pip=True)
    install(python, tmp_path, "--no-deps", wheel)
    package = next((tmp_path / "environment/lib").glob("python*/site-packages/deepreduce_hvd"))
    record = next(package.parent.glob("deepreduce_hvd-*.dist-info/RECORD"))
    others = ("_torch_ops-2.9.1.so", "_tf_ops-2.17.0.so")
    for name in others:
        (package / name).write_bytes(b"of another version")
        record.write_text(f"{record.read_text()}deepreduce_hvd/{name},,\n")
    check = run([python, "-m", "deepreduce_hvd", "--check"], tmp_path)
    assert check.returncode == 1, check.stdout
    for got in ("got operators for 2.9.1", "got operators for 2.17.0"):
        assert got in check.stdout

    built = run([python, "-m", "deepreduce_hvd", "--build"], tmp_path, **compiler)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    expect_all_is_well(built.stdout, package)
    assert not any((package / name).exists() for name in others)
    assert (package / "_sources/setup.py").exists()  # for the next upgrade
    assert train(None, tmp_path / "report", python) == [
        {**report, "package": str(package / "__init__.py")} for report in with_operators
    ]


def test_operators_for_frameworks_that_were_there_before(
    source_distribution, compiler, frameworks, tmp_path
):
    """pip builds in isolation, but finds the frameworks; the extras are satisfied by them."""
    python = environment_with(tmp_path / "environment", frameworks)
    what = f"deepreduce_hvd[torch,tensorflow] @ {source_distribution.as_uri()}"
    install(python, tmp_path, "--no-cache-dir", what, **compiler)
    check = run([python, "-m", "deepreduce_hvd", "--check"], tmp_path)
    assert check.returncode == 0, check.stdout + check.stderr
    expect_all_is_well(check.stdout, tmp_path / "environment")


def test_a_wheel_has_every_source(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("deepreduce_hvd/csrc", "torch_ops", "tf_ops"):
        for path in (ROOT / folder).rglob("*.*"):
            assert f"deepreduce_hvd/_sources/{path.relative_to(ROOT)}" in names


def test_a_wheel_without_any_framework(wheel, tmp_path):
    python = environment_with(tmp_path / "environment")
    install(python, tmp_path, wheel)
    use = (
        "import numpy as np, deepreduce_hvd as dr; a = np.arange(5, dtype=np.float32); "
        "print(dr.decode(dr.Codec(dr.TopK(1.0)).encode(a)).tolist())"
    )
    done = run([python, "-c", use], tmp_path)
    assert done.stdout.strip() == "[0.0, 1.0, 2.0, 3.0, 4.0]", done.stderr
    check = run([python, "-m", "deepreduce_hvd", "--check"], tmp_path)
    assert check.returncode == 0 and check.stdout.count("not installed") >= 3, check.stdout
    assert check.stdout.count("no operators in this installation") == 2, check.stdout
    build = run([python, "-m", "deepreduce_hvd", "--build"], tmp_path)
    assert build.returncode == 1 and "got neither; install one first" in build.stdout, build.stdout
