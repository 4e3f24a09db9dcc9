"""Test that codecs and their stages cannot be changed."""

import copy
import pickle

import numpy as np
import pytest

import deepreduce_hvd as dr


def test_codecs_and_stages_are_immutable():
    """A change after the first use would be ignored by messages, and differ between ranks."""
    codec = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1))
    before = codec.encode(np.arange(1000, dtype=np.float32)).tobytes()
    for change in (
        lambda: setattr(codec, "value", dr.RawValue()),
        lambda: setattr(codec.value, "bits", 4),
        lambda: setattr(codec.sparsifier, "ratio", 0.5),
    ):
        with pytest.raises(dr.InvalidArgumentError, match="are immutable, got .*; make a new"):
            change()
    assert codec.encode(np.arange(1000, dtype=np.float32)).tobytes() == before
    for copied in (copy.deepcopy(codec), pickle.loads(pickle.dumps(codec))):
        assert copied == codec


def test_a_stage_of_ones_own_may_change():
    class Counts(dr.NoneSparsifier):
        stage_id = None
        calls = 0

        def select(self, accumulated, key, step=0):
            self.calls += 1
            return super().select(accumulated, key, step)

    sparsifier = Counts()
    codec = dr.Codec(sparsifier)
    for _ in range(2):
        codec.encode(np.ones(4, np.float32))
    assert sparsifier.calls == 2
