"""Bytes that one rank sends per step of well-known networks, by codec.

    python benchmarks/network_bytes.py

Each tensor is encoded as random values from a normal distribution. Tensors with fewer than 1,024
elements are sent uncompressed by all rows, as with a ``Compressor``. Takes about 10 s.
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
_FEWEST = 1024  # elements of a tensor that is compressed


def bytes_of(shapes, codec):
    """Return the bytes of one step's gradients: (of payloads, of uncompressed tensors)."""
    draw = np.random.default_rng(0)
    payloads = uncompressed = 0
    for shape in shapes:
        elements = math.prod(shape)
        if elements < _FEWEST:
            uncompressed += 4 * elements
        else:
            payloads += codec.encode(draw.standard_normal(elements, np.float32)).size
    return payloads, uncompressed


def main():
    codecs = {"Top-r pairs": dr.Codec(dr.TopK(0.01)), "default": default_codec()}
    rows = []
    for key, network in NETWORKS.items():
        shapes = [shape for _, shape, _ in getattr(architectures, key)()]
        dense = 4 * sum(map(math.prod, shapes))
        for name, codec in codecs.items():
            payloads, uncompressed = bytes_of(shapes, codec)
            rows.append(
                {
                    "network": network,
                    "name": name,
                    "bytes": payloads + uncompressed,
                    "uncompressed": uncompressed,
                    "dense": dense,
                }
            )
            print(f"{network:<12}{name:<14}{payloads + uncompressed:>12,} of {dense:,}", flush=True)
    path = RESULTS / "network-bytes.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{path} written")


if __name__ == "__main__":
    main()
