"""Test the state of a compressor with fully_shard, hybrid sharding, and errors.

Some scenarios compare with PyTorch's own hybrid sharding. Run by fsdp_scenarios.py.
"""

import warnings
import weakref

import measured_steps
import torch
import torch.distributed as dist
from ddp_tools import CODEC, Network, assert_refused
from fsdp_tools import (
    WHOLE,
    Reference,
    ShardOracle,
    expect_on_all_ranks,
    loss_of,
    meshes,
    shard,
    sharded,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import deepreduce_hvd as dr

LEARNING_RATE = 0.1


def _whole(network):
    """Return {name: (parameter, gradient)}, gathered in each host."""
    return {
        name: (one.full_tensor(), None if one.grad is None else one.grad.full_tensor())
        for name, one in network.named_parameters()
    }


def train(network, first, count, factor=1.0):
    for step in range(first, first + count):
        network.zero_grad()
        (loss_of(network, step, dist.get_rank()) * factor).backward()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad


def _expect_equal(one, other, what, tolerance=0.0):
    for name, (parameter, gradient) in one.items():
        torch.testing.assert_close(
            parameter, other[name][0], rtol=tolerance, atol=tolerance, msg=f"{what}, {name}"
        )
        torch.testing.assert_close(
            gradient, other[name][1], rtol=tolerance, atol=tolerance, msg=f"{what}, {name}"
        )


def _divide(network):
    network.set_gradient_divide_factor(3.0)
    for module in (network.convolution, network.first, network.last):
        module.set_gradient_divide_factor(3.0)


def force_sums(network):
    network.set_force_sum_reduction_for_comms(True)
    for module in (network.convolution, network.first, network.last):
        module.set_force_sum_reduction_for_comms(True)


def scenario_dense_is_pytorchs_hybrid_sharding(directory):
    mesh = meshes(2)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for dtype, policy, prepare, tolerance in (
        (torch.float32, None, None, 0.0),
        (torch.float64, None, None, 0.0),
        (torch.float64, None, _divide, 1e-12),
        (torch.float32, None, force_sums, 0.0),
        (torch.float32, half, None, 1e-2),
    ):
        networks = Network(dtype), Network(dtype)
        shard(networks[0], mesh, mp_policy=policy or MixedPrecisionPolicy())
        compressor = sharded(networks[1], mesh, "dense", policy=policy)
        for step in range(3):
            found = []
            for network in networks:
                if prepare is not None and not step:
                    prepare(network)
                network.zero_grad()
                for number in range(3):  # two micro-batches that are reduced only within the host
                    network.set_requires_all_reduce(number == 2)
                    loss_of(network, 10 * step + number, dist.get_rank(), True, dtype).backward()
                with torch.no_grad():
                    for parameter in network.parameters():
                        parameter -= LEARNING_RATE * parameter.grad
                found.append(_whole(network))
            _expect_equal(*found, f"{dtype} {policy} {prepare}, step {step}", tolerance)
        assert {row["path"] for row in compressor.stats().values()} == {"dense"}


def scenario_statistics_and_equal_parameters(directory):
    network = Network()
    compressor = sharded(network, meshes(2), CODEC)
    train(network, 0, 3)
    for name, row in compressor.stats().items():
        slot = compressor.adapter.slots[name]
        assert row["elements"] == slot.shape.numel() and row["steps"] == 3, (name, row)
        if row["elements"] and compressor.policies[name].codec is not None:
            assert row["path"] == ("dense" if slot.dense else "compressed"), (name, row)
            assert 0 < row["sent_bytes"] < row["dense_bytes"] or slot.dense, (name, row)
    expect_equal_everywhere(network)


def scenario_profile_and_timeline(directory):
    network = Network()
    compressor = sharded(network, meshes(2), CODEC)
    measured_steps.check(compressor, network, lambda number: train(network, number, 1), directory)


def expect_equal_everywhere(network):
    own = torch.cat([one.full_tensor().reshape(-1) for one in network.parameters()]).detach()
    everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, own)
    for other in everywhere:
        assert torch.equal(other, own)


def scenario_auto_chooses_between_hosts(directory):
    network = Network()
    compressor = sharded(network, meshes(2), CODEC, communicator="auto")
    train(network, 0, 2)
    assert "predicted" in compressor.stats()["first.weight"]["communicator"]
    expect_equal_everywhere(network)


def scenario_threads_that_encode_change_nothing(directory):
    mesh, networks = meshes(2), []
    for threads in (0, 2):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 3))
        shard(network, mesh["ranks"], [["0"], [""]])
        compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), threads=threads)
        compressor.register(network, mesh["hosts"])
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            network.zero_grad()
            network(torch.randn(4, 200)).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= LEARNING_RATE * parameter.grad
        networks.append(network)
    _expect_equal(*map(_whole, networks), "threads")


class Twice(torch.nn.Module):
    """A network that uses a layer twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = torch.nn.Linear(30, 30), torch.nn.Linear(30, 2)

    def forward(self, inputs):
        return self.last(self.layer(self.layer(inputs).tanh()).tanh())


def scenario_gradients_are_freed_with_those_of_the_model(directory):
    network, buffers = Network(), []
    compressor = sharded(network, meshes(2), CODEC)
    average = compressor.adapter.average

    def watched(group, parameters, buffer):
        buffers.append(weakref.ref(buffer))
        average(group, parameters, buffer)

    compressor.adapter.average = watched
    train(network, 0, 2)
    network.zero_grad()
    assert len(buffers) >= 4 and not any(buffer() is not None for buffer in buffers)


def scenario_layer_used_twice(directory):
    mesh, networks = meshes(2), (Twice(), Twice())
    shard(networks[0], mesh, [["layer"], [""]])
    compressor = sharded(networks[1], mesh, "dense", calls=[["layer"], [""]])
    found = []
    for network in networks:
        torch.manual_seed(dist.get_rank())
        network(torch.randn(4, 30)).pow(2).mean().backward()
        found.append(_whole(network))
    _expect_equal(*found, "used twice")
    assert {row["steps"] for row in compressor.stats().values()} == {1}


def scenario_inf_in_one_shard_voids_the_step_of_all(directory):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    network = Network()
    compressor = sharded(network, meshes(2), CODEC, loss_scale=scaler.get_scale)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    skipped = []
    for step in range(4):
        optimizer.zero_grad()
        # Inf in the first row of one weight, which only the first rank of each host has
        handle = None
        if step == 2 and dist.get_rank() == 2:
            handle = network.first.register_forward_hook(
                lambda module, inputs, output: output * torch.tensor([float("inf")] + [1.0] * 59)
            )
        kept = compressor.state_dict()["parameters"]
        before = {name: one.full_tensor() for name, one in network.named_parameters()}
        loss = scaler.scale(loss_of(network, step, dist.get_rank()))
        if handle is not None:
            handle.remove()
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(before[n], one.full_tensor()) for n, one in network.named_parameters()]
        if all(same):
            skipped.append(step)
            after = compressor.state_dict()["parameters"]
            for name, saved in kept.items():
                for kind, memory in saved["memory"].items():
                    assert torch.equal(memory, after[name]["memory"][kind]), name
    assert skipped == [2], skipped


def scenario_resume_is_bit_for_bit(directory):
    mesh, network = meshes(2), Network()
    compressor = sharded(network, mesh, CODEC)
    train(network, 0, 3)
    weights = {name: one.full_tensor() for name, one in network.named_parameters()}
    state = compressor.state_dict()
    train(network, 3, 3)
    for in_one_list in (False, True):
        other = Network()
        other.load_state_dict(weights)
        resumed = sharded(other, mesh, CODEC)
        if in_one_list:
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, state)
            resumed.load_state_dict(states)
        else:
            path = directory / f"fsdp.{dist.get_rank()}.pt"
            torch.save(state, path)
            resumed.load_state_dict(torch.load(path, weights_only=True))
        train(other, 3, 3)
        for (name, one), (_, two) in zip(network.named_parameters(), other.named_parameters()):
            assert torch.equal(one.to_local(), two.to_local()), name


def sum_of_residuals(compressor, mesh):
    """Return {name: sum of the residuals of all hosts, for the whole parameter}."""
    total = {}
    for name, slot in compressor.adapter.slots.items():
        if not slot.state_names:
            continue
        whole = torch.zeros(slot.parameter.shape, dtype=torch.float64)
        place, ranks = mesh.get_local_rank("ranks"), mesh["ranks"].size()
        rows = -(-whole.shape[0] // ranks)
        own = slot.memory()["residual"].double().view(slot.shape)
        whole[place * rows : place * rows + own.shape[0]] = own
        dist.all_reduce(whole)
        total[name] = whole
    return total


def scenario_resume_with_other_hosts_and_shards(directory):
    """The update in the residuals stays the same: their mean, or with a divisor set, their sum."""
    for prepare in (None, _divide):
        mesh = meshes(2)
        network = Network()
        compressor = sharded(network, mesh, CODEC)
        if prepare is not None:
            prepare(network)
            force_sums(network)  # Gloo does not divide float32
        train(network, 0, 2)
        expected = sum_of_residuals(compressor, mesh)
        assert any(one.abs().max() > 0 for one in expected.values())
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, compressor.state_dict())
        for hosts in (1, 4, 2):
            mesh = meshes(hosts)
            other = Network()
            resumed = sharded(other, mesh, CODEC)
            resumed.load_state_dict(states)
            for name, found in sum_of_residuals(resumed, mesh).items():
                update = expected[name] * (hosts / 2 if prepare is None else 1)
                torch.testing.assert_close(found, update, rtol=0, atol=1e-6)
            train(other, 2, 1)
            assert resumed.stats()["branch.weight"]["steps"] == 3


def scenario_refused(directory):
    mesh = meshes(2)

    def made(network, **options):
        return dr.Compressor(CODEC, parameters=network.named_parameters(), **options)

    plain = Network()
    assert_refused("on the whole network", lambda: made(plain).register(plain, mesh["hosts"]))
    shard(plain, mesh["ranks"], calls=[["last"]])
    assert_refused("on the whole network", lambda: made(plain).register(plain))
    ddp = DistributedDataParallel(Network())
    assert_refused("expected no mesh", lambda: made(ddp.module).register(ddp, mesh["hosts"]))
    first = FullyShardedDataParallel(Network(), device_id=torch.device("cpu"))
    assert_refused("(FSDP1)", lambda: made(first).register(first, mesh["hosts"]))
    hybrid = Network()
    shard(hybrid, mesh)
    assert_refused("sums uncompressed before", lambda: made(hybrid).register(hybrid, mesh["hosts"]))
    network = Network()
    early = made(network)
    shard(network, mesh["ranks"])
    assert_refused("create the compressor after", lambda: early.register(network, mesh["hosts"]))
    assert_refused("one-dimensional DeviceMesh", lambda: made(network).register(network))
    assert_refused("got 2 dimensions", lambda: made(network).register(network, mesh))
    assert_refused("share only this rank", lambda: made(network).register(network, mesh["ranks"]))
    assert_refused(
        "expected schedule=None or a Plan",
        lambda: made(network, schedule="auto").register(network, mesh["hosts"]),
    )
    ignoring = torch.nn.Sequential(torch.nn.Linear(30, 30))
    fully_shard(ignoring, mesh=mesh["ranks"], ignored_params={ignoring[0].bias})
    assert_refused("got also 0.bias", lambda: made(ignoring).register(ignoring, mesh["hosts"]))
    compressor = made(network)
    compressor.register(network, mesh["hosts"])
    assert_refused("one compressor per model", lambda: compressor.register(network, mesh["hosts"]))
    assert_refused("has a hook", lambda: made(network).register(network, mesh["hosts"]))
    assert_refused("registered with a model", lambda: compressor.compress(torch.zeros(3)))
    state = compressor.state_dict()
    assert_refused("state of fully_shard", lambda: compressor.load_state_dict({"rank": 0}))
    other = {**state, "shard": 1 - state["shard"]}
    assert_refused("of shard", lambda: compressor.load_state_dict(other))
    assert_refused("one state of each shard", lambda: compressor.load_state_dict([state, state]))
    compressor.close()
    assert_refused("got one after close()", lambda: loss_of(network, 0, dist.get_rank()).backward())


def scenario_reentrant_checkpoint_is_refused(directory):
    network = Network()
    sharded(network, meshes(2), CODEC)
    hidden = torch.ones(2, 32, requires_grad=True)
    hidden = checkpoint(network.first, hidden, use_reentrant=True)
    assert_refused("with use_reentrant=False", lambda: hidden.sum().backward())


def scenario_compiled_layers(directory):
    network, mesh = Network(), meshes(2)
    reference = Reference(network)
    network.first.compile(backend="eager")
    compressor = sharded(network, mesh, CODEC)
    oracle = ShardOracle(compressor, network, mesh)
    for step in range(2):
        reference.follow(network)
        own = [reference.gradients(step, rank) for rank in range(dist.get_world_size())]
        network.zero_grad()
        loss_of(network, step, dist.get_rank()).backward()
        shards = reference.on_hosts(own, mesh)
        expect_on_all_ranks(lambda: oracle.compare(compressor, network, shards, "compiled"))


def scenario_optimizer_with_momentum_is_warned_about_and_prepared(directory):
    for prepared in (False, True):
        network = Network()
        compressor = sharded(network, meshes(2), CODEC)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        if prepared:
            dr.prepare(optimizer, compressor)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                optimizer.zero_grad()
                loss_of(network, step, dist.get_rank()).backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
        found = [str(one.message) for one in caught if "betas" in str(one.message)]
        assert len(found) == (not prepared), found


def scenario_hook_of_an_optimizer_sees_the_average(directory):
    network, mesh = Network(), meshes(2)
    seen = {}
    shard(network, mesh["ranks"], WHOLE)
    names = {id(one): name for name, one in network.named_parameters()}
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one: seen.update({names[id(one)]: one.grad.to_local().clone()})
        )
    compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=200)
    compressor.register(network, mesh["hosts"])
    loss_of(network, 0, dist.get_rank()).backward()
    for name, parameter in network.named_parameters():
        assert torch.equal(seen[name], parameter.grad.to_local()), name
