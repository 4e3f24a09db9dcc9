"""Measure training steps on a GPU: alone, with Horovod or DDP uncompressed, and compressed.

    export PYTHONPATH=.
    python benchmarks/gpu_step.py horovod           one rank: what compression itself takes
    python benchmarks/gpu_step.py ddp
    horovodrun -np 2 python benchmarks/gpu_step.py horovod     several ranks

Ranks share the GPUs. Networks are ResNet-50 (if torchvision is installed) with 32 images per rank,
and a transformer of the size of BERT-base with 16 texts of 128 words, both in bfloat16 autocast.
Each compressed row says where its gradients are compressed; the codec of the last one has no
kernels. All rows train in turns of several steps; the time of a step is that of a turn, at the end of which
the program waits for the GPU, divided by the steps. ``--device cpu --small`` tries the script.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import statistics
import time

import torch
from measure import write

import deepreduce_hvd as dr
from deepreduce_hvd.torch.ddp.base import DistributedAdapter

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCAL = "no exchange"
ROWS = {
    LOCAL: None,
    "none": None,
    "fp16": None,
    "default": {},
    "Rice, QSGD": {"codec": dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.QSGD(bits=4))},
    # its values have no kernels, so gradients are compressed on the host
    "Rice, Deflate": {"codec": dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.Deflate())},
}
STEPS, TURNS = 6, 3
WARM_UP = 60  # the density of the default falls in its first 50 steps
WORDS = 30_522


class Transformer(torch.nn.Module):
    """A language model with the layers of BERT-base (Devlin et al., 2019): 109 M parameters."""

    def __init__(self, layers=12, width=768):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        layer = torch.nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, words):
        return (self.layers(self.embedding(words)) @ self.embedding.weight.T).flatten(0, 1)


def network_of(name, small):
    if name == "transformer":
        return Transformer(*((1, 48) if small else ()))
    import torchvision

    return torchvision.models.resnet18() if small else torchvision.models.resnet50()


def batch_of(name, device, small):
    examples = 2 if small else {"resnet50": 32, "transformer": 16}[name]
    if name == "resnet50":
        images = torch.randn(examples, 3, 224, 224, device=device)
        return images, torch.randint(1000, (examples,), device=device)
    words = torch.randint(WORDS, (examples, 129), device=device)
    return words[:, :-1], words[:, 1:].flatten()


class HorovodJob:
    def __init__(self):
        import horovod.torch as hvd

        self._hvd = hvd
        hvd.init()
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        # with one rank, Horovod only then calls the compressor
        os.environ["HOROVOD_ELASTIC"] = "1"
        self.backend = "NCCL" if hvd.nccl_built() else "Gloo"

    def train(self, row, network, optimizer):
        hvd, named = self._hvd, list(network.named_parameters())
        compression = getattr(hvd.Compression, row, None)
        compressor = None
        if compression is None:
            compression = compressor = dr.Compressor(parameters=named, **ROWS[row])
        return network, hvd.DistributedOptimizer(optimizer, named, compression), compressor

    def slowest(self, seconds):
        return float(self._hvd.allreduce(torch.tensor(seconds), op=self._hvd.Max, name="seconds"))


class DdpJob:
    def __init__(self, device):
        import torch.distributed as dist

        self._dist = dist
        if "RANK" not in os.environ:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ.setdefault("MASTER_PORT", "29511")
        shared = int(os.environ["WORLD_SIZE"]) > max(1, torch.cuda.device_count())
        self.backend = "Gloo" if shared or device == "cpu" else "NCCL"
        dist.init_process_group("gloo" if self.backend == "Gloo" else "cpu:gloo,cuda:nccl")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def train(self, row, network, optimizer):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
        compressor = None
        if row == "fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        elif row != "none":
            compressor = dr.Compressor(parameters=network.named_parameters(), **ROWS[row])
            DistributedAdapter.compresses_alone = True
            compressor.register(model)
        return model, optimizer, compressor

    def slowest(self, seconds):
        largest = torch.tensor(seconds)
        self._dist.all_reduce(largest, self._dist.ReduceOp.MAX)
        return float(largest)


def measure(job, name, device, small):
    """Return {row: {"seconds": of each turn's steps, "bytes": sent per step or None}}."""
    batch = batch_of(name, device, small)
    trained = {}
    for row in ROWS:
        torch.manual_seed(0)
        network = network_of(name, small).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
        trained[row] = (
            (network, optimizer, None) if row == LOCAL else job.train(row, network, optimizer)
        )

    def turn(row, steps):
        model, optimizer, _ = trained[row]
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        return job.slowest((time.perf_counter() - started) / steps)

    for row in ROWS:
        turn(row, 2 if small else WARM_UP if row == "default" else 10)
    seconds = {row: [] for row in ROWS}
    for number in range(1 if small else TURNS):
        for row in random.Random(number).sample(list(ROWS), len(ROWS)):
            turn(row, 1)
            seconds[row].append(turn(row, 2 if small else STEPS))
    found = {}
    for row, (_, _, compressor) in trained.items():
        sent = where = None
        if compressor is not None:
            sent = sum(one["sent_bytes"] for one in compressor.stats().values())
            on_device = all(map(compressor.adapter.device_path.takes, trained[row][0].parameters()))
            where = "GPU" if on_device else "host"
        found[row] = {"seconds": seconds[row], "bytes": sent, "where": where}
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", choices=("horovod", "ddp"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small networks, for a trial run")
    parser.add_argument("--networks", default="resnet50,transformer")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/gpu-step.json")
    arguments = parser.parse_args()
    job = HorovodJob() if arguments.framework == "horovod" else DdpJob(arguments.device)
    device, gpu = arguments.device, "host"
    if device != "cpu":
        device = f"cuda:{job.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        gpu = torch.cuda.get_device_name(device)
    output = arguments.output or ROOT / "results" / "gpu-step.json"
    rows = []
    for name in arguments.networks.split(","):
        if name == "resnet50" and importlib.util.find_spec("torchvision") is None:
            if job.rank == 0:
                print("NOT MEASURED: ResNet-50, because torchvision is not installed", flush=True)
            continue
        found = measure(job, name, device, arguments.small)
        alone = statistics.median(found[LOCAL]["seconds"])
        for row, one in found.items():
            spent = statistics.median(one["seconds"])
            rows.append({
                "framework": arguments.framework, "ranks": job.size, "backend": job.backend,
                "network": name, "row": row, "seconds": spent, "fastest": min(one["seconds"]),
                "slowest": max(one["seconds"]), "ratio": spent / alone, "sent_bytes": one["bytes"],
                "compressed_on": one["where"],
                "device": gpu,
            })  # fmt: skip
            if job.rank == 0:
                print(
                    f"{arguments.framework} {job.size} x {job.backend} {name:<12}{row:<16}"
                    f"{1e3 * spent:9.2f} ms  {spent / alone:6.3f} of {LOCAL}"
                    + (
                        ""
                        if one["bytes"] is None
                        else f"  {one['bytes']:12,.0f} bytes per step, compressed on the {one['where']}"
                    ),
                    flush=True,
                )
    if job.rank == 0:
        kept = json.loads(output.read_text()) if output.exists() else []
        measured = {(one["framework"], one["ranks"], one["network"]) for one in rows}
        kept = [
            one for one in kept if (one["framework"], one["ranks"], one["network"]) not in measured
        ]
        write(output, kept + rows)


if __name__ == "__main__":
    main()
