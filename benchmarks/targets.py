"""Check the package's targets for speed and size, each relative to a measurement of the same run.

One thread, d = 25,557,032 float32 elements (ResNet-50).
"""

import math
import os
import pathlib
import subprocess
import sys

import fits
import numpy as np
from measure import RESNET50, bound, default_codec, heavy_tailed, paired_ratio, row, seconds

import deepreduce_hvd as dr
from deepreduce_hvd.arrays import zeros_on_huge_pages
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.sums import GatheredPayloads
from deepreduce_hvd.native import core as _native
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

_RANKS = 64
COMPRESS = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.RawValue())


def _encode(codec, memory, gradient, state, threshold=0.0, step=0):
    return encode_numpy(codec, memory, gradient, state, threshold, 0, step, 0, 0)


def compress(report):
    """Measure error feedback, exact top-k and encoding, over steps with a new gradient each."""
    import torch

    torch.set_num_threads(1)
    gradients = [heavy_tailed(RESNET50, seed) for seed in range(3)]
    residual, plain = zeros_on_huge_pages(RESNET50), zeros_on_huge_pages(RESNET50)
    step, threshold = 0, 0.0

    def add():
        np.add(plain, gradients[step % 3], out=plain)

    def first():
        nonlocal step
        step += 1
        _encode(COMPRESS, dr.Residual(), gradients[step % 3], (residual,), 0.0, step)

    ratio, work, unit = paired_ratio(first, add)
    report(
        row(
            "compress, first step / r += g",
            ratio,
            5,
            milliseconds=1e3 * work,
            unit_milliseconds=1e3 * unit,
        )
    )

    def steady():
        nonlocal step, threshold
        step += 1
        _, threshold = _encode(
            COMPRESS, dr.Residual(), gradients[step % 3], (residual,), threshold, step
        )

    for _ in range(5):
        steady()
    ratio, work, unit = paired_ratio(steady, add)
    report(
        row(
            "compress, later steps / r += g",
            ratio,
            3,
            milliseconds=1e3 * work,
            unit_milliseconds=1e3 * unit,
        )
    )
    default = default_codec()

    def recommended():
        nonlocal step, threshold
        step += 1
        _, threshold = _encode(
            default, dr.Residual(), gradients[step % 3], (residual,), threshold, step
        )

    recommended()
    ratio, work, unit = paired_ratio(recommended, add)
    report(row("compress, default codec, later steps / r += g", ratio, milliseconds=1e3 * work))

    tensor = torch.from_numpy(gradients[0])
    ratio, work, unit = paired_ratio(lambda: torch.topk(tensor.abs(), RESNET50 // 100), add, 3)
    report(row("torch.topk(|g|, 1 %) alone / r += g", ratio, milliseconds=1e3 * work))

    payload, _ = _encode(COMPRESS, dr.Residual(), gradients[0], (residual,), threshold, step)
    ratio, work, unit = paired_ratio(lambda: dr.decode_sum([payload], plain), add)
    report(
        row(
            "decode-and-sum of that payload / r += g",
            ratio,
            1,
            milliseconds=1e3 * work,
            unit_milliseconds=1e3 * unit,
        )
    )


def many_ranks(report):
    """Measure the sums of 64 ranks' payloads of small gradients, as an exchange gets them.

    The unit is the core's decoding of the same payloads, which are divided already. Small gradients
    show what each payload takes beside that.
    """
    count, d = 161, 3600
    gradients = np.split(heavy_tailed(count * d, 0), count)
    members = [BucketMember(str(number), one, ()) for number, one in enumerate(gradients)]
    bucket = Bucket(default_codec(), dr.NoMemory(), members)
    gathered = np.concatenate([bucket.encode()] * _RANKS)
    outs = [np.zeros(d, dtype=np.float32) for _ in range(count)]
    total = GatheredPayloads(bucket, gathered, _RANKS)
    divided = [total.payloads(number) for number in range(count)]

    def whole():
        total = GatheredPayloads(bucket, gathered, _RANKS)
        for number, out in enumerate(outs):
            total.add_to(number, out, 1 / _RANKS)

    def core():
        for payloads, out in zip(divided, outs):
            _native.decode_sum(payloads, out, 1 / _RANKS)

    ratio, work, unit = paired_ratio(whole, core)
    report(
        row(
            f"sums of {_RANKS} ranks' payloads of {count} small gradients / the core's decoding",
            ratio,
            1.1,
            milliseconds=1e3 * work,
            unit_milliseconds=1e3 * unit,
        )
    )


def rice(report):
    """Measure bits per index against the information bound, on uniform supports."""
    for density in (0.001, 0.01, 0.1):
        k = int(RESNET50 * density)
        support = np.sort(np.random.default_rng(0).choice(RESNET50, k, replace=False)).astype(
            np.uint32
        )
        section = dr.Rice().encode(support, RESNET50, 0)[0]
        report(
            row(
                f"Rice bits per index / information bound, density {density:.1%}",
                8 * len(section) / k / bound(RESNET50, k),
                1.02,
                bits=8 * len(section) / k,
            )
        )


def bloom(report):
    """Measure the filter's size and false positives against the formula, and the index scan."""
    k, rate = RESNET50 // 100, 1e-3
    gradient = np.zeros(RESNET50, dtype=np.float32)
    gradient[np.random.default_rng(0).choice(RESNET50, k, replace=False)] = 1
    codec = dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=rate, policy="p0"))
    payload, _ = _encode(codec, dr.NoMemory(), gradient, ())
    info = dr.inspect(payload)
    formula = k * math.log(1 / rate) / math.log(2) ** 2
    report(row("Bloom section bits / formula", 8 * info["index_bytes"] / formula, 1.01))
    measured = (info["k"] - k) / (RESNET50 - k)
    report(
        row(
            "Bloom |measured false-positive rate / epsilon - 1|",
            abs(measured / rate - 1),
            0.10,
            unit="relative",
        )
    )
    scan = dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=rate, policy="leftmost"))
    payload, _ = _encode(scan, dr.NoMemory(), gradient, ())
    plain = np.zeros(RESNET50, dtype=np.float32)
    ratio, work, unit = paired_ratio(
        lambda: dr.decode_sum_sparse([payload], RESNET50),
        lambda: np.add(plain, gradient, out=plain),
    )
    report(
        row(
            "Bloom universe scan, epsilon 1e-3, 1 % / r += g",
            ratio,
            10,
            milliseconds=1e3 * work,
            unit_milliseconds=1e3 * unit,
        )
    )


def fit_poly(report):
    """Measure encoding of 1 % of the values, and its error.

    The time of the native codec is compared with the NumPy oracle, the error with NumPy's least
    squares.
    """
    values = heavy_tailed(RESNET50, 0)
    values = values[
        np.abs(values) >= np.partition(np.abs(values), -(RESNET50 // 100))[-(RESNET50 // 100)]
    ]
    value = dr.FitPoly()
    fitted, raw = dr.Codec(dr.NoneSparsifier(), value=value), dr.Codec(dr.NoneSparsifier())
    native = seconds(lambda: _encode(fitted, dr.NoMemory(), values, ()), 151) - seconds(
        lambda: _encode(raw, dr.NoMemory(), values, ()), 151
    )
    oracle = seconds(lambda: value.encode(values, 0), 3)
    report(
        row(
            "FitPoly encode of the 1 % values / the NumPy oracle",
            native / oracle,
            0.02,
            milliseconds=1e3 * native,
            oracle_milliseconds=1e3 * oracle,
        )
    )
    payload, _ = _encode(fitted, dr.NoMemory(), values, ())
    error = fits.relative_error(dr.decode(payload), values)
    report(
        row(
            "FitPoly error / least squares on the same knots",
            error / fits.least_squares_error(values, value.degree),
            1.001,
            relative_error=error,
        )
    )


def qsgd(report):
    """Measure encode and decode of 4-bit values, with the payload's other work subtracted."""
    values = heavy_tailed(4_000_000, 0)
    out = np.zeros_like(values)
    total = 0.0
    for codec, sign in (
        (dr.Codec(dr.NoneSparsifier(), value=dr.QSGD(bits=4)), 1),
        (dr.Codec(dr.NoneSparsifier()), 0),
    ):
        payload, _ = _encode(codec, dr.NoMemory(), values, ())
        spent = seconds(lambda: _encode(codec, dr.NoMemory(), values, ())) + seconds(
            lambda: decode_sum_numpy([payload], out, 1.0)
        )
        total += sign * spent
    report(
        row(
            "QSGD 4-bit encode + decode, whole payloads",
            values.size / total / 1e6,
            200,
            "M values per second",
            at_most=False,
        )
    )


_PEAK = """
import numpy as np
import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.sums import GatheredPayloads
from deepreduce_hvd.native import core as _native
from deepreduce_hvd.numpy_backend import encode_numpy
from measure import RESNET50, bound, heavy_tailed

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

codec = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.RawValue())
gradient, residual = heavy_tailed(RESNET50, 0), np.zeros(RESNET50, dtype=np.float32)
residual += gradient
encode_numpy(dr.Codec(dr.TopK(0.01), index=dr.Rice()), dr.NoMemory(), gradient[:10000], (), 0.0, 0, 0, 0, 0)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
payload, _ = encode_numpy(codec, dr.Residual(), gradient, (residual,), 0.0, 0, 0, 0, 0)
print((status("VmHWM") - before - payload.size) / gradient.nbytes)
"""


def peak_memory(report):
    """Measure the memory that a first compress touches, as the operating system counts it.

    Gradient, residual and payload are not counted.
    """
    finished = subprocess.run(
        [sys.executable, "-c", _PEAK],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    report(
        row(
            "peak extra memory of compress / gradient",
            float(finished.stdout),
            0.10,
            unit="of the gradient's bytes",
        )
    )


MEASUREMENTS = (compress, many_ranks, rice, bloom, fit_poly, qsgd, peak_memory)
