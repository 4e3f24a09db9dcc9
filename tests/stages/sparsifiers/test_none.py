"""Test that NoneSparsifier sends all elements, without indices."""

import numpy as np
from codecs_table import gradient
from native_and_numpy import selected, sent

import deepreduce_hvd as dr
from deepreduce_hvd import container


def test_zeros_are_sent_too():
    values = np.where(np.arange(1000) % 3, gradient(1000), np.float32(0))
    payload, (residual,), _ = sent(dr.Codec(dr.NoneSparsifier()), values, (np.zeros_like(values),))
    indices, kept = selected(payload)
    np.testing.assert_array_equal(indices, np.arange(1000))
    np.testing.assert_array_equal(kept, values)
    assert not residual.any()


def test_the_payload_has_no_indices():
    """Whatever the index codec, the size is that of the header and of 1000 values of a bit."""
    for index in (dr.RawIndex(), dr.Rice(), dr.Bloom()):
        codec = dr.Codec(dr.NoneSparsifier(), index=index, value=dr.QSGD(bits=1, bucket=1000))
        payload, _, _ = sent(codec, gradient(1000))
        # QSGD: bits, values per bucket, one norm
        assert len(payload) == container.HEADER.size + (1 + 2 + 4) + 1000 // 8
        assert dr.inspect(np.frombuffer(payload, dtype=np.uint8))["index"] == "all"
