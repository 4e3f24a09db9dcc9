"""Compare PyTorch's DDP on a GPU with the same training on the host, bit for bit, with torchrun.

    export PYTHONPATH=.
    torchrun --standalone --nproc-per-node 2 scripts/gpu_ddp.py gloo    two ranks share the GPU
    torchrun --standalone --nproc-per-node 1 scripts/gpu_ddp.py nccl    NCCL has one rank per GPU

Gradients and memories must be equal. With codecs and communicators that the GPU supports, the
gradients must be encoded and summed there, and a payload that is corrupt must end all ranks.
``--device cpu`` tries the comparison on a machine without a GPU.
"""

import argparse
import datetime
import sys

import torch
import torch.distributed as dist
from gpu_training import CYCLES, SHAPES, STEPS, expect_same, loss_of
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.torch.cuda import device as torch_device
from deepreduce_hvd.torch.ddp.base import DistributedAdapter
from deepreduce_hvd.torch.ddp.buckets import BucketJob
from deepreduce_hvd.torch.ddp.device_buckets import DeviceBucketJob

QUANTIZED = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4))
FITTED = dr.Codec(dr.TopK(0.1), index=dr.EliasFano(), value=dr.FitPoly())
DEFLATE = dr.Codec(dr.TopK(0.05), value=dr.Deflate())
TIMEOUT = datetime.timedelta(seconds=60)


def overflows(step, rank):
    return (step, rank) == (2, dist.get_world_size() - 1)


CASES = {
    "default": {},
    # CUDA graphs, from the third step of the same buckets on
    "Rice, QSGD": {"codec": QUANTIZED, "dense_below": 0, "steps": 8},
    "two codecs": {"codec": {"first": FITTED, "*": QUANTIZED}, "steps": 8},
    "momentum": {"codec": FITTED, "memory": dr.MomentumCorrection(0.9)},
    "uncompressed": {"codec": "dense"},
    "gradients as views of buckets": {"ddp": {"gradient_as_bucket_view": True}},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "channels_last": {"channels_last": True},
    "GTopK": {"codec": QUANTIZED, "communicator": dr.GTopK()},
    "Deflate": {"codec": DEFLATE},
    "a gradient overflows": {
        "loss_scale": lambda: 8.0,
        "factor": lambda step: float("inf") if overflows(step, dist.get_rank()) else 8.0,
    },
}


ON_HOST = ("GTopK", "Deflate")
ran = set()  # the classes of the buckets' jobs
_run, _decode_some, _bytes_on = (
    BucketJob.run,
    torch_device.DeviceSums.decode_some,
    torch_device._bytes_on,
)


def _noted_run(job):
    ran.add(type(job))
    _run(job)


def _late_decode_some(sums, results, total, scale):
    """Keep the GPU busy before the sums, so that one that is read too early shows."""
    torch.cuda._sleep(CYCLES)
    _decode_some(sums, results, total, scale)


BucketJob.run, torch_device.DeviceSums.decode_some = _noted_run, _late_decode_some


class Network(torch.nn.Module):
    def __init__(self, dtype, channels_last):
        super().__init__()
        for name, shape in {**SHAPES, "image": (40, 30, 3, 3)}.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, step, factor):
        return loss_of(self.parameters(), step, dist.get_rank(), factor)


def model_of(device, dtype=torch.float32, channels_last=False, ddp=None, **options):
    network = Network(dtype, channels_last).to(device)
    model = DistributedDataParallel(network, bucket_cap_mb=0.1, **(ddp or {}))
    compressor = dr.Compressor(parameters=network.named_parameters(), **options)
    DistributedAdapter.compresses_alone = True  # with NCCL there is one rank
    compressor.register(model)
    return network, model, compressor


def train(device, factor=lambda step: 1.0, steps=STEPS, **options):
    """Return the averaged gradients and the memories of each step, and the way of payloads."""
    network, model, compressor = model_of(device, **options)
    seen = []
    for step in range(steps):
        network.zero_grad()
        model(step, factor(step)).backward()
        # in the order of the stream, so that an average that arrives too late shows
        gradients = {
            name: parameter.grad.clone().nan_to_num()
            for name, parameter in network.named_parameters()
        }
        memories = {
            name: dict(kept["memory"])
            for name, kept in compressor.state_dict()["parameters"].items()
        }
        seen.append(
            {"gradient": {n: one.cpu() for n, one in gradients.items()}, "memory": memories}
        )
    way = "payloads by NCCL" if compressor.adapter.device_path.nccl else "payloads through the host"
    compressor.close()
    return seen, way


def expect_path(name):
    """Check which path has run on the GPU; return it as text."""
    expected = {BucketJob if name in ON_HOST else DeviceBucketJob}
    if ran != expected:
        raise SystemExit(f"{name}: expected {expected}, got {ran}")
    return f"compressed on the {'host' if name in ON_HOST else 'GPU'}"


def expect_corrupt_payload(device):
    """Damage a payload on the last rank: all ranks must get the error in the next step."""

    def damaged(there, gathered):
        payloads = _bytes_on(there, gathered).clone()
        if dist.get_rank() == dist.get_world_size() - 1:
            payloads[-1] ^= 1
        return payloads

    torch_device._bytes_on = damaged
    _, model, compressor = model_of(device, codec=QUANTIZED)
    try:
        for step in range(2):
            model(step, 1.0).backward()
    except (dr.CorruptPayloadError, dr.PeerFailedError) as error:
        if "payload checksum: expected" not in str(error):
            raise
    else:
        raise SystemExit("a corrupt payload: expected an error, got none")
    finally:
        torch_device._bytes_on = _bytes_on
    compressor.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", choices=("gloo", "nccl"))
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    dist.init_process_group(
        "gloo" if arguments.backend == "gloo" else "cpu:gloo,cuda:nccl", timeout=TIMEOUT
    )
    for name, options in CASES.items():
        ran.clear()
        there, way = train(arguments.device, **options)
        path = "compressed on the host"
        if arguments.device != "cpu":
            path = f"{expect_path(name)}, {way}"
        expect_same(there, train("cpu", **options)[0], f"{name}: step")
        if dist.get_rank() == 0:
            print(
                f"{name}: {len(there)} steps of DDP on {dist.get_world_size()} ranks with "
                f"{arguments.backend}, {arguments.device}, {path}: the same bits as on the host",
                flush=True,
            )
    if arguments.device != "cpu":
        expect_corrupt_payload(arguments.device)
        print(f"rank {dist.get_rank()}: a corrupt payload was refused", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
