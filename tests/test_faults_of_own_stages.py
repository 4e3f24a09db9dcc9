"""Faults of custom stages and communicators that would otherwise give wrong sums, or no message."""

import dataclasses

import numpy as np
import pytest
import torch
from own_stages import OwnResidual, Three

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.communicators.sums import CompleteSum
from deepreduce_hvd.errors import InvalidArgumentError, PeerFailedError
from deepreduce_hvd.planning.layout import ratio_of
from deepreduce_hvd.stages import calls, registry

COMMUNICATORS = [
    dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.CLTK()
]  # fmt: skip
PARAMETERS = [("weight", torch.nn.Parameter(torch.zeros(40, 100)))]


class Negates(OwnResidual):
    def update(self, gradient, accumulated, state, indices, decoded):
        decoded *= -1
        return super().update(gradient, accumulated, state, indices, -decoded)


class Reverses(OwnResidual):
    def update(self, gradient, accumulated, state, indices, decoded):
        kept = super().update(gradient, accumulated, state, indices, decoded)
        indices[:] = indices[::-1]
        return kept


class WritesIntoItsState(OwnResidual):
    def update(self, gradient, accumulated, state, indices, decoded):
        state[0][indices] -= decoded
        return state


class ReturnsWhatItPutsBack(OwnResidual):
    def put_back(self, state, indices, values):
        kept = state[0].copy()
        kept[indices] += values
        return (kept,)


def exchanged(communicator, codec, memory, ranks=3, d=300):
    """Exchange random gradients of simulated ranks, which all must have the same sum or error."""
    draw = np.random.default_rng(0)
    buckets = [
        Bucket(
            codec,
            memory,
            [
                BucketMember(
                    "w", draw.standard_normal(d).astype(np.float32), (np.zeros(d, np.float32),)
                )
            ],
            rank=rank,
        )
        for rank in range(ranks)
    ]
    outcomes = Simulator(ranks).run(communicator, buckets)
    assert len({isinstance(outcome, Exception) for outcome in outcomes}) == 1, outcomes
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


@pytest.mark.parametrize("memory", [Negates(), Reverses(), WritesIntoItsState()])
@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_memory_cannot_change_what_is_sent(communicator, memory):
    for codec in (dr.Codec(dr.TopK(0.1)), dr.Codec(dr.TopK(0.1), dr.Bloom(0.01), dr.QSGD(4))):
        with pytest.raises((PeerFailedError, ValueError), match="read-only"):
            exchanged(communicator, codec, memory)


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_memory_may_return_a_part_as_it_was(communicator):
    """It gets views that it cannot write to, but its state stays writable."""
    codec, draw = dr.Codec(dr.TopK(0.1), value=dr.QSGD(4)), np.random.default_rng(0)
    states = [tuple(np.zeros(300, np.float32) for _ in range(3)) for _ in range(3)]
    for _ in range(3):
        members = [
            BucketMember("w", draw.standard_normal(300).astype(np.float32), state)
            for state in states
        ]
        buckets = [Bucket(codec, Three(), [one], rank=rank) for rank, one in enumerate(members)]
        for outcome in Simulator(3).run(communicator, buckets):
            assert not isinstance(outcome, Exception), outcome
        states = [member.state for member in members]
        assert all(part.flags.writeable for state in states for part in state)
    assert all(state[1].min() == state[1].max() > 0 for state in states)
    kept = tuple(np.zeros(300, np.float32) for _ in range(3))
    accumulated, begun = calls.accumulate(Three(), states[0][0], kept)
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.float32)
    returned = calls.update(Three(), states[0][0], accumulated, begun, *nothing)
    assert all(part.flags.writeable for part in (*begun, *returned))


@pytest.mark.parametrize("communicator", [dr.SplitAllgather(), dr.GTopK(), dr.RecursiveDoubling()])
def test_what_put_back_returns_is_not_lost(communicator):
    codec = dr.Codec(dr.TopK(0.1), value=dr.QSGD(4))
    message = "ReturnsWhatItPutsBack.put_back: expected None, .* got tuple"
    with pytest.raises((PeerFailedError, InvalidArgumentError), match=message):
        exchanged(communicator, codec, ReturnsWhatItPutsBack())


@pytest.mark.parametrize("built_in", [dr.TopK(0.05), dr.ChunkTopK(0.05), dr.RandomK(0.05)])
def test_a_plan_never_replaces_a_subclass_by_its_base(built_in):
    """A subclass that selects otherwise says itself how to get another density, or no plan does."""
    kind = type(built_in)

    class Own(kind):
        def select(self, accumulated, key, step=0):
            return super().select(accumulated, key, step)[::2].copy()

    class WithRatio(Own):
        def with_ratio(self, ratio):
            return WithRatio(ratio)

    assert ratio_of(dr.Codec(built_in)) == 0.05
    assert ratio_of(dr.Codec(Own(0.05))) is None
    assert ratio_of(dr.Codec(WithRatio(0.05))) == 0.05
    assert type(WithRatio(0.05).with_ratio(0.1)) is WithRatio


class Remembers(dr.Sparsifier):
    """Keeps its last selection, an array, which a new codec would refuse."""

    def select(self, accumulated, key, step=0):
        order = np.argsort(-np.abs(accumulated), kind="stable")[: accumulated.size // 20]
        self.last = np.sort(order).astype(np.uint32)
        return self.last

    def most_selected(self, d, step=0):
        return d // 20


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_stage_in_use_may_have_arrays(communicator):
    codec = dr.Codec(Remembers())
    for _ in range(3):
        sums = exchanged(communicator, codec, dr.Residual())
        assert all(total.sparse(0, 1.0)[0].size for total in sums)
    changed = codec.with_stages(value=dr.QSGD(4))
    assert changed.sparsifier is codec.sparsifier and changed == codec.with_stages(None, dr.QSGD(4))
    assert changed.value == dr.QSGD(4) and changed != codec and repr(changed) != repr(codec)
    with pytest.raises(InvalidArgumentError, match="last"):
        codec.with_stages(codec.sparsifier)


@dataclasses.dataclass
class Decay(OwnResidual):
    decay: float = 0.9


def test_a_memory_may_be_a_dataclass():
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), Decay(0.5), parameters=PARAMETERS)
    assert compressor.memory == Decay(0.5) != Decay(0.6)


@pytest.mark.parametrize("kinds", [{"alpha", "beta"}, frozenset({1, 2}), [{"alpha"}], {"a": {1}}])
def test_sets_are_refused(kinds):
    class Own(dr.Sparsifier):
        def __init__(self):
            self.kinds = kinds

        def select(self, accumulated, key, step=0):
            return np.zeros(0, dtype=np.uint32)

    expected = r"Own.kinds: expected numbers, .* got (frozen)?set; write a sorted tuple"
    with pytest.raises(InvalidArgumentError, match=expected):
        dr.Codec(Own())


@pytest.fixture
def own_index(monkeypatch):
    """Return a function that registers an index codec, for one test."""
    monkeypatch.setattr(registry, "_registry", {k: dict(v) for k, v in registry._registry.items()})

    def define(stays, change):
        @dr.register
        class Own(dr.IndexCodec):
            stage_id = 217
            any_order = True

            def encode(self, indices, d, key, value_bits=32.0):
                sent = change(indices)
                return sent.astype("<u4").tobytes(), sent, stays

            @classmethod
            def decode(cls, section, d, count):
                return np.frombuffer(section, "<u4").astype(np.uint32)

        return Own()

    return define


def test_indices_in_another_order_than_their_values(own_index):
    gradient = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    kept = np.zeros_like(gradient)
    codec = dr.Codec(dr.TopK(0.1), index=own_index(False, np.array), value=dr.FitPoly())
    assert np.abs(dr.decode(codec.encode(gradient, kept)) + kept - gradient).max() < 1e-5
    codec = dr.Codec(dr.TopK(0.1), index=own_index(False, np.sort), value=dr.FitPoly())
    with pytest.raises(InvalidArgumentError, match="Own.encode: expected the given indices in the"):
        codec.encode(gradient, np.zeros_like(gradient))


def test_values_that_stay_need_as_many_indices(own_index):
    def doubled(indices):
        return np.union1d(indices, (indices + 1) % 500).astype(np.uint32)

    gradient = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    with pytest.raises(
        InvalidArgumentError, match="as many decoded indices as were given, 50, bec"
    ):
        dr.Codec(dr.TopK(0.1), index=own_index(True, doubled)).encode(gradient)
    dr.Codec(dr.TopK(0.1), index=own_index(False, doubled)).encode(gradient)


class Returns(dr.Communicator):
    """Returns something that is no sum."""

    def __init__(self, what=None):
        self.what = what

    def exchange(self, bucket, channel):
        yield channel.allgather(bucket.encode())
        return self.what


class Adds(dr.Communicator):
    """Gives an allreduce numbers of another type."""

    def exchange(self, bucket, channel):
        total = yield channel.allreduce(bucket.members[0].gradient.astype(np.float64))
        return CompleteSum(bucket, total)


@pytest.mark.parametrize(
    "communicator, message",
    [
        (Returns(), "Returns.exchange: expected it to return a BucketSum, got NoneType"),
        (Returns(3), "Returns.exchange: expected it to return a BucketSum, got int"),
        (Adds(), r"allreduce: expected an \(n,\) float32 NumPy array, got .*float64"),
    ],
)
def test_communicators_that_do_not_keep_to_the_interface(communicator, message):
    with pytest.raises(InvalidArgumentError, match=message):
        exchanged(communicator, dr.Codec(dr.TopK(0.1)), dr.Residual())


def test_a_communicator_with_an_address_in_its_text():
    with pytest.raises(InvalidArgumentError, match="communicator: expected attributes with a repr"):
        dr.Compressor(communicator=Returns(lambda: 0), parameters=PARAMETERS)
