"""Run calls of the device core for several tensors under the emulator, as graphs and without."""

import ctypes
import weakref

import numpy as np
from emulation import (
    Codec,
    Encoding,
    Result,
    Sum,
    codec_numbers,
    finish,
    in_workspace,
    library,
    placed,
)

import deepreduce_hvd as dr
from deepreduce_hvd import container


def _last_recorded_size():
    counted = library().dr_test_last_recorded_size
    counted.restype = ctypes.c_uint64
    return counted()


class RecordedEncodings:
    """A graph that encodes several tensors, as dr_cuda_record_encodings makes it.

    Args:
        codecs: list of codecs, one for each tensor.
        memories: list of their memories.
        sizes: list of their numbers of elements.
        states: list of tuples of (d,) float32 arrays, which each launch updates.

    Attributes:
        size: number of launches, copies and fills in the graph.
    """

    def __init__(self, codecs, memories, sizes, states):
        count = len(codecs)
        self._results = (Result * count)()
        self._payloads, self._headers = [], []
        self._encodings = (Encoding * count)()
        for number, (d, state) in enumerate(zip(sizes, states)):
            self._headers.append(placed(np.full(container.HEADER.size, 0xA5, dtype=np.uint8)))
            self._encodings[number] = Encoding(
                None, 0, d, *[array.ctypes.data for array in state], *[None] * (2 - len(state)),
                0, 0, 0, 0, None, 0,
                ctypes.addressof(self._results[number]), self._headers[-1].ctypes.data,
            )  # fmt: skip
        fields = (Codec * count)(
            *[codec_numbers(codec, memory, 0) for codec, memory in zip(codecs, memories)]
        )
        self._states, self._fields = states, fields
        self._prepare()

    def _prepare(self):
        self._graph = ctypes.c_void_p()
        self._context, self._check, self._workspace = in_workspace(
            lambda context, workspace, size: library().dr_cuda_record_encodings(
                context, self._fields, self._encodings, ctypes.c_uint64(len(self._fields)),
                workspace, size, ctypes.byref(self._graph),
            ),
            self._give_memory,
        )  # fmt: skip
        self.size = _last_recorded_size()
        weakref.finalize(self, library().dr_cuda_free, ctypes.c_void_p(self._graph.value))

    def _start(self):
        self._check(
            library().dr_cuda_launch_encodings(
                ctypes.byref(self._context), self._graph, self._encodings, None
            ),
            self._context.message.decode(),
        )

    def _give_memory(self):
        self._payloads = []
        for encoding in self._encodings:
            self._payloads.append(placed(np.full(encoding.payload_capacity, 0xA5, np.uint8)))
            encoding.payload = self._payloads[-1].ctypes.data

    def launch(self, gradients, seed, step):
        """Encode (d,) float32 arrays; return (payload, header) of each."""
        for number, gradient in enumerate(gradients):
            self._encodings[number].gradient = gradient.ctypes.data
            self._encodings[number].seed, self._encodings[number].step = seed, step
            self._encodings[number].tensor = number
        self._start()
        made = []
        for payload, header, result in zip(self._payloads, self._headers, self._results):
            finish(self._context, self._check, result)
            made.append((payload[: result.payload_bytes].copy(), header.copy()))
        return made


class DirectEncodings(RecordedEncodings):
    """The same without a graph: each launch is a call of dr_cuda_encode."""

    def _prepare(self):
        """Do nothing: each call has a new workspace."""

    def _start(self):
        self._context, self._check, _ = in_workspace(
            lambda context, workspace, size: library().dr_cuda_encode(
                context, self._fields, self._encodings, ctypes.c_uint64(len(self._fields)),
                workspace, size, None,
            ),
            self._give_memory,
        )  # fmt: skip


def repeats(codec):
    """Return whether a graph may encode with a codec: see dr_cuda_repeats."""
    return bool(library().dr_cuda_repeats(ctypes.byref(codec_numbers(codec, dr.NoMemory(), 0))))


class RecordedSums:
    """A graph of the sums of several tensors, as dr_cuda_record_sums makes it.

    Args:
        codec: the codec of all payloads.
        sizes: list of the numbers of elements.
        most_sizes: for each tensor, a list of the maximum sizes of its payloads in bytes.

    Attributes:
        size: number of launches, copies and fills in the graph.
    """

    def __init__(self, codec, sizes, most_sizes):
        count = len(sizes)
        self._fields = codec_numbers(codec, dr.NoMemory(), 0)
        self._results = (Result * count)()
        self._most = [(ctypes.c_uint64 * len(most))(*most) for most in most_sizes]
        self._sums = (Sum * count)(*[
            Sum(None, None, most, len(most), None, d, 0.0, ctypes.addressof(result))
            for d, most, result in zip(sizes, self._most, self._results)
        ])  # fmt: skip
        self._prepare()

    def _prepare(self):
        self._graph = ctypes.c_void_p()
        self._context, self._check, self._workspace = in_workspace(
            lambda context, workspace, size: library().dr_cuda_record_sums(
                context, ctypes.byref(self._fields), self._sums,
                ctypes.c_uint64(len(self._sums)), workspace, size, ctypes.byref(self._graph),
            )
        )  # fmt: skip
        self.size = _last_recorded_size()
        weakref.finalize(self, library().dr_cuda_free, ctypes.c_void_p(self._graph.value))

    def _start(self):
        self._check(
            library().dr_cuda_launch_sums(
                ctypes.byref(self._context), self._graph, ctypes.byref(self._fields), self._sums,
                None,
            ),
            self._context.message.decode(),
        )  # fmt: skip

    def launch(self, payloads, outs, scale):
        """Add lists of payloads, one for each tensor, to ``outs`` in place."""
        kept = []
        for own, payloads_of_one, out in zip(self._sums, payloads, outs):
            pointers = (ctypes.c_void_p * len(payloads_of_one))(
                *[payload.ctypes.data for payload in payloads_of_one]
            )
            sizes = (ctypes.c_uint64 * len(pointers))(*[one.size for one in payloads_of_one])
            kept.append((pointers, sizes))
            own.payloads, own.sizes, own.out, own.scale = pointers, sizes, out.ctypes.data, scale
        self._start()
        for result in self._results:
            finish(self._context, self._check, result)


class DirectSums(RecordedSums):
    """The same without a graph: each launch is a call of dr_cuda_decode_sum."""

    def _prepare(self):
        """Do nothing: each call has a new workspace."""

    def _start(self):
        self._context, self._check, _ = in_workspace(
            lambda context, workspace, size: library().dr_cuda_decode_sum(
                context, ctypes.byref(self._fields), self._sums,
                ctypes.c_uint64(len(self._sums)), workspace, size, None,
            )
        )  # fmt: skip
