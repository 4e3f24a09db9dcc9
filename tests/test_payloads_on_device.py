"""Test how the headers of many payloads are read together, and those of payloads on a device."""

import struct

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember

torch = pytest.importorskip("torch")

from deepreduce_hvd.torch.cuda.exchange import PayloadsOnDevice  # noqa: E402

CODEC = dr.Codec(dr.TopK(0.1), index=dr.Rice())


def payloads_of(random, count):
    """Return payloads of several sizes; some are non-finite."""
    gradients = [
        random.standard_normal(int(d)).astype(np.float32) for d in random.integers(1, 500, count)
    ]
    for gradient in gradients[::3]:
        gradient[0] = random.choice([np.nan, 0])
    return [CODEC.encode(gradient) for gradient in gradients]


def headers_of(payloads):
    return np.stack([payload[: container.HEADER.size] for payload in payloads])


def sent(entries):
    """Return headers or notices as they are sent: each one with its length."""
    return np.concatenate(
        [np.frombuffer(struct.pack("<I", len(one)) + bytes(one), np.uint8) for one in entries]
    )


def bucket_of(count):
    members = [BucketMember(f"p{i}", np.zeros(500, np.float32), ()) for i in range(count)]
    return Bucket(CODEC, dr.NoMemory(), members)


@pytest.mark.parametrize("seed", range(5))
def test_headers_are_read_together_as_one_by_one(seed):
    payloads = payloads_of(np.random.default_rng(seed), 20)
    headers = headers_of(payloads)
    sizes, non_finite = (found.tolist() for found in container.read_headers(headers))
    assert list(zip(sizes, non_finite)) == [container.read_header(header) for header in headers]
    assert sizes == [payload.size for payload in payloads]


@pytest.mark.parametrize("place", [0, 3, 4])
def test_a_wrong_start_is_refused(place):
    headers = headers_of(payloads_of(np.random.default_rng(0), 3))
    headers[1, place] ^= 1
    with pytest.raises(
        dr.CorruptPayloadError, match="payload header: expected 40 bytes that start"
    ):
        container.read_headers(headers)


@pytest.mark.parametrize("field", ["flags", "d", "checksum"])
def test_a_damaged_payload_does_not_pass_as_non_finite(field):
    """Only its header is ever read, so this must be checked completely."""
    finite, void = (CODEC.encode(np.full(50, value, np.float32)) for value in (1, np.nan))
    assert container.read_header(void) == (container.HEADER.size, True)
    header = finite[: container.HEADER.size].copy() if field == "flags" else void.copy()
    header[{"flags": 5, "d": 12, "checksum": 32}[field]] ^= container.NON_FINITE
    for read, given in ((container.read_header, header), (container.read_headers, header[None])):
        with pytest.raises(dr.CorruptPayloadError, match="payload (length|checksum): expected"):
            read(given)


@pytest.mark.parametrize("ranks", [1, 3])
def test_payloads_are_where_their_headers_say(ranks):
    payloads = payloads_of(np.random.default_rng(ranks), 4 * ranks)
    gathered = torch.from_numpy(np.concatenate(payloads))
    total = PayloadsOnDevice(bucket_of(4), sent(headers_of(payloads)), gathered, ranks)
    for number in range(4):
        own = payloads[number::4]
        for payload, expected in zip(total.payloads(number), own, strict=True):
            assert np.array_equal(payload.numpy(), expected)
        non_finite = [container.read_header(payload[: container.HEADER.size])[1] for payload in own]
        assert total.non_finite(number) == any(non_finite)


def test_notices_and_wrong_headers_are_found():
    payloads = payloads_of(np.random.default_rng(7), 2)
    headers, gathered = headers_of(payloads), torch.from_numpy(np.concatenate(payloads))

    def read(entries, of=gathered, cut=None):
        return PayloadsOnDevice(bucket_of(1), sent(entries)[:cut], of, 2)

    read(headers)
    with pytest.raises(dr.PeerFailedError, match="rank 1: KeyError"):
        read([headers[0], wire.notice(KeyError("none"))], gathered[: payloads[0].size])
    with pytest.raises(dr.CorruptPayloadError, match="payloads with"):
        read(headers, gathered[:-1])
    with pytest.raises(dr.CorruptPayloadError, match="headers with"):
        read(headers, cut=-1)
    with pytest.raises(dr.CorruptPayloadError, match="expected 1 payloads from each of 2 ranks"):
        read(headers[:1], gathered[: payloads[0].size])
    headers[1, 4] ^= 1  # the version
    with pytest.raises(dr.CorruptPayloadError, match="payload header"):
        read(headers)
