"""Warnings about programs whose gradients PyTorch's DDP does not exchange.

Run by ddp_scenarios.py.
"""

import itertools
import random
import warnings

import torch
import torch.distributed as dist
from ddp_tools import Network, distributed, loss_of, warnings_of_two_steps
from scenario_runner import refused, texts_of_warnings
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr


def _warned(optimizers, make_gradients):
    """Make gradients and step; return the warnings about those that were not exchanged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer in optimizers:
            optimizer.zero_grad()
        make_gradients()
        for optimizer in optimizers:
            optimizer.step()
    return [str(one.message) for one in caught if "not exchanged" in str(one.message)]


def _is_equal_everywhere(network):
    """Return whether all ranks have the same parameters."""
    flat = torch.cat([one.detach().flatten() for one in network.parameters()])
    all_of = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, flat)
    return all(torch.equal(one, flat) for one in all_of)


def scenario_a_program_is_warned_exactly_if_ranks_differ(directory):
    """Random programs: layers frozen at any time, no_sync() and passes around the DDP model."""
    seen = set()
    for seed in range(12):
        choose = random.Random(seed)
        network = Network()
        layers = [network.convolution, network.first, network.branch, network.last]
        for layer in layers[:-1]:  # the last one is always trained
            layer.requires_grad_(choose.random() < 0.7)
        finds = {"find_unused_parameters": True}
        model, _ = distributed(network, ddp=finds, dense_below=0)
        cut = choose.randrange(8)
        everything = list(network.parameters())
        optimizers = [
            torch.optim.SGD(part, lr=0.1) for part in (everything[:cut], everything[cut:]) if part
        ]
        has_differed = False
        for step in range(6):
            for layer in layers[:-1]:
                if choose.random() < 0.1:
                    layer.requires_grad_(choose.random() < 0.8)
            way = choose.choice(["plain"] * 8 + ["no_sync", "bypass", "accumulate"])

            def make_gradients(step=step, way=way, model=model, network=network):
                if way in ("no_sync", "accumulate"):
                    with model.no_sync():
                        loss_of(model, step, dist.get_rank()).backward()
                if way != "no_sync":
                    called = network if way == "bypass" else model
                    loss_of(called, step, dist.get_rank()).backward()

            texts = _warned(optimizers, make_gradients)
            differs = not _is_equal_everywhere(network)
            assert bool(texts) == (differs and not has_differed), (seed, step, way, texts, differs)
            has_differed = has_differed or differs
            seen.add((way, differs))
    assert {
        ("plain", True), ("plain", False), ("accumulate", False), ("no_sync", True),
        ("bypass", True),
    } <= seen  # fmt: skip


def scenario_layers_that_are_added_later_are_named(directory):
    """Only those of a DDP model that has a compressor, and of no other one."""
    network, other = Network(), Network()
    model, _ = distributed(network, dense_below=0)
    plain = DistributedDataParallel(other)
    optimizer = torch.optim.SGD([*network.parameters(), *other.parameters()], lr=0.1)

    def make_gradients():
        (loss_of(model, 0, dist.get_rank()) + loss_of(plain, 0, dist.get_rank())).backward()

    assert _warned([optimizer], make_gradients) == []
    added = torch.nn.Linear(network.last.out_features, network.last.out_features)
    optimizer.add_param_group({"params": added.parameters()})
    assert _warned([optimizer], make_gradients) == []  # it is in no model
    network.last = torch.nn.Sequential(network.last, added)
    texts = _warned([optimizer], make_gradients)
    assert not _is_equal_everywhere(network)
    (text,) = texts
    assert "of last.1.weight, last.1.bias that was not exchanged" in text, text


def scenario_a_layer_of_two_models_is_not_named(directory):
    """It was added to one of them, and the other one exchanges it."""
    network, other = Network(), Network()
    models = [distributed(one, dense_below=0)[0] for one in (network, other)]
    network.last = torch.nn.Sequential(network.last, other.last)
    other.last = torch.nn.Sequential(other.last)
    optimizer = torch.optim.SGD({*network.parameters(), *other.parameters()}, lr=0.1)
    for step in range(3):
        texts = _warned(
            [optimizer], lambda step=step: loss_of(models[1], step, dist.get_rank()).backward()
        )
        assert texts == [], texts


def scenario_a_parameter_that_ddp_ignores_is_not_named(directory):
    network = Network()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        network, ["branch.weight", "branch.bias"]
    )
    model, _ = distributed(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        texts = _warned(
            [optimizer], lambda step=step: loss_of(model, step, dist.get_rank()).backward()
        )
        assert texts == [], texts


def scenario_models_that_share_parameters_are_not_named(directory):
    """What one model exchanges does not count as missing in the other one."""
    network, other = Network(), Network()
    other.first = network.first
    pairs = [distributed(one, dense_below=0) for one in (network, other)]
    optimizer = torch.optim.SGD({*network.parameters(), *other.parameters()}, lr=0.1)
    for step in range(4):
        model = pairs[step % 2][0]
        texts = _warned(
            [optimizer],
            lambda step=step, model=model: loss_of(model, step, dist.get_rank()).backward(),
        )
        assert texts == [], texts


def scenario_a_closed_compressor_does_not_warn(directory):
    network = Network()
    model, compressor = distributed(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for after in range(3):
        for step in range(2):
            texts = _warned(
                [optimizer], lambda step=step: loss_of(model, step, dist.get_rank()).backward()
            )
            assert texts == [], (after, texts)
        if after == 0:  # the same model with another compressor
            compressor.close()
            compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=50)
            compressor.register(model)
        elif after == 1:  # without a compressor
            compressor.close()
            del model
            model = DistributedDataParallel(network)


def scenario_gradients_that_were_cleared_are_not_named(directory):
    network = Network()
    network.branch.requires_grad_(False)
    model, _ = distributed(network, ddp={"find_unused_parameters": True})
    network.branch.requires_grad_(True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def cleared_before_the_exchange():
        loss_of(network, 1, dist.get_rank()).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, 2, dist.get_rank(), branch=False).backward()

    assert _warned([optimizer], cleared_before_the_exchange) == []
    assert _is_equal_everywhere(network)


def scenario_sparse_gradients_that_ddp_leaves_out_are_named(directory):
    network = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(50, 4, sparse=True), "head": torch.nn.Linear(4, 1)}
    )
    network["table"].requires_grad_(False)
    model = DistributedDataParallel(_Looked(network))
    compressor = dr.Compressor(parameters=model.module.named_parameters())
    compressor.register(model)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    rows = torch.arange(3) + dist.get_rank()
    assert _warned([optimizer], lambda: model(rows).sum().backward()) == []
    network["table"].requires_grad_(True)
    (text,) = _warned([optimizer], lambda: model(rows).sum().backward())
    assert "network.table.weight that was not exchanged" in text, text


class _Looked(torch.nn.Module):
    """The sums of the rows of a table."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, rows):
        return self.network["head"](self.network["table"](rows))


def scenario_parameters_outside_of_the_ddp_model_are_named(directory):
    network = Network()
    model = DistributedDataParallel(network.first)
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=50)
    (text,) = texts_of_warnings(lambda: compressor.register(model))
    assert "not in the DDP model: convolution.weight" in text and "last.weight" in text, text
    assert "first.weight" not in text, text


def scenario_a_warning_that_is_an_error_leaves_a_registered_compressor(directory):
    network = Network()
    model = DistributedDataParallel(network.first)
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused("not in the DDP model"):
            compressor.register(model)
    optimizer = torch.optim.SGD(network.first.parameters(), lr=0.1)
    rows = torch.randn(4, network.first.in_features) + dist.get_rank()
    assert _warned([optimizer], lambda: model(rows).pow(2).sum().backward()) == []
    assert compressor.stats()["first.weight"]["steps"] == 1
    assert _is_equal_everywhere(network)


def scenario_every_optimizer_with_momentum_is_named(directory):
    """Also one of another phase of training, or of other layers."""
    network = Network()
    model, compressor = distributed(network)

    def named(*optimizers):
        found = warnings_of_two_steps(network, model, lambda: optimizers)
        found = [str(one.message) for one in found if "which costs accuracy" in str(one.message)]
        return [text.split()[1] for text in found]

    first = [*network.convolution.parameters(), *network.first.parameters()]
    rest = [*network.branch.parameters(), *network.last.parameters()]
    assert named(torch.optim.SGD(first, 0.1, 0.9), torch.optim.Adam(rest)) == ["SGD", "Adam"]
    prepared = dr.prepare(torch.optim.SGD(network.parameters(), 0.1, 0.9), compressor)
    assert named(prepared) == []
    later = torch.optim.RMSprop(network.parameters(), momentum=0.5)
    assert named(later) == ["RMSprop"]
    assert named(later) == []


def scenario_a_state_between_backward_and_step_is_named(directory):
    network = Network()
    model, compressor = distributed(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def saved():
        return texts_of_warnings(compressor.state_dict)

    for number in range(3):
        optimizer.zero_grad()
        assert saved() == []
        with model.no_sync():
            loss_of(model, number, dist.get_rank()).backward()
        assert saved() == []
        loss_of(model, number, dist.get_rank()).backward()
        if number == 2:
            (text,) = saved()
            assert "got one between backward() and step()" in text, text
            compressor.adapter._warned.discard("state")  # to be warned once more
        optimizer.step()
        assert saved() == []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 3, dist.get_rank())
        loss.backward()
        return loss

    optimizer.step(closure)
    assert saved() == []


def scenario_a_scaler_that_the_compressor_does_not_know_is_named(directory):
    for enabled, known in itertools.product((True, False), repeat=2):
        network = Network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        options = {"loss_scale": scaler.get_scale} if known else {}
        model, _ = distributed(network, **options)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

        def train(optimizer=optimizer, model=model, scaler=scaler):
            for number in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, number, dist.get_rank())).backward()
                scaler.step(optimizer)
                scaler.update()

        said = [one for one in texts_of_warnings(train) if "GradScaler" in one]
        assert len(said) == (enabled and not known), (enabled, known, said)


def scenario_a_state_after_join_is_complete(directory):
    """The rank whose data ended first has no step after the last backward passes of the others."""
    network = Network()
    model, compressor = distributed(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    rank = dist.get_rank()
    for epoch in range(2):
        with model.join():
            for number in range(2 + rank):
                optimizer.zero_grad()
                loss_of(model, number, rank).backward()
                if epoch == 0 or rank or number == 0:
                    optimizer.step()
        texts = texts_of_warnings(compressor.state_dict)
        found = [text for text in texts if "got one between backward() and step()" in text]
        assert len(found) == (epoch == 1 and rank == 0), (epoch, texts)


def scenario_loss_scales_that_differ_are_refused(directory):
    last = dist.get_rank() == dist.get_world_size() - 1
    scales = [8.0, 8.0, 4.0 if last else 8.0]
    network = Network()
    model, _ = distributed(network, loss_scale=lambda: scales[0])
    for number in range(2):
        loss_of(model, number, dist.get_rank()).backward()
        network.zero_grad()
        scales.pop(0)
    try:
        loss_of(model, 2, dist.get_rank()).backward()
    except dr.DeepReduceError as error:
        text = str(error)
        assert "loss scale 4.0" in text and "loss scale 8.0" in text, text
        assert "expected the same loss scale on every rank" in text and "join()" in text, text
    else:
        raise AssertionError("loss scales that differ were taken")


def scenario_momentum_is_not_applied_twice(directory):
    """Random programs: a memory with a momentum takes only gradients that were not averaged."""
    seen = set()
    for seed in range(16):
        choose = random.Random(seed)
        memory = choose.choice(
            [dr.MomentumCorrection(0.9), dr.MomentumCorrection(0.5), dr.LowPass()]
        )
        views = choose.random() < 0.5
        network = Network()
        network.branch.requires_grad_(False)
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        model, _ = distributed(
            network, memory=memory, ddp=ddp, loss_scale=choose.choice([None, lambda: 1.0])
        )
        network.branch.requires_grad_(True)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        averaged = adds = False
        for number in range(12):
            way = choose.choice(["clear", "step", "no_sync", "exchange", "exchange"])
            if way == "clear":
                optimizer.zero_grad(set_to_none=choose.random() < 0.5)
                averaged = adds = False
            elif way == "step":
                optimizer.step()
                optimizer.zero_grad()
                averaged = adds = False
            elif way == "no_sync":
                with model.no_sync():
                    loss_of(model, number, dist.get_rank()).backward()
            else:
                adds, averaged = averaged, True
                expected = adds and not isinstance(memory, dr.LowPass)
                try:
                    loss_of(model, number, dist.get_rank()).backward()
                except dr.DeepReduceError as error:
                    assert "expected one backward pass per step that synch" in str(error), error
                    assert expected, (seed, number)
                    break
                assert not expected, (seed, number)
                seen.add((type(memory), adds))
        else:
            continue
        seen.add("refused")
    assert seen == {
        "refused", (dr.MomentumCorrection, False), (dr.LowPass, False), (dr.LowPass, True),
    }  # fmt: skip
