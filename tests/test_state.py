"""Compressor.load_state_dict and checkpoints load a checked state as a whole, or nothing."""

import copy
import io
import pathlib
import resource

import numpy as np
import pytest
import torch
from compressors_with_state import FRAMEWORKS, SHAPES, OnTorch, assert_equal, snapshot

import deepreduce_hvd as dr
from deepreduce_hvd.checkpoints import checkpoint
from deepreduce_hvd.coordination import memory_transfer

PARTS = {"residual": 0, "velocity": 1}


@FRAMEWORKS
@pytest.mark.parametrize(
    "memory", [dr.Residual(), dr.MomentumCorrection(), dr.NoMemory()], ids=repr
)
def test_what_is_saved_is_taken(framework, memory):
    source, target = framework(memory), framework(memory)
    for seed in range(3):
        source.step(seed)
    state = source.compressor.state_dict()
    target.step(9)
    target.compressor.load_state_dict(state)
    assert_equal(snapshot(target.compressor), snapshot(source.compressor))
    for one, other in zip(source.step(4), target.step(4)):
        np.testing.assert_array_equal(one, other)
    assert state["parameters"]["first"]["steps"] == 3, "the state itself changed"


@FRAMEWORKS
def test_arrays_in_the_parameters_shape_and_numbers_of_numpy(framework):
    source, target = framework(), framework()
    source.step(0)
    state = source.compressor.state_dict()
    for name, row in state["parameters"].items():
        row["steps"] = np.int64(row["steps"])
        for kind, part in row["memory"].items():
            row["memory"][kind] = np.array(part).reshape(SHAPES[name])
    target.compressor.load_state_dict(state)
    assert_equal(snapshot(target.compressor), snapshot(source.compressor))
    saved = target.compressor.state_dict()["parameters"].values()
    assert {type(row["steps"]) for row in saved} == {int}  # torch.load takes no numbers of NumPy


def change(path, value):
    """Edit a state: set ``value`` at ``path``.

    A callable value is a function of the framework. Ellipsis removes the entry.
    """

    def edit(state, framework):
        *parents, last = path
        for key in parents:
            state = state[key]
        if value is ...:
            del state[last]
        else:
            state[last] = value(framework) if callable(value) else value

    return edit


FIRST, SECOND = ("parameters", "first"), ("parameters", "second")
RESIDUAL = (*SECOND, "memory", "residual")


def array_of(value, shape=(300,), dtype=np.float32):
    return lambda framework: framework.array(np.full(shape, value, dtype))


REFUSED = {
    "version": (("version",), 2, "expected a dictionary of version 1, got 2"),
    "no_version": (("version",), ..., r"expected what Compressor.state_dict\(\) returned, got a dictionary with the keys fingerprint, settings, rank, …"),
    "no_rank": (("rank",), ..., "expected version, fingerprint, settings, rank, size, parameters, got no rank"),
    "more": (("epoch",), 3, "got also epoch"),
    "fingerprint": (("fingerprint",), 5, r"with the same configuration and parameters \(\w{8}\), got 00000005"),
    "text_fingerprint": (("fingerprint",), "5", "got '5'"),
    "list_of_settings": (("settings",), [], ": settings: expected a dictionary, got list"),
    "rank": (("rank",), 1, "expected integers 0 <= rank < size, got 1 and 1"),
    "text_rank": (("rank",), "0", "expected integers 0 <= rank < size, got '0' and 1"),
    "another_size": (("size",), 2, "expected the state of rank 0 of 1, got the state of rank 0 of 2; if the number of ranks has changed, pass the list"),
    "list_of_parameters": (("parameters",), [], ": parameters: expected a dictionary, got list"),
    "missing_parameter": (SECOND, ..., "parameters: expected first, second, third, got no second"),
    "unknown_parameter": (("parameters", "fourth"), {}, "parameters: .* got also fourth"),
    "no_dictionary": (SECOND, 3, ", parameter second: expected a dictionary, got int"),
    "no_steps": ((*SECOND, "steps"), ..., "parameter second: expected steps, loss_scale, reduction, is_table, memory, got no steps"),
    "more_of_a_parameter": ((*SECOND, "lr"), 1, "parameter second: .* got also lr"),
    "text_steps": ((*SECOND, "steps"), "a", r"parameter second: expected steps, an integer in \[0, 2\^63\), got 'a'"),
    "negative_steps": ((*SECOND, "steps"), -5, "parameter second: expected steps.*, got -5"),
    "too_many_steps": ((*SECOND, "steps"), 2**70, f"got {2**70}"),
    "half_a_step": ((*SECOND, "steps"), 1.5, "got 1.5"),
    "true_steps": ((*SECOND, "steps"), True, "got True"),
    "loss_scale_of_0": ((*SECOND, "loss_scale"), 0.0, "parameter second: expected loss_scale None or a positive finite number, got 0.0"),
    "loss_scale_of_nan": ((*SECOND, "loss_scale"), float("nan"), "got nan"),
    "text_loss_scale": ((*SECOND, "loss_scale"), "1024", "got '1024'"),
    "loss_scale_that_is_not_followed": ((*SECOND, "loss_scale"), 1024.0, "parameter second: expected loss_scale None, because this Compressor does not have loss_scale=, got 1024.0"),
    "another_reduction": ((*SECOND, "reduction"), "product", "parameter second: expected a reduction of None, 'average', 'sum', got 'product'"),
    "a_number_of_tables": ((*SECOND, "is_table"), 1, "parameter second: expected is_table None, True or False, got 1"),
    "no_residual": (RESIDUAL, ..., "parameter second, memory: expected residual, got no residual"),
    "velocity": ((*SECOND, "memory", "velocity"), array_of(0), "parameter second, memory: expected residual, got also velocity"),
    "memory_of_a_dense_one": (("parameters", "third", "memory", "residual"), array_of(0, (4,)), "parameter third, memory: expected nothing, got also residual"),
    "one_element": (RESIDUAL, array_of(0, (1,)), r"parameter second, residual: expected a float32 array of shape \(300,\), got .*float32 of shape \(1,\)"),
    "transposed": (RESIDUAL, array_of(0, (10, 30)), r"got .*float32 of shape \(10, 30\)"),
    "float": (RESIDUAL, 0.0, r"expected a float32 array of shape \(300,\), got float"),
    "float64": (RESIDUAL, array_of(0, dtype=np.float64), "got .*float64 of shape"),
    "integers": (RESIDUAL, array_of(0, dtype=np.int32), "got .*int32 of shape"),
    "other_byte_order": (RESIDUAL, lambda _: np.zeros(300, ">f4"), "got >f4 of shape"),
    "nan": (RESIDUAL, array_of(np.nan), "parameter second, residual: expected finite numbers, got nan at 0"),
    "inf": (RESIDUAL, array_of(-np.inf), "parameter second, residual: expected finite numbers, got -inf at 0"),
}  # fmt: skip


@FRAMEWORKS
@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("as_list", [False, True], ids=["own", "list"])
def test_a_refused_state_leaves_everything_as_it_was(framework, refused, as_list):
    path, value, message = REFUSED[refused]
    if as_list and refused == "another_size":
        message = r"expected the states of all ranks in rank order, got ranks \[0\] of \[2\]"
    elif refused != "another_size":
        message = f"^compressor state{' of rank 0' if as_list else ''}.*{message}"
    owner = framework()
    owner.step(0)
    state = copy.deepcopy(owner.compressor.state_dict())
    owner.step(1)
    before = snapshot(owner.compressor)
    change(path, value)(state, owner)
    with pytest.raises(dr.InvalidArgumentError, match=message):
        owner.compressor.load_state_dict([state] if as_list else state)
    assert_equal(snapshot(owner.compressor), before)


@FRAMEWORKS
def test_no_state_at_all(framework):
    owner = framework()
    for wrong, message in (
        (None, "^compressor state: expected what Compressor.state_dict.. returned, got None$"),
        (3, "got int$"),
        ({}, "got an empty dictionary$"),
        ({"0.weight": 1, "0.bias": 2}, "got a dictionary with the keys 0.weight, 0.bias$"),
        (dict.fromkeys("abcd"), "got a dictionary with the keys a, b, c, …$"),
        ([3], "of rank 0: expected what Compressor.state_dict.. returned, got int$"),
        ([], r"got ranks \[\] of \[\]"),
    ):
        with pytest.raises(dr.InvalidArgumentError, match=message):
            owner.compressor.load_state_dict(wrong)


@FRAMEWORKS
def test_the_list_of_all_ranks(framework):
    owner = framework()
    owner.step(0)
    state = owner.compressor.state_dict()
    states = [{**copy.deepcopy(state), "rank": rank, "size": 3} for rank in range(3)]
    owner.step(1)
    before = snapshot(owner.compressor)
    wrong = copy.deepcopy(states)
    wrong[2]["parameters"]["second"]["steps"] = 7
    for given, message in (
        (
            states[::-1],
            r"expected the states of all ranks in rank order, got ranks \[2, 1, 0\] of \[3\]",
        ),
        (states[:2], r"got ranks \[0, 1\] of \[3\]"),
        (
            wrong,
            (
                "compressor state of rank 2, parameter second: expected the same steps as in "
                "the first state, 1, got 7"
            ),
        ),
    ):
        with pytest.raises(dr.InvalidArgumentError, match=message):
            owner.compressor.load_state_dict(given)
        assert_equal(snapshot(owner.compressor), before)
    owner.compressor.load_state_dict(states)
    for name, (steps, _, memory) in snapshot(owner.compressor).items():
        assert steps == state["parameters"][name]["steps"], name
        for kind, part in memory.items():
            one = np.array(state["parameters"][name]["memory"][kind])
            np.testing.assert_array_equal(part, one)  # the mean of three, now of one rank
    largest = np.float32(3e38)
    for one in states:
        one["parameters"]["second"]["memory"]["residual"] = owner.array(np.full(300, largest))
        one["parameters"]["second"]["reduction"] = "sum"
    owner.compressor.load_state_dict(states)
    kept = snapshot(owner.compressor)["second"][2]["residual"]
    assert (kept == np.finfo(np.float32).max).all(), (
        "a sum beyond float32 must stop at its largest number"
    )


@FRAMEWORKS
def test_memories_go_to_the_ranks_that_send_them(framework):
    """Hosts of two ranks, where the first one sends: a state of six ranks is loaded on four."""
    owner = framework()
    owner.step(0)
    slots, configuration = owner.compressor.adapter.slots, owner.compressor.configuration
    state = owner.compressor.state_dict()
    states = [{**copy.deepcopy(state), "rank": rank, "size": 6} for rank in range(6)]
    for rank, one in enumerate(states):
        one["parameters"]["first"]["reduction"] = "sum"
        one["parameters"]["first"]["memory"]["residual"] = owner.array(
            np.full(200, 2.0**rank, np.float32)
        )

    def first_of_host(rank):
        return rank - rank % 2

    for rank, old in enumerate([(0, 1, 4, 5), (), (2, 3), ()]):
        checkpoint.load(slots, states, configuration, rank, 4, first_of_host)
        kept = snapshot(owner.compressor)["first"][2]["residual"]
        assert (kept == sum(2.0**one for one in old)).all()
    owner.compressor.load_state_dict({**state, "rank": 0, "size": 1})
    before = snapshot(owner.compressor)
    with pytest.raises(
        dr.InvalidArgumentError,
        match=(
            "parameter first: expected no memory on rank 3, whose communicator sends from "
            "rank 2.* list of all"
        ),
    ):
        checkpoint.load(slots, states[3] | {"size": 4}, configuration, 3, 4, first_of_host)
    assert_equal(snapshot(owner.compressor), before)
    checkpoint.load(slots, states[2] | {"size": 4}, configuration, 2, 4, first_of_host)
    assert (snapshot(owner.compressor)["first"][2]["residual"] == 4).all()
    for name in ("first", "second"):
        states[3]["parameters"][name]["memory"]["residual"] *= 0
    checkpoint.load(slots, states[3] | {"size": 4}, configuration, 3, 4, first_of_host)


def test_a_memory_in_units_of_a_loss_scale_stays_with_a_compressor_that_follows_it():
    scaled, plain, other = (
        OnTorch(loss_scale=lambda: 1024.0),
        OnTorch(),
        OnTorch(loss_scale=lambda: 2.0),
    )
    fresh = OnTorch().compressor.state_dict()
    for owner in (scaled, plain):
        owner.step(0)
    state = scaled.compressor.state_dict()
    with pytest.raises(
        dr.InvalidArgumentError, match="parameter first: expected loss_scale None, .*, got 1024.0"
    ):
        plain.compressor.load_state_dict(state)
    with pytest.raises(
        dr.InvalidArgumentError,
        match=(
            "parameter first: expected loss_scale a number, because this Compressor has "
            "loss_scale=, got None"
        ),
    ):
        scaled.compressor.load_state_dict(plain.compressor.state_dict())
    other.compressor.load_state_dict(state)
    assert other.compressor.state_dict()["parameters"]["first"]["loss_scale"] == 1024.0
    scaled.compressor.load_state_dict(fresh)  # empty memories have no unit
    assert not snapshot(scaled.compressor)["first"][2]["residual"].any()


def others(**changed):
    """Return shapes of parameters that differ from :data:`SHAPES`; None leaves one out."""
    return {name: shape for name, shape in {**SHAPES, **changed}.items() if shape is not None}


DIFFERENT = [
    ({"seed": 7}, "seed: expected 0, as in this Compressor, got 7"),
    ({"memory": dr.NoMemory()}, "memory: expected Residual(), as in this Compressor, got NoMemory()"),
    ({"communicator": dr.SplitAllgather()}, "communicator: expected Allgather(), as in this Compressor, got SplitAllgather("),
    ({"bucket_bytes": 5}, "bucket_bytes: expected 67108864, as in this Compressor, got 5"),
    ({"codec": "fp16"}, "codec: expected Codec(TopK(ratio=0.1, "),
    ({"codec": {"first": "dense"}}, "got by parameter"),
    ({"shapes": others(second=(30, 12))}, "parameter second: expected shape (30, 10), as in this Compressor, got shape (30, 12)"),
    ({"shapes": others(second=None)}, "parameter second: expected shape (30, 10), as in this Compressor, got none"),
    ({"shapes": others(fourth=(60,))}, "parameter fourth: expected none, as in this Compressor, got shape (60,)"),
    ({"shapes": dict(reversed(SHAPES.items()))}, "order of the parameters: expected parameter first next, as in this Compressor, got parameter third"),
]  # fmt: skip


@FRAMEWORKS
@pytest.mark.parametrize(("options", "message"), DIFFERENT)
@pytest.mark.parametrize("as_list", [False, True], ids=["own", "list"])
def test_the_message_names_what_differs(framework, options, message, as_list):
    owner = framework()
    state = framework(**options).compressor.state_dict()
    before = snapshot(owner.compressor)
    with pytest.raises(dr.InvalidArgumentError) as refused:
        owner.compressor.load_state_dict([state] if as_list else state)
    assert str(refused.value).startswith(f"compressor state{' of rank 0' if as_list else ''}: ")
    assert message in str(refused.value)
    assert_equal(snapshot(owner.compressor), before)


def test_the_message_names_the_parameter_that_is_compressed_otherwise():
    owner, other = (OnTorch(codec={"second": codec}) for codec in (dr.Codec(dr.TopK(0.2)), "dense"))
    message = "codec of parameter second: expected Codec.* with Residual.*, got dense$"
    with pytest.raises(dr.InvalidArgumentError, match=message):
        owner.compressor.load_state_dict(other.compressor.state_dict())


@FRAMEWORKS
def test_a_state_of_before_settings_were_saved(framework):
    owner, other = framework(), framework(seed=7)
    owner.step(0)
    state, different = owner.compressor.state_dict(), other.compressor.state_dict()
    before = snapshot(owner.compressor)
    owner.step(1)
    del state["settings"], different["settings"]
    with pytest.raises(dr.InvalidArgumentError, match="with the same configuration and parameters"):
        owner.compressor.load_state_dict(different)
    owner.compressor.load_state_dict(state)
    assert_equal(snapshot(owner.compressor), before)


def test_settings_take_little_space():
    """A codec that many parameters have is written once."""
    shapes = {f"layer.{number}.weight": (40, 50) for number in range(1000)}
    state = OnTorch(shapes=shapes).compressor.state_dict()
    size, loaded = saved_file(state)
    assert loaded["settings"] == state["settings"]
    del state["settings"]
    assert size - saved_file(state)[0] < 120 * len(shapes)


def resident_bytes():
    """Return the memory of this process that has pages."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def saved_file(state):
    """Return a state as torch.save writes it, and as it is read again."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell(), torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_memories_of_zeros_take_no_space():
    shapes = {**SHAPES, "frozen": (5000, 5000)}
    source, target = OnTorch(shapes=shapes), OnTorch(shapes=shapes)
    source.named[-1][1].requires_grad_(False)
    source.named = source.named[:-1]
    source.step(0)
    size, state = saved_file(source.compressor.state_dict())
    assert size < 20_000
    assert state["parameters"]["frozen"]["memory"]["residual"].shape == (5000 * 5000,)
    target.named = target.named[:-1]
    before = resident_bytes()
    target.compressor.load_state_dict(state)
    assert resident_bytes() - before < 50 << 20  # of 100 MB
    for one, other in zip(source.step(1), target.step(1)):
        np.testing.assert_array_equal(one, other)


def test_zeros_as_arrays_are_loaded_too():
    """As they were saved before, on one rank and from other ranks."""
    owner = OnTorch()
    state = owner.compressor.state_dict()
    whole = copy.deepcopy(state)
    for name in ("first", "second"):
        saved = state["parameters"][name]["memory"]["residual"]
        assert saved.untyped_storage().nbytes() == 4 and not saved.any()
        whole["parameters"][name]["memory"]["residual"] = torch.zeros(saved.shape)
    for loaded in (state, whole, [{**state, "size": 2}, {**whole, "rank": 1, "size": 2}]):
        owner.step(0)
        owner.compressor.load_state_dict(loaded)
        for steps, _, memory in snapshot(owner.compressor).values():
            assert steps == 0 and not any(part.any() for part in memory.values())


def test_a_memory_of_zeros_takes_what_another_rank_kept():
    """Elastic training adds the memory of a lost rank."""
    owner = OnTorch()
    slots = list(owner.compressor.adapter.slots.values())
    kept = np.arange(500, dtype=np.float32)
    memory_transfer.add(slots, kept)
    memory_transfer.add(slots, kept)
    both = np.concatenate([slot.state[0] for slot in slots[:2]])
    np.testing.assert_array_equal(both, 2 * kept)
    assert owner.compressor.state_dict()["parameters"]["second"]["memory"]["residual"][1] == 402
    memory_transfer.clear(slots)
    assert not any(part.any() for slot in slots for part in slot.state)


def test_negative_zeros_are_kept():
    owner = OnTorch()
    (residual,) = owner.compressor.adapter.slots["first"].state
    residual[3] = -0.0
    saved = owner.compressor.state_dict()
    assert torch.signbit(saved["parameters"]["first"]["memory"]["residual"]).nonzero() == 3
    residual.zero_()
    owner.compressor.load_state_dict(saved)
    assert torch.signbit(residual).nonzero() == 3
