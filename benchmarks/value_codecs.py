"""Measure the value codecs that fit no curve: bits per value, relative error, values per second.

    taskset -c 1 python benchmarks/value_codecs.py [--values 255570] [--json results/value_codecs.json]

The values are the largest 1 % of a heavy-tailed gradient. Times are of the native codec alone on
one thread, medians of one run: value_codecs.cc, which this script compiles. "both" is values /
(time to encode + time to decode).
"""

import argparse
import pathlib
import subprocess
import tempfile

import numpy as np
from measure import RESNET50, compile_program, every_codec, heavy_tailed, row, verdict, write

import deepreduce_hvd as dr

#: the codecs that keep the order of the values; fits.py measures the others
CODECS = [
    codec
    for codec in every_codec(
        dr.ValueCodec,
        {
            repr(codec): codec
            for codec in (
                dr.Deflate(),
                *(dr.Deflate(level=level, strategy="default") for level in (1, 3, 6, 9)),
                dr.Deflate(level=6, shuffle=False),
                *(dr.QSGD(bits=bits) for bits in (1, 2, 4, 8)),
                dr.QSGD(bits=4, bucket=64),
                dr.QSGD(bits=4, norm="l2"),
                *(dr.LloydMax(bits=bits) for bits in (1, 2, 3)),
                dr.Quantile(),
                dr.Quantile(buckets=16),
            )
        },
    ).values()
    if not codec.sorts
]
#: codecs that have a kernel for each SIMD level
SIMD_LEVELS = {0: "scalar", 1: "AVX2", -1: "best"}
QSGD_MILLIONS = 200


def time_codec(program, file, value, simd, repeats):
    """Return bytes, nanoseconds to encode, nanoseconds to decode, relative error."""
    words = [
        program,
        file,
        str(value.stage_id),
        str(simd),
        str(repeats),
        *(str(float(p)) for p in value.parameters()),
    ]
    numbers = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return [float(number) for number in numbers]


def rows(count, repeats):
    values = heavy_tailed(RESNET50 if count <= RESNET50 // 100 else 100 * count, 0)
    magnitudes = np.abs(values)
    selected = values[magnitudes >= np.partition(magnitudes, -count)[-count]][:count]
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(folder, "value_codecs", "value")
        file = pathlib.Path(folder) / "values"
        selected.tofile(file)
        for value in CODECS:
            slow = isinstance(value, (dr.Deflate, dr.Quantile))
            levels = {-1: "best"} if slow or isinstance(value, dr.RawValue) else SIMD_LEVELS
            for simd, level in levels.items():
                size, encode, decode, error = time_codec(
                    program, file, value, simd, max(repeats // 10, 3) if slow else repeats
                )
                target = QSGD_MILLIONS if value == dr.QSGD(bits=4) and simd == -1 else None
                speeds = {
                    "encode": 1e3 * selected.size / encode,
                    "decode": 1e3 * selected.size / decode,
                }
                yield row(
                    f"{value!r}, {level}",
                    1e3 * selected.size / (encode + decode),
                    target,
                    "M values per second, encode + decode",
                    at_most=False,
                    bits_per_value=8 * size / selected.size,
                    relative_error=error,
                    **speeds,
                )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--values", type=int, default=RESNET50 // 100, help="how many values to encode at once"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=101,
        help="calls whose median counts; a tenth for the slow codecs",
    )
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    print(
        f"{'codec, SIMD level':<52}{'bits':>7}{'error':>11}{'M/s encode':>12}{'decode':>9}{'both':>8}"
    )
    results = []
    for result in rows(arguments.values, arguments.repeats):
        results.append(result)
        print(
            f"{result['what']:<52}{result['bits_per_value']:>7.2f}{result['relative_error']:>11.2e}{result['encode']:>12.0f}"
            f"{result['decode']:>9.0f}{result['value']:>8.0f}{verdict(result)}",
            flush=True,
        )
    if arguments.json:
        write(arguments.json, results)


if __name__ == "__main__":
    main()
