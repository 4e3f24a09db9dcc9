"""Test custom stages: attributes of all kinds, decoded values, and classes defined again."""

import dataclasses

import numpy as np
import pytest
import torch
from own_stages import OwnResidual

import deepreduce_hvd as dr
from deepreduce_hvd.stages import registry


class Levels(OwnResidual):
    def __init__(self, levels):
        self.levels = levels


def test_attributes_that_are_not_hashable():
    hvd = pytest.importorskip("horovod.torch")
    hvd.init()
    memory = Levels([1, {"two": 2}])
    assert memory == Levels([1, {"two": 2}]) and hash(memory) == hash(Levels([1, {"two": 2}]))
    assert memory != Levels([1, {"two": 3}])
    weight = torch.nn.Parameter(torch.ones(2000))
    dr.Compressor(memory=memory, parameters=[("weight", weight)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dr.TopK(np.float64(0.01)), dr.TopK(0.01)),
        (dr.TopK(0.01, warmup_ratio=1), dr.TopK(0.01, warmup_ratio=1.0)),
    ],
)
def test_equal_stages_have_one_hash(one, other):
    assert one == other and len({one, other}) == 1


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_an_array_as_an_attribute(make):
    """The settings of two ranks are compared as text, which leaves out parts of long arrays."""
    with pytest.raises(dr.InvalidArgumentError, match=r"Levels.levels: expected .*levels.tolist()"):
        dr.Codec(dr.TopK(0.5)).encode(
            np.ones(9, np.float32), np.zeros(9, np.float32), memory=Levels(make([1.0, 2.0]))
        )
    for nested in ([1, make([1.0])], {"table": (make([1.0]), 2)}):
        with pytest.raises(
            dr.InvalidArgumentError, match=r"Levels.levels: .*write .tolist\(\) of it"
        ):
            dr.Codec(dr.TopK(0.5)).encode(
                np.ones(9, np.float32), np.zeros(9, np.float32), memory=Levels(nested)
            )


@pytest.fixture
def register(monkeypatch):
    monkeypatch.setattr(registry, "_registry", {k: dict(v) for k, v in registry._registry.items()})
    return dr.register


def logarithm(factor):
    class Logarithm(dr.ValueCodec):
        stage_id = 211

        def encode(self, values, key):
            with np.errstate(all="ignore"):
                decoded = np.log(values * np.float32(factor))
            return values.astype(np.float32).tobytes(), decoded, None

        @classmethod
        def decode(cls, data, count):
            return np.log(np.frombuffer(data, np.float32))

    return Logarithm


def test_decoded_values_are_finite(register):
    """NaN would stay in the residual for good."""
    codec = dr.Codec(dr.NoneSparsifier(), value=register(logarithm(1))())
    residual = np.zeros(5, np.float32)
    with pytest.raises(dr.InvalidArgumentError, match="Logarithm.encode: expected finite decoded"):
        codec.encode(np.array([1, 2, 0, 3, 4], np.float32), residual)
    assert not residual.any()


def test_a_class_that_is_defined_again(register):
    codec = dr.Codec(dr.NoneSparsifier(), value=register(logarithm(1))())
    values = np.array([1, 2, 3], np.float32)
    codec.encode(values)
    again = register(logarithm(2))
    assert registry.find(dr.ValueCodec, 211) is again
    with pytest.raises(dr.InvalidArgumentError, match="Logarithm: .*; make a new Codec"):
        codec.encode(values)  # the receiver would decode with the new class

    class Other(dr.ValueCodec):
        stage_id = 211

    same_name = logarithm(1)
    same_name.stage_id = 212
    for refused in (Other, same_name):
        with pytest.raises(dr.InvalidArgumentError, match="expected an unused name and id"):
            register(refused)


def test_an_instance_in_place_of_a_class():
    with pytest.raises(dr.InvalidArgumentError, match="register: expected an IndexCodec or"):
        dr.register(dr.RawValue())


class _Slotted:
    __slots__ = ("share",)


@pytest.mark.parametrize("kind", ["own", "inherited", "dataclass"])
def test_settings_that_ranks_would_not_compare(kind):
    with pytest.raises(dr.InvalidArgumentError, match=r"Own: expected a class without __slots__"):
        if kind == "inherited":

            class Own(_Slotted, dr.Sparsifier):
                pass

        elif kind == "dataclass":

            @dataclasses.dataclass(slots=True)
            class Own(dr.Sparsifier):
                share: float

        else:

            class Own(dr.Sparsifier):
                __slots__ = ("share",)
