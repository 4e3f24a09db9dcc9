"""Test that sums of payloads return the largest magnitude that occurred, to show overflows."""

import numpy as np
import pytest
from codecs_table import INDEX, VALUE, gradient
from sampling import parametrize_values

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.communicators.bucket import payload_of_nothing
from deepreduce_hvd.numpy_backend import add_payloads

D = 500
LARGEST = np.finfo(np.float32).max
WAYS = {
    "oracle": {"native": False},
    **{f"simd {level}": {"simd": level} for level in range(_native.simd_level() + 1)},
}
CODECS = {
    "sparse": dr.Codec(dr.TopK(0.1), index=dr.Rice()),
    "dense": dr.Codec(dr.NoneSparsifier()),
    "fit": dr.Codec(dr.TopK(0.5), value=dr.FitPoly()),
}


def peak(height, place=3):
    values = np.zeros(D, dtype=np.float32)
    values[place] = height
    return values


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", CODECS)
def test_the_largest_of_all_additions(codec, way):
    payloads = [CODECS[codec].encode(gradient(D, key)) for key in range(3)]
    out, largest = np.zeros(D, dtype=np.float32), 0.0
    for payload in payloads:
        before = out.copy()
        add_payloads([payload], out, 0.5, **WAYS[way])
        largest = max(largest, float(np.abs(out[out != before]).max()))
    again = np.zeros(D, dtype=np.float32)
    assert add_payloads(payloads, again, 0.5, **WAYS[way]) == largest
    np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["sparse", "dense"])
def test_an_overflow_cannot_be_missed(codec, way):
    def largest(*heights, scale=1.0):
        with np.errstate(over="ignore", invalid="ignore"):
            payloads = [CODECS[codec].encode(peak(height)) for height in heights]
        return add_payloads(payloads, np.zeros(D, dtype=np.float32), scale, **WAYS[way])

    assert largest(LARGEST) == LARGEST
    assert largest(LARGEST, LARGEST, scale=0.5) == LARGEST
    assert largest(LARGEST, LARGEST) == np.inf
    assert largest(LARGEST, LARGEST, -LARGEST) == np.inf
    assert largest(LARGEST, LARGEST, -1.0) == np.inf
    assert largest(1.0, scale=np.inf) > LARGEST or np.isnan(largest(1.0, scale=np.inf))
    assert (
        np.isnan(largest(np.nan))
        and np.isnan(largest(1.0, np.nan))
        and np.isnan(largest(np.nan, 1.0))
    )
    assert largest() == 0


@parametrize_values(index=INDEX, value=VALUE)
def test_a_payload_of_nothing(index, value):
    payload = payload_of_nothing(
        dr.Codec(dr.TopK(0.5), index=INDEX[index], value=VALUE[value]), D, 1
    )
    for way in WAYS.values():
        out = np.ones(D, dtype=np.float32)
        assert add_payloads([payload], out, 1.0, **way) == 0
        assert (out == 1).all()
    about = dr.inspect(payload)
    assert (
        about["k"] == 0
        and about["d"] == D
        and about["dtype"] == "float16"
        and about["total_bytes"] < 110
    )
