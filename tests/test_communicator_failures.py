"""Test that failures of simulated ranks, and values that are not finite, reach all ranks."""

import math
import re

import numpy as np
import pytest
from codecs_table import MEMORIES, gradient
from sampling import parametrize_product
from simulated_ranks import (
    LOSSY,
    SCHEMES,
    dense_of,
    gradients_of,
    jobs_of,
    kept_of,
    run,
    same_bits,
    sparsifier_of,
)

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import BucketMember
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.simulator import PeerGone, SimulatedTransport, Simulator

#: those that send a bucket as one tensor
WHOLE_BUCKETS = [name for name, scheme in SCHEMES.items() if not scheme.sends_payloads]


@parametrize_product(scheme=SCHEMES, shapes=[None, [60, 140]], who=[0, 1, 4], bad=[np.nan, np.inf])
def test_not_finite_on_one_rank_is_nan_on_all(scheme, who, bad, shapes):
    gradients = gradients_of(5, 200)
    gradients[who][120] = bad
    residuals = [gradient(200, 30 + rank) for rank in range(5)]
    totals, buckets = run(
        scheme,
        dr.Codec(sparsifier_of(scheme), *LOSSY),
        gradients,
        residuals=residuals,
        shapes=shapes,
    )
    for total in totals:
        assert np.isnan(total[60:]).all()
    # the memory of the rank is unchanged, that of another member too if they are one tensor
    unchanged = slice(60 if shapes and scheme not in WHOLE_BUCKETS else 0, None)
    same_bits(kept_of(buckets[who])[unchanged], residuals[who][unchanged])


@parametrize_product(scheme=WHOLE_BUCKETS, memory=MEMORIES, bad=[np.nan, None])
def test_the_order_of_a_bucket_does_not_decide_which_memories_change(scheme, memory, bad):
    """Members with NaN, and others that have failed, are found before any memory changes."""
    random = np.random.default_rng(sorted(SCHEMES).index(scheme))
    codec = dr.Codec(sparsifier_of(scheme), *LOSSY)
    for _ in range(10):
        shapes = random.integers(1, 60, random.integers(2, 6)).tolist()
        who, which = int(random.integers(3)), int(random.integers(len(shapes)))
        buckets = jobs_of(codec, MEMORIES[memory], gradients_of(3, sum(shapes)), shapes=shapes)
        members = buckets[who].members
        for member in members:
            for part in member.state:
                part[...] = random.standard_normal(part.size)
        states = [part.copy() for member in members for part in member.state]
        if bad is None:
            members[which].failure = ValueError("gone")
        else:
            members[which].gradient[random.integers(shapes[which])] = bad
        for outcome in Simulator(3).run(SCHEMES[scheme], buckets):
            assert (
                isinstance(outcome, dr.PeerFailedError)
                if bad is None
                else np.isnan(dense_of(outcome, buckets)).all()
            )
        for before, after in zip(states, [part for member in members for part in member.state]):
            same_bits(before, after)


class LimitedSimulator(Simulator):
    """Simulator whose collectives fail if a rank sends or receives too much."""

    def _perform(self, group, calls):
        results = super()._perform(group, calls)
        for call, result in zip(calls, results):
            assert call.kind == "allreduce" or max(bytes_of(call.data), bytes_of(result)) <= (
                SimulatedTransport.most_bytes
            )
        return results


def bytes_of(data):
    return 0 if data is None else sum(part.nbytes for part in data)


@parametrize_product(
    scheme=[*SCHEMES, "hierarchical"], shapes=[None, [6000, 14_000]], size=[2, 4, 6]
)
def test_messages_that_are_too_large_are_refused_on_all_ranks(monkeypatch, scheme, shapes, size):
    random = np.random.default_rng(size)
    communicator = {**SCHEMES, "hierarchical": dr.Hierarchical(dr.Allgather(), 2)}[scheme]
    codec = dr.Codec(sparsifier_of(scheme, 0.4), *LOSSY)
    endings = set()
    for most in random.permutation(np.geomspace(1000 * size, 400_000, 7).astype(int)).tolist():
        gradients = gradients_of(size, 20_000)
        for whole in gradients:  # some ranks send much less than others
            whole[random.integers(20_000) :] *= random.integers(2)

        def outcomes(most):
            monkeypatch.setattr(SimulatedTransport, "most_bytes", most)
            buckets = jobs_of(codec, dr.Residual(), gradients, shapes=shapes)
            ends = LimitedSimulator(size).run(communicator, buckets)
            refused = [isinstance(end, dr.PeerFailedError) for end in ends]
            assert len(set(refused)) == 1, ends
            return ends if refused[0] else [dense_of(end, buckets) for end in ends]

        ends = outcomes(most)
        endings.add(isinstance(ends[0], Exception))
        for end, whole in zip(ends, outcomes(math.inf)):
            if isinstance(end, Exception):
                assert re.search(r"rank \d: expected at most \d+ bytes, .*, got \d+; use", str(end))
            else:
                same_bits(end, whole)
    assert True in endings or scheme in (
        "cltk",
        "shared_random_k",
    )  # they send few indices, or none
    assert False in endings


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no message")


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (ValueError("lone \ud83d surrogate"), "ValueError: lone \\ud83d surrogate"),
        (ValueError("四" * 5000), "ValueError: " + "四" * 1300),
        (Unprintable(), "Unprintable, whose message cannot be read"),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_failure_of_any_text_is_heard(scheme, error, heard):
    buckets = jobs_of(dr.Codec(sparsifier_of(scheme), *LOSSY), dr.Residual(), gradients_of(3, 200))
    buckets[1].members[0] = BucketMember.failed("tensor0", 200, error)
    for outcome in Simulator(3).run(SCHEMES[scheme], buckets):
        assert (
            isinstance(outcome, dr.PeerFailedError)
            and f"rank 1: {heard}" in str(outcome)
            and "\ufffd" not in str(outcome)
        ), outcome


@parametrize_product(scheme=SCHEMES, who=[[0], [1], [4], [2, 3]])
def test_a_rank_that_fails_makes_all_raise(scheme, who):
    buckets = jobs_of(dr.Codec(sparsifier_of(scheme), *LOSSY), dr.Residual(), gradients_of(5, 200))
    for rank in who:
        buckets[rank].members[0].state = (np.zeros(7, dtype=np.float32),)
    outcomes = Simulator(5).run(SCHEMES[scheme], buckets)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, dr.PeerFailedError), (rank, outcome)
        for failed in who:
            assert f"rank {failed}: " in str(outcome)
        assert "tensor0" in str(outcome)
        assert (outcome.__cause__ is not None) == (rank in who)


#: {name: (byte of a message, bits that change)}
DAMAGE = {"last_byte": (-1, 1), "non_finite": (5, 1), "unknown_flag": (5, 2)}


def damaged(message, damage):
    byte, bits = DAMAGE[damage]
    message = message.copy()
    message[byte] ^= bits
    return message


@parametrize_product(scheme=["split", "recursive_doubling", "gtopk"], damage=DAMAGE)
def test_a_corrupt_message_is_named(scheme, damage):
    """A message to one rank is corrupted. The other ranks learn of it in a later round."""

    class Breaking(Simulator):
        def _alltoall(self, group, calls):
            received = super()._alltoall(group, calls)
            if self.rounds == 1:
                part = received[2][3]
                assert part.size
                received[2] = [*received[2][:3], damaged(part, damage), *received[2][4:]]
            return received

    buckets = jobs_of(
        dr.Codec(dr.TopK(0.1), dr.Rice(), dr.RawValue()), dr.Residual(), gradients_of(4, 200)
    )
    outcomes = Breaking(4).run(SCHEMES[scheme], buckets)
    for outcome in outcomes:
        assert isinstance(outcome, dr.PeerFailedError), outcome
        assert "rank 2: CorruptPayloadError" in str(outcome)


@parametrize_product(scheme=SCHEMES, size=[2, 5], who=[0, 3], damage=DAMAGE)
def test_what_one_rank_breaks_is_an_error_on_all(scheme, size, who, damage):
    """A rank sends a payload with a corrupted byte, in any round.

    Every rank raises an error with the cause and the rank that detected it.
    """
    who = min(who, size - 1)

    class Breaking(Simulator):
        def __init__(self, broken_round):
            super().__init__(size)
            self.broken_round = broken_round
            self.broke = False

        def _broken(self, data):
            if (
                data is None
                or data.dtype != np.uint8
                or not data.size
                or self.rounds != self.broken_round
            ):
                return data
            self.broke = True
            return damaged(data, damage)

        def _perform(self, group, calls):
            calls[who].data = (
                [self._broken(part) for part in calls[who].data]
                if calls[who].kind == "alltoall"
                else self._broken(calls[who].data)
            )
            return super()._perform(group, calls)

    codec = dr.Codec(sparsifier_of(scheme), dr.Rice(), dr.RawValue())
    broken = 0
    for broken_round in range(10):
        # the step makes rank ``who`` CLTK's leader
        buckets = jobs_of(codec, dr.Residual(), gradients_of(size, 200), step=who)
        simulator = Breaking(broken_round)
        outcomes = simulator.run(SCHEMES[scheme], buckets)
        broken += simulator.broke
        for rank, outcome in enumerate(outcomes):
            if not simulator.broke:
                assert not isinstance(outcome, Exception)
                continue
            if not isinstance(outcome, Exception):
                with pytest.raises(dr.CorruptPayloadError) as raised:
                    dense_of(outcome, buckets)
                outcome = raised.value
            assert "payload checksum: expected" in str(outcome) and "rank " in str(outcome), (
                rank,
                outcome,
            )
    assert broken >= (scheme != "shared_random_k") and broken <= simulator.rounds


def test_an_exchange_that_is_not_a_generator():
    class Summing(dr.Allgather):
        def exchange(self, bucket, channel):
            return channel.allgather(np.zeros(1, np.uint8))

    (bucket,) = jobs_of(dr.Codec(dr.TopK(0.1)), dr.Residual(), gradients_of(1, 50))
    exchange = Exchange(Summing(), bucket, SimulatedTransport((0,), 0), "one")
    with pytest.raises(dr.InvalidArgumentError, match=r"Summing\.exchange: expected a generator, "):
        exchange.finish()


def test_a_rank_that_dies_does_not_leave_the_others_in_silence():
    class Dying(dr.Allgather):
        def exchange(self, bucket, channel):
            if bucket.rank == 1:
                raise OSError("gone")
            return (yield from super().exchange(bucket, channel))

    buckets = jobs_of(dr.Codec(dr.TopK(0.1)), dr.Residual(), gradients_of(3, 50))
    outcomes = Simulator(3).run(Dying(), buckets)
    assert isinstance(outcomes[1], OSError)
    assert isinstance(outcomes[0], PeerGone) and isinstance(outcomes[2], PeerGone)
