"""Test that steps give the same results on a device and on the host, with two ranks.

They have frozen and unused parameters, several layouts and dtypes, and skipped steps.
"""

import horovod.torch as hvd
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import deepreduce_hvd as dr

hvd.init()
SHAPES = {"first": (60, 50), "frozen": (70, 40), "unused": (50, 40), "image": (8, 6, 5, 5)}
STEPS = 6
OVERFLOWS = 4


def train(device, codec, dtype):
    """Return [gradients of the optimizer and memories, for every step]."""
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        for name, shape in SHAPES.items()
    }
    parameters["image"].data = parameters["image"].data.to(memory_format=torch.channels_last)
    compressor = dr.Compressor(
        codec,
        parameters=parameters.items(),
        dense_below=0,
        bucket_bytes=20_000,
        loss_scale=lambda: 1.0,
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        parameters.items(),
        compression=compressor,
        op=hvd.Sum,
    )
    seen, kept = [], None
    for step in range(STEPS):
        made = [
            StorageWeakRef(one.grad.untyped_storage())
            for one in parameters.values()
            if one.grad is not None
        ]
        optimizer.zero_grad()
        assert all(storage.expired() for storage in made), (
            "expected gradients that nothing keeps after the last result"
        )
        parameters["frozen"].requires_grad_(step not in (2, 3))
        random = torch.Generator().manual_seed(1000 * step + hvd.rank())
        loss = 0
        for name, parameter in parameters.items():
            numbers = torch.randn(parameter.shape, generator=random).to(dtype)
            if step == OVERFLOWS and name == "first":
                # finite on each rank, but not in the sum
                numbers[3, 3] = 0.9 * torch.finfo(dtype).max
            if name != "unused" or (step + hvd.rank()) % 2:
                loss = loss + (parameter * numbers.to(device)).sum()
        loss.backward()
        optimizer.synchronize()
        got = {
            name: parameter.grad.detach().cpu().clone() for name, parameter in parameters.items()
        }
        assert parameters["image"].grad.stride() == parameters["image"].stride(), (
            "expected the strides of channels_last"
        )
        if step in (2, 3):
            assert not got["frozen"].any(), "expected a frozen layer to stay"
        with optimizer.skip_synchronize():
            if step != OVERFLOWS:
                optimizer.step()
        before, kept = (
            kept,
            {
                name: one["memory"]["residual"]
                for name, one in compressor.state_dict()["parameters"].items()
            },
        )
        if step == OVERFLOWS:
            assert not got["first"].isfinite().all(), "expected an overflow"
            assert all(torch.equal(kept[name], before[name]) for name in kept), (
                "expected the memories of before the skipped step"
            )
        seen.append((got, kept))
    return seen


for codec in (
    dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4)),
    dr.Codec(dr.TopK(0.05), value=dr.Deflate()),
):
    for dtype in (torch.float32, torch.float16):
        for step, (there, here) in enumerate(
            zip(train("cuda:0", codec, dtype), train("cpu", codec, dtype))
        ):
            for kind, one, other in zip(("gradient", "residual"), there, here):
                for name in SHAPES:
                    assert torch.equal(one[name].nan_to_num(), other[name].nan_to_num()), (
                        codec,
                        dtype,
                        step,
                        kind,
                        name,
                    )
print("as expected")
