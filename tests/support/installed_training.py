"""Train briefly on two ranks and write the results, for tests/test_install.py.

Usage: ``installed_training.py OUTPUT``.
"""

import hashlib
import json
import pathlib
import sys
import warnings

import horovod.torch as hvd
import torch

import deepreduce_hvd as dr

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
network = torch.nn.Sequential(
    torch.nn.Linear(60, 70), torch.nn.ReLU(), torch.nn.Linear(70, 10).bfloat16()
)


def forward(batch):
    return network[2](network[1](network[0](batch)).bfloat16()).float()


said = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=100)
    said += [str(warning.message) for warning in caught]
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(network.parameters(), lr=0.1),
    named_parameters=network.named_parameters(),
    compression=compressor,
)
for step in range(6):
    optimizer.zero_grad()
    torch.manual_seed(100 * step + hvd.rank())
    forward(torch.randn(8, 60)).square().mean().backward()
    optimizer.step()
numbers = [parameter.detach().float().numpy() for parameter in network.parameters()]
kept = [
    part
    for row in compressor.state_dict()["parameters"].values()
    for part in row["memory"].values()
]
digest = hashlib.sha256(
    b"".join(array.tobytes() for array in [*numbers, *(part.numpy() for part in kept)])
)
gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
payload = dr.recommended_codec().encode(gradient, torch.zeros(1000))
pathlib.Path(f"{sys.argv[1]}.{hvd.rank()}").write_text(
    json.dumps(
        {
            "package": dr.__file__,
            "digest": digest.hexdigest(),
            "payload": bytes(payload.tolist()).hex(),
            "decoded": dr.decode(payload).tolist(),
            "said": said,
        }
    )
)
