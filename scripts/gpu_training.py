"""The training that the comparisons of a GPU with the host share.

The loss is a sum of parameters times numbers that are drawn on the host. So backward passes on both
devices make the same gradients, bit for bit.
"""

import torch

TABLE = (900, 8)  # the shape of an embedding table
SHAPES = {"first": (300, 200), "second": (200, 70), "norm": (300,), "bias": (70,), "table": TABLE}
USED_ROWS = 60  # of a table, in one step of one rank
STEPS = 4
CYCLES = 3_000_000  # of a GPU's clock; about 2 ms


class _Late(torch.autograd.Function):
    """Keep the GPU busy before it makes a gradient, so that one that is read too early shows."""

    @staticmethod
    def forward(ctx, parameter):
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        if gradient.is_cuda:
            torch.cuda._sleep(CYCLES)
        return gradient.clone()


def loss_of(parameters, step, rank, factor=1.0):
    """Return the loss of one rank in one step; the gradients are random, times ``factor``."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    total = 0.0
    for parameter in parameters:
        numbers = torch.randn(parameter.shape, generator=random) * factor
        if parameter.shape == TABLE:
            numbers[torch.randperm(TABLE[0], generator=random)[USED_ROWS:]] = 0
        total = total + (_Late.apply(parameter) * numbers.to(parameter)).sum()
    return total


def expect_same(one, other, what):
    """Compare two tensors or nested dictionaries and lists of tensors, bit for bit.

    Raises:
        SystemExit: they differ.
    """
    if isinstance(one, dict):
        if one.keys() != other.keys():
            raise SystemExit(f"{what}: expected {sorted(other)}, got {sorted(one)}")
        for name in one:
            expect_same(one[name], other[name], f"{what}, {name}")
    elif isinstance(one, list):
        for number, pair in enumerate(zip(one, other, strict=True)):
            expect_same(*pair, f"{what} {number}")
    elif not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
        raise SystemExit(f"{what}: expected the bits of the host, got others")
