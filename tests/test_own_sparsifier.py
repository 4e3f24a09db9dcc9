"""The custom sparsifier of docs/add-a-codec.md does what its formula says, wherever it is used."""

import pathlib
import re

import numpy as np
import pytest
from simulated_ranks import SCHEMES, assert_mass_balance, gradients_of, run

import deepreduce_hvd as dr

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "add-a-codec.md"


def largest_blocks(*arguments):
    """Return the custom sparsifier of the page."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if block.startswith("class LargestBlocks("))
    names = {"dr": dr, "np": np, "__name__": "page"}
    exec(code, names)
    return names["LargestBlocks"](*arguments)


def in_largest_blocks(values, ratio, size):
    """Return the indices that it selects, by its formula and element by element."""
    starts = range(0, len(values), size)
    sums = {start: sum(float(one) ** 2 for one in values[start : start + size]) for start in starts}
    kept = sorted(sums, key=lambda start: (-sums[start], start))
    kept = kept[: max(1, int(ratio * len(values) / size))]
    return [
        index for start in sorted(kept) for index in range(start, min(start + size, len(values)))
    ]


@pytest.mark.parametrize("d", [1, 15, 16, 17, 900])
def test_it_selects_by_its_formula(d):
    sparsifier = largest_blocks(0.1, 16)
    codec = dr.Codec(sparsifier, index=dr.RLE())
    kept = np.zeros(d, dtype=np.float32)
    random = np.random.default_rng(d)
    for step in range(4):
        # small integers: sums of squares are exact, and some of them are equal
        gradient = random.integers(-3, 4, d).astype(np.float32)
        accumulated = gradient + kept
        payload = codec.encode(gradient, kept, step=step)
        expected = in_largest_blocks(accumulated, 0.1, 16)
        assert len(expected) <= sparsifier.most_selected(d)
        sent = np.zeros(d, dtype=np.float32)
        sent[expected] = accumulated[expected]
        np.testing.assert_array_equal(dr.decode(payload), sent)
        np.testing.assert_array_equal(kept, accumulated - sent)
        assert dr.inspect(payload)["k"] == len(expected)


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"shared_random_k"}))
def test_it_works_with_communicators(scheme):
    codec, gradients = dr.Codec(largest_blocks(0.1, 16), index=dr.RLE()), gradients_of(4, 900)
    totals, buckets = run(scheme, codec, gradients)
    assert totals[0].any() and all((total == totals[0]).all() for total in totals)
    assert_mass_balance(gradients, None, totals[0], buckets, 16)


def test_it_trains():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    hvd.init()
    torch.manual_seed(0)
    network = torch.nn.Linear(40, 50, bias=False)
    codec = dr.Codec(largest_blocks(0.1, 16), index=dr.RLE())
    compressor = dr.Compressor(codec, parameters=network.named_parameters())
    weight, kept = network.weight, np.zeros(2000, dtype=np.float32)
    for _ in range(3):
        network.zero_grad()
        network(torch.randn(8, 40)).pow(2).mean().backward()
        accumulated = weight.grad.numpy().ravel() + kept
        chosen = in_largest_blocks(accumulated, 0.1, 16)
        sent = np.zeros(2000, dtype=np.float32)
        sent[chosen] = accumulated[chosen]
        kept = accumulated - sent
        reduced, context = compressor.compress(weight.grad)
        gradient = compressor.decompress(reduced, context).numpy().ravel()
        np.testing.assert_array_equal(gradient, sent)
        weight.data -= 0.1 * torch.from_numpy(gradient).view(50, 40)
    saved = compressor.state_dict()["parameters"]["weight"]["memory"]["residual"]
    np.testing.assert_array_equal(np.asarray(saved).ravel(), kept)
