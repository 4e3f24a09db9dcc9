"""Test that ``python -m deepreduce_hvd --check`` prints what is installed and what is missing."""

import subprocess
import sys

WITHOUT = """
import importlib.util, runpy, sys

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)
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
        "nothing lost",
        "PyTorch ",
        "TensorFlow ",
        "Horovod for PyTorch",
    ):
        assert expected in finished.stdout


def test_an_absent_framework_is_no_problem():
    finished = run("-c", WITHOUT.format(missing="torch"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "-        PyTorch                 not installed" in finished.stdout


def test_operators_that_do_not_load_are_a_problem_with_a_remedy():
    finished = run("-c", BROKEN)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "PROBLEM  PyTorch" in finished.stdout
    assert "DEEPREDUCE_WITH_PYTORCH=1" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "1 problem(s)"
