"""check_codec accepts valid codecs and names the error of invalid ones."""

import itertools

import numpy as np
import pytest
from codecs_table import INDEX, VALUE

import deepreduce_hvd as dr

numbers = itertools.count(130)


@pytest.mark.parametrize("name", [*INDEX, *VALUE])
def test_every_built_in_codec_keeps_the_contract(name):
    dr.check_codec(INDEX.get(name) or VALUE[name])


def value_codec(**methods):
    """Return a registered value codec of float32 values, with some methods replaced."""

    def encode(self, values, key):
        return values.tobytes(), values.copy(), None

    def decode(cls, section, count):
        if len(section) != 4 * count:
            raise dr.CorruptPayloadError(f"expected {4 * count} bytes, got {len(section)}")
        return np.frombuffer(section, dtype=np.float32).copy()

    number = next(numbers)
    body = {"stage_id": number, "encode": encode, "decode": classmethod(decode), **methods}
    return dr.register(type(f"Own{number}", (dr.ValueCodec,), body))()


def test_a_codec_of_ones_own():
    dr.check_codec(value_codec())


BROKEN = {
    "a tuple of three": {"encode": lambda self, values, key: values.tobytes()},
    "bytes as the first item": {"encode": lambda self, values, key: (values, values.copy(), None)},
    "a float32 array": {
        "encode": lambda self, values, key: (values.tobytes(), values.astype(float), None)
    },
    "the decoded array that encode returned": {
        "encode": lambda self, values, key: (values.tobytes(), values * np.float32(0.5), None)
    },
    "an array as the order": {"sorts": True},
    "CorruptPayloadError, got no error": {
        "decode": classmethod(
            lambda cls, section, count: (
                np.frombuffer(section[: len(section) // 4 * 4], np.float32)[:count].copy()
                if len(section) // 4 >= count
                else np.zeros(count, np.float32)
            )
        )
    },
    "of 0 normal values: expected no error, got ZeroDivisionError": {
        "encode": lambda self, values, key: (bytes(1 // values.size), values.copy(), None)
    },
    r"decode of 0 normal values: expected no error, got IndexError": {
        "decode": classmethod(lambda cls, section, count: section[0])
    },
    "of a gradient: expected no error, got ZeroDivisionError": {
        "bits_per_value": lambda self: 1 // 0
    },
    r"decode: expected a class method, got an ordinary one; write @classmethod above": {
        "decode": lambda self, section, count: np.frombuffer(section, np.float32).copy()
    },
    "CorruptPayloadError, got ValueError": {
        "decode": classmethod(lambda cls, section, count: np.frombuffer(section, np.float32).copy())
    },
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_breaks_the_contract_is_named(message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.check_codec(value_codec(**BROKEN[message]))


def test_a_codec_that_is_not_registered():
    class Loose(dr.ValueCodec):
        stage_id = 222

    with pytest.raises(dr.InvalidArgumentError, match="registered"):
        dr.check_codec(Loose())


def test_something_else():
    with pytest.raises(
        dr.InvalidArgumentError, match="expected an IndexCodec or a ValueCodec, got 3"
    ):
        dr.check_codec(3)


VALUES = np.arange(12, dtype=np.float32)


def encode_with(stage):
    """Return the payload of the values, encoded with an index or value codec."""
    name = "value" if isinstance(stage, dr.ValueCodec) else "index"
    return dr.Codec(dr.TopK(k=5), **{name: stage}).encode(VALUES)


def encodes(*result):
    """Return a value codec whose ``encode`` returns what functions of the values return."""
    return value_codec(encode=lambda self, values, key: tuple(one(values) for one in result))


def nothing(values):
    return None


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (encodes(str, np.copy, nothing), "bytes as the first item, got str"),
        (encodes(np.float64, np.copy, nothing), "bytes as the first item, got ndarray"),
        (encodes(np.copy, np.copy, nothing), "bytes as the first item, got ndarray"),
        (encodes(bytes, np.copy), "a tuple of three items, got 2 items"),
        (
            value_codec(encode=lambda self, values, key: values.tobytes()),
            "a tuple of three items, got bytes",
        ),
        (encodes(bytes, np.float64, nothing), r"a float32 array of shape \(5,\), got float64"),
        (encodes(bytes, list, nothing), r"a float32 array of shape \(5,\), got list"),
        (encodes(bytes, lambda values: values[1:], nothing), r"got float32 of shape \(4,\)"),
        (value_codec(sorts=True), r"a uint32 array of shape \(5,\), got NoneType"),
        (encodes(bytes, np.copy, lambda values: np.arange(values.size)), "None as the order"),
    ],
)
def test_a_value_codec_that_breaks_the_contract_makes_no_payload(stage, message):
    with pytest.raises(dr.InvalidArgumentError, match=rf"^Own\d+\.encode: expected .*{message}"):
        encode_with(stage)


@pytest.mark.parametrize(
    "decoded", [lambda indices: indices[::-1], lambda indices: indices + np.uint32(9), np.int64, list]
)  # fmt: skip
def test_an_index_codec_that_breaks_the_contract_makes_no_payload(decoded):
    number = next(numbers)
    body = {
        "stage_id": number,
        "encode": lambda self, indices, *_: (indices.tobytes(), decoded(indices), False),
        "decode": classmethod(lambda cls, section, d, count: np.frombuffer(section, np.uint32)),
    }
    stage = dr.register(type(f"Own{number}", (dr.IndexCodec,), body))()
    with pytest.raises(
        dr.InvalidArgumentError,
        match=rf"^Own{number}\.encode: expected ascending distinct uint32 indices below 12, got",
    ):
        encode_with(stage)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_section_in_any_type_of_bytes(kind):
    payload = encode_with(encodes(kind, np.copy, nothing))
    assert dr.inspect(payload)["value_bytes"] == 5 * 4
    np.testing.assert_array_equal(dr.decode(payload), VALUES * (VALUES >= 7))


def test_decode_is_a_class_method():
    def decode(section, count):
        return np.frombuffer(section, np.float32)

    with pytest.raises(dr.InvalidArgumentError, match="decode: expected a class method"):
        encode_with(value_codec(decode=decode))
    payload = encode_with(value_codec(decode=staticmethod(decode)))
    np.testing.assert_array_equal(dr.decode(payload), VALUES * (VALUES >= 7))


def index_codec(**methods):
    """Return a registered index codec of 32-bit indices, with some methods replaced."""

    def encode(self, indices, d, key, value_bits=32.0):
        return indices.tobytes(), indices.copy(), True

    def decode(cls, section, d, count):
        if len(section) != 4 * count:
            raise dr.CorruptPayloadError(f"expected {4 * count} bytes, got {len(section)}")
        found = np.frombuffer(section, dtype=np.uint32).copy()
        if (found[1:] <= found[:-1]).any() or (count and found[-1] >= d):
            raise dr.CorruptPayloadError(f"expected ascending indices below {d}")
        return found

    number = next(numbers)
    body = {"stage_id": number, "encode": encode, "decode": classmethod(decode), **methods}
    return dr.register(type(f"Own{number}", (dr.IndexCodec,), body))()


def changes_its_input(self, indices, d, key, value_bits=32.0):
    kept = indices.copy()
    indices[1:] -= kept[:-1]
    return kept.tobytes(), kept, True


def random_bytes(self, indices, d, key, value_bits=32.0):
    kept = indices[np.sort(np.random.permutation(indices.size)[: indices.size // 2])]
    return kept.tobytes(), kept, True


def test_index_codecs_that_break_the_contract_are_named():
    dr.check_codec(index_codec())
    with pytest.raises(dr.InvalidArgumentError, match="expected unchanged indices, got changed"):
        dr.check_codec(index_codec(encode=changes_its_input))
    with pytest.raises(dr.InvalidArgumentError, match="the same bytes in a second call"):
        dr.check_codec(index_codec(encode=random_bytes))


def in_any_order(**methods):
    def decode(cls, section, d, count):
        if len(section) != 4 * count:
            raise dr.CorruptPayloadError(f"expected {4 * count} bytes, got {len(section)}")
        return np.frombuffer(section, dtype=np.uint32).copy()

    return index_codec(any_order=True, decode=classmethod(decode), **methods)


def sorts_indices(self, indices, d, key, value_bits=32.0):
    return np.sort(indices).tobytes(), np.sort(indices), False


def test_index_codecs_in_any_order_keep_the_order():
    dr.check_codec(in_any_order())
    dr.check_codec(index_codec(encode=sorts_indices))
    with pytest.raises(dr.InvalidArgumentError, match="another order: .* because any_order = True"):
        dr.check_codec(in_any_order(encode=sorts_indices))


def test_a_codec_that_keeps_something_in_its_class():
    def encode(self, values, key):
        type(self).largest = np.abs(values).max(initial=0)
        return np.zeros(values.size, np.uint8).tobytes(), values.copy(), None

    def decode(cls, section, count):
        if len(section) != count:
            raise dr.CorruptPayloadError(f"expected {count} bytes, got {len(section)}")
        return encoded.copy()

    def keep(self, values, key):
        nonlocal encoded
        encoded = values.copy()
        return encode(self, values, key)

    encoded = np.zeros(0, np.float32)
    codec = value_codec(encode=keep, decode=classmethod(decode))
    with pytest.raises(dr.InvalidArgumentError, match="the class to stay as it is.*largest"):
        dr.check_codec(codec)


@pytest.mark.parametrize(
    "decoded", [lambda values: values[:1], np.float64, list, lambda values: values.astype(">f4")]
)
def test_what_decode_of_a_value_codec_returns_is_checked(decoded):
    codec = value_codec(
        decode=classmethod(lambda cls, section, count: decoded(np.frombuffer(section, np.float32)))
    )
    payload = encode_with(codec)
    with pytest.raises(dr.InvalidArgumentError, match=r"^Own\d+\.decode: expected a float32 array"):
        dr.decode(payload)


@pytest.mark.parametrize(
    "decoded",
    [
        lambda indices: indices[::-1], lambda indices: indices + np.uint32(9), np.int64,
        lambda indices: indices[:1], lambda indices: indices * np.uint32(0), list,
    ],
)  # fmt: skip
def test_what_decode_of_an_index_codec_returns_is_checked(decoded):
    number = next(numbers)
    body = {
        "stage_id": number,
        "encode": lambda self, indices, *_: (indices.tobytes(), indices, False),
        "decode": classmethod(
            lambda cls, section, d, count: decoded(np.frombuffer(section, np.uint32))
        ),
    }
    payload = encode_with(dr.register(type(f"Own{number}", (dr.IndexCodec,), body))())
    with pytest.raises(dr.InvalidArgumentError, match=rf"^Own{number}\.decode: expected "):
        dr.decode(payload)


def test_encode_cannot_write_to_its_input():
    number = next(numbers)

    def encode(self, indices, *_):
        indices[1:] -= indices[:-1].copy()
        return indices.tobytes(), np.cumsum(indices, dtype=np.uint32), False

    body = {"stage_id": number, "encode": encode, "decode": classmethod(lambda *_: None)}
    codec = dr.register(type(f"Own{number}", (dr.IndexCodec,), body))()
    with pytest.raises(ValueError, match="read-only"):
        encode_with(codec)
