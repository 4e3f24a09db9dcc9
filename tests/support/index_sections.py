"""Encode and decode index sections with the native core and the NumPy classes, which must agree."""

import numpy as np
import pytest
from codecs_table import INDEX
from native_and_numpy import both

import deepreduce_hvd as dr
from deepreduce_hvd import container


def on_support(indices, d):
    """Return (d,) float32 that is not zero exactly at ``indices``."""
    values = np.zeros(d, dtype=np.float32)
    values[indices] = np.where(np.arange(len(indices)) % 3, np.float32(1), np.float32(-2))
    return values


def index_section(name, indices, d):
    """Return the section of the native encoder; check that it equals the oracle's.

    It is empty if all or no elements are sent.
    """
    values = on_support(indices, d)
    # with one bit per value, any index section fits before the payload is as large as the tensor
    codec = dr.Codec(dr.TopK(k=max(len(indices), 1)), index=INDEX[name], value=dr.QSGD(bits=1))
    data, _ = both(codec, dr.NoMemory(), values, ())
    sent, _ = dr.decode_sum_sparse([data], d)
    if dr.inspect(data)["index"] == "all":
        return None
    np.testing.assert_array_equal(sent, indices)
    return container.read(data).index


def by_hand(name, section, count, d):
    """Return a payload with this index section and the values 1, 2, 3, …"""
    values = (1 + np.arange(count, dtype=np.float32)).tobytes()
    return container.write(
        container.Payload(
            d, count, index_id=INDEX[name].stage_id, value_id=1, index=section, values=values
        )
    )


def decoded_natively(name, indices, d):
    """Return the indices that the native decoder finds in the oracle's section.

    No dense array is needed.
    """
    indices = np.asarray(indices, dtype=np.uint32)
    section, _, _ = INDEX[name].encode(indices, d, key=0)
    np.testing.assert_array_equal(type(INDEX[name]).decode(section, d, indices.size), indices)
    data = by_hand(name, section, indices.size, d)
    sent, numbers = dr.decode_sum_sparse([data], d)
    np.testing.assert_array_equal(numbers, 1 + np.arange(indices.size))
    return sent


def assert_refused(name, section, count, d, match):
    """Check that both decoders refuse an index section, with an error that matches."""
    with pytest.raises(dr.CorruptPayloadError, match=match):
        dr.decode_sum_sparse([by_hand(name, section, count, d)], d)
    with pytest.raises(dr.CorruptPayloadError, match=match):
        type(INDEX[name]).decode(section, d, count)
