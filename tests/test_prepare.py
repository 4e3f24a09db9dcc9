"""Test prepare: compressed parameters are stepped without momentum.

This holds whatever else changes the parameter groups.
"""

import random

import horovod.torch as hvd
import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.torch.adapter import Adapter

SETTINGS = {
    torch.optim.SGD: ("momentum", "dampening", "nesterov", "weight_decay"),
    torch.optim.RMSprop: ("momentum", "centered", "weight_decay"),
    torch.optim.Adam: ("betas", "amsgrad"),
    torch.optim.AdamW: ("betas", "weight_decay"),
    torch.optim.NAdam: ("betas",),
    torch.optim.RAdam: ("betas",),
    torch.optim.Adamax: ("betas",),
    torch.optim.Adagrad: ("weight_decay",),
}


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def drawn(draw, names):
    """Return random settings of an optimizer."""
    values = {
        "momentum": draw.choice((0.5, 0.9, 0.99)),
        "dampening": draw.choice((0.0, 0.25)),
        "nesterov": False,
        "weight_decay": draw.choice((0.0, 0.01)),
        "centered": draw.random() < 0.5,
        "betas": (draw.choice((0.5, 0.9)), 0.99),
        "amsgrad": draw.random() < 0.5,
    }
    chosen = {name: values[name] for name in names}
    if chosen.get("dampening") == 0:
        chosen["nesterov"] = draw.random() < 0.5
    return chosen


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40))


def compressor_of(model, codec=None, **settings):
    return dr.Compressor(codec, parameters=model.named_parameters(), **settings)


def parted(model):
    """Return the parameters that a compressor compresses, and the others."""
    parts = [], []
    for parameter in model.parameters():
        parts[parameter.numel() < 1024].append(parameter)
    return parts


def without_momentum(group, scale=1.0):
    """Return the settings that prepare promises for a group of compressed parameters."""
    changed = dict(group)
    if "betas" in group:
        changed["betas"] = (0.0, group["betas"][1])
    elif "momentum" in group:
        factor = (1 - group.get("dampening", 0)) / (1 - group["momentum"])
        changed.update(momentum=0.0, lr=group["lr"] * factor * scale)
        if "nesterov" in group:
            changed.update(nesterov=False, dampening=0.0)
    return changed


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def train_both(model, optimizer, twin, plain, steps):
    for _ in range(steps):
        inputs = torch.randn(8, 30)
        step(model, optimizer, inputs)
        step(twin, plain, inputs)


def same(model, other):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("seed", range(24))
def test_compressed_parameters_are_stepped_without_momentum(seed, capsys):
    draw = random.Random(seed)
    kind = draw.choice(list(SETTINGS))
    settings = {"lr": 0.01, **drawn(draw, SETTINGS[kind])}
    model, twin = network(), network()
    groups = [{"params": [p]} for p in model.parameters()] if draw.random() < 0.5 else None
    optimizer = kind(model.parameters() if groups is None else groups, **settings)
    assert dr.prepare(optimizer, compressor_of(model)) is optimizer
    if draw.random() < 0.5:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compressor_of(model)
        )
    large, small = parted(twin)
    plain = kind([{"params": large}, {"params": small}], **settings)
    for name, value in without_momentum(plain.param_groups[0]).items():
        plain.param_groups[0][name] = value
    train_both(model, optimizer, twin, plain, 4)
    same(model, twin)
    assert {name: optimizer.param_groups[0][name] for name in settings} == settings
    said = capsys.readouterr().out
    assert f"prepared {kind.__name__}: " in said
    assert ("for 2 of 4 parameters, " in said) == (kind is not torch.optim.Adagrad)
    assert ("Only a part of their gradients is sent" in said) == (kind is not torch.optim.Adagrad)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_schedule_of_the_momentum_counts(kind):
    """OneCycleLR sets the momentum in each step.

    The step size follows it, and the momentum stays 0.
    """
    model, twin = network(), network()
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = dr.prepare(kind(model.parameters(), lr=0.01, **settings), compressor_of(model))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    large, small = parted(twin)
    plain = kind([{"params": large}, {"params": small}], lr=0.01, **settings)
    seen = set()
    for _ in range(9):
        group = optimizer.param_groups[0]
        seen.add(group["betas"][0] if "betas" in group else group["momentum"])
        now = {name: value for name, value in group.items() if name != "params"}
        plain.param_groups[0].update(without_momentum(now))
        plain.param_groups[1].update(now)
        inputs = torch.randn(8, 30)
        step(model, optimizer, inputs)
        step(twin, plain, inputs)
        schedule.step()
    same(model, twin)
    assert len(seen) > 3


def test_none_undoes_it():
    model, twin = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = type(optimizer), repr(optimizer)
    compressor = compressor_of(model)
    for _ in range(2):
        dr.prepare(optimizer, compressor)
    assert isinstance(optimizer, torch.optim.SGD)
    assert dr.prepare(optimizer, None) is optimizer
    assert (type(optimizer), repr(optimizer)) == before
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    train_both(model, optimizer, twin, plain, 3)
    same(model, twin)


@pytest.mark.parametrize(
    ("kind", "large_settings"),
    [
        # what is sent is 10 times as large, and so must be the decay that is added to it
        (torch.optim.SGD, {"momentum": 0.0, "lr": 0.1, "weight_decay": 0.2}),
        # RMSprop divides by the size of what is sent
        (torch.optim.RMSprop, {"momentum": 0.0, "lr": 1.0, "weight_decay": 0.2}),
        (torch.optim.Adam, {"betas": (0.0, 0.999), "weight_decay": 0.2}),
        (torch.optim.Adagrad, {"weight_decay": 0.2}),
        # the decay is not added to gradients
        (torch.optim.AdamW, {"betas": (0.0, 0.999)}),
    ],
)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_memory_with_momentum_has_other_factors(
    kind, large_settings, momentum, capsys, monkeypatch
):
    """The step size does not depend on the momentum that is replaced: it is the memory's own."""
    monkeypatch.setattr(Adapter, "sends_nothing", lambda *_: False)  # as in a job of several ranks
    model, twin = network(), network()
    if not momentum and kind is torch.optim.RMSprop:
        large_settings = {**large_settings, "lr": 0.1}  # nothing to make up for
    compressor = compressor_of(model, memory=dr.MomentumCorrection(0.9))
    settings = {"lr": 0.1, "weight_decay": 0.02}
    if "momentum" in large_settings:
        settings["momentum"] = momentum
    elif "betas" in large_settings:
        settings["betas"] = (momentum, 0.999)
    optimizer = dr.prepare(kind(model.parameters(), **settings), compressor)
    large, small = parted(twin)
    plain = kind([{"params": large, **large_settings}, {"params": small}], **settings)
    train_both(model, optimizer, twin, plain, 3)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    said = capsys.readouterr().out
    decays = "weight_decay" in large_settings
    assert ("the weight decay is multiplied by 10" in said) == decays, said
    assert ("nothing changes" in said) == (kind is torch.optim.AdamW and not momentum), said


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_one_rank_does_not_use_a_memory_with_momentum(kind):
    """Its steps then have the size of the optimizer's own momentum."""
    model, twin = network(), network()
    compressor = compressor_of(model, memory=dr.MomentumCorrection(0.9))
    settings = {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.02}
    optimizer = dr.prepare(kind(model.parameters(), **settings), compressor)
    large, small = parted(twin)
    groups = [{"params": large, "momentum": 0.0, "lr": 0.05}, {"params": small}]
    train_both(model, optimizer, twin, kind(groups, **settings), 3)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": dr.NoMemory()},
        {"codec": dr.Codec(dr.NoneSparsifier(), value=dr.QSGD())},
        {"dense_below": 10**6},
    ],
    ids=["no memory", "all elements", "all dense"],
)
def test_nothing_changes_where_nothing_is_delayed(settings, capsys):
    model, twin = network(), network()
    optimizer = dr.prepare(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compressor_of(model, **settings)
    )
    assert "prepared SGD: nothing changes" in capsys.readouterr().out
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    train_both(model, optimizer, twin, plain, 3)
    same(model, twin)


def test_tensors_as_settings():
    model, twin = network(), network()
    betas = torch.tensor(0.9), torch.tensor(0.99)
    optimizer = dr.prepare(
        torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), betas=betas, foreach=False),
        compressor_of(model),
    )  # fmt: skip
    large, small = parted(twin)
    plain = torch.optim.Adam(
        [{"params": large, "betas": (0.0, 0.99)}, {"params": small, "betas": (0.9, 0.99)}], lr=0.01
    )
    train_both(model, optimizer, twin, plain, 3)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
