"""Test prepare with closures, hooks, compiled steps, copies and states of optimizers."""

import copy
import io
import pickle

import horovod.torch as hvd
import pytest
import torch
from test_prepare import compressor_of, horovod, network, same, step  # noqa: F401

import deepreduce_hvd as dr
from deepreduce_hvd.torch.unprepared import momentum_warning


def test_a_state_is_that_of_the_plain_optimizer():
    """A run that was saved without prepare continues with it, and vice versa."""
    model = network()
    compressor = compressor_of(model)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, plain, torch.randn(8, 30))
    prepared = dr.prepare(torch.optim.AdamW(model.parameters(), lr=0.5), compressor)
    prepared.load_state_dict(plain.state_dict())
    assert prepared.param_groups[0]["lr"] == 0.1
    step(model, prepared, torch.randn(8, 30))
    saved = prepared.state_dict()
    assert saved["param_groups"] == plain.state_dict()["param_groups"]
    plain.load_state_dict(saved)


def test_compiled_steps_are_those_of_eager_mode():
    """torch.compile would trace the groups of the first step, which has no momentum buffers."""
    model, twin = network(), network()
    settings = {"lr": 0.01, "momentum": 0.9}
    optimizer = dr.prepare(torch.optim.SGD(model.parameters(), **settings), compressor_of(model))
    eager = dr.prepare(torch.optim.SGD(twin.parameters(), **settings), compressor_of(twin))
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(5):
        inputs = torch.randn(8, 30)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        compiled()
        step(twin, eager, inputs)
    same(model, twin)


@pytest.mark.parametrize("place", ["closure", "hook"])
def test_closures_and_hooks_have_the_groups_of_the_user(place):
    """They may read and set the learning rate, as Lightning's training_step does."""
    model, twin = network(), network()
    compressor = compressor_of(model)
    optimizer = dr.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), compressor)
    other = dr.prepare(
        torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9), compressor_of(twin)
    )
    seen, inputs = [], torch.randn(8, 30)

    def set_rate(*_):
        seen.append((len(optimizer.param_groups), optimizer.param_groups[0]["momentum"]))
        optimizer.param_groups[0]["lr"] = 0.01

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if place == "closure":
            set_rate()
        return loss

    if place == "hook":
        optimizer.register_step_pre_hook(set_rate)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(twin(inputs).square().mean().item())
    step(twin, other, inputs)
    same(model, twin)
    assert seen == [(1, 0.9)] and optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("way", ["undone", "loaded"])
def test_a_run_goes_on_without_prepare(kind, way):
    model = network()
    optimizer = dr.prepare(kind(model.parameters(), momentum=0.9, lr=0.01), compressor_of(model))
    step(model, optimizer, torch.randn(8, 30))
    saved = copy.deepcopy(optimizer.state_dict())
    if way == "undone":
        dr.prepare(optimizer, None)
    else:
        optimizer = kind(model.parameters(), momentum=0.9, lr=0.01)
        optimizer.load_state_dict(saved)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, optimizer, torch.randn(8, 30))
    assert all(not one.equal(two) for one, two in zip(model.parameters(), before))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam])
@pytest.mark.parametrize("codec", [None, dr.recommended_codec()], ids=["tables", "no tables"])
def test_a_loaded_state_has_the_entries_of_other_ranks(kind, codec):
    """hvd.broadcast_optimizer_state sends each entry of rank 0, which alone may load a state.

    With the default codec, a layer may be an embedding table, which keeps its momentum.
    """
    model, twin = network(), network()
    settings = {} if kind is torch.optim.Adam else {"momentum": 0.9}
    plain = kind(model.parameters(), lr=0.01, **settings)
    step(model, plain, torch.randn(8, 30))
    loaded = dr.prepare(kind(model.parameters(), lr=0.01, **settings), compressor_of(model, codec))
    loaded.load_state_dict(plain.state_dict())
    fresh = dr.prepare(kind(twin.parameters(), lr=0.01, **settings), compressor_of(twin, codec))
    step(twin, fresh, torch.randn(8, 30))
    assert entries_of(loaded) == entries_of(fresh)
    # what was loaded does not stay, for a run that goes on without prepare
    step(model, loaded, torch.randn(8, 30))
    assert entries_of(loaded) == entries_of(fresh)
    compressed = [one for one in model.parameters() if one.numel() >= 1024]
    kept = [loaded.state[one].get("momentum_buffer") for one in compressed if one in loaded.state]
    assert compressed and not any(one.any() for one in kept if one is not None)


@pytest.mark.parametrize("codec", [None, dr.recommended_codec()], ids=["tables", "no tables"])
@pytest.mark.parametrize("dense_below", [0, 50, 10000])
@pytest.mark.parametrize("momenta", [(), (0,), (1, 3), (0, 2)])
def test_a_state_of_a_run_with_other_codecs_gets_the_entries_of_other_ranks(
    codec, dense_below, momenta
):
    """There, other parameters were compressed, so others have a momentum in the state of SGD."""
    model, twin = network(), network()
    state = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9).state_dict()
    state["state"] = {
        number: {"momentum_buffer": torch.ones_like(list(model.parameters())[number])}
        for number in momenta
    } or {0: {"momentum_buffer": None}}
    optimizers = [
        dr.prepare(
            torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9),
            compressor_of(one, codec, dense_below=dense_below),
        )
        for one in (model, twin)
    ]
    optimizers[0].load_state_dict(state)
    for one, optimizer in zip((model, twin), optimizers):
        if not optimizer.state:  # then Horovod makes a step
            step(one, optimizer, torch.randn(8, 30))
    assert entries_of(optimizers[0]) == entries_of(optimizers[1])
    assert optimizers[0].param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("codec", [None, dr.recommended_codec()], ids=["tables", "no tables"])
@pytest.mark.parametrize("change", ["cleared", "wrapped", "written", "copied"])
def test_momenta_of_zeros_are_those_of_the_state(kind, codec, change):
    """Whatever changes the state: hvd.DistributedOptimizer begins with an empty one, for example."""
    model = network()
    base = dr.prepare(kind(model.parameters(), lr=0.01, momentum=0.9), compressor_of(model, codec))
    step(model, base, torch.randn(8, 30))
    entries, optimizer = entries_of(base), base
    if change == "cleared":
        base.state.clear()
    elif change == "wrapped":
        optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
        assert not optimizer.state
    elif change == "copied":
        optimizer = copy.copy(base)
        optimizer.load_state_dict(base.state_dict())
    for one in optimizer.state.values() if change != "wrapped" else ():
        if one.get("momentum_buffer") is not None:
            one["momentum_buffer"] = torch.full_like(one["momentum_buffer"], 7.0)
    step(model, optimizer, torch.randn(8, 30))
    assert entries_of(optimizer) == entries
    for parameter in model.parameters():
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        assert buffer is None or buffer.any() == (parameter.numel() < 1024)
    plain = kind(model.parameters(), lr=0.01, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    step(model, plain, torch.randn(8, 30))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_steps_between_two_preparations_leave_no_momentum(kind):
    model = network()
    compressor = compressor_of(model)
    optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
    for prepared_for in (compressor, None, compressor):
        dr.prepare(optimizer, prepared_for)
        step(model, optimizer, torch.randn(8, 30))
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].any() == (parameter.numel() < 1024)


@pytest.mark.parametrize("settings", [{"nesterov": True}, {"dampening": 0.9}])
def test_momenta_that_have_not_begun_stay_so_without_horovod(settings):
    """Zeros in their place would be multiplied by the dampening, and do not suit sparse ones."""
    model = network()
    compressor = compressor_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **settings)
    dr.prepare(optimizer, compressor)
    type(optimizer).keeps_a_state = False
    state = optimizer.state_dict()
    state["state"] = {1: {"momentum_buffer": torch.ones(40)}}
    optimizer.load_state_dict(state)
    assert list(optimizer.state_dict()["state"]) == [1]


def entries_of(optimizer):
    """Return {number of the parameter: names of its entries} of an optimizer's state."""
    return {number: sorted(one) for number, one in optimizer.state_dict()["state"].items()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW])
@pytest.mark.parametrize("again", [False, True], ids=["prepared by the copy", "prepared again"])
def test_a_copy_steps_its_own_parameters_without_momentum(kind, again):
    """A copy makes the steps of the original, and neither steps the other's parameters."""
    model = network()
    settings = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
    optimizer = dr.prepare(kind(model.parameters(), lr=0.01, **settings), compressor_of(model))
    step(model, optimizer, torch.randn(8, 30))
    twin, copied = copy.deepcopy((model, optimizer))
    assert momentum_warning(copied, compressor_of(twin)) is None
    if again:
        dr.prepare(copied, compressor_of(twin))
    twice, copied_twice = copy.deepcopy((twin, copied))
    for _ in range(4):
        inputs = torch.randn(8, 30)
        step(model, optimizer, inputs)
        step(twin, copied, inputs)
        step(twice, copied_twice, inputs)
    same(model, twin)
    same(model, twice)
    assert repr(copied) == repr(optimizer)
    dr.prepare(copied, None)
    assert type(copied) is kind and momentum_warning(optimizer, compressor_of(model)) is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("protocol", [1, 2, pickle.HIGHEST_PROTOCOL])
def test_only_the_state_is_pickled(kind, protocol):
    model = network()
    optimizer = dr.prepare(kind(model.parameters(), lr=0.1), compressor_of(model))
    step(model, optimizer, torch.randn(8, 30))
    for save in (
        lambda: pickle.dumps(optimizer, protocol),
        lambda: torch.save(
            {"optimizer": optimizer}, io.BytesIO(), pickle_protocol=max(protocol, 2)
        ),
    ):
        with pytest.raises(
            dr.InvalidArgumentError, match=rf"a prepared {kind.__name__}, .*optimizer\.state_dict"
        ):
            save()
    torch.save(optimizer.state_dict(), io.BytesIO())
    assert type(pickle.loads(pickle.dumps(dr.prepare(optimizer, None), protocol))) is kind


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_stepped_as_before(kind, seed):
    """In a job of one process too: in a larger one, Horovod sums them in full."""
    torch.manual_seed(seed)
    settings = {} if kind is torch.optim.Adagrad else {"momentum": 0.9}
    table, twin = (torch.nn.Embedding(60, 30, sparse=True) for _ in range(2))
    twin.load_state_dict(table.state_dict())
    optimizer = dr.prepare(kind(table.parameters(), lr=0.1, **settings), compressor_of(table))
    plain = kind(twin.parameters(), lr=0.1, **settings)
    for _ in range(5):
        rows = torch.randint(60, (7,))
        for one, its in ((table, optimizer), (twin, plain)):
            its.zero_grad()
            one(rows).square().sum().backward()
            its.step()
    torch.testing.assert_close(table.weight, twin.weight)


def test_a_shallow_copy_has_the_same_parameters():
    model = network()
    compressor = compressor_of(model)
    optimizer = dr.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compressor)
    copied = copy.copy(optimizer)
    assert copied.param_groups is optimizer.param_groups
    assert momentum_warning(copied, compressor) is None


def test_parameters_that_another_compressor_has_are_warned_of():
    """An optimizer is prepared for the parameters of the compressor that it was prepared with."""
    model, other = network(), network()
    both = [*model.parameters(), *other.parameters()]
    optimizer = torch.optim.SGD(both, lr=0.1, momentum=0.9)
    dr.prepare(optimizer, compressor_of(model))
    assert momentum_warning(optimizer, compressor_of(model)) is None
    text = momentum_warning(optimizer, compressor_of(other))
    assert "SGD has momentum 0.9 for compressed parameters" in text
    assert "write optimizer = dr.prepare" in text


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam])
def test_a_state_that_is_loaded_before_prepare_has_the_same_entries(kind):
    """So rank 0 may also load it before it prepares the optimizer."""
    settings = {} if kind is torch.optim.Adam else {"momentum": 0.9}

    def entries(first):
        model = network()
        plain = kind(model.parameters(), lr=0.01, **settings)
        step(model, plain, torch.randn(8, 30))
        optimizer = kind(model.parameters(), lr=0.01, **settings)
        for action in (first, "load" if first == "prepare" else "prepare"):
            if action == "load":
                optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
            else:
                dr.prepare(optimizer, compressor_of(model))
        return {number: sorted(state) for number, state in optimizer.state_dict()["state"].items()}

    assert entries("load") == entries("prepare")


def test_groups_are_back_after_a_step_that_fails():
    model = network()
    optimizer = dr.prepare(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compressor_of(model)
    )
    groups = optimizer.param_groups

    def closure():
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        optimizer.step(closure)
    assert optimizer.param_groups is groups


@pytest.mark.parametrize("order", ["load, prepare", "prepare, load"])
def test_a_loaded_state_stays_a_state(order):
    """Horovod makes a step of zeros on a rank without one, which would decay loaded weights."""
    model = network()
    compressor = compressor_of(model, dense_below=1)

    def made():
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    saved = dr.prepare(made(), compressor)
    step(model, saved, torch.randn(8, 30))
    optimizer = made()
    for action in order.split(", "):
        if action == "load":
            optimizer.load_state_dict(saved.state_dict())
        else:
            dr.prepare(optimizer, compressor)
    assert optimizer.state_dict()["state"] == saved.state_dict()["state"] != {}
    before = [one.detach().clone() for one in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(map(torch.equal, model.parameters(), before))
    fresh = dr.prepare(made(), compressor)
    assert not fresh.state
