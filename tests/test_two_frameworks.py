"""Test one process that uses Horovod with PyTorch and with TensorFlow."""

import importlib.util
import subprocess
import sys

import pytest

_STEPS = """
import horovod.torch as hvd
import horovod.tensorflow  # Horovod's process sets now belong to this one
import torch

import deepreduce_hvd as dr

hvd.init()
network = torch.nn.Linear(40, 50)
compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=0)
for _ in range(2):
    network.zero_grad()
    network(torch.ones(3, 40)).sum().backward()
    pending = [compressor.compress(parameter.grad) for parameter in network.parameters()]
    for reduced, context in pending:
        assert compressor.decompress(reduced, context).abs().sum() > 0
print(compressor.adapter.transport.ranks, compressor.adapter.transport.size)
"""


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("horovod", "torch", "tensorflow")),
    reason="needs Horovod, PyTorch and TensorFlow",
)
def test_the_frameworks_horovod_that_was_imported_first_works():
    job = subprocess.run(
        [sys.executable, "-c", _STEPS], capture_output=True, text=True, timeout=120, check=False
    )
    assert job.returncode == 0, job.stderr[-2000:]
    assert job.stdout.split("\n")[-2] == "[0] 1", job.stdout
