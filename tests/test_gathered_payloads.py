"""Test how the messages of all ranks are divided and added, against one payload after another."""

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.sums import GatheredPayloads
from deepreduce_hvd.native import core as native
from deepreduce_hvd.numpy_backend import add_payloads
from deepreduce_hvd.stages import registry

CODECS = (
    dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=dr.LloydMax(bits=2)),
    dr.Codec(dr.NoneSparsifier()),
    dr.Codec(dr.Threshold(1.0), index=dr.Bitmap(), value=dr.Float16()),
)


class Halves(dr.ValueCodec):
    """A custom codec, which the native core does not know."""

    stage_id = 230

    def encode(self, values, key):
        return (values / 2).astype(np.float32).tobytes(), values, None

    @classmethod
    def decode(cls, data, count):
        return np.frombuffer(data, np.float32) * 2


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registry", {k: dict(v) for k, v in registry._registry.items()})
    dr.register(Halves)


def random_messages(random, codec, count, ranks):
    """Return a bucket, and for each rank the messages of its members; some are non-finite."""
    sizes = random.integers(1, 400, count)
    messages = []
    for _ in range(ranks):
        gradients = [random.standard_normal(d).astype(np.float32) for d in sizes]
        if random.random() < 0.3:
            gradients[random.integers(count)][0] = np.nan
        messages.append([codec.encode(gradient) for gradient in gradients])
    members = [BucketMember(f"p{i}", one, (), i) for i, one in enumerate(gradients)]
    return Bucket(codec, dr.NoMemory(), members), messages


@pytest.mark.parametrize("seed", range(30))
def test_sums_are_those_of_one_payload_after_another(seed):
    random = np.random.default_rng(seed)
    codec = (*CODECS, dr.Codec(dr.TopK(0.5), value=Halves()))[seed % 4]
    count, ranks = int(random.integers(1, 7)), int(random.choice([1, 2, 3, 9, 64]))
    bucket, messages = random_messages(random, codec, count, ranks)
    total = GatheredPayloads(
        bucket, np.concatenate([part for own in messages for part in own]), ranks
    )
    for number, member in enumerate(bucket.members):
        own = [parts[number] for parts in messages]
        for one, other in zip(total.payloads(number), own, strict=True):
            np.testing.assert_array_equal(one, other)
        assert total.non_finite(number) == any(dr.inspect(one)["non_finite"] for one in own)
        start = random.standard_normal(member.d).astype(np.float32)
        out = start.copy()
        largest = total.add_to(number, out, 1 / 3)
        np.testing.assert_equal(largest, add_payloads(own, start, 1 / 3, native=False))
        np.testing.assert_array_equal(out, start)


@pytest.mark.parametrize("seed", range(10))
def test_notices_name_their_rank_and_parameter(seed):
    random = np.random.default_rng(seed)
    count, ranks = int(random.integers(1, 7)), int(random.integers(1, 10))
    bucket, messages = random_messages(random, CODECS[seed % 3], count, ranks)
    failed = random.integers(count)
    of_ranks = sorted(random.choice(ranks, int(random.integers(1, ranks + 1)), replace=False))
    for rank in of_ranks:
        messages[rank][failed] = wire.notice(KeyError(f"cause {rank}"))
    expected = "; ".join(f"rank {rank}: KeyError: 'cause {rank}'" for rank in of_ranks)
    with pytest.raises(dr.PeerFailedError, match=f"^parameter p{failed}: {expected}$"):
        GatheredPayloads(bucket, np.concatenate([part for own in messages for part in own]), ranks)


@pytest.mark.parametrize("cut", [1, 30, 60])
def test_messages_that_end_early_are_refused(cut):
    bucket, messages = random_messages(np.random.default_rng(cut), CODECS[1], 3, 2)
    gathered = np.concatenate([part for own in messages for part in own])
    with pytest.raises(dr.CorruptPayloadError):
        GatheredPayloads(bucket, gathered[:-cut], 2)
    with pytest.raises(
        dr.CorruptPayloadError, match="expected 3 payloads from each of 3 ranks, got 6"
    ):
        GatheredPayloads(bucket, gathered, 3)


def test_a_damaged_payload_names_its_rank():
    bucket, messages = random_messages(np.random.default_rng(0), CODECS[1], 2, 3)
    messages[2][1][-1] ^= 1
    total = GatheredPayloads(bucket, np.concatenate([part for own in messages for part in own]), 3)
    total.add_to(0, np.zeros(bucket.members[0].d, np.float32), 1.0)
    with pytest.raises(dr.CorruptPayloadError, match="rank 2: payload checksum"):
        total.add_to(1, np.zeros(bucket.members[1].d, np.float32), 1.0)


def test_a_damaged_payload_does_not_pass_as_non_finite():
    bucket, messages = random_messages(np.random.default_rng(0), CODECS[1], 2, 3)
    messages[1][1][5] ^= 1
    with pytest.raises(dr.CorruptPayloadError, match=r"^parameter .*: rank 1: payload checksum"):
        GatheredPayloads(bucket, np.concatenate([part for own in messages for part in own]), 3)


@pytest.mark.parametrize(
    ("starts", "ends", "words"),
    [
        ([-1], [50], "payload 0: expected bytes within"),
        ([0, 8], [50, 7], "payload 1: expected bytes within"),
        ([0], [10_000], "payload 0: expected bytes within"),
        ([2**62], [-(2**62)], "payload 0: expected bytes within"),
        ([0, 1], [5], "ends: expected 2 numbers, got 1"),
    ],
)
def test_the_core_refuses_positions_outside_of_the_messages(starts, ends, words):
    payload = CODECS[1].encode(np.ones(20, np.float32))
    with pytest.raises(ValueError, match=words):
        native.decode_sum_of(
            payload, np.array(starts), np.array(ends), np.zeros(20, np.float32), 1.0
        )
