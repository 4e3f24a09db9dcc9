"""Measure TopK with error feedback against NumPy's `r += g`.

Usage: ``python benchmarks/selection.py [elements]``.
"""

import statistics
import sys
import time

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd import _native

RESNET50 = 25_557_032
LEVELS = ("scalar", "avx2", "avx512")


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(elements=RESNET50, ratio=0.01, simd=-1, memory=None, repeats=7):
    """Return median seconds of one thread on Gaussian float32 gradients of ``elements`` numbers.

    The three measurements alternate, so other load on the machine affects all of them.

    Returns:
        {"add": NumPy's r += g, "first": encode without a known threshold, "steady": encode with the
        threshold of the last step}. Encode is a whole encode: error feedback, TopK(ratio),
        RawIndex, RawValue, payload.
    """
    codec = dr.Codec(dr.TopK(ratio))
    memory = dr.Residual() if memory is None else memory
    generator = np.random.default_rng(0)
    gradients = [generator.standard_normal(elements, dtype=np.float32) for _ in range(2)]
    state = tuple(np.zeros(elements, dtype=np.float32) for _ in memory.state)
    summed = np.zeros(elements, dtype=np.float32)
    fields, threshold = codec.fields(memory), 0.0
    samples = {"add": [], "first": [], "steady": []}

    def encode(gradient, hint):
        nonlocal threshold
        _, threshold, _ = _native.encode(fields, gradient, 0, *state, threshold=hint, simd=simd)

    for step in range(20):  # the distribution of the residual becomes steady
        encode(gradients[step % 2], threshold)
    for _ in range(repeats):
        samples["add"].append(_seconds(lambda: np.add(summed, gradients[0], out=summed)))
        samples["first"].append(_seconds(lambda: encode(gradients[0], 0.0)))
        samples["steady"].append(_seconds(lambda: encode(gradients[1], threshold)))
    return {name: statistics.median(times) for name, times in samples.items()}


def main():
    elements = int(sys.argv[1]) if len(sys.argv) > 1 else RESNET50
    print("| level | k | r += g, ms | first step | steady state |\n|---|---:|---:|---:|---:|")
    for simd in range(_native.simd_level() + 1):
        for ratio in (0.001, 0.01, 0.1):
            times = measure(elements, ratio, simd)
            ratios = (times[name] / times["add"] for name in ("first", "steady"))
            print(
                f"| {LEVELS[simd]} | {100 * ratio:g} % | {1e3 * times['add']:.1f} |",
                " | ".join(f"{x:.2f}" for x in ratios),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
