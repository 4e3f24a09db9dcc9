"""Bytes that one rank sends per step of well-known networks, by codec.

    python benchmarks/network_bytes.py

Each tensor is encoded as random values from a normal distribution, by the default codec or by one
for large tensors only. Tensors that are too small for a codec are sent uncompressed, as with a
``Compressor``. Takes about 10 s.
"""

import json
import math
import pathlib

import architectures
import numpy as np
from measure import default_codec

import deepreduce_hvd as dr

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
NETWORKS = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "bert_base": "BERT-base", "lstm": "LSTM"}
_LARGE, _SMALL = 1024, 32  # elements from which the default compresses as a large or small tensor


def bytes_of(shapes, large, small=None):
    """Return the bytes of one step's gradients: (of payloads, of uncompressed tensors).

    Args:
        shapes: those of the gradients.
        large, small: codecs of large and of small tensors; None sends them uncompressed.
    """
    draw = np.random.default_rng(0)
    payloads = uncompressed = 0
    for shape in shapes:
        elements = math.prod(shape)
        codec = large if elements >= _LARGE else small if elements >= _SMALL else None
        if codec is None:
            uncompressed += 4 * elements
        else:
            payloads += codec.encode(draw.standard_normal(elements, np.float32)).size
    return payloads, uncompressed


def main():
    codecs = {
        "Top-r pairs": (dr.Codec(dr.TopK(0.01)),),
        "default": (default_codec(), dr.recommended_codec((1,))),
        "large tensors": (default_codec(),),
    }
    rows = []
    for key, network in NETWORKS.items():
        shapes = [shape for _, shape, _ in getattr(architectures, key)()]
        dense = 4 * sum(map(math.prod, shapes))
        for name, own in codecs.items():
            payloads, uncompressed = bytes_of(shapes, *own)
            rows.append(
                {
                    "network": network,
                    "name": name,
                    "bytes": payloads + uncompressed,
                    "uncompressed": uncompressed,
                    "dense": dense,
                }
            )
            print(f"{network:<12}{name:<24}{payloads + uncompressed:>12,} of {dense:,}", flush=True)
    path = RESULTS / "network-bytes.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{path} written")


if __name__ == "__main__":
    main()
