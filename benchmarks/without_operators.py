"""Measure PyTorch without this package's operators, against the operators in the same run.

    python benchmarks/without_operators.py

Encode and decode-and-sum then use NumPy.
"""

import sys

import torch
from measure import default_codec, paired_ratio

import deepreduce_hvd as dr
from deepreduce_hvd.torch import ops as adapter

SIZES = (10_000, 1_000_000)


def step_of(d, why_no_operators):
    """Return a function that encodes a gradient of ``d`` elements and adds up two payloads."""
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(0))
    residual, hint, out = torch.zeros(d), torch.zeros(1), torch.zeros(d)
    codec, memory = default_codec(), dr.Residual()
    number = iter(range(sys.maxsize))

    def step():
        adapter.WHY_NO_OPERATORS = why_no_operators
        payload = adapter.encode_flat(
            codec, memory, gradient, (residual,), hint, 0, next(number), 1, 0
        )
        adapter.decode_sum_flat([payload, payload], out, 0.5)

    return step


def main():
    torch.set_num_threads(1)
    if adapter.WHY_NO_OPERATORS is not None:
        sys.exit(f"expected the operators for the comparison: {adapter.WHY_NO_OPERATORS}")
    for d in SIZES:
        without, operators = step_of(d, "measured without"), step_of(d, None)
        for _ in range(20):  # until the residuals are as in the middle of a training
            without()
            operators()
        ratio, seconds, unit = paired_ratio(without, operators, repeats=201)
        print(
            f"{d:>9,} elements: {1e6 * seconds:8.1f} us without, {1e6 * unit:8.1f} us "
            f"with operators, ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
