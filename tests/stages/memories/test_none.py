"""Test that NoMemory keeps nothing."""

import numpy as np
from codecs_table import gradient
from native_and_numpy import selected, sent

import deepreduce_hvd as dr


def test_what_is_not_sent_is_lost():
    """The same element is sent at every step, with the value of one gradient."""
    values = np.array([3, 2, 1], dtype=np.float32)
    for step in range(3):
        payload, state, _ = sent(dr.Codec(dr.TopK(k=1)), values, (), dr.NoMemory(), step=step)
        assert [array.item() for array in selected(payload)] == [0, 3]
        assert state == ()


def test_it_sends_what_a_new_residual_sends():
    values = gradient(3000)
    codec = dr.Codec(dr.TopK(0.1), value=dr.LloydMax())
    first, _, _ = sent(codec, values, (), dr.NoMemory())
    assert first == sent(codec, values, (np.zeros_like(values),), dr.Residual())[0]
    assert first != sent(codec, values, (gradient(3000, key=3),), dr.Residual())[0]
