"""What register and the first steps check with PyTorch's DDP; run by ddp_scenarios.py."""

import contextlib
import copy
import datetime
import io
import os
import random
import warnings

import torch
import torch.distributed as dist
from ddp_tools import Network, assert_equal_everywhere, distributed, loss_of, warnings_of_two_steps
from scenario_runner import refused, texts_of_warnings
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.torch.ddp.transport import DistributedTransport


def random_part(draw, names):
    return {name for name in sorted(names) if draw.random() < 0.3}  # the same on all ranks


def scenario_parameters_that_are_averaged_must_be_known(directory):
    """Random ones are frozen before and after DDP is called, and random ones are left out."""
    outcomes = set()
    for seed in range(20):
        draw = random.Random(seed)
        network = Network()
        parameters = dict(network.named_parameters())
        frozen = random_part(draw, parameters)
        later = random_part(draw, parameters) - frozen if draw.random() < 0.7 else set()
        trained = parameters.keys() - frozen - later
        left_out = random_part(draw, frozen | later)
        if not trained:
            continue
        for name in frozen:
            parameters[name].requires_grad_(False)
        model = DistributedDataParallel(network, find_unused_parameters=True)
        for name in later:
            parameters[name].requires_grad_(False)
        named = [(name, one) for name, one in parameters.items() if name not in left_out]
        compressor = dr.Compressor(parameters=named, dense_below=0)
        what = f"seed {seed}: frozen {frozen}, later {later}, left out {left_out}"
        try:
            compressor.register(model)
            loss_of(model, 0, dist.get_rank()).backward()
            found = None
        except dr.InvalidArgumentError as error:
            found = str(error)
        unknown = left_out & later
        assert (found is not None) == bool(unknown), f"{what}: {found}"
        assert found is None or any(f"none for {name}," in found for name in unknown), found
        outcomes.add(found is None)
    assert outcomes == {True, False}


def scenario_register_again_after_a_failure(directory):
    size = dist.get_world_size()
    network = Network()
    model = DistributedDataParallel(network)
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.05)),
        communicator=dr.Hierarchical(dr.Allgather()),
        parameters=network.named_parameters(),
        dense_below=0,
    )
    for failing in range(2):
        compressor.communicator.ranks_per_host = size + 1 + failing
        try:
            compressor.register(model)
        except dr.InvalidArgumentError as error:
            assert f"expected hosts with {size + 1 + failing} ranks each" in str(error), error
        else:
            raise AssertionError("expected an error")
    compressor.communicator.ranks_per_host = None
    compressor.register(model)
    other = Network()
    at_once, _ = distributed(
        other, communicator=dr.Hierarchical(dr.Allgather(), size), dense_below=0
    )
    for step in range(2):
        found = []
        for one in (model, at_once):
            one.zero_grad()
            loss_of(one, step, dist.get_rank()).backward()
            found.append([(name, own.grad) for name, own in one.module.named_parameters()])
        for (name, gradient), (_, expected) in zip(*found):
            assert torch.equal(gradient, expected), f"step {step}, {name}"
        assert_equal_everywhere(found[0], f"step {step}")


@contextlib.contextmanager
def _on_node(number):
    """Be on a node of torchrun."""
    before = os.environ["GROUP_RANK"]
    os.environ["GROUP_RANK"] = str(number)
    try:
        yield
    finally:
        os.environ["GROUP_RANK"] = before


def scenario_hosts_are_those_of_the_ranks_in_the_process_group(directory):
    """The launcher tells how many ranks of the whole job are on a host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [0, size - 1]
    group = dist.new_group(members)
    if rank not in members:
        return
    for node, expected in ((rank, 1), (0, 2)):
        sent = []
        for count in (None, expected):
            with _on_node(node):
                model, compressor = distributed(
                    Network(),
                    communicator=dr.Hierarchical(dr.Allgather(), count),
                    ddp={"process_group": group},
                )
            loss_of(model, 0, rank).backward()
            sent.append(compressor.stats()["branch.weight"]["sent_bytes"])
        assert sent[0] == sent[1], f"{expected} per host: {sent}"


def scenario_hosts_with_different_numbers_of_ranks_are_refused(directory):
    transport = DistributedTransport([dist.get_rank()], datetime.timedelta(seconds=60))
    for hosts, expected in (
        ("a", 1),
        ("aaaa", 4),
        ("aabbcc", 2),
        ("ab", 1),
        ("aab", None),
        ("abab", None),
        ("aabbaa", None),
        ("abb", None),
    ):
        transport._hosts, transport._ranks = list(hosts), list(range(len(hosts)))
        if expected is not None:
            assert transport.local_size == expected, hosts
            continue
        with refused("expected the same number of consecutive ranks on each host, got rank 0 on a"):
            transport.local_size  # noqa: B018


def scenario_register_another_compressor_after_close(directory):
    network = Network()
    model, closed = distributed(network)
    for number in range(2):  # the second one takes over a hook that was taken over already
        loss_of(model, 0, dist.get_rank()).backward()
        closed.close()
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.2)), parameters=network.named_parameters(), dense_below=200
        )
        compressor.register(model)
        at_once, _ = distributed(Network(), dr.Codec(dr.TopK(0.2)))
        for step in range(1, 3):
            for one in (model, at_once):
                one.zero_grad()
                loss_of(one, step, dist.get_rank()).backward()
            for (name, own), other in zip(network.named_parameters(), at_once.parameters()):
                # other buckets: three ranks sum small gradients in another order
                where = f"{number}, step {step}, {name}"
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7, msg=where)
        with refused("expected one that is not closed"):
            closed.stats()
        closed = compressor
    with refused("got one that has a hook"):
        dr.Compressor(parameters=network.named_parameters()).register(model)
    with refused("pickling or copying a DDP model"):
        copy.deepcopy(model)


def scenario_momentum_of_each_optimizer_is_checked(directory):
    """Random optimizers of random parameters, some prepared, some without momentum."""
    outcomes = set()
    for seed in range(20):
        draw = random.Random(seed)
        network = Network()
        model = DistributedDataParallel(network)
        compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=200)
        compressor.register(model)
        delayed = {
            name for name, policy in compressor.policies.items() if not policy.dense
        }  # all of them have a Residual
        count = draw.randint(1, 3)
        owners = {name: draw.randrange(count) for name in compressor.policies}
        optimizers, forgotten = [], 0
        for number in range(count):
            own = [name for name, owner in owners.items() if owner == number]
            if not own:
                continue
            parameters = [one for name, one in network.named_parameters() if name in own]
            momentum = draw.choice([0, 0.9])
            optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=momentum)
            if draw.random() < 0.6:
                dr.prepare(optimizer, compressor)
            elif momentum and delayed.intersection(own):
                forgotten += 1
            optimizers.append(optimizer)
        caught = warnings_of_two_steps(
            network, model, lambda: draw.sample(optimizers, len(optimizers))
        )
        messages = [str(one.message) for one in caught if "momentum" in str(one.message)]
        assert len(messages) == forgotten, f"seed {seed}: {owners} {optimizers} {messages}"
        outcomes.add(forgotten)
    assert {0, 1} <= outcomes


def scenario_a_model_that_is_not_registered(directory):
    """The summary says so, and the first step of a prepared optimizer."""
    for registers in (False, True):
        network = Network()
        model = DistributedDataParallel(network)
        compressor = dr.Compressor(parameters=network.named_parameters())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        dr.prepare(optimizer, compressor)
        if registers:
            compressor.register(model)
        caught = warnings_of_two_steps(network, model, lambda: [optimizer])
        unregistered = (
            f"torch.distributed has {dist.get_world_size()} ranks, but the compressor is not"
            " registered with a model; call register(ddp_model), or after fully_shard"
            ' register(module, mesh["hosts"])'
        )
        found = [one for one in caught if str(one.message).endswith(f": {unregistered}")]
        assert len(found) == (not registers), caught
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            compressor.summary()
        assert (unregistered in printed.getvalue()) == (not registers), printed.getvalue()


def scenario_no_warning_of_momentum_where_nothing_is_compressed(directory):
    """After close, and with one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([one]) for one in range(size)][rank]
    for closes, ddp in ((True, {}), (False, {"process_group": alone})):
        network = Network()
        model = DistributedDataParallel(network, **ddp)
        compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=200)
        compressor.register(model)
        loss_of(model, 0, rank).backward()
        if closes:
            compressor.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9).step()


def scenario_a_second_compressor_of_the_same_parameters_is_named(directory):
    """Unless the first one is closed, its state is loaded, or both were there before the steps."""
    for kind in ("another", "closed", "loaded", "no memory", "both before"):
        network = Network()
        memory = dr.NoMemory() if kind == "no memory" else None
        model, first = distributed(network, memory=memory)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        if kind == "both before":
            other, second = distributed(network)

        def train(model, optimizer=optimizer):
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, step, dist.get_rank()).backward()
                optimizer.step()

        train(model)
        state = first.state_dict()
        if kind == "closed":
            first.close()
        if kind != "both before":
            other, second = distributed(network)
        if kind == "loaded":
            second.load_state_dict(state)
        texts = texts_of_warnings(lambda train=train, other=other: train(other))
        texts = [text for text in texts if "begins without residuals" in text]
        assert len(texts) == (kind == "another" and dist.get_rank() == 0), (kind, texts)
        for one in (first, second):
            one.close()


def scenario_a_step_of_before_prepare_is_named(directory):
    """Accelerate's wrapper keeps it if the loss is scaled."""
    for kept, momentum in ((False, 0.9), (True, 0.9), (True, 0.0)):
        network = Network()
        model, compressor = distributed(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum)
        step_of_before = optimizer.step
        dr.prepare(optimizer, compressor)

        def train(
            model=model, optimizer=optimizer, step=step_of_before if kept else optimizer.step
        ):
            for number in range(3):
                optimizer.zero_grad()
                loss_of(model, number, dist.get_rank()).backward()
                step()

        texts = [text for text in texts_of_warnings(train) if "before dr.prepare is" in text]
        assert len(texts) == (kept and momentum > 0), texts
        compressor.close()
