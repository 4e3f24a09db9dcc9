"""Test the PyTorch operators for CUDA and the adapter's GPU path, on a simulated device.

Only the GPU, its streams and NCCL are missing.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import device
import pytest
from launch import run_ranks
from rank_servers import python_command

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUN = HERE / "pretend" / "run.py"

pytestmark = pytest.mark.slow  # PyTorch's headers take a minute to compile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    import torch

    if torch.version.cuda is not None or not torch.__version__.startswith("2.13."):
        pytest.skip(
            "the pretended device is written for PyTorch 2.13 without CUDA, here is "
            f"{torch.__version__}"
        )
    return device.package(tmp_path_factory.mktemp("pretended"))


def run(folder, script, *arguments):
    command = [sys.executable, RUN, folder, script, *map(str, arguments)]
    path = os.pathsep.join(map(str, (folder, ROOT / "tests" / "support", ROOT / "scripts")))
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def on_two_ranks(folder, script):
    return run_ranks(
        "horovodrun", "-np", 2, *ranks_command(folder, script),
        folders=[folder, HERE / "pretend", ROOT / "scripts"], timeout=600,
    )  # fmt: skip


def ranks_command(folder, script, *arguments):
    served = python_command(RUN, device.SERVED, folder=folder)
    return [*served, folder, script, *arguments]


def test_same_bytes_as_the_host(folder):
    done = run(folder, "scripts/gpu_equality.py", "--small", "--device", "cuda:0")
    assert done.returncode == 0 and " 0 differ" in done.stdout, (
        done.stdout[-3000:] + done.stderr[-3000:]
    )


@pytest.mark.parametrize("script", ["scripts/gpu_ranks.py", "tests/cuda/pretend/nccl.py"])
def test_two_ranks_train_as_on_the_host(folder, script):
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")
    done = on_two_ranks(folder, ROOT / script)
    assert done.returncode == 0, done.stdout[-5000:]
    for words in (
        "raw: 4 steps on 2 ranks, compressed on the GPU",
        "Bitmap, half: 4 steps on 2 ranks, compressed on the GPU",
        "Deflate: 4 steps on 2 ranks, compressed through the host",
    ):
        assert words in done.stdout, done.stdout[-5000:]
    assert ("payloads went from the device to the collective" in done.stdout) == (
        script != "scripts/gpu_ranks.py"
    )


def test_a_bucket_is_read_at_once_and_failures_reach_both_ranks(folder):
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")
    done = on_two_ranks(folder, HERE / "pretend" / "exchanges.py")
    assert done.returncode == 0 and done.stdout.count("as expected") == 2, done.stdout[-5000:]


@pytest.mark.parametrize("script", ["groups.py", "steps.py", "tables.py"])
def test_steps_groups_and_tables(folder, script):
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")
    done = on_two_ranks(folder, HERE / "pretend" / script)
    assert done.returncode == 0 and done.stdout.count("as expected") == 2, done.stdout[-5000:]


def test_uncompressed_messages_are_those_of_the_host(folder):
    done = run(folder, HERE / "pretend" / "uncompressed.py")
    assert done.returncode == 0 and "as expected" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "script", ["ddp.py", "ddp_device.py", "gpu_ddp.py gloo", "gpu_ddp.py nccl"]
)
def test_ddp_trains_as_on_the_host(folder, script):
    name, *arguments = script.split()
    done = run_ranks(
        "torchrun", "--standalone", "--nproc-per-node=2", "--no-python",
        *ranks_command(folder, HERE / "pretend" / name, *arguments),
        folders=[folder, HERE / "pretend", ROOT / "tests" / "parallel", ROOT / "scripts"],
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("as expected") == 2, done.stdout[-5000:]


def test_errors_come_by_their_cause(folder):
    done = run(folder, HERE / "pretend" / "failures.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
