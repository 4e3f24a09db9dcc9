"""Test that every public function reads its arrays correctly, or refuses them by name."""

import mmap

import numpy as np
import pytest
from codecs_table import gradient

import deepreduce_hvd as dr
from deepreduce_hvd.arrays import zeros_on_huge_pages
from deepreduce_hvd.numpy_backend import encode_numpy, encode_sparse_numpy, select_numpy
from deepreduce_hvd.stages.base import Memory

CODEC = dr.Codec(dr.TopK(0.25), index=dr.Rice())
D = 40


class Own(Memory):
    """Residual as a custom memory, run by NumPy."""

    state = dr.Residual.state
    accumulate = dr.Residual.accumulate
    update = dr.Residual.update


MEMORIES = pytest.mark.parametrize("memory", [dr.Residual(), Own()], ids=["native", "own"])


def values(dtype=np.float32):
    return gradient(D).astype(dtype)


def payload():
    return CODEC.encode(values())


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


STRUCTURED = np.dtype([("real", np.float32)])
#: invalid argument in place of an array of `dtype` -> its description in the message
BAD = {
    "other_byte_order": (
        lambda array: array.astype(array.dtype.newbyteorder()),
        "not in native byte order",
    ),
    "structured": (lambda array: array.view([("x", array.dtype)]), "a structured dtype of shape"),
    "object": (lambda array: array.astype(object), "object of shape"),
    "scalar": (lambda array: np.array(array[0]), r"of shape \(\)"),
    "two_dimensions": (lambda array: array.reshape(1, -1), r"of shape \(1, \d+\)"),
    "masked": (np.ma.masked_array, "masked"),
    "complex": (lambda array: array.astype(np.complex64), "complex64 of shape"),
    "text": (lambda array: array.astype("S8"), r"\|S8 of shape"),
    "boolean": (lambda array: array.astype(bool), "bool of shape"),
    "longdouble": (lambda array: array.astype(np.longdouble), "float128 of shape"),
}
EVERY_BAD = pytest.mark.parametrize("bad", BAD)


def strided(array):
    return np.repeat(array, 2)[::2]


@EVERY_BAD
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@MEMORIES
def test_gradients(dtype, memory, bad):
    make, message = BAD[bad]
    wrong = make(values(dtype))
    kept = np.zeros(D, np.float32)
    for refused in (
        lambda: CODEC.encode(wrong, kept, memory=memory),
        lambda: select_numpy(CODEC, memory, wrong, (kept,)),
    ):
        with pytest.raises(
            dr.InvalidArgumentError,
            match=f"gradient: expected a 1-D float32, float16, float64 array, got .*{message}",
        ):
            refused()
    assert not kept.any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@MEMORIES
def test_gradients_need_not_be_contiguous_or_writable(dtype, memory):
    expected_state = np.zeros(D, np.float32)
    expected = CODEC.encode(values(dtype), expected_state)
    for given in (
        strided(values(dtype)),
        read_only(values(dtype)),
        values(dtype)[::-1].copy()[::-1],
    ):
        before, kept = given.copy(), np.zeros(D, np.float32)
        assert CODEC.encode(given, kept, memory=memory).tobytes() == expected.tobytes()
        np.testing.assert_array_equal(kept, expected_state)
        np.testing.assert_array_equal(given, before)
        selected = select_numpy(CODEC, memory, given, (np.zeros(D, np.float32),))
        np.testing.assert_array_equal(selected[0], np.flatnonzero(dr.decode(expected)))


def refused_residuals():
    kept = np.zeros(D, np.float32)
    for name, (make, message) in BAD.items():
        yield pytest.param(make(kept), message, id=name)
    for name, wrong, message in (
        ("float64", kept.astype(np.float64), "float64"),
        ("short", kept[:1], r"of shape \(1,\)"),
        ("strided", strided(kept), "not contiguous"),
        ("read_only", read_only(kept), "read-only"),
        ("list", [0.0] * D, "list"),
    ):
        yield pytest.param(wrong, message, id=name)


@pytest.mark.parametrize(("wrong", "message"), list(refused_residuals()))
@MEMORIES
def test_residuals(memory, wrong, message):
    for refused in (
        lambda: CODEC.encode(values(), wrong, memory=memory),
        lambda: select_numpy(CODEC, memory, values(), (wrong,)),
    ):
        with pytest.raises(
            dr.InvalidArgumentError,
            match=(
                r"residual: expected a writable contiguous 1-D float32 array of shape "
                rf"\({D},\), got .*{message}"
            ),
        ):
            refused()


@MEMORIES
def test_a_residual_has_memory_of_its_own(memory):
    both = np.zeros(2 * D, np.float32)
    with pytest.raises(
        dr.InvalidArgumentError,
        match="residual: expected separate memory, got memory shared with gradient",
    ):
        CODEC.encode(both[:D], both[:D], memory=memory)
    with pytest.raises(
        dr.InvalidArgumentError,
        match="residual: expected separate memory, got memory shared with gradient",
    ):
        CODEC.encode(both[5 : D + 5], both[:D], memory=memory)
    CODEC.encode(both[:D], both[D:], memory=memory)
    with pytest.raises(
        dr.InvalidArgumentError,
        match="velocity: expected separate memory, got memory shared with residual",
    ):
        CODEC.encode(values(), (both[:D], both[:D]), memory=dr.MomentumCorrection())


@EVERY_BAD
def test_indices_and_values_of_a_sparse_tensor(bad):
    make, message = BAD[bad]
    indices, sent = np.arange(5, dtype=np.uint32), np.ones(5, np.float32)
    with pytest.raises(
        dr.InvalidArgumentError,
        match=f"indices: expected a contiguous 1-D uint32 array, got .*{message}",
    ):
        CODEC.encode_sparse(make(indices), sent, D)
    with pytest.raises(
        dr.InvalidArgumentError,
        match=(
            r"values: expected a writable contiguous 1-D float32 array of shape \(5,\), got "
            rf".*{message}"
        ),
    ):
        CODEC.encode_sparse(indices, make(sent), D)
    with pytest.raises(
        dr.InvalidArgumentError,
        match=f"indices: expected a contiguous 1-D uint32 array, got .*{message}",
    ):
        select_numpy(CODEC, dr.NoMemory(), values(), (), given=make(indices))


@pytest.mark.parametrize("native", [True, False])
def test_more_of_sparse_tensors(native):
    indices, sent = np.arange(5, dtype=np.uint32), np.ones(5, np.float32)
    for wrong, message in (
        (read_only(sent), "read-only"),
        (strided(sent), "not contiguous"),
        (sent[:4], r"of shape \(4,\)"),
    ):
        with pytest.raises(
            dr.InvalidArgumentError, match=f"values: expected a writable .*{message}"
        ):
            encode_sparse_numpy(CODEC, indices, wrong, D, native=native)
    with pytest.raises(
        dr.InvalidArgumentError,
        match="values: expected separate memory, got memory shared with indices",
    ):
        encode_sparse_numpy(CODEC, indices, indices.view(np.float32), D, native=native)
    with pytest.raises(dr.InvalidArgumentError, match="indices: expected a contiguous"):
        encode_sparse_numpy(CODEC, strided(indices), sent, D, native=native)
    expected = encode_sparse_numpy(CODEC, indices, sent.copy(), D, native=native)
    found = encode_sparse_numpy(CODEC, read_only(indices), sent, D, native=native)
    assert found[0].tobytes() == expected[0].tobytes()


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad != "other_byte_order"])
def test_payloads(bad):
    make, message = BAD[bad]
    wrong, out = make(payload()), np.zeros(D, np.float32)
    for refused in (
        lambda: dr.decode(wrong),
        lambda: dr.inspect(wrong),
        lambda: dr.decode_sum([payload(), wrong], out),
        lambda: dr.decode_sum_sparse([wrong], D),
    ):
        with pytest.raises(
            dr.InvalidArgumentError, match=f"payload: expected a 1-D uint8 array, got .*{message}"
        ):
            refused()
    assert not out.any()


def test_payloads_need_not_be_contiguous_or_writable():
    expected = dr.decode(payload())
    for given in (strided(payload()), read_only(payload())):
        np.testing.assert_array_equal(dr.decode(given), expected)
        np.testing.assert_array_equal(dr.decode_sum([given], np.zeros(D, np.float32)), expected)
        assert dr.inspect(given) == dr.inspect(payload())


@pytest.mark.parametrize(
    ("wrong", "message"), [one for one in refused_residuals() if one.id not in ("short", "list")]
)
def test_sums(wrong, message):
    with pytest.raises(
        dr.InvalidArgumentError,
        match=f"out: expected a writable contiguous 1-D float32 array, got .*{message}",
    ):
        dr.decode_sum([payload()], wrong)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e300, "1", None, True, 1j])
def test_scales(scale):
    out = np.zeros(D, np.float32)
    for refused in (
        lambda: dr.decode_sum([payload()], out, scale),
        lambda: dr.decode_sum_sparse([payload()], D, scale),
    ):
        with pytest.raises(dr.InvalidArgumentError, match=r"scale: expected a finite float32, got"):
            refused()
    assert not out.any()


@pytest.mark.parametrize("d", [-1, 2**31, 1.5, "40", None, True])
def test_numbers_of_elements(d):
    with pytest.raises(
        dr.InvalidArgumentError,
        match="d: expected an integer of at least 0 and at most 2147483647, got",
    ):
        dr.decode_sum_sparse([payload()], d)
    with pytest.raises(
        dr.InvalidArgumentError,
        match="d: expected an integer of at least 0 and at most 2147483647, got",
    ):
        CODEC.encode_sparse(np.zeros(0, np.uint32), np.zeros(0, np.float32), d)


def test_what_is_no_array_at_all():
    for wrong in ([1.0, 2.0], 3.0, np.float32(3), b"bytes", None):
        for name, refused in (
            ("gradient", lambda: CODEC.encode(wrong)),
            ("payload", lambda: dr.decode(wrong)),
            ("payload", lambda: dr.inspect(wrong)),
            ("out", lambda: dr.decode_sum([], wrong)),
        ):
            with pytest.raises(
                dr.InvalidArgumentError,
                match=f"^{name}: expected a NumPy array or a tensor of torch, tensorflow, got",
            ):
                refused()


def test_bytes_in_place_of_a_payload():
    sent = CODEC.encode(values())
    for given in (sent.tobytes(), bytearray(sent), memoryview(sent)):
        for refused in (
            lambda: dr.decode(given),
            lambda: dr.inspect(given),
            lambda: dr.decode_sum([given], np.zeros(D, np.float32)),
        ):
            with pytest.raises(dr.InvalidArgumentError) as message:
                refused()
            line = str(message.value).partition("; for bytes write ")[2]
            np.testing.assert_array_equal(
                dr.decode(eval(line, {"np": np, "data": given})), dr.decode(sent)
            )
    with pytest.raises(dr.InvalidArgumentError, match="^gradient: .*, got bytes$"):
        CODEC.encode(b"bytes")


def test_the_dtype_of_the_numbers_and_their_code():
    """Inside the package, values of any dtype may be stored as float32, but not the reverse."""
    for code, dtype in ((1, np.float16), (3, np.float64)):
        expected, _ = encode_numpy(CODEC, dr.NoMemory(), values(dtype), (), 0.0, 0, 0, 0, 0)
        as_float32 = values(dtype).astype(np.float32)
        found, _ = encode_numpy(CODEC, dr.NoMemory(), as_float32, (), 0.0, 0, 0, 0, 0, dtype=code)
        assert dr.inspect(found)["dtype"] == np.dtype(dtype).name
        np.testing.assert_array_equal(dr.decode(found), dr.decode(expected))


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    def test_memory_of_its_own(self, torch):
        both = torch.zeros(2 * D)
        with pytest.raises(
            dr.InvalidArgumentError,
            match="residual: expected separate memory, got memory shared with gradient",
        ):
            CODEC.encode(both[:D], both[5 : D + 5])
        CODEC.encode(both[:D], both[D:])
        CODEC.encode(both[::2], both[D:])  # a strided gradient is copied

    def test_views_that_negate(self, torch):
        negated = torch.complex(torch.zeros(D), torch.from_numpy(values())).conj().imag
        assert negated.is_neg()
        with pytest.raises(
            dr.InvalidArgumentError,
            match=(
                "gradient: expected a tensor without the negative or conjugate bit, got a "
                "view with one"
            ),
        ):
            CODEC.encode(negated)
        assert torch.equal(
            CODEC.encode(negated.resolve_neg().clone()), torch.from_numpy(CODEC.encode(-values()))
        )

    @MEMORIES
    def test_strided_ones(self, torch, memory):
        twice = torch.from_numpy(np.repeat(values(), 2))
        expected = CODEC.encode(values())
        assert CODEC.encode(twice[::2]).numpy().tobytes() == expected.tobytes()
        with pytest.raises(dr.InvalidArgumentError, match="residual: expected .*contiguous"):
            CODEC.encode(twice[::2], torch.zeros(2 * D)[::2], memory=memory)
        data = torch.from_numpy(np.repeat(expected, 2))[::2]
        assert torch.equal(dr.decode(data), dr.decode(torch.from_numpy(expected)))
        with pytest.raises(
            dr.InvalidArgumentError, match="out: expected a contiguous 1-D float32 tensor"
        ):
            dr.decode_sum([data], torch.zeros(2 * D)[::2])

    @MEMORIES
    def test_a_residual_that_asks_for_gradients(self, torch, memory):
        kept = torch.zeros(D, requires_grad=True)
        CODEC.encode(torch.from_numpy(values()), kept, memory=memory)
        assert kept.detach().any()


@pytest.mark.parametrize("d", [0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_001])
def test_zeros_on_huge_pages(d):
    zeros = zeros_on_huge_pages(d)
    assert zeros.shape == (d,) and zeros.dtype == np.float32 and not zeros.any()
    assert zeros.flags.writeable and zeros.flags.c_contiguous
    zeros[:] = np.arange(d)
    part = zeros[d // 2 :]
    del zeros  # the memory stays while a part of it is used
    assert np.array_equal(part, np.arange(d // 2, d, dtype=np.float32))


def test_zeros_without_huge_pages(monkeypatch):
    class NoPages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError("no such advice")

    monkeypatch.setattr("deepreduce_hvd.arrays.mmap.mmap", NoPages)
    assert not zeros_on_huge_pages(1 << 21).any()


def test_residuals_take_memory_only_when_they_are_written():
    before = _resident()
    many = [zeros_on_huge_pages((5 << 18) + 1) for _ in range(20)]  # 5 MiB, no multiple of a page
    for one in many:
        one[:] = 1
    assert _resident() - before < 110 << 20
    del many, one
    zeros = zeros_on_huge_pages(50 << 20)
    assert _resident() - before < 10 << 20
    zeros[: 1 << 20] = 1
    assert _resident() - before < 20 << 20
    zeros[:] = 1
    assert _resident() - before > 150 << 20
    del zeros
    assert _resident() - before < 20 << 20


def _resident():
    """Return the bytes of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
