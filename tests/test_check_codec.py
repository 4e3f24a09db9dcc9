"""check_codec accepts valid codecs and names the error of invalid ones."""

import itertools

import numpy as np
import pytest
from codecs_table import INDEX, VALUE

import deepreduce_hvd as dr

numbers = itertools.count(230)


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
