"""Test codecs and memories by parameter: which parameter gets which, and what is refused."""

import fnmatch
import random

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning import policies
from deepreduce_hvd.planning.policies import Policy

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

ONE, TWO = dr.Codec(dr.TopK(0.1)), dr.Codec(dr.TopK(0.1), index=dr.Rice())
SHAPES = {
    "embed.weight": (50, 40),
    "body.0.weight": (40, 40),
    "body.0.bias": (40,),
    "head": (2000,),
}


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()


def resolved(codec=None, memory=None, dense_below=0, shapes=SHAPES, compresses_small=False):
    return policies.resolve(codec, memory, shapes, dense_below, compresses_small)


def compressor(codec=None, memory=None, **options):
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
    return dr.Compressor(codec, memory, parameters=named, **options)


def test_the_first_pattern_that_matches_counts():
    found = resolved({"embed*": "dense", "*.bias": "fp16", "body*": TWO}, {"b*": dr.NoMemory()})
    assert found == {
        "embed.weight": Policy("dense"),
        "body.0.weight": Policy("codec", TWO, dr.NoMemory()),
        "body.0.bias": Policy("fp16"),
        "head": Policy("codec", dr.recommended_codec(), dr.Residual()),
    }


def test_a_function_of_name_and_shape():
    found = resolved(
        lambda name, shape: "dense" if len(shape) == 1 else None,
        lambda name, shape: dr.NoMemory() if name.startswith("e") else None,
    )
    assert [policy.way for policy in found.values()] == ["codec", "codec", "dense", "dense"]
    assert [policy.memory for policy in found.values()][:2] == [dr.NoMemory(), dr.Residual()]


def test_small_tensors_are_dense_unless_another_way_is_given():
    found = resolved({"*.bias": "fp16", "*": TWO}, dense_below=1700)
    ways = [policy.way for policy in found.values()]
    assert ways == ["codec", "dense", "fp16", "codec"]


#: the recipe of docs/accuracy.md for embedding tables
ROWS = dr.Codec(dr.Threshold(0), index=dr.RLE(), value=dr.LloydMax(bits=4))


@pytest.mark.parametrize("given", ["rows", {"*": "rows"}, lambda name, shape: "rows"])
def test_rows_keep_nothing_unless_a_memory_is_given(given):
    for memory, kept in (
        (None, [dr.NoMemory()] * 4),
        (dr.Residual(), [dr.Residual()] * 4),
        ({"head": dr.Residual()}, [dr.NoMemory()] * 3 + [dr.Residual()]),
    ):
        found = resolved(given, memory)
        assert list(found.values()) == [Policy("codec", ROWS, one) for one in kept], memory


def test_rows_of_all_parameters():
    comp = compressor("rows")
    assert (comp.codec, comp.memory) == ("rows", dr.NoMemory())
    # small tensors are uncompressed, as with every codec that is given
    assert [policy.codec for policy in comp.policies.values()] == [ROWS, ROWS, None, ROWS]
    with pytest.warns(UserWarning, match="payloads grow. Use memory=NoMemory"):
        compressor({"embed*": "rows"}, dr.Residual())


LARGE = dr.Codec(dr.TopK(0.01, warmup_steps=50), index=dr.Rice(), value=dr.LloydMax(bits=1))
SMALL = dr.Codec(dr.NoneSparsifier(), index=dr.Rice(), value=dr.LloydMax(bits=4))
SIZES = 0, 1, 31, 32, 1023, 1024, 5000


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({}, [None, None, None, SMALL, SMALL, LARGE, LARGE]),
        ({"memory": dr.NoMemory()}, [None, None, None, SMALL, SMALL, LARGE, LARGE]),
        ({"dense_below": 0}, [SMALL] * 5 + [LARGE] * 2),
        ({"dense_below": 1023}, [None] * 4 + [SMALL] + [LARGE] * 2),
        ({"dense_below": 5000}, [None] * 6 + [LARGE]),
        ({"memory": dr.MomentumCorrection()}, [None] * 5 + [LARGE] * 2),
        ({"memory": dr.LowPass(0.1)}, [None] * 5 + [LARGE] * 2),
        ({"communicator": dr.GTopK()}, [None] * 5 + [LARGE] * 2),
        ({"communicator": "auto"}, [None] * 5 + [LARGE] * 2),
        ({"schedule": "auto"}, [None] * 5 + [LARGE] * 2),
        ({"schedule": "auto", "dense_below": 31}, [None] * 2 + [LARGE] * 5),
        ({"codec": TWO}, [None] * 5 + [TWO] * 2),
        ({"codec": LARGE}, [None] * 5 + [LARGE] * 2),
        ({"codec": {"p1": TWO, "p1024": TWO, "p31": SMALL}}, [None] * 3 + [SMALL] * 2 + [TWO, LARGE]),
        ({"codec": lambda name, shape: dr.recommended_codec(shape)},
         [None] * 3 + [SMALL] * 2 + [LARGE] * 2),
        ({"codec": lambda name, shape: dr.recommended_codec(shape), "communicator": dr.GTopK()},
         [None] * 5 + [LARGE] * 2),
        ({"codec": {"*": SMALL}}, [None] * 3 + [SMALL] * 4),
    ],
)  # fmt: skip
def test_the_default_is_by_size(settings, outcome):
    named = [(f"p{size}", torch.nn.Parameter(torch.zeros(size))) for size in SIZES]
    comp = dr.Compressor(parameters=named, **settings)
    assert [policy.codec for policy in comp.policies.values()] == outcome
    assert all(policy.way in ("dense", "codec") for policy in comp.policies.values())


TWO_PERCENT = dr.Codec(dr.TopK(0.02, warmup_steps=50), index=dr.Rice(), value=dr.LloydMax(bits=1))


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({}, [None] * 3 + [SMALL] * 2 + [TWO_PERCENT] * 2),
        ({"communicator": dr.GTopK()}, [None] * 5 + [TWO_PERCENT] * 2),
        ({"codec": {"p1024": TWO}}, [None] * 3 + [SMALL] * 2 + [TWO, TWO_PERCENT]),
        ({"codec": lambda name, shape: LARGE if name == "p5000" else None},
         [None] * 3 + [SMALL] * 2 + [TWO_PERCENT, LARGE]),
    ],
)  # fmt: skip
def test_the_density_of_the_default(settings, outcome):
    named = [(f"p{size}", torch.nn.Parameter(torch.zeros(size))) for size in SIZES]
    comp = dr.Compressor(parameters=named, density=0.02, **settings)
    assert [policy.codec for policy in comp.policies.values()] == outcome
    other = dr.Compressor(parameters=named, **settings)
    assert comp.fingerprint != other.fingerprint and ", density=0.02" in repr(comp)
    assert (
        dr.Compressor(parameters=named, density=0.01, **settings).fingerprint == other.fingerprint
    )
    with pytest.raises(dr.InvalidArgumentError, match="state: "):
        comp.load_state_dict(other.state_dict())


@pytest.mark.parametrize("steps", [0, 7, 500])
def test_the_warm_up_of_the_default(steps):
    comp = compressor(density=0.02, warmup_steps=steps)
    sparsifiers = {policy.codec.sparsifier for policy in comp.policies.values() if policy.delays}
    assert sparsifiers == {dr.TopK(0.02, warmup_steps=steps)}
    assert f", density=0.02, warmup_steps={steps}" in repr(comp)
    assert comp.fingerprint != compressor(density=0.02).fingerprint
    assert dr.recommended_codec(warmup_steps=steps) == dr.Codec(
        dr.TopK(0.01, warmup_steps=steps), index=dr.Rice(), value=dr.LloydMax(bits=1)
    )


@pytest.mark.parametrize("steps", [-1, 1.5, None, True, "50"])
def test_a_number_of_warm_up_steps(steps):
    with pytest.raises(dr.InvalidArgumentError, match=r"warmup_steps: expected an integer of at"):
        compressor(warmup_steps=steps)


@pytest.mark.parametrize("settings", [{"density": 0.3}, {"warmup_steps": 0}])
def test_tables_are_found_with_every_default(settings):
    assert compressor(**settings).table_candidates == compressor().table_candidates != set()


@pytest.mark.parametrize("density", [0, -0.1, 1.01, float("nan"), "0.1", None, True])
def test_a_density_is_a_share(density):
    with pytest.raises(
        dr.InvalidArgumentError, match=r"density: expected a number in \(0, 1\], got"
    ):
        compressor(density=density)


@pytest.mark.parametrize("name, value", [("density", 0.05), ("warmup_steps", 500)])
def test_a_setting_of_the_default_beside_a_codec(name, value):
    for codec in (TWO, "dense"):
        with pytest.raises(dr.InvalidArgumentError, match=f"{name}: expected none beside a codec"):
            compressor(codec, **{name: value})


def test_only_parts_of_large_tensors_are_delayed():
    delays = [policy.delays for policy in compressor().policies.values()]
    assert delays == [True, True, False, True]
    selects = [policy.selects for policy in compressor(memory=dr.NoMemory()).policies.values()]
    assert selects == [True, True, False, True]


def test_a_state_is_not_loaded_where_other_tensors_are_compressed():
    """Small tensors have a memory only without a schedule, by default."""
    state = compressor().state_dict()
    compressor().load_state_dict(state)
    message = "codec of parameter body.0.bias: expected dense, .* got Codec.NoneSparsifier"
    with pytest.raises(dr.InvalidArgumentError, match=message):
        compressor(schedule="auto").load_state_dict(state)
    message = r"state: codec: expected Codec.*, got recommended_codec\(shape\)$"
    with pytest.raises(dr.InvalidArgumentError, match=message):
        compressor(dr.recommended_codec()).load_state_dict(state)
    compressor(TWO, schedule="auto").load_state_dict(compressor(TWO).state_dict())
    state = compressor(dense_below=1024).state_dict()
    compressor(schedule="auto", dense_below=1024).load_state_dict(state)


@pytest.mark.parametrize("seed", range(200))
def test_random_patterns(seed):
    """Each random name gets the value of the first random pattern that matches."""
    draw = random.Random(seed)
    names = sorted({"".join(draw.choices("ab.", k=draw.randint(1, 4))) for _ in range(8)})
    patterns = ["".join(draw.choices("ab.*?", k=draw.randint(1, 3))) for _ in range(4)]
    given = {pattern: draw.choice((ONE, TWO, "dense", "fp16", "rows")) for pattern in patterns}
    first = {
        name: next((one for one in given if fnmatch.fnmatchcase(name, one)), None) for name in names
    }
    needed = set(first.values()) | {"*"}
    shapes = dict.fromkeys(names, (1,))
    if not needed >= set(given):
        with pytest.raises(dr.InvalidArgumentError, match="expected a pattern that a parameter"):
            resolved(given, shapes=shapes)
        given = {one: value for one, value in given.items() if one in needed}
    found = resolved(given, shapes=shapes)
    for name in names:
        expected = given.get(first[name], dr.recommended_codec())
        expected = ROWS if expected == "rows" else expected
        assert (found[name].codec or found[name].way) == expected, (given, name)


@pytest.mark.parametrize(
    ("codec", "memory", "message"),
    [
        ({"embd*": "dense"}, None, "got 'embd\\*', one that matches none of embed.weight, body.0"),
        ({"*": ONE, "head": TWO}, None, "earlier patterns leave nothing: .* they match head"),
        (
            {"head": "half"},
            None,
            "codec of 'head': expected a Codec, 'dense', 'fp16' or 'rows', got 'half'",
        ),
        ({"head": dr.TopK(0.1)}, None, r"write Compressor\(Codec\(TopK"),
        ({3: ONE}, None, "expected patterns of parameter names, such as 'embed\\*', got 3"),
        ("half", None, "codec: expected a Codec, 'dense', 'fp16' or 'rows', got 'half'"),
        (lambda name, shape: 3, None, "codec of parameter embed.weight: expected a Codec, .*got 3"),
        (None, {"*": "dense"}, "memory of '\\*': expected a Memory, got 'dense'"),
        (None, lambda name, shape: ONE, "memory of parameter embed.weight: expected a Memory, got"),
        (None, {"*": dr.Residual}, r"write Residual\(\) to pass an instance"),
        ({"head": dr.Codec(dr.TopK(0.1), value=dr.QSGD(1))}, None, "QSGD.* would grow without"),
    ],
)
def test_what_is_refused(codec, memory, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        compressor(codec, memory)


def test_the_communicator_is_checked_with_every_codec():
    with pytest.raises(dr.InvalidArgumentError, match="expected a sparsifier with a fixed k"):
        compressor({"head": dr.Codec(dr.Threshold(0.1))}, communicator=dr.GTopK())


def test_the_fingerprint_covers_the_outcome_and_not_the_way_to_it():
    one = compressor({"embed*": "dense", "*": TWO})
    same = compressor(lambda name, shape: "dense" if name == "embed.weight" else TWO)
    other = compressor({"embed*": "fp16", "*": TWO})
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert (
        compressor(TWO).fingerprint
        == compressor(dr.Codec(dr.TopK(0.1), index=dr.Rice())).fingerprint
    )


def test_repr_shows_the_patterns():
    assert "{'embed*': 'dense', '*': Codec(" in repr(compressor({"embed*": "dense", "*": TWO}))


def test_only_what_is_compressed_has_a_memory():
    comp = compressor(
        {"embed*": "dense", "head": "fp16", "*": TWO},
        {"*bias": dr.MomentumCorrection()},
        dense_below=0,
    )
    kept = {name: list(one["memory"]) for name, one in comp.state_dict()["parameters"].items()}
    assert kept == {
        "embed.weight": [],
        "body.0.weight": ["residual"],
        "body.0.bias": ["residual", "velocity"],
        "head": [],
    }
    state = comp.state_dict()
    comp.load_state_dict(state)
    message = "codec of parameter body.0.bias: .* with Residual.*, got .* with MomentumCorrection"
    with pytest.raises(dr.InvalidArgumentError, match=message):
        compressor({"embed*": "dense", "*": TWO}, dense_below=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("ranks", "changes", "bias"),
    [
        # alone, this rank does not use the memory, which would multiply by its own factor
        (
            1,
            "for 2 of 4 parameters, momentum is 0 instead of 0.5, and the learning rate is multiplied"
            " by 2.",
            4.0,
        ),
        (
            2,
            "for 1 of 4 parameters, momentum is 0 instead of 0.5, and the learning rate is multiplied"
            " by 2; for 1 of 4 parameters, momentum is 0 instead of 0.5, and the learning rate is"
            " multiplied by 0.2.",
            0.4,
        ),
    ],
)
def test_prepare_leaves_what_is_not_compressed(ranks, changes, bias, capsys, monkeypatch):
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
    correction = dr.MomentumCorrection()
    comp = dr.Compressor(
        {"embed*": "dense", "head": "fp16"},
        {"body.0.b*": correction},
        parameters=named,
        dense_below=0,
    )
    if ranks > 1:  # pretended
        monkeypatch.setattr(comp.adapter, "sends_nothing", lambda slot: False)
    weights = dict(named)
    optimizer = torch.optim.SGD(weights.values(), lr=1.0, momentum=0.5)
    optimizer = dr.prepare(optimizer, comp)
    said = capsys.readouterr().out
    alone = " This job of one process compresses nothing: leave out dr.prepare."
    assert said == (
        f"deepreduce_hvd: prepared SGD: {changes} Only a part of their gradients is sent in each"
        f" step.{alone if ranks == 1 else ''}\n"
    )
    for _ in range(2):
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    # with momentum 0.5, two steps move by 1 + 1.5; without it, at twice the rate, by 2 + 2
    moved = {name: -weight.detach().flatten()[0].item() for name, weight in weights.items()}
    expected = {"embed.weight": 2.5, "body.0.weight": 4.0, "body.0.bias": bias, "head": 2.5}
    assert moved == pytest.approx(expected)


def test_a_bracket_in_a_name_is_explained():
    shapes = {"layers[0].weight": (9, 9), "layers[1].weight": (9, 9)}
    with pytest.raises(dr.InvalidArgumentError, match=r"write \[\[\] for a \["):
        resolved({"layers[0]*": "dense"}, shapes=shapes)
    found = resolved({"layers[[]0]*": "dense"}, shapes=shapes)
    assert [policy.way for policy in found.values()] == ["dense", "codec"]


def test_what_only_tensorflow_has_is_refused_on_pytorch():
    one = compressor()
    for call in (lambda: one.bound_to([]), lambda: one.trackable):
        with pytest.raises(dr.InvalidArgumentError, match="expected a compressor of TensorFlow"):
            call()
