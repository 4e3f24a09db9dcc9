"""Measure FitPoly and FitDExp: time, error, and bytes of the published layer.

    taskset -c 1 python benchmarks/fits.py [--elements 25557032] [--json results/fits.json]

Time is compared with the NumPy oracle, error with an independent least squares fit. Times are
medians of one thread in one run. The native core is measured through whole payloads. Row "codec":
the time of the native encode of all values with the codec, minus that with RawValue (so packing the
order mapping counts), over the time of the oracle's value.encode alone. Row "payload": the same
payload from the native core and from the oracle, nothing subtracted.
"""

import argparse
import pathlib

import numpy as np
from measure import RESNET50, row, seconds, verdict, write
from numpy.polynomial import chebyshev

import deepreduce_hvd as dr
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy
from deepreduce_hvd.stages.value_codecs import fit_poly
from deepreduce_hvd.stages.value_codecs.fit_sides import sort_sides

SAMPLES = {
    "laplace": lambda random, n: random.laplace(size=n),
    "student t3": lambda random, n: random.standard_t(3, n),
    "normal": lambda random, n: random.standard_normal(n),
}


def largest_percent(sample, elements):
    """Return the largest 1 % of ``elements`` samples, in index order, float32."""
    values = SAMPLES[sample](np.random.default_rng(0), elements) * 1e-3
    count = elements // 100
    chosen = np.argpartition(np.abs(values), elements - count)[elements - count :]
    return values[np.sort(chosen)].astype(np.float32)


def relative_error(decoded, values):
    return float(
        np.linalg.norm(decoded.astype(np.float64) - values)
        / np.linalg.norm(values.astype(np.float64))
    )


def least_squares_error(values, degree):
    """Return the relative error of NumPy's Chebyshev least squares fit on FitPoly's knots."""
    squared = 0.0
    for y in sort_sides(values)[1]:
        for start, end in fit_poly.find_segments(y, fit_poly.choose_segments(y, degree), degree):
            x = np.linspace(-1, 1, end - start)
            squared += (
                (chebyshev.chebval(x, chebyshev.chebfit(x, y[start:end], degree)) - y[start:end])
                ** 2
            ).sum()
    return float(np.sqrt(squared) / np.linalg.norm(values.astype(np.float64)))


def rows(elements):
    for sample in SAMPLES:
        values = largest_percent(sample, elements)
        for name, value in (("FitPoly", dr.FitPoly()), ("FitDExp", dr.FitDExp())):
            codec = dr.Codec(dr.NoneSparsifier(), value=value)
            raw = dr.Codec(dr.NoneSparsifier())
            out = np.zeros_like(values)
            payload, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 0, 0, 0, 0)
            native = seconds(
                lambda: encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 0, 0, 0, 0), 15
            )
            around = seconds(
                lambda: encode_numpy(raw, dr.NoMemory(), values, (), 0.0, 0, 0, 0, 0), 15
            )
            oracle = seconds(lambda: value.encode(values, 0), 3)
            whole = seconds(
                lambda: encode_numpy(
                    codec, dr.NoMemory(), values, (), 0.0, 0, 0, 0, 0, native=False
                ),
                3,
            )
            decode = seconds(lambda: decode_sum_numpy([payload], out, 1.0), 15)
            info = dr.inspect(payload)
            yield row(
                f"{name} encode / oracle, codec, {sample}, k = {values.size}",
                (native - around) / oracle, 0.02 if name == "FitPoly" else None,
                native_ms=1e3 * (native - around), oracle_ms=1e3 * oracle,
                decode_sum_ms=1e3 * decode, value_bytes=info["value_bytes"],
            )  # fmt: skip
            yield row(
                f"{name} encode / oracle, payload, {sample}, k = {values.size}",
                native / whole,
                native_ms=1e3 * native,
                oracle_ms=1e3 * whole,
            )
            error = relative_error(dr.decode(payload), values)
            yield row(f"{name} relative error, {sample}", error, unit="|x - v| / |v|")
            if name == "FitPoly":
                ratio = error / least_squares_error(values, value.degree)
                yield row(f"{name} error / least squares, {sample}", ratio, 1.001)
        layer = np.zeros(36864, dtype=np.float32)
        layer[np.linspace(0, 36863, 368).astype(int)] = largest_percent(sample, 36800)
        for name, value in (("FitPoly", dr.FitPoly()), ("FitDExp", dr.FitDExp())):
            payload = dr.Codec(dr.TopK(0.01), value=value).encode(layer)
            share = payload.size / (4 * layer.size)
            target = {"FitPoly": 0.0117, "FitDExp": 0.0102}[name]
            yield row(f"{name} volume, d = 36,864 at 1 %, {sample}", share, target, "of dense")
            error = relative_error(dr.decode(payload), layer)
            yield row(f"{name} relative error there, {sample}", error, unit="|x - v| / |v|")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements",
        type=int,
        default=RESNET50,
        help="of the gradient whose largest 1 %% are fitted",
    )
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    results = []
    for result in rows(arguments.elements):
        results.append(result)
        details = "".join(
            f"  {key} {result[key]:.4g}" for key in result if key.endswith(("_ms", "_bytes"))
        )
        print(
            f"{result['what']:62} {result['value']:.6f} {result['unit']}{verdict(result)}{details}",
            flush=True,
        )
    if arguments.json:
        write(arguments.json, results)


if __name__ == "__main__":
    main()
