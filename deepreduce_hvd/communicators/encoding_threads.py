"""Threads that encode gradients while backward goes on."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from deepreduce_hvd.communicators.bucket import Bucket

#: A gradient with fewer elements takes less time to encode than to hand to a thread.
FEWEST_ELEMENTS = 1 << 14
_MOST_THREADS = 4


class Encoding:
    """The payload of one gradient that a thread encodes.

    Args:
        member: the :class:`~deepreduce_hvd.communicators.bucket.BucketMember`.
        bucket: the bucket of this member alone.

    Attributes:
        done: whether the encoding has ended, with a payload or with an error.
        times: times of ``time.perf_counter`` at its start and its end; None unless it has a
            payload.
    """

    def __init__(self, member, bucket):
        self._work: Any = (member, bucket)
        self._payload = self._error = self.times = None
        self._ended = threading.Event()
        self._functions: list[Callable[[], None]] | None = []
        self._lock = threading.Lock()  # guards the functions
        self._job: Future

    def start(self, pool):
        """Start to encode in a thread of ``pool``."""
        self._job = pool.submit(self._run)

    def _run(self):
        # avoid a reference cycle: the member and the message refer to this object
        (member, bucket), self._work = self._work, None
        started = time.perf_counter()
        try:
            self._payload = _encode(member, bucket)
            self.times = started, time.perf_counter()
        except BaseException as error:  # ``payload`` raises it in the thread that asks for it
            self._error = error
        with self._lock:
            self._ended.set()
            functions, self._functions = self._functions or [], None
        for function in functions:
            function()

    @property
    def done(self):
        return self._ended.is_set()

    @property
    def seconds(self):
        """Seconds that the encoding took; 0 unless it has a payload."""
        return 0.0 if self.times is None else self.times[1] - self.times[0]

    def payload(self):
        """Wait for the payload and return it; raise the error of the encoding if it failed."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._payload

    def wait(self):
        """Wait for the payload or the error, and for the functions of :meth:`when_done`."""
        wait([self._job])

    def when_done(self, function):
        """Call ``function()`` in the encoding thread at its end, or now if it has ended."""
        with self._lock:
            if self._functions is not None:
                self._functions.append(function)
                return
        function()


class Encodings:
    """The handle of several encodings. Its result is None, once all have ended.

    Args:
        encodings: list of :class:`Encoding`.
    """

    def __init__(self, encodings):
        self._encodings = encodings

    def __bool__(self):
        return bool(self._encodings)

    def query(self):
        return all(encoding.done for encoding in self._encodings)

    def result(self):
        for encoding in self._encodings:
            encoding.wait()

    def when_done(self, function):
        """Call ``function()`` after each of the encodings; see :meth:`Encoding.when_done`."""
        for encoding in self._encodings:
            encoding.when_done(function)


class EncodingThreads:
    """Threads that encode bucket members as soon as their gradients have come.

    The native core releases Python's global interpreter lock (GIL), so backward goes on meanwhile.
    Each member has its own memory and its own random numbers. So payloads do not depend on the
    number of threads.

    Args:
        count: number of threads, which start with the first gradient. None: the cores of this host
            per rank, less the one that runs backward, at most 4. Without a spare core, a thread
            would only take turns with backward.
        local_size: number of ranks on this host.
    """

    def __init__(self, count, local_size):
        if count is None:
            spare = len(os.sched_getaffinity(0)) // local_size - 1
            count = min(max(spare, 0), _MOST_THREADS)
        self._count = count
        self._pool = None
        # weak, because an encoding refers to its payload and to its message
        self._started: weakref.WeakSet = weakref.WeakSet()

    def start(self, member, codec, memory, seed, step, rank):
        """Start to encode a bucket member in a thread, if it is large enough.

        Members with a custom stage are not encoded in threads, because Python code holds the GIL.

        Args:
            member: the :class:`~deepreduce_hvd.communicators.bucket.BucketMember`.
            codec, memory, seed, step, rank: those of its bucket.

        Returns:
            The :class:`Encoding`; None if the bucket's message encodes the member when it starts.
        """
        too_little = member.d < FEWEST_ELEMENTS
        if too_little or self._count == 0 or member.held or member.failure is not None:
            return None
        if not codec.is_native(memory):
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, "deepreduce-encoder")
        encoding = Encoding(member, Bucket(codec, memory, [member], seed, step, rank))
        try:
            encoding.start(self._pool)
        # a pool accepts no jobs once the main thread has ended; other threads may still train
        except RuntimeError:
            return None
        member.encoding = encoding
        self._started.add(encoding)
        return encoding

    def settle(self):
        """Wait until nothing is being encoded, before anything else reads or writes memories."""
        for encoding in list(self._started):
            encoding.wait()


def _encode(member, bucket):
    return member.encode(bucket)
