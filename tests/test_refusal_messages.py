"""Test that each refusal of a payload says what was expected and what there was.

The native core and the NumPy classes are tested, on payloads with matching checksums.
"""

import re
import zlib

import numpy as np
import pytest
from codecs_table import INDEX, VALUE, gradient
from hostile_payloads import resealed, with_hostile_sections

import deepreduce_hvd as dr
from deepreduce_hvd import _native, container
from deepreduce_hvd.numpy_backend import decode_sum_numpy


def refusals(data, d):
    """Return the messages of the native core and of the NumPy classes that refuse a payload."""
    messages = []
    for native in (True, False):
        try:
            decode_sum_numpy([data], np.zeros(d, dtype=np.float32), 1.0, native=native)
        except dr.UnknownCodecError:
            pass  # its message names the codecs that there are
        except dr.DeepReduceError as error:
            messages.append(str(error))
    return messages


def expect_sense(messages):
    """Check that messages have both parts, and that a number is not expected and refused."""
    for message in messages:
        assert re.search("expected .*got", message), message
        numbers = re.search(r"expected (\d+)(?: [a-z]+)?, got (\d+)(?: [a-z]+)?$", message)
        assert numbers is None or numbers[1] != numbers[2], message
        bounds = re.search(r"expected \D*?(-?\d+) to (-?\d+)[^,]*, got (-?\d+)$", message)
        if bounds is not None:
            least, most, got = map(int, bounds.groups())
            assert not least <= got <= most, message


@pytest.mark.parametrize("name", [*INDEX, *VALUE])
def test_of_sections(name):
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    data = codec.encode(gradient(300))
    for hostile in with_hostile_sections(data):
        expect_sense(refusals(hostile, 300))
    for bit in range(40 * 8, data.size * 8, 3):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        expect_sense(refusals(resealed(flipped), 300))


@pytest.mark.parametrize("non_finite", [False, True])
@pytest.mark.parametrize("value", [dr.RawValue(), dr.FitPoly(), dr.FitDExp(), dr.Quantile()])
@pytest.mark.parametrize("d", [0, 1, 20])
def test_of_headers(d, value, non_finite):
    """Every field of the header gets other values; the sections stay."""
    values = gradient(d)
    if non_finite:
        values[:1] = np.nan
    data = dr.Codec(dr.NoneSparsifier(), value=value).encode(values)
    for at in range(container.HEADER.size - 8):
        for changed in (0, 1, 2, 3, 255):
            hostile = data.copy()
            hostile[at] = changed
            expect_sense(refusals(resealed(hostile), d))


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"flags": 1, "count": 2}, "non-finite payload: expected (no|0) values, got 2"),
        ({"flags": 1, "values": b"12"}, "non-finite payload: expected 40 bytes.*, got 42"),
        ({"flags": 1, "index_id": 4}, "non-finite payload: expected .*index codec.*, got 4"),
        ({"flags": 1, "value_id": 3}, "non-finite payload: expected .*value codec.*, got 3"),
        ({"count": 3, "index": b"1"}, "expected an empty index section, got 1 bytes"),
        ({"count": 3, "order": 2}, "without indices: expected an order of at most 1, got 2"),
    ],
)
def test_the_faults_of_a_header_are_told_apart(fields, message):
    data = container.write(container.Payload(**{"d": 3, "count": 0, **fields}))
    messages = refusals(data, 3)
    assert len(messages) == 2
    for got in messages:
        assert re.search(message, got), got


def poly_section(positives, segments, exponents):
    """Return a section of FitPoly of degree 1 with these fields and no coefficients."""
    return (
        positives.to_bytes(4, "little")
        + np.array(segments, dtype="<u2").tobytes()
        + np.array(exponents, dtype="<i2").tobytes()
        + bytes([1, 0, 0, 0])
    )


@pytest.mark.parametrize(
    "value_id,section,count,message",
    [
        (6, poly_section(3, (4, 0), (0, 0)), 3, "expected 1 to 3 segments for 3 values, got 4"),
        (6, poly_section(3, (1, 1), (0, 0)), 3, "expected 0 to 0 segments for 0 values, got 1"),
        (6, poly_section(3, (1, 0), (0, 3)), 3, "exponent of 0 to 0 for 0 values, got 3"),
        (6, poly_section(3, (1, 0), (161, 0)), 3, "exponent of -152 to 160 for 3 values, got 161"),
        (dr.Quantile.stage_id, b"\1\0\0\0\0", 0, "expected 0 buckets coded as 0, got 1 coded as 0"),
        (dr.Quantile.stage_id, b"\0\0\0\0\1", 0, "expected 0 buckets coded as 0, got 0 coded as 1"),
    ],
)
def test_ranges_of_small_sides(value_id, section, count, message):
    order = 1 if value_id == 6 and count else 0
    data = container.write(
        container.Payload(count, count, value_id=value_id, values=section, order=order)
    )
    messages = refusals(data, count)
    assert len(messages) == 2
    for got in messages:
        assert message in got, got


def floats(*numbers):
    return np.array(numbers, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    "codec,section,message",
    [
        (
            dr.FitDExp,
            b"\3\0\0\0" + floats(1, 1, np.inf, 1, 0, 0, 0, 0),
            "finite coeff.*, got .*inf",
        ),
        (dr.FitDExp, b"\3\0\0\0" + floats(1, 1, 1, 1, 0, 0, 0, 2), "without values, got .*2"),
        (dr.QSGD, b"\4\x08\0" + floats(-1.5) + bytes(2), "norms of at least 0, got -1.5"),
        (dr.LloydMax, b"\2" + floats(3, 2) + bytes(1), "in ascending order, got .*2"),
        (dr.Quantile, b"\0\0\1\0\0" + floats(np.nan), "expected finite means, got nan"),
        (
            dr.Deflate,
            b"\0" + zlib.compress(bytes(11)),
            "stream of 12 bytes, got 11, its end, and 0",
        ),
        (
            dr.Deflate,
            b"\0" + zlib.compress(bytes(12)) + b"ab",
            "got 12, its end, and 2 bytes after",
        ),
        (dr.Deflate, b"\0" + zlib.compress(bytes(12))[:-1], "got 12, not its end, and 0"),
        (dr.Deflate, b"\0abcdefgh", "expected a zlib stream, got .*incorrect header"),
    ],
)
def test_of_values(codec, section, message):
    order = int(codec is dr.FitDExp)
    data = container.write(
        container.Payload(3, 3, value_id=codec.stage_id, values=section, order=order,
                          order_map=b"\x24" * order)
    )  # fmt: skip
    messages = refusals(data, 3)
    assert len(messages) == 2
    for got in messages:
        assert re.search(message, got), got


@pytest.mark.parametrize(
    "codec,section,message",
    [
        (dr.Huffman, None, "ascending indices, got .*2.* after .*5"),
        (dr.EliasFano, bytes([0b0001, 0b0011]), "ascending indices, got 1 followed by 0"),
        (dr.RawIndex, np.array([5, 5], "<u4").tobytes(), "distinct indices, got 5 twice"),
        (dr.RawIndex, np.array([5, 2], "<u4").tobytes(), "payload order 0, got 2 after 5"),
    ],
)
def test_of_indices(codec, section, message):
    if section is None:
        section, _, _ = codec().encode(np.array([5, 2], np.uint32), 8, 0, 32.0)
    data = container.write(
        container.Payload(8, 2, index_id=codec.stage_id, value_id=1, index=section,
                          values=floats(1, 2))
    )  # fmt: skip
    messages = refusals(data, 8)
    assert len(messages) == 2
    for got in messages:
        assert re.search(message, got), got


def test_length_of_a_notice():
    """The limit of a notice is the smaller one of 4096 bytes and of what is there."""
    for length, size, most in ((5000, 9000, 4096), (100, 50, 50)):
        notice = b"DRER" + length.to_bytes(4, "little") + b"x" * size
        with pytest.raises(
            dr.CorruptPayloadError, match=f"notice: expected at most {most} bytes, got {length}"
        ):
            _native.read_messages(np.frombuffer(notice, dtype=np.uint8))


def test_messages_of_another_version_are_not_split():
    """Their lengths may be elsewhere in a header of another version."""
    data = dr.Codec(dr.TopK(0.1)).encode(gradient(100))
    bounds, _, _ = _native.read_messages(np.concatenate([data, data]))
    assert bounds.tolist() == [0, data.size, 2 * data.size]
    data[4] = 2
    for messages in (data, resealed(data)):
        with pytest.raises(dr.CorruptPayloadError, match="version: expected 1, got 2"):
            _native.read_messages(messages)
