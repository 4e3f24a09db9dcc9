"""Faults of custom stages and communicators that would otherwise give wrong sums, or no message."""

import dataclasses

import numpy as np
import pytest
import torch
from own_stages import OwnResidual, Three

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.communicators.sparse_sum import SparseSum, merged
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


class Reduces(dr.Communicator):
    """Adds gradients in an allreduce, and makes the result in a way of its own."""

    def __init__(self, make):
        self.make = make

    def exchange(self, bucket, channel):
        own = bucket.select()
        dense = np.zeros(bucket.d, np.float32)
        dense[own.indices] = own.values
        total = yield channel.allreduce(dense)
        return CompleteSum(bucket, self.make(total))


def _at_nonzero(total, shift=0, kind=np.uint32, order=1, dtype=np.float32):
    places = np.flatnonzero(total)
    return SparseSum((places[::order] + shift).astype(kind), total[places].astype(dtype)[::order])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda total: SparseSum(values=total), r"values: .* shape \(0,\), one number for each"),
        (lambda total: _at_nonzero(total, shift=total.size), "uint32 indices below 300"),
        (lambda total: _at_nonzero(total, kind=np.int64), "expected ascending distinct uint32"),
        (lambda total: _at_nonzero(total, order=-1), "expected ascending distinct uint32"),
        (lambda total: _at_nonzero(total, dtype=np.float64), "values: expected a float32 array"),
    ],
)
def test_sums_that_are_no_sparse_tensors_are_refused(make, message):
    """Their elements would be lost, or come to other places, in silence."""
    with pytest.raises(InvalidArgumentError, match=message):
        exchanged(Reduces(make), dr.Codec(dr.TopK(0.1)), dr.Residual())
    exchanged(Reduces(_at_nonzero), dr.Codec(dr.TopK(0.1)), dr.Residual())


class Gathers(dr.Communicator):
    """Adds the messages of all ranks as an allgather returns them, one after another."""

    def exchange(self, bucket, channel):
        gathered = yield channel.allgather(bucket.code(bucket.select(), 0, channel.rank))
        return CompleteSum(bucket, merged([gathered], bucket.d, channel.rank))


@pytest.mark.parametrize("codec", [dr.Codec(dr.TopK(0.1)), dr.Codec(dr.NoneSparsifier())])
def test_gathered_messages_are_added(codec):
    totals = exchanged(Gathers(), codec, dr.Residual())
    expected = exchanged(dr.RecursiveDoubling(), codec, dr.Residual())
    for one, other in zip(totals, expected):
        sums = np.zeros((2, 300), np.float32)
        one.add_to(0, sums[0], 1.0)
        other.add_to(0, sums[1], 1.0)
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-6, atol=1e-6)


class Adaptive(dr.Sparsifier):
    """Selects as many elements as have half of the energy, which differs between ranks."""

    def __init__(self):
        self.k = 5

    def select(self, accumulated, key, step=0):
        order = np.argsort(-np.abs(accumulated), kind="stable")
        energy = np.cumsum(np.square(accumulated[order], dtype=np.float64))
        self.k = int(np.searchsorted(energy, energy[-1] / 2)) + 1
        return np.sort(order[: self.k]).astype(np.uint32)

    def most_selected(self, d, step=0):
        return min(d, self.k)


@pytest.mark.parametrize("form", ["butterfly", "tree"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gtopk_refuses_a_count_that_depends_on_the_gradient(form, ranks):
    """Each rank would keep its own number of elements, and the sums would differ."""
    with pytest.raises((InvalidArgumentError, PeerFailedError), match="depends on d and step only"):
        exchanged(dr.GTopK(form), dr.Codec(Adaptive()), dr.Residual(), ranks)


class Adds(dr.Communicator):
    """Gives an allreduce numbers of another type."""

    def exchange(self, bucket, channel):
        total = yield channel.allreduce(bucket.members[0].gradient.astype(np.float64))
        return CompleteSum(bucket, total)


class Yields(dr.Communicator):
    """Yields something that is no handle."""

    def __init__(self, what=None):
        self.what = what

    def exchange(self, bucket, channel):
        yield self.what
        return bucket


@pytest.mark.parametrize(
    "communicator, message",
    [
        (Yields(), "Yields.exchange: expected it to yield a handle, .* got NoneType"),
        (Yields(SparseSum()), "Yields.exchange: expected it to yield a handle, .* got SparseSum"),
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
