"""Compare two ranks on one GPU with the same training on the host, bit for bit, with horovodrun.

Gradients and residuals must be equal. The loss is a sum of parameters times numbers that are drawn
on the host, so both backward passes make the same gradients.
"""

import sys
import warnings

import horovod.torch as hvd
import torch

import deepreduce_hvd as dr
import deepreduce_hvd.torch.ops

STEPS = 4
SHAPES = {"first": (300, 200), "second": (200, 70), "bias": (70,)}
CODECS = {
    "raw": dr.Codec(dr.TopK(0.05), index=dr.RawIndex(), value=dr.RawValue()),
    "Bitmap, half": dr.Codec(dr.Threshold(1), index=dr.Bitmap(), value=dr.Float16()),
    "Rice, raw": dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.RawValue()),
    "recommended": dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.QSGD(bits=4)),
    "Bloom P2, FitPoly": dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.02), value=dr.FitPoly()),
    "Deflate": dr.Codec(dr.TopK(0.05), value=dr.Deflate()),
}


def train(device, codec):
    """Return {name: [reduced gradient of each step]} and {name: residual at the end}."""
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, device=device))
        for name, shape in SHAPES.items()
    }
    compressor = dr.Compressor(
        codec, parameters=parameters.items(), dense_below=0, bucket_bytes=50_000
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        named_parameters=parameters.items(),
        compression=compressor,
    )
    arrived = {name: [] for name in SHAPES}
    for step in range(STEPS):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(1000 * step + hvd.rank())
        loss = sum(
            (parameter * torch.randn(parameter.shape, generator=random).to(device)).sum()
            for parameter in parameters.values()
        )
        loss.backward()
        optimizer.synchronize()
        for name, parameter in parameters.items():
            arrived[name].append(parameter.grad.detach().cpu().clone())
        with optimizer.skip_synchronize():
            optimizer.step()
    return arrived, {
        name: kept["memory"] for name, kept in compressor.state_dict()["parameters"].items()
    }


def main():
    hvd.init()
    for name, codec in CODECS.items():
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always")
            on_device, kept_on_device = train(torch.device("cuda:0"), codec)
        through_host = [
            str(one.message) for one in noticed if "compressed on the host" in str(one.message)
        ]
        there = torch.ops.deepreduce.cuda_supports(codec.fields(dr.Residual()))
        if bool(through_host) == there:
            raise SystemExit(
                f"{name}: expected {'no notice' if there else 'a notice'} of the host's "
                f"path, got {through_host}"
            )
        on_host, kept_on_host = train(torch.device("cpu"), codec)
        for parameter in SHAPES:
            for step, (one, other) in enumerate(zip(on_device[parameter], on_host[parameter])):
                if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                    raise SystemExit(
                        f"{name}: expected {parameter}'s gradient of step {step} as on "
                        "the host, got another"
                    )
            if not torch.equal(
                kept_on_device[parameter]["residual"], kept_on_host[parameter]["residual"]
            ):
                raise SystemExit(
                    f"{name}: expected {parameter}'s residual as on the host, got another"
                )
        if hvd.rank() == 0:
            where = "on the GPU" if there else "through the host"
            print(
                (
                    f"{name}: {STEPS} steps on {hvd.size()} ranks, compressed {where}, the "
                    "same bits as on the host"
                ),
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
