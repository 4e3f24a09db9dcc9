"""Test types of settings: numbers of NumPy or fractions count as plain ones, a list as no name."""

import fractions
import itertools

import numpy as np
import pytest
import torch
from codecs_table import gradient
from native_and_numpy import both

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import Policy

_INTEGERS = (int, np.int16, np.uint16, np.int32, np.int64, np.uint64)
_NUMBERS = (float, np.float16, np.float32, np.float64, np.longdouble, fractions.Fraction)


def numbers(low, high):
    """Return a function of a random generator that draws a number of any type in [low, high)."""

    def draw(random):
        exact = fractions.Fraction(random.uniform(low, high)).limit_denominator(10_000)
        kind = _NUMBERS[random.integers(len(_NUMBERS))]
        return exact if kind is fractions.Fraction else kind(float(exact))

    return draw


def integers(*choices):
    """Return a function of a random generator that draws an integer of any type."""

    def draw(random):
        return _INTEGERS[random.integers(len(_INTEGERS))](random.choice(choices))

    return draw


_RATIO = numbers(0.01, 0.99)
SPARSIFIERS = [
    (dr.TopK, {"ratio": _RATIO}),
    (dr.TopK, {"k": integers(1, 20, 300)}),
    (
        dr.TopK,
        {
            "ratio": numbers(0.01, 0.4),
            "warmup_steps": integers(0, 3, 9),
            "warmup_ratio": numbers(0.5, 0.99),
        },
    ),
    (dr.TopK, {"ratio": _RATIO, "warmup_steps": integers(0, 3, 9)}),
    (dr.RandomK, {"ratio": _RATIO}),
    (dr.RandomK, {"k": integers(1, 20, 300)}),
    (dr.ChunkTopK, {"ratio": _RATIO}),
    (dr.ChunkTopK, {"chunk": integers(1, 20, 300)}),
    (dr.Threshold, {"threshold": numbers(0, 3)}),
]
INDEX = [(dr.Rice, {}), *((dr.Bloom, {"fpr": _RATIO, "policy": lambda _: "p0"}),) * 2]
VALUE = [
    (dr.QSGD, {"bits": integers(1, 2, 5, 8), "bucket": integers(8, 64, 512)}),
    (dr.LloydMax, {"bits": integers(1, 2, 4)}),
    (dr.Quantile, {"buckets": integers(2, 30, 256)}),
    (dr.Deflate, {"level": integers(1, 6)}),
    (dr.FitPoly, {"degree": integers(1, 3), "segments": integers(1, 4)}),
]
MEMORIES = [
    (dr.Residual, {}),
    (dr.LowPass, {"beta": _RATIO}),
    (dr.MomentumCorrection, {"momentum": _RATIO}),
]
COMMUNICATORS = [
    (dr.SplitAllgather, {"dense": integers(2, 4, 8)}),
    (dr.Hierarchical, {"across": lambda _: dr.GTopK(), "ranks_per_host": integers(1, 2)}),
]


def drawn(table, random):
    """Return (an instance of a class in the table, the same made from plain numbers)."""
    kind, settings = table[random.integers(len(table))]
    given = {name: draw(random) for name, draw in settings.items()}
    return kind(**given), kind(**{name: plain(value) for name, value in given.items()})


def plain(value):
    if isinstance(value, np.generic):
        return value.item() if not isinstance(value, np.longdouble) else float(value)
    return float(value) if isinstance(value, fractions.Fraction) else value


@pytest.mark.parametrize("table", [SPARSIFIERS, INDEX, VALUE, MEMORIES, COMMUNICATORS])
def test_objects_are_those_of_plain_numbers(table):
    random = np.random.default_rng(1)
    for _ in range(200):
        given, expected = drawn(table, random)
        assert repr(given) == repr(expected)
        assert given == expected and hash(given) == hash(expected)


class OwnSparsifier(dr.Sparsifier):
    """A custom stage, which keeps settings as it gets them."""

    def __init__(self, ratio):
        self.ratio = ratio

    def select(self, accumulated, key, step=0):
        raise NotImplementedError


class OwnCommunicator(dr.Communicator):
    def __init__(self, ranks):
        self.ranks = ranks


def test_equal_objects_have_equal_hashes():
    random = np.random.default_rng(2)
    few = [1, 1.0, np.float32(1), np.int64(1), fractions.Fraction(1), True, 0.5, np.float16(0.5)]
    groups = [[], [], []]
    for _ in range(60):
        codec = dr.Codec(OwnSparsifier(few[random.integers(len(few))]), drawn(INDEX, random)[0])
        groups[0].append(codec)
        groups[1].append(Policy("codec", codec, drawn(MEMORIES[:1], random)[0]))
        groups[1].append(Policy("dense"))
        groups[2].append(OwnCommunicator(few[random.integers(len(few))]))
    for objects in groups:
        equal = [(a, b) for a, b in itertools.combinations(objects, 2) if a == b]
        assert any(repr(a) != repr(b) for a, b in equal)
        assert all(hash(a) == hash(b) for a, b in equal)


@pytest.mark.parametrize("seed", range(40))
def test_the_core_computes_as_numpy_does(seed):
    random = np.random.default_rng(seed)
    codec = dr.Codec(*(drawn(table, random)[0] for table in (SPARSIFIERS, INDEX, VALUE)))
    memory = drawn(MEMORIES, random)[0]
    d = int(random.choice([50, 1000, 7000]))
    values = gradient(d, key=seed)
    state = tuple(gradient(d, key=seed + number) for number in range(len(memory.state)))
    step = int(random.integers(10))
    payload, _ = both(codec, memory, values, state, step=step)
    most = codec.sparsifier.most_selected(d, step)
    if most is not None and not isinstance(codec.index, dr.Bloom):
        assert dr.inspect(np.frombuffer(payload, dtype=np.uint8))["k"] in range(most + 1), codec


class OwnRandomK(dr.RandomK):
    """A custom stage, so NumPy encodes."""


@pytest.mark.parametrize("native", [True, False])
def test_positions(native):
    """The seed, step, tensor and rank of a payload."""
    random = np.random.default_rng(4)
    codec = dr.Codec(dr.RandomK(0.1) if native else OwnRandomK(0.1), value=dr.QSGD())
    values = gradient(500)
    for _ in range(20):
        position = {
            name: integers(0, 3, 999)(random) for name in ("seed", "step", "tensor", "rank")
        }
        expected = codec.encode(values, **{name: int(part) for name, part in position.items()})
        np.testing.assert_array_equal(codec.encode(values, **position), expected)


@pytest.mark.parametrize("value", [fractions.Fraction(1, 10**400), 10**400, -(10**400), 1j, "1"])
def test_numbers_that_no_float_can_hold(value):
    for kind, name in ((dr.TopK, "ratio"), (dr.LowPass, "beta"), (dr.Bloom, "fpr")):
        with pytest.raises(dr.InvalidArgumentError, match=f"{kind.__name__} {name}: expected "):
            kind(**{name: value})


def test_the_numbers_of_a_compressor():
    """Ranks compare a checksum of the settings, so it must not depend on their types."""
    random = np.random.default_rng(6)
    settings = {
        "bucket_bytes": integers(0, 9999), "threads": integers(0, 2), "seed": integers(0, 7),
        "dense_below": integers(0, 100), "writer_interval": integers(1, 50),
    }  # fmt: skip
    parameters = [("w", torch.nn.Parameter(torch.zeros(50)))]
    for _ in range(10):
        given = {name: draw(random) for name, draw in settings.items()}
        one = dr.Compressor(parameters=parameters, **given)
        other = dr.Compressor(parameters=parameters, **{n: int(v) for n, v in given.items()})
        assert repr(one) == repr(other) and one.fingerprint == other.fingerprint


def test_a_list_in_place_of_a_name_is_refused():
    settings = {"compressor": "SKCompressCPU", "sparsifier": ["topk"], "num_quantiles": 9}
    with pytest.raises(dr.InvalidArgumentError, match=r"expected one of topk, .*, got \['topk'\]"):
        dr.from_params({**settings, "communicator": "allgather"}, parameters=[])


@pytest.mark.parametrize("array", [np.zeros(3), torch.zeros(3)], ids=["NumPy", "PyTorch"])
@pytest.mark.parametrize("name", ["codec", "memory", "communicator", "schedule"])
def test_an_array_in_place_of_a_setting_is_named(name, array):
    parameters = [("weight", torch.nn.Parameter(torch.zeros(4000)))]
    with pytest.raises(dr.InvalidArgumentError, match=f"Compressor {name}: expected"):
        dr.Compressor(parameters=parameters, **{name: array})
