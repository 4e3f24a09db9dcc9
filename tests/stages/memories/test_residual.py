"""Test that Residual keeps what the payloads have not carried."""

import numpy as np
from codecs_table import gradient
from native_and_numpy import selected, sent

import deepreduce_hvd as dr


def test_every_element_has_its_turn():
    """Six steps computed by hand: one of three elements is sent at each step."""
    values, state = np.array([3, 2, 1], dtype=np.float32), (np.zeros(3, dtype=np.float32),)
    payloads = []
    for step in range(6):
        payload, state, _ = sent(dr.Codec(dr.TopK(k=1)), values, state, dr.Residual(), step=step)
        payloads.append(tuple(array.item() for array in selected(payload)))
    assert payloads == [(0, 3), (1, 4), (0, 6), (1, 4), (0, 6), (2, 6)]
    np.testing.assert_array_equal(state[0], [3, 4, 0])


def test_it_keeps_what_rounding_and_selection_leave():
    m, g = gradient(3000, key=3), gradient(3000)
    codec = dr.Codec(dr.TopK(0.1), value=dr.Float16())
    payload, (after,), _ = sent(codec, g, (m,), dr.Residual())
    indices, values = selected(payload)
    expected = m + g
    expected[indices] -= values
    np.testing.assert_array_equal(after, expected)
    assert after[indices].any()
