"""Train briefly on two ranks under torchrun, without Horovod, for tests/test_install.py.

Usage: ``installed_ddp_training.py OUTPUT``.
"""

import hashlib
import importlib.util
import json
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist

import deepreduce_hvd as dr

absent = [name for name in ("horovod", "tensorflow") if importlib.util.find_spec(name) is None]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
network = torch.nn.Sequential(torch.nn.Linear(60, 70), torch.nn.ReLU(), torch.nn.Linear(70, 10))
model = torch.nn.parallel.DistributedDataParallel(network)
said = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=100)
    compressor.register(model)
    said += [str(warning.message) for warning in caught]
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(8, 60)).square().mean().backward()
    optimizer.step()
rows = compressor.stats()
digest = hashlib.sha256(
    b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
)
pathlib.Path(f"{sys.argv[1]}.{rank}").write_text(
    json.dumps(
        {
            "absent": absent,
            "package": dr.__file__,
            "digest": digest.hexdigest(),
            "payload_bytes": sum(row["sent_bytes"] for row in rows.values()),
            "said": said,
        }
    )
)
dist.destroy_process_group()
