"""Test where the adapter of a compressor comes from if nothing is initialized yet."""

import subprocess
import sys

import pytest

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
