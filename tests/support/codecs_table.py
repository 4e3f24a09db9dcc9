"""The codecs, sparsifiers and inputs of the conformance suite.

A new codec is in the tables with its default; other settings get a row here. Each needs a golden
file. A new sparsifier or memory needs a row here.
"""

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.numerics.random import random32, random_uniform


def _of_all(kind, settings):
    """Return {name: codec}: every codec of the table of stages with its default, and settings.

    A default has the name of its file, unless ``settings`` has another name for it.
    """
    table = {}
    for row in (row for row in _native.stages() if row["kind"] == kind):
        default = getattr(dr, row["name"])()
        own = {name: codec for name, codec in settings.items() if type(codec) is type(default)}
        if default not in own.values():
            table[row["file"]] = default
        table.update(own)
    return table


#: name -> index codec
INDEX = _of_all(
    "index",
    {
        "huffman_delta": dr.Huffman(delta=True),
        "bloom_naive": dr.Bloom(fpr=0.02, policy="naive"),
        "bloom_p0": dr.Bloom(fpr=1e-3, policy="p0"),
        "bloom_p0_auto": dr.Bloom(fpr="auto", policy="p0"),
        "bloom_p1": dr.Bloom(fpr=0.02, policy="p1"),
        "bloom_leftmost": dr.Bloom(fpr=0.02, policy="leftmost"),
        "bloom_p2": dr.Bloom(fpr=0.02),
        "bloom_p2_default": dr.Bloom(),
    },
)

#: name -> value codec
VALUE = _of_all(
    "value",
    {
        "deflate": dr.Deflate(strategy="default"),
        "deflate_rle": dr.Deflate(),
        "deflate_plain": dr.Deflate(level=6, shuffle=False),
        "qsgd_1": dr.QSGD(bits=1),
        "qsgd_2": dr.QSGD(bits=2, bucket=64),
        "qsgd_4": dr.QSGD(bits=4),
        "qsgd_5_l2": dr.QSGD(bits=5, bucket=16, norm="l2"),
        "qsgd_8": dr.QSGD(bits=8),
        "fit_poly_degree1": dr.FitPoly(degree=1),
        "fit_poly_degree7": dr.FitPoly(degree=7),
        "fit_poly_segments4": dr.FitPoly(segments=4),
        "quantile_16": dr.Quantile(buckets=16),
        "lloyd_max_1": dr.LloydMax(bits=1),
        "lloyd_max_2": dr.LloydMax(),
        "lloyd_max_3": dr.LloydMax(bits=3),
        "lloyd_max_4": dr.LloydMax(bits=4),
    },
)

#: the same, with value codecs that a compressor with a memory accepts: some have smaller buckets
VALUE_WITH_MEMORY = {
    name: codec if codec.relative_error() < 1 else dr.QSGD(bits=2, bucket=16)
    for name, codec in VALUE.items()
}

#: the index codecs that a compressor with a memory accepts
INDEX_WITH_MEMORY = {name: codec for name, codec in INDEX.items() if not codec.misplaces_values}

#: name -> sparsifier for the small inputs below
SPARSIFIERS = {
    "topk": dr.TopK(0.05),
    "topk_k": dr.TopK(k=3),
    "topk_half": dr.TopK(0.5),
    "topk_warm": dr.TopK(0.01, warmup_steps=2),
    "random_k": dr.RandomK(0.05),
    "random_k_3": dr.RandomK(k=3),
    "random_k_all": dr.RandomK(1.0),
    "threshold": dr.Threshold(0.1),
    "threshold_0": dr.Threshold(0),
    "chunk_topk": dr.ChunkTopK(0.02),
    "chunk_topk_1": dr.ChunkTopK(chunk=1),
    "chunk_topk_3000": dr.ChunkTopK(chunk=3000),
    "none": dr.NoneSparsifier(),
}

MEMORIES = {
    "no_memory": dr.NoMemory(),
    "residual": dr.Residual(),
    "low_pass": dr.LowPass(0.1),
    "low_pass_1": dr.LowPass(1),
    "momentum_correction": dr.MomentumCorrection(),
    "momentum_correction_0": dr.MomentumCorrection(0),
}

#: sizes around the widths of vectors, the blocks of the passes and the memory for candidates
SIZES = (1, 7, 8, 9, 15, 16, 17, 31, 33, 2047, 2048, 2049, 4097, 16383, 16384, 16385, 20000)


def gradient(d, key=7):
    """Return a heavy-tailed test gradient, (d,) float32, the same on every machine."""
    counters = np.arange(d)
    sign = np.where(random32(key, counters) & 1, np.float32(1), np.float32(-1))
    uniform = random_uniform(key + 1, counters)
    return (sign * uniform * uniform * uniform * uniform).astype(np.float32)


def _is_lossless(codec):
    indices = np.flatnonzero(np.abs(gradient(20_000)) > 0.7).astype(np.uint32)
    return np.array_equal(codec.encode(indices, 20_000, key=0)[1], indices)


#: names of the index codecs that keep all indices, and add none
LOSSLESS = [name for name, codec in INDEX.items() if _is_lossless(codec)]


def on_device(table):
    """Return the names of the codecs of a table that have a device codec."""
    device = {row["name"] for row in _native.stages() if row["on_device"]}
    return [name for name, codec in table.items() if type(codec).__name__ in device]


def inputs():
    """Return {name: (d,) float32}: sizes around block and word boundaries, and degenerate ones."""
    cases = {f"d{d}": gradient(d) for d in (1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 4096, 20011)}
    cases["empty"] = np.zeros(0, dtype=np.float32)
    cases["zeros"] = np.zeros(100, dtype=np.float32)
    cases["all_equal"] = np.full(300, 0.25, dtype=np.float32)
    cases["all_positive"] = np.abs(gradient(500))
    cases["all_negative"] = -np.abs(gradient(500))
    cases["one_nonzero"] = np.eye(1, 400, 399, dtype=np.float32)[0]
    cases["sparse"] = np.where(np.arange(3000) % 37 == 0, gradient(3000), np.float32(0))
    cases["clustered"] = np.where(
        np.abs(np.arange(5000) - 2500) < 130, gradient(5000) + 1, gradient(5000) * np.float32(1e-3)
    )
    cases["huge_and_tiny"] = (
        gradient(700) * np.float32(1e38) * np.where(np.arange(700) % 2, 1, 1e-70)
    ).astype(np.float32)
    cases["denormal"] = gradient(256) * np.float32(1e-41)
    # one side has only numbers below the normal ones, which differ in their last five bits
    cases["denormal_side"] = np.where(
        np.arange(4000) % 101 == 0, -np.exp2(gradient(4000) * 30), np.arange(4000) % 32 * 2.0**-149
    ).astype(np.float32)
    cases["ties"] = np.round(gradient(2000) * 4).astype(np.float32)
    return cases
