"""Compare two ranks on one GPU with the same training on the host, bit for bit, with horovodrun.

Gradients and residuals must be equal.
"""

import sys
import warnings

import horovod.torch as hvd
import torch
from gpu_training import SHAPES, STEPS, expect_same, loss_of

import deepreduce_hvd as dr
import deepreduce_hvd.torch.ops

CODECS = {
    "raw": dr.Codec(dr.TopK(0.05), index=dr.RawIndex(), value=dr.RawValue()),
    "Bitmap, half": dr.Codec(dr.Threshold(1), index=dr.Bitmap(), value=dr.Float16()),
    "Rice, raw": dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.RawValue()),
    "recommended": dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.QSGD(bits=4)),
    "Bloom P2, FitPoly": dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.02), value=dr.FitPoly()),
    "Deflate": dr.Codec(dr.TopK(0.05), value=dr.Deflate()),
    "default": None,  # by the size of the tensor
}


def train(device, codec):
    """Return {name: [reduced gradient of each step]} and {name: residual at the end}."""
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, device=device))
        for name, shape in SHAPES.items()
    }
    options = {} if codec is None else {"codec": codec, "dense_below": 0}
    compressor = dr.Compressor(parameters=parameters.items(), bucket_bytes=50_000, **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        named_parameters=parameters.items(),
        compression=compressor,
    )
    arrived = {name: [] for name in SHAPES}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(parameters.values(), step, hvd.rank()).backward()
        optimizer.synchronize()
        for name, parameter in parameters.items():
            arrived[name].append(parameter.grad.detach().clone())
        with optimizer.skip_synchronize():
            optimizer.step()
    return {name: [one.cpu() for one in gradients] for name, gradients in arrived.items()}, {
        name: kept["memory"] for name, kept in compressor.state_dict()["parameters"].items()
    }


def runs_on_device(codec):
    """Return whether this build compresses on the GPU with a codec; None stands for the default."""
    codecs = map(dr.recommended_codec, SHAPES.values()) if codec is None else [codec]
    return all(torch.ops.deepreduce.cuda_supports(one.fields(dr.Residual())) for one in codecs)


def main():
    hvd.init()
    for name, codec in CODECS.items():
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always")
            on_device = train(torch.device("cuda:0"), codec)
        through_host = [
            str(one.message) for one in noticed if "compressed on the host" in str(one.message)
        ]
        there = runs_on_device(codec)
        if bool(through_host) == there:
            raise SystemExit(
                f"{name}: expected {'no notice' if there else 'a notice'} of the host's "
                f"path, got {through_host}"
            )
        on_host = train(torch.device("cpu"), codec)
        for what, one, other in zip(("gradient", "memory"), on_device, on_host):
            expect_same(one, other, f"{name}: {what}")
        if hvd.rank() == 0:
            where = "on the GPU" if there else "through the host"
            print(
                f"{name}: {STEPS} steps on {hvd.size()} ranks, compressed {where}, the same bits "
                "as on the host",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
