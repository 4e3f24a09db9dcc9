"""Test what ``python -m deepreduce_hvd`` prints with ``--check``, and does with ``--build``."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd import __main__ as command, native

WITHOUT = """
import importlib.util, runpy, sys

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)
sys.argv = ["deepreduce_hvd", "--check"]
runpy.run_module("deepreduce_hvd", run_name="__main__")
"""
NO_LIBRARIES = """
import pathlib, runpy, sys
from deepreduce_hvd import backends

backends.operator_library = lambda *arguments: pathlib.Path({path!r})
sys.argv = ["deepreduce_hvd", "--check"]
runpy.run_module("deepreduce_hvd", run_name="__main__")
"""
BROKEN = """
import runpy, sys

sys.modules["deepreduce_hvd.torch"] = None
sys.argv = ["deepreduce_hvd", "--check"]
runpy.run_module("deepreduce_hvd", run_name="__main__")
"""


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_all_is_well_here():
    finished = run("-m", "deepreduce_hvd", "--check")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "all is well"
    for expected in (
        "native core",
        "Deflate                 zlib 1.",
        "nothing lost",
        "PyTorch ",
        "TensorFlow ",
        "PyTorch on GPUs ",
        "TensorFlow on GPUs ",
        "Horovod for PyTorch",
    ):
        assert expected in finished.stdout
    assert finished.stdout.count("they give the bytes of the native core") == 2


@pytest.mark.slow
def test_an_absent_framework_is_no_problem():
    finished = run("-c", WITHOUT.format(missing="torch"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "-        PyTorch                 not installed; operators for " in finished.stdout


def test_operators_that_do_not_load_are_a_problem_with_a_remedy():
    finished = run("-c", BROKEN)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "PROBLEM  PyTorch" in finished.stdout
    assert "DEEPREDUCE_WITH_PYTORCH=1" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "1 problem(s)"


@pytest.mark.slow
def test_libraries_that_are_not_libraries_are_problems(tmp_path):
    path = tmp_path / "_ops.so"
    path.write_bytes(b"no library")
    finished = run("-c", NO_LIBRARIES.format(path=str(path)))
    assert finished.returncode == 1, finished.stdout + finished.stderr
    found = [line for line in finished.stdout.splitlines() if "PROBLEM" in line]
    assert "works on the host, without operators: expected _ops.so to load into PyTorch" in found[0]
    assert "NativeMissingError: expected _ops.so to load into TensorFlow, got: " in found[1]
    assert finished.stdout.count("=1 python -m deepreduce_hvd --build") == 2


@pytest.fixture
def torch_only(monkeypatch):
    """The framework PyTorch, whose answers a test may change; there is no other."""
    framework = command._FRAMEWORKS[0]
    monkeypatch.setattr(command, "_FRAMEWORKS", (framework,))
    return framework


@pytest.mark.parametrize(
    "cuda, on_gpus, expected",
    [
        ("13.0", True, "CUDA 13.0, operators with CUDA kernels"),
        ("13.0", False, "DEEPREDUCE_WITH_CUDA=1 python -m deepreduce_hvd --build"),
        (None, False, "not in this build of the framework"),
    ],
)
def test_gpus(torch_only, monkeypatch, capsys, cuda, on_gpus, expected):
    monkeypatch.setattr(torch_only, "cuda_of", lambda *modules: (cuda, on_gpus))
    report = command._Report()
    assert command._check_framework(report, torch_only) and report.problems == 0
    assert expected in capsys.readouterr().out


def test_operators_that_give_other_bytes_are_a_problem(torch_only, monkeypatch, capsys):
    monkeypatch.setattr(torch_only, "trial", lambda codec, gradient: gradient)
    assert not command._check_framework(command._Report(), torch_only)
    assert "expected the bytes of the native core" in capsys.readouterr().out


@pytest.fixture
def started(monkeypatch):
    """What ``--build`` would start: a list of (command, environment); every command succeeds."""
    calls = []

    def start(words, env=None, **options):
        if words[1] == "-c":
            failed = words[2] in started.broken
            return SimpleNamespace(
                returncode=int(failed), stderr="Traceback\nImportError: no numpy"
            )
        calls.append((list(words), env))
        return SimpleNamespace(returncode=started.returncode)

    started = SimpleNamespace(calls=calls, returncode=0, broken=[])
    monkeypatch.setattr(command.subprocess, "run", start)
    monkeypatch.setattr(command, "_copy_of_sources", lambda folder: None)
    for framework in ("PYTORCH", "TENSORFLOW"):
        monkeypatch.delenv(f"DEEPREDUCE_WITH_{framework}", raising=False)
    return started


@pytest.mark.parametrize("how", ["switched off", "broken"])
def test_build_asks_pip_for_what_is_installed(started, monkeypatch, capsys, how):
    expected = "without TensorFlow: DEEPREDUCE_WITHOUT_TENSORFLOW=1"
    if how == "broken":
        started.broken = ["import tensorflow"]
        expected = "without TensorFlow, which cannot be imported here: ImportError: no numpy"
    else:
        monkeypatch.setenv("DEEPREDUCE_WITHOUT_TENSORFLOW", "1")
    assert command.main(["--build", "--no-build-isolation"]) == 0
    (install, environment), (check, _) = started.calls
    assert install[1:4] == ["-m", "pip", "install"]
    assert {"--force-reinstall", "--no-cache-dir", "--no-build-isolation"} <= set(install)
    assert environment["DEEPREDUCE_WITH_PYTORCH"] == "1"
    assert "DEEPREDUCE_WITH_TENSORFLOW" not in environment
    assert check[1:] == ["-m", "deepreduce_hvd", "--check"]
    said = capsys.readouterr().out
    assert expected in said and "building for PyTorch" in said and "and TensorFlow" not in said


def test_build_needs_a_framework_that_can_be_imported(started, capsys):
    started.broken = ["import torch", "import tensorflow"]
    assert command.main(["--build"]) == 1 and not started.calls
    assert "got neither; install one first" in capsys.readouterr().out


@pytest.mark.parametrize(
    "imports, remedy",
    [
        (True, "run: DEEPREDUCE_WITH_PYTORCH=1 python -m deepreduce_hvd --build"),
        (False, "repair or remove PyTorch: `python -c 'import torch'` fails"),
    ],
)
def test_the_remedy_depends_on_what_does_not_work(
    torch_only, started, monkeypatch, capsys, imports, remedy
):
    """Building operators again does not mend a framework that cannot be imported."""
    started.broken = [] if imports else ["import torch"]
    monkeypatch.setattr(torch_only, "operators", "deepreduce_hvd.no_such_module")
    report = command._Report()
    assert not command._check_framework(report, torch_only) and report.problems == 1
    assert remedy in capsys.readouterr().out


@pytest.mark.parametrize("left_out", [False, True])
def test_operators_that_the_user_leaves_out_are_no_problem(
    torch_only, monkeypatch, capsys, left_out
):
    operators = SimpleNamespace(WHY_NO_OPERATORS="expected some, got none; run this")
    monkeypatch.setattr(command.importlib, "import_module", lambda name: operators)
    monkeypatch.setenv("DEEPREDUCE_WITHOUT_PYTORCH", "1" if left_out else "0")
    report = command._Report()
    assert command._check_framework(report, torch_only) and report.problems == (not left_out)
    assert ("DEEPREDUCE_WITHOUT_PYTORCH=1" in capsys.readouterr().out) == left_out


def test_a_core_that_is_older_than_its_sources_is_refused():
    native._expect_names_of('module.def("encode", &encode); module.attr("abi_version") = 1;')
    sources = 'module.def("encode", &encode); module.def("no_such_function", &one,'
    with pytest.raises(dr.NativeMissingError, match="older one without no_such_function; run"):
        native._expect_names_of(sources)


def test_a_build_that_fails_is_no_success(started, capsys):
    started.returncode = 3
    assert command.main(["--build"]) == 3 and len(started.calls) == 1
    assert "the installation was not changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "missing, expected",
    [(("torch", "tensorflow"), "got neither; install one first"), (("pip",), "expected pip in ")],
)
def test_build_says_what_it_needs(started, monkeypatch, capsys, missing, expected):
    find = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    assert command.main(["--build"]) == 1 and not started.calls
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chek"], "unrecognized arguments: --chek; did you mean --check?"),
        (["--biuld", "-v"], "unrecognized arguments: --biuld -v; did you mean --build?"),
        (["--fast"], "unrecognized arguments: --fast\n"),
        ([], "expected one of --check, --build and --version, got none"),
    ],
)
def test_a_command_that_is_misspelled_or_missing(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"deepreduce_hvd {dr.__version__}\n"


def test_only_build_takes_options_of_pip(capsys):
    with pytest.raises(SystemExit):
        command.main(["--check", "--no-build-isolation"])
    assert "unrecognized arguments: --no-build-isolation" in capsys.readouterr().err


def test_a_folder_with_the_name_of_a_framework_is_none(tmp_path, monkeypatch):
    (tmp_path / "some_framework" / "examples").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    framework = command._Framework("Some", "some_framework", (), "_some_ops", None, None)
    assert not framework.installed()
    (tmp_path / "some_framework" / "__init__.py").touch()
    command.importlib.invalidate_caches()
    assert framework.installed()


def test_a_copy_of_a_read_only_installation_can_be_built_in(tmp_path, monkeypatch):
    package = tmp_path / "deepreduce_hvd"
    (package / "_sources" / "deepreduce_hvd" / "csrc").mkdir(parents=True)
    (package / "_sources" / "setup.py").touch()
    (package / "_sources" / "deepreduce_hvd" / "csrc" / "one.cc").touch()
    (package / "one.py").touch()
    paths = [package, *package.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    monkeypatch.setattr(command, "_PACKAGE", package)
    copy = tmp_path / "copy"
    try:
        command._copy_of_sources(copy)
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | 0o200)
    found = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert found == {"setup.py", "deepreduce_hvd/csrc/one.cc", "deepreduce_hvd/one.py"}
    # as root, everything can be written, so look at the modes
    assert all(path.stat().st_mode & 0o200 for path in (copy, *copy.rglob("*")))
