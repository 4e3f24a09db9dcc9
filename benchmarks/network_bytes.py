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

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import resolve

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
NETWORKS = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "bert_base": "BERT-base", "lstm": "LSTM"}
_STEP = 50  # after the density warm-up of the default


def bytes_of(shapes, codec, compresses_small):
    """Return the bytes of one step's gradients: of large and small payloads, and uncompressed.

    Args:
        shapes: those of the gradients.
        codec: codec of a compressor; None is the default.
        compresses_small: whether the default compresses small tensors.

    Returns:
        {"large": bytes of payloads of selected elements, "small": bytes of payloads of all
        elements, "uncompressed": bytes of uncompressed tensors}.
    """
    draw = np.random.default_rng(0)
    found = {"large": 0, "small": 0, "uncompressed": 0}
    named = {str(number): shape for number, shape in enumerate(shapes)}
    for name, policy in resolve(codec, None, named, None, compresses_small).items():
        elements = math.prod(named[name])
        if policy.dense:
            found["uncompressed"] += 4 * elements
        else:
            gradient = draw.standard_normal(elements, np.float32)
            kind = "large" if policy.selects else "small"
            found[kind] += policy.codec.encode(gradient, step=_STEP).size
    return found


def main():
    codecs = {
        "Top-r pairs": (dr.Codec(dr.TopK(0.01)), False),
        "default": (None, True),
        "large tensors": (None, False),
    }
    rows = []
    for key, network in NETWORKS.items():
        shapes = [shape for _, shape, _ in getattr(architectures, key)()]
        dense = 4 * sum(map(math.prod, shapes))
        for name, own in codecs.items():
            parts = bytes_of(shapes, *own)
            total = sum(parts.values())
            rows.append({"network": network, "name": name, "bytes": total, **parts, "dense": dense})
            print(f"{network:<12}{name:<24}{total:>12,} of {dense:,}", flush=True)
    path = RESULTS / "network-bytes.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{path} written")


if __name__ == "__main__":
    main()
