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


SETTINGS = {
    "codec": "fp16", "memory": dr.NoMemory(), "communicator": dr.GTopK(), "density": 0.1,
    "warmup_steps": 1, "bucket_bytes": 0, "schedule": "auto", "threads": 0, "dense_below": 9,
    "seed": 4, "process_set": None, "loss_scale": lambda: 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_compressor_are_fixed(name):
    """Most would have no effect. Another communicator on one rank makes all ranks wait."""
    hvd = pytest.importorskip("horovod.torch")
    torch = pytest.importorskip("torch")
    hvd.init()
    compressor = dr.Compressor(parameters=[("weight", torch.nn.Parameter(torch.zeros(4000)))])
    with pytest.raises(
        dr.InvalidArgumentError,
        match=rf"Compressor\.{name}: .* fixed, got .*; make a new Compressor",
    ):
        setattr(compressor, name, SETTINGS[name])
    compressor.writer_interval = 7
    assert compressor.writer_interval == 7
