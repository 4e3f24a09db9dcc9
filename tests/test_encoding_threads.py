"""Test threads that encode bucket members.

Payloads and memories are the same as without threads, and errors become notices.
"""

import gc
import random
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import encoding_threads, wire
from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.encoding_threads import Encodings, EncodingThreads

CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.LloydMax(bits=1))
CODECS = (
    CODEC,
    dr.Codec(dr.TopK(0.05), value=dr.QSGD(4)),
    dr.Codec(dr.RandomK(0.1), index=dr.EliasFano()),
)


@pytest.fixture(autouse=True)
def small_gradients_too(monkeypatch):
    monkeypatch.setattr(encoding_threads, "FEWEST_ELEMENTS", 0)


class OwnTopK(dr.TopK):
    """A custom stage."""

    def select(self, *arguments):
        return super().select(*arguments)


def members(seed, held=0.1):
    """Return random bucket members with memories."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    found = []
    for number in range(draw.randint(1, 12)):
        d = draw.choice((0, 1, 7, 300, 20_000))
        gradient = numbers.standard_normal(d).astype(draw.choice((np.float32, np.float64)))
        state = (numbers.standard_normal(d).astype(np.float32),)
        found.append(
            BucketMember(f"m{number}", gradient, state, key=number, held=draw.random() < held)
        )
    return found


def started(threads, bucket, member):
    """Start to encode one member of a bucket; return its encoding."""
    return threads.start(member, bucket.codec, bucket.memory, bucket.seed, bucket.step, bucket.rank)


@pytest.mark.parametrize("seed", range(60))
def test_payloads_and_memories_are_those_without_threads(seed):
    codec = CODECS[seed % len(CODECS)]
    alone, early = (Bucket(codec, dr.Residual(), members(seed), 3, seed, 1) for _ in range(2))
    threads = EncodingThreads(1 + seed % 3, 1)
    encodings = [one for one in (started(threads, early, m) for m in early.members) if one]
    assert len(encodings) == sum(not member.held for member in early.members)
    np.testing.assert_array_equal(alone.encode(), early.encode())
    for one, other in zip(alone.members, early.members):
        np.testing.assert_array_equal(one.state[0], other.state[0])
        np.testing.assert_array_equal(one.threshold, other.threshold)
    assert all(one.done and one.seconds > 0 for one in encodings)


def test_an_error_in_a_thread_becomes_a_notice_in_place_of_the_payload():
    first, bad, last = (
        BucketMember(name, np.ones(2000, np.float32), (np.zeros(2000, np.float32),))
        for name in ("first", "bad", "last")
    )
    bad.state = (np.zeros(3, np.float32),)  # not the length of the gradient
    bucket = Bucket(CODEC, dr.Residual(), [first, bad, last])
    threads = EncodingThreads(2, 1)
    for member in bucket.members:
        started(threads, bucket, member)
    message = bucket.encode()
    assert isinstance(bad.failure, dr.InvalidArgumentError)
    assert first.failure is None and last.failure is None
    payloads = [member.encoding.payload() for member in (first, last)]
    expected = np.concatenate([payloads[0], wire.notice(bad.failure), payloads[1]])
    np.testing.assert_array_equal(message, expected)
    assert bad.encoding.done and bad.encoding.seconds == 0


def test_settle_waits_and_callbacks_run_when_the_last_is_done(monkeypatch):
    go, threads, calls = threading.Event(), EncodingThreads(2, 1), []
    encode = encoding_threads._encode

    def slowly(member, bucket):
        assert go.wait(30)
        return encode(member, bucket)

    monkeypatch.setattr(encoding_threads, "_encode", slowly)
    bucket = Bucket(CODEC, dr.Residual(), members(1, held=0))
    handle = Encodings([started(threads, bucket, member) for member in bucket.members])
    handle.when_done(lambda: calls.append(handle.query()))
    assert handle and not handle.query() and not calls
    go.set()
    threads.settle()
    assert handle.query() and handle.result() is None
    assert len(calls) == len(bucket.members) and calls[-1]


def test_the_threads_keep_no_gradient():
    threads, callback = EncodingThreads(1, 1), dr.TopK(0.5)
    member = members(1, held=0)[0]
    bucket = Bucket(CODEC, dr.Residual(), [member])
    started(threads, bucket, member).when_done(lambda kept=callback: kept)
    bucket.encode()
    threads.settle()
    known = [weakref.ref(one) for one in (member, bucket, member.gradient, callback)]
    del member, bucket, callback
    gc.collect()
    assert [one() for one in known] == [None] * 4


class Any:
    """An object with these attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Roll:
    """A roll call that all ranks have answered."""

    def expect_all(self):
        return iter(())


def flight_of(bucket, transport, threads):
    """Start the exchange of a bucket whose members threads encode, as PyTorch's adapter does."""
    buckets = pytest.importorskip("deepreduce_hvd.torch.optimizer_buckets")
    policy = Any(codec=bucket.codec, memory=bucket.memory)
    slots = [Any(name=m.name, policy=policy, steps=4) for m in bucket.members]
    flight = buckets.Flight(slots)
    flight.roll_call = Roll()
    flight.members = dict(zip(slots, bucket.members))
    flight.encodings = [started(threads, bucket, member) for member in bucket.members]
    flight.start(Any(number=0, seed=0), transport, dr.Allgather(), 0)
    return flight


class Alone(Transport):
    """A transport of one rank. Its collectives are recorded and complete at once."""

    size, rank = 1, 0

    def __init__(self):
        self.started = []

    def allgather(self, array, name):
        self.started.append(name)
        return Any(query=lambda: True, result=lambda: array)

    def test(self, handle):
        return handle.query()

    def wait(self, handle):
        return handle.result()

    def pause(self, since):
        pass


def test_a_step_is_freed_without_the_garbage_collector():
    """The memory of a step is freed without a garbage collection.

    Otherwise many gradients would stay in memory until a full collection.
    """
    torch = pytest.importorskip("torch")
    from deepreduce_hvd.torch.host import HostMember

    gradients = [torch.randn(2000) for _ in range(3)]
    slots = [
        Any(name=str(n), key=n, state=(state,), encoder_state=(state,), threshold=hint, steps=4)
        for n, (state, hint) in enumerate((torch.zeros(2000), torch.zeros(1)) for _ in range(3))
    ]
    bucket = Bucket(
        CODEC, dr.Residual(), [HostMember(s, g, False) for s, g in zip(slots, gradients)]
    )
    gc.collect()
    gc.disable()
    try:
        threads = EncodingThreads(2, 1)
        flight = flight_of(bucket, Alone(), threads)
        assert flight.exchange.finish() is not None
        threads.settle()
        known = [weakref.ref(one) for one in (*gradients, flight, flight.exchange)]
        del bucket, flight, gradients
        assert [one() for one in known] == [None] * 5
    finally:
        gc.enable()


def test_settle_waits_for_what_follows_an_encoding():
    """``settle`` waits for an exchange that an encoding thread begins.

    An exchange that begins later would belong to the next step, or would still run.
    """
    transport, threads, begun = Alone(), EncodingThreads(1, 1), threading.Event()
    allgather = transport.allgather

    def slowly(array, name):
        begun.set()
        time.sleep(0.2)
        return allgather(array, name)

    transport.allgather = slowly
    flight = flight_of(Bucket(CODEC, dr.Residual(), members(1, held=0)), transport, threads)
    assert begun.wait(30)
    threads.settle()
    assert transport.started == ["deepreduce.0.m0.1"], transport.started
    flight.exchange.finish()


def test_gradients_after_the_end_of_the_main_thread_are_encoded_without_threads():
    """After the end of the main thread, Python starts no threads, but other threads continue."""
    program = """
import threading, time
import numpy as np
import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.encoding_threads import EncodingThreads

def train():
    threads = EncodingThreads(1, 1)
    for step in range(2):
        member = BucketMember("w", np.ones(20_000, np.float32), (np.zeros(20_000, np.float32),))
        bucket = Bucket(dr.Codec(dr.TopK(0.05)), dr.Residual(), [member])
        encoding = threads.start(bucket.members[0], bucket.codec, bucket.memory, 0, 0, 0)
        print(encoding is not None, bucket.encode().size > 0, flush=True)
        first.set()
        threading.main_thread().join()

first = threading.Event()
threading.Thread(target=train).start()
first.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "False", "True"], done.stderr


def test_a_communicator_that_overrides_exchange_does_not_inherit_sends_payloads():
    """A custom exchange may select elements itself, and would remove them from the memory twice."""

    class Selects(dr.Allgather):
        def exchange(self, bucket, channel):
            yield bucket.select()

    class SendsPayloads(Selects):
        sends_payloads = True

        def exchange(self, bucket, channel):
            yield bucket.encode()

    class Renamed(dr.Allgather):
        pass

    found = [kind.sends_payloads for kind in (Selects, SendsPayloads, Renamed, dr.Allgather)]
    assert found == [False, True, True, True]


def test_what_no_thread_encodes(monkeypatch):
    def one_started(count=1, codec=CODEC, d=1000, **options):
        member = BucketMember("m", np.ones(d, np.float32), (np.zeros(d, np.float32),), **options)
        return EncodingThreads(count, 1).start(member, codec, dr.Residual(), 0, 0, 0)

    assert one_started() is not None
    assert one_started(count=0) is None
    assert one_started(held=True) is None
    assert one_started(codec=dr.Codec(OwnTopK(0.05))) is None
    monkeypatch.setattr(encoding_threads, "FEWEST_ELEMENTS", 1001)
    assert one_started() is None and one_started(d=1001) is not None


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(1, 1, 0), (2, 2, 0), (2, 1, 1), (8, 2, 3), (64, 4, 4), (4, 8, 0)]
)
def test_the_default_number_of_threads(monkeypatch, cores, ranks, count):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    assert EncodingThreads(None, ranks)._count == count


@pytest.mark.parametrize("threads", [-1, 1.5, True, "2"])
def test_a_wrong_number_of_threads_is_refused(threads):
    torch = pytest.importorskip("torch")
    with pytest.raises(dr.InvalidArgumentError, match="threads: expected None or an integer"):
        dr.Compressor(parameters=[("w", torch.nn.Parameter(torch.zeros(3)))], threads=threads)
