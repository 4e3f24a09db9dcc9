"""Test where the adapter of a compressor comes from if nothing is initialized yet."""

import os
import subprocess
import sys

import pytest

from deepreduce_hvd.coordination.launchers import why_alone

PROGRAM = """
import os
import torch
import torch.distributed as dist
import deepreduce_hvd as dr

network = torch.nn.Linear(40, 50)
compressor = dr.Compressor(parameters=network.named_parameters())
try:
    compressor.compress(torch.zeros(50, 40))
except dr.InvalidArgumentError as error:
    print(error)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(network)
compressor.register(model)
model(torch.ones(2, 40)).sum().backward()
print(compressor.stats()["weight"]["steps"])
"""


def test_a_compressor_before_torch_distributed():
    """With Horovod installed, too."""
    pytest.importorskip("horovod.torch")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    message, steps = done.stdout.splitlines()
    assert "expected an initialized Horovod or a registered model, got neither" in message
    assert steps == "1"


@pytest.mark.parametrize(
    ("variable", "processes"),
    [
        ("OMPI_COMM_WORLD_SIZE=4", 4), ("SLURM_STEP_NUM_TASKS=2", 2), ("WORLD_SIZE=64", 64),
        ("WORLD_SIZE=1", None), ("PMI_SIZE=many", None), ("PMI_SIZE=", None),
    ],
)  # fmt: skip
def test_launchers_tell_how_many_processes_there_are(monkeypatch, variable, processes):
    monkeypatch.setenv(*variable.split("="))
    told = why_alone()
    assert (told is None) == (processes is None)
    assert told is None or f"{processes} processes were started ({variable})" in told


@pytest.mark.parametrize(("framework", "make"), [("torch", "tensor"), ("tensorflow", "Variable")])
def test_processes_that_train_alone_are_told(framework, make):
    """Another launcher than horovodrun has started them, and Horovod has no MPI."""
    pytest.importorskip(f"horovod.{framework}")
    program = (
        f"import horovod.{framework} as hvd, {framework}, deepreduce_hvd as dr; hvd.init()\n"
        f"dr.Compressor(parameters=[('weight', {framework}.{make}([3.0] * 2000))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=100,
        env={**os.environ, "OMPI_COMM_WORLD_SIZE": "4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "<string>:2: UserWarning: deepreduce_hvd: Horovod has one rank, but 4" in done.stderr
