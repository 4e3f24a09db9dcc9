"""Measure the index codecs: bits per index, and time against `r += g`.

    taskset -c 1 python benchmarks/index_codecs.py [--json results/index_codecs.json]

Bits per index are compared with the information bound and DeepReduce's volumes. Times are of the
native codec alone on one thread, d = 25,557,032, medians of one run: index_codecs.cc, which this
script compiles.
"""

import argparse
import pathlib
import subprocess
import tempfile

import numpy as np
from measure import RESNET50, bound, compile_program, every_codec, heavy_tailed, row, verdict, write

import deepreduce_hvd as dr

#: the lossless codecs
CODECS = every_codec(
    dr.IndexCodec, {"Huffman": dr.Huffman(), "Huffman(delta=True)": dr.Huffman(delta=True)}
)
del CODECS["Bloom"]
BEST_SIMD, SCALAR = -1, 0
#: indices and raw values in % of dense, for a layer of d = 36,864 at 1 %
PUBLISHED = {"RLE": 1.59, "Huffman": 1.62}
RICE_MILLISECONDS = 1.0


def uniform(d, count):
    """Return (d,) float32 that is nonzero at ``count`` random places."""
    gradient = np.zeros(d, dtype=np.float32)
    gradient[np.random.default_rng(0).choice(d, count, replace=False)] = 1
    return gradient


def sizes():
    for d, density in ((RESNET50, 0.001), (RESNET50, 0.01), (RESNET50, 0.1), (36_864, 0.01)):
        count = int(d * density)
        gradient = uniform(d, count)
        for name, index in CODECS.items():
            info = dr.inspect(
                dr.Codec(dr.TopK(k=count), index=index, value=dr.QSGD(bits=1)).encode(gradient)
            )
            if info["index"] == "all":
                continue  # larger than dense
            bits = 8 * info["index_bytes"] / count
            target = 1.02 if name == "Rice" and d == RESNET50 else None
            yield row(
                f"{name} bits / bound, d = {d:,}, {density:.1%}",
                bits / bound(d, count),
                target,
                bits_an_index=bits,
            )


def published_volumes():
    gradient = heavy_tailed(36_864, 0)
    for name, index in CODECS.items():
        info = dr.inspect(dr.Codec(dr.TopK(0.01), index=index).encode(gradient))
        volume = 100 * (info["index_bytes"] + info["value_bytes"]) / gradient.nbytes
        yield row(
            f"{name} + raw values, d = 36,864 at 1 %",
            round(volume, 2),
            PUBLISHED.get(name),
            "% of dense",
        )


def times():
    levels = {name: (codec, BEST_SIMD) for name, codec in CODECS.items()}
    levels["Rice, scalar"] = CODECS["Rice"], SCALAR
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(folder, "index_codecs", "index")
        for density in (0.001, 0.01, 0.1):
            for name, (codec, simd) in levels.items():
                words = (RESNET50, density, codec.stage_id, simd, *map(float, codec.parameters()))
                answer = subprocess.run(
                    [program, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
                ).stdout
                encode, decode, add = map(float, answer.split())
                target = RICE_MILLISECONDS if name == "Rice" and density == 0.01 else None
                for what, spent in (("encode", encode), ("decode", decode)):
                    yield row(
                        f"{name} {what}, {density:.1%} of {RESNET50:,}",
                        spent,
                        target,
                        "milliseconds",
                        over_add=spent / add,
                    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = []
    for part in (sizes, published_volumes, times):
        for result in part():
            rows.append(result)
            details = "".join(
                f"  {key} {result[key]:.3f}"
                for key in ("bits_an_index", "over_add")
                if key in result
            )
            print(
                (
                    f"{result['what']:<56}{result['value']:>10.4f} "
                    f"{result['unit']}{details}{verdict(result)}"
                ),
                flush=True,
            )
    if arguments.json:
        write(arguments.json, rows)


if __name__ == "__main__":
    main()
