"""Run the device codecs under the host's emulator of CUDA.

The library is built on first use, and called with NumPy arrays. A codec's stage can be run alone
(:func:`encode_index`, :func:`decode_index`, :func:`encode_value`, :func:`decode_value`).

DEEPREDUCE_CUDA_SANITIZE=1 builds the library with AddressSanitizer and UBSan, =thread with
ThreadSanitizer. For ThreadSanitizer each emulated thread is a separate thread. So it reports a data
race if a barrier is missing, if blocks access the same memory, or if a shuffle is used as a
barrier. The libraries of the sanitizers must be preloaded, for example

    DEEPREDUCE_CUDA_SANITIZE=thread LD_PRELOAD=$(gcc -print-file-name=libtsan.so) setarch -R python
    -m pytest tests/cuda/test_emulation.py
"""

import ctypes
import functools
import os
import weakref

import numpy as np
from emulation_build import SANITIZERS, build

from deepreduce_hvd.errors import OF_STATUS

#: sections are decoded from addresses of any alignment
MISALIGNMENTS = (0, 1, 7)
#: (schedule, seed): forward, reverse and shuffled
SCHEDULES = ((0, 0), (1, 0), (2, 1), (2, 2))


class Result(ctypes.Structure):
    """The struct dr_cuda_result."""

    _fields_ = [
        ("status", ctypes.c_int32), ("code", ctypes.c_int32), ("expected", ctypes.c_uint64),
        ("got", ctypes.c_uint64),
        ("payload", ctypes.c_uint64), ("payload_bytes", ctypes.c_uint64),
        ("count", ctypes.c_uint32), ("non_finite", ctypes.c_int32),
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def library():
    return ctypes.CDLL(str(build(SANITIZERS[os.environ.get("DEEPREDUCE_CUDA_SANITIZE", "")])))


def set_schedule(schedule=0, seed=1, poison=0xA5):
    """Set the order of blocks and threads, and the initial bytes of memory."""
    library().dr_test_schedule(ctypes.c_int(schedule), ctypes.c_uint64(seed), ctypes.c_int(poison))


def _pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def call(name, *arguments, result=None):
    """Call a function of the library; raise the error of the package if its status is not 0."""
    message = ctypes.create_string_buffer(512)
    status = getattr(library(), name)(*arguments, message)
    text = message.value.decode()
    if status == 0 and result is not None and result.status != 0:
        status, text = (
            result.status,
            f"code {result.code}: expected {result.expected}, got {result.got}",
        )
    if status != 0:
        raise OF_STATUS[status](text)


def _parameters(stage):
    return np.array(stage.fields()[1:], dtype=np.float64)


def encode_index(stage, indices, d, key, value_bits=32.0, spare=0):
    """Encode like :meth:`IndexCodec.encode`, with the device codec.

    ``spare`` is by how much the host's bound of the count exceeds the count.
    """
    indices = np.ascontiguousarray(indices, dtype=np.uint32)
    parameters, capacity = _parameters(stage), indices.size + spare
    most_bytes, most_decoded = ctypes.c_uint64(), ctypes.c_uint32()
    call("dr_test_index_capacity", stage.stage_id, ctypes.c_uint32(d), ctypes.c_uint32(capacity), _pointer(parameters), ctypes.byref(most_bytes),
         ctypes.byref(most_decoded))  # fmt: skip
    section, decoded = (
        np.zeros(most_bytes.value + 1, dtype=np.uint8),
        np.zeros(most_decoded.value + 1, dtype=np.uint32),
    )
    section_bytes, decoded_count, stay, result = (
        ctypes.c_uint64(),
        ctypes.c_uint32(),
        ctypes.c_int(),
        Result(),
    )
    call(
        "dr_test_index_encode", stage.stage_id, ctypes.c_uint32(d), ctypes.c_uint32(indices.size),
        ctypes.c_uint32(capacity), _pointer(indices),
        _pointer(parameters), ctypes.c_double(value_bits), ctypes.c_uint64(key), _pointer(section),
        ctypes.byref(section_bytes), _pointer(decoded),
        ctypes.byref(decoded_count), ctypes.byref(stay), ctypes.byref(result), result=result,
    )  # fmt: skip
    return (
        section[: section_bytes.value].tobytes(),
        decoded[: decoded_count.value],
        bool(stay.value),
    )


def _decode(name, stage, section, d, count, dtype, misalignment, spare, active):
    parameters = _parameters(stage)
    expected = [_pointer(parameters)] if name == "dr_test_index_decode" else []
    section_array, out, result = (
        np.frombuffer(section, dtype=np.uint8),
        np.zeros(count + 1, dtype=dtype),
        Result(),
    )
    call(
        name, stage.stage_id, _pointer(section_array), ctypes.c_uint64(len(section)),
        ctypes.c_int(misalignment), ctypes.c_uint32(d), ctypes.c_uint32(count),
        ctypes.c_uint32(count + spare), ctypes.c_int(active), *expected, _pointer(out),
        ctypes.byref(result), result=result,
    )  # fmt: skip
    return out[:count]


def decode_index(stage, section, d, count, misalignment=0, spare=0, active=True):
    """Decode like :meth:`IndexCodec.decode`, with the device codec."""
    return _decode(
        "dr_test_index_decode", stage, section, d, count, np.uint32, misalignment, spare, active
    )


def encode_value(stage, values, key, spare=0):
    """Encode like :meth:`ValueCodec.encode`, with the device codec."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    parameters, count = _parameters(stage), values.size
    most_bytes = ctypes.c_uint64()
    call(
        "dr_test_value_capacity",
        stage.stage_id,
        ctypes.c_uint32(count + spare),
        _pointer(parameters),
        ctypes.byref(most_bytes),
    )
    section, decoded, order = (
        np.zeros(most_bytes.value + 1, dtype=np.uint8),
        np.zeros(count + 1, dtype=np.float32),
        np.zeros(count + 1, dtype=np.uint32),
    )
    section_bytes, result = ctypes.c_uint64(), Result()
    call(
        "dr_test_value_encode", stage.stage_id, ctypes.c_uint32(count),
        ctypes.c_uint32(count + spare), _pointer(values), _pointer(parameters),
        ctypes.c_uint64(key), _pointer(section), ctypes.byref(section_bytes), _pointer(decoded),
        _pointer(order), ctypes.byref(result), result=result,
    )  # fmt: skip
    return (
        section[: section_bytes.value].tobytes(),
        decoded[:count],
        order[:count] if stage.sorts else None,
    )


def decode_value(stage, section, count, misalignment=0, spare=0, active=True):
    """Decode like :meth:`ValueCodec.decode`, with the device codec."""
    return _decode(
        "dr_test_value_decode",
        stage,
        section,
        max(count, 1),
        count,
        np.float32,
        misalignment,
        spare,
        active,
    )


def encode_order(order, spare=0):
    """Return the order section of ``order``, (k,) uint32."""
    order = np.ascontiguousarray(order, dtype=np.uint32)
    section, section_bytes, result = (
        np.zeros(4 * (order.size + spare) + 8, dtype=np.uint8),
        ctypes.c_uint64(),
        Result(),
    )
    call("dr_test_order_encode", _pointer(order), ctypes.c_uint32(order.size), ctypes.c_uint32(order.size + spare), _pointer(section),
         ctypes.byref(section_bytes), ctypes.byref(result), result=result)  # fmt: skip
    return section[: section_bytes.value].tobytes()


def decode_order(section, count, spare=0):
    """Return the order, (count,) uint32, or raise CorruptPayloadError."""
    section_array, order, result = (
        np.frombuffer(section, dtype=np.uint8),
        np.zeros(count + 1, dtype=np.uint32),
        Result(),
    )
    call("dr_test_order_decode", _pointer(section_array), ctypes.c_uint64(len(section)), ctypes.c_uint32(count), ctypes.c_uint32(count + spare),
         _pointer(order), ctypes.byref(result), result=result)  # fmt: skip
    return order[:count]


class _Context(ctypes.Structure):
    """The struct dr_context."""

    _fields_ = [
        ("allocate", ctypes.c_void_p), ("output", ctypes.c_void_p), ("user", ctypes.c_void_p),
        ("simd", ctypes.c_int32),
        ("message", ctypes.c_char * 512),
    ]  # fmt: skip


class _Stage(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("parameters", ctypes.c_double * 4)]


class Codec(ctypes.Structure):
    _fields_ = [("stages", _Stage * 4)]


class Encoding(ctypes.Structure):
    """The struct dr_cuda_encoding."""

    _fields_ = [
        ("gradient", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("d", ctypes.c_uint64),
        ("residual", ctypes.c_void_p), ("velocity", ctypes.c_void_p),
        ("seed", ctypes.c_uint64), ("step", ctypes.c_uint64), ("tensor", ctypes.c_uint64),
        ("rank", ctypes.c_uint64),
        ("payload", ctypes.c_void_p), ("payload_capacity", ctypes.c_uint64),
        ("result", ctypes.c_void_p), ("header", ctypes.c_void_p),
    ]  # fmt: skip


class Sum(ctypes.Structure):
    """The struct dr_cuda_sum."""

    _fields_ = [
        ("payloads", ctypes.POINTER(ctypes.c_void_p)), ("sizes", ctypes.POINTER(ctypes.c_uint64)),
        ("most_sizes", ctypes.POINTER(ctypes.c_uint64)), ("payload_count", ctypes.c_uint64),
        ("out", ctypes.c_void_p), ("d", ctypes.c_uint64), ("scale", ctypes.c_float),
        ("result", ctypes.c_void_p),
    ]  # fmt: skip


def codec_numbers(codec, memory, step):
    fields, result = codec.fields(memory, step), Codec()
    for stage, at in zip(result.stages, range(0, 20, 5)):
        stage.id = int(fields[at])
        stage.parameters[:] = fields[at + 1 : at + 5]
    return result


def _allocate(nbytes, alignment):
    """Return a uint8 array in memory of exactly its size, which is freed with it.

    So AddressSanitizer detects accesses past the end.
    """
    libc, address = ctypes.CDLL(None), ctypes.c_void_p()
    libc.free.argtypes = [ctypes.c_void_p]
    assert (
        libc.posix_memalign(
            ctypes.byref(address), ctypes.c_size_t(alignment), ctypes.c_size_t(nbytes)
        )
        == 0
    )
    buffer = (ctypes.c_uint8 * nbytes).from_address(address.value)
    weakref.finalize(buffer, libc.free, address.value)
    return np.frombuffer(buffer, dtype=np.uint8)


def placed(array, misalignment=0, alignment=256):
    """Return a copy of the array at a given alignment.

    It starts ``misalignment`` elements after a multiple of ``alignment`` bytes, and ends where its
    memory ends.
    """
    start = misalignment * array.itemsize
    copy = (
        _allocate(start + array.nbytes, alignment)[start:].view(array.dtype)
        if array.nbytes
        else np.zeros_like(array)
    )
    copy[...] = array
    return copy


def in_workspace(function, between=lambda: None):
    """Call function(workspace, size), a status, without a workspace and then with one.

    The workspace has exactly the size that the first call returns, and is poisoned. ``between()``
    is called before the second call.
    """
    context, size = _Context(), ctypes.c_size_t()

    def check(status, text):
        if status != 0:
            raise OF_STATUS[status](text)

    check(function(ctypes.byref(context), None, ctypes.byref(size)), context.message.decode())
    between()
    workspace = placed(np.full(size.value, 0xA5, dtype=np.uint8))
    check(
        function(ctypes.byref(context), _pointer(workspace), ctypes.byref(size)),
        context.message.decode(),
    )
    return context, check, workspace


def finish(context, check, result):
    check(
        library().dr_cuda_message(ctypes.byref(context), ctypes.byref(result)),
        context.message.decode(),
    )


def encode(codec, memory, gradient, state, dtype, seed=0, step=0, tensor=0, rank=0, misalignment=0):
    """Call dr_cuda_encode; return (payload, new state, result).

    ``gradient`` is (d,) in the storage type of the ``dtype`` code. ``state`` are (d,) float32
    arrays.
    """
    fields = codec_numbers(codec, memory, step)
    gradient, state = (
        placed(gradient, misalignment),
        tuple(placed(array, misalignment) for array in state),
    )
    result = Result()
    pointers = [array.ctypes.data for array in state] + [None] * (2 - len(state))
    encoding = Encoding(
        gradient.ctypes.data,
        dtype,
        gradient.size,
        *pointers,
        seed,
        step,
        tensor,
        rank,
        None,
        0,
        ctypes.addressof(result),
    )
    payload = None

    def give_memory():
        nonlocal payload
        payload = placed(np.full(encoding.payload_capacity, 0xA5, dtype=np.uint8))
        encoding.payload = payload.ctypes.data

    one = ctypes.c_uint64(1)
    context, check, _ = in_workspace(
        lambda context, workspace, size: library().dr_cuda_encode(
            context, ctypes.byref(fields), ctypes.byref(encoding), one, workspace, size, None
        ),
        give_memory,
    )
    finish(context, check, result)
    assert (payload[result.payload_bytes :] == 0xA5).all(), "bytes beyond the payload were written"
    return payload[: result.payload_bytes].copy(), state, result


def decode_sum(codec, memory, payloads, out, scale=1.0, misalignment=0):
    """Call dr_cuda_decode_sum, which adds to ``out`` in place; return ``out``."""
    fields, result = codec_numbers(codec, memory, 0), Result()
    payloads = [placed(payload, misalignment) for payload in payloads]
    pointers = (ctypes.c_void_p * len(payloads))(*[payload.ctypes.data for payload in payloads])
    sizes = (ctypes.c_uint64 * len(payloads))(*[payload.size for payload in payloads])
    sums = Sum(
        pointers, sizes, sizes, len(payloads), out.ctypes.data, out.size, scale,
        ctypes.addressof(result),
    )  # fmt: skip
    context, check, _ = in_workspace(
        lambda context, workspace, size: library().dr_cuda_decode_sum(
            context, ctypes.byref(fields), ctypes.byref(sums), ctypes.c_uint64(1), workspace,
            size, None,
        )
    )  # fmt: skip
    finish(context, check, result)
    return out
