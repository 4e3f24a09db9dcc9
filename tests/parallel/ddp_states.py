"""State of a compressor with PyTorch's DDP, and what is refused; run by ddp_scenarios.py."""

import contextlib
import copy
import datetime
import gc
import pickle
import time
import weakref

import measured_steps
import pytest
import random_plans
import torch
import torch.distributed as dist
from ddp_tools import (
    CODEC,
    SMALL_BUCKETS,
    Network,
    assert_refused,
    distributed,
    gradients_of,
    loss_of,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import deepreduce_hvd as dr
from deepreduce_hvd.errors import PeerFailedError
from deepreduce_hvd.schedule import Message
from deepreduce_hvd.torch.ddp.transport import ranks_and_timeout


def scenario_resume_is_bit_for_bit(directory):
    # DDP assigns gradients to buckets after the first step, and, from three ranks on, dense sums
    # depend on what is in a bucket
    rank = dist.get_rank()

    def steps(model, network, first, count):
        for step in range(first, first + count):
            network.zero_grad()
            loss_of(model, step, rank).backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= 0.1 * parameter.grad

    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS, dense_below=0)
    steps(model, network, 0, 3)
    weights, state = copy.deepcopy(network.state_dict()), compressor.state_dict()
    steps(model, network, 3, 3)
    for in_one_list in (False, True):
        other = Network()
        other.load_state_dict(weights)
        again, resumed = distributed(other, CODEC, ddp=SMALL_BUCKETS, dense_below=0)
        if in_one_list:
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, state)
            resumed.load_state_dict(states)
        else:
            resumed.load_state_dict(state)
        steps(again, other, 3, 3)
        for (name, one), (_, two) in zip(network.named_parameters(), other.named_parameters()):
            assert torch.equal(one, two), name


def scenario_a_plan_that_sends_a_parameter_uncompressed_adds_its_residual_once(directory):
    rank, size = dist.get_rank(), dist.get_world_size()
    network = Network()
    model, compressor = distributed(network, CODEC)
    loss_of(model, 0, rank).backward()
    state = compressor.state_dict()
    names = [name for name, policy in compressor.policies.items() if not policy.dense]
    dense, fp16, *others = names
    plan = random_plans.plan_of(
        [
            Message((dense,), "dense"),
            Message((fp16,), "fp16"),
            Message(tuple(others), "codec", 0.3, "SplitAllgather"),
        ],
        size,
    )
    other = Network()
    model, planned = distributed(other, CODEC, schedule=plan)
    planned.load_state_dict(state)
    assert planned.plan == plan
    for step in (1, 2):
        other.zero_grad()
        expected = [
            gradients_of(
                other, lambda copy, one=one, step=step: loss_of(copy, step, one).backward()
            )
            for one in range(size)
        ]
        loss_of(model, step, rank).backward()
        for name, near in ((dense, 1e-5), (fp16, 2e-2)):
            total = sum(own[name] for own in expected)
            if step == 1:
                kept = state["parameters"][name]["memory"]["residual"].clone()
                dist.all_reduce(kept)
                assert kept.any(), name
                total = total + kept.view_as(total)
            mean = total / size
            found = dict(other.named_parameters())[name].grad
            torch.testing.assert_close(found, mean, rtol=near, atol=near * float(mean.abs().max()))
            left = planned.state_dict()["parameters"][name]["memory"]["residual"].abs().max()
            # float16 always rounds
            assert left <= (1e-3 * mean.abs().max() if name == fp16 else 0.0), (name, left)
    rows = planned.stats()
    assert (rows[dense]["path"], rows[fp16]["path"]) == ("dense", "fp16")
    assert rows[fp16]["sent_bytes"] == 2 * rows[fp16]["elements"]


def scenario_profile_and_timeline(directory):
    for with_plan in (False, True):
        network = Network()
        names = [name for name, one in network.named_parameters() if one.numel() >= 200]
        plan = random_plans.plan_of(
            [Message(tuple(names), "codec", 0.3, "Allgather")], dist.get_world_size()
        )
        model, compressor = distributed(
            network, CODEC, ddp=SMALL_BUCKETS, schedule=plan if with_plan else None
        )

        def step(number, model=model):
            model.zero_grad()
            loss_of(model, number, dist.get_rank()).backward()

        measured_steps.check(compressor, network, step, directory)


def scenario_resume_with_fewer_ranks(directory):
    network = Network()
    model, compressor = distributed(network, CODEC)
    loss_of(model, 0, dist.get_rank()).backward()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, compressor.state_dict())
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        other = Network()
        model, resumed = distributed(other, CODEC, ddp={"process_group": alone})
        resumed.load_state_dict(states)
        for name, saved in resumed.state_dict()["parameters"].items():
            for kind, kept in saved["memory"].items():
                total = sum(one["parameters"][name]["memory"][kind].double() for one in states)
                mean = total / len(states)  # DDP averages
                torch.testing.assert_close(kept.double(), mean, rtol=0, atol=1e-6)
        loss_of(model, 1, 0).backward()
        assert resumed.stats()["branch.weight"]["steps"] == 2


def scenario_refused(directory):
    network = Network()
    model = DistributedDataParallel(network)

    def compressor(**options):
        return dr.Compressor(CODEC, parameters=network.named_parameters(), **options)

    assert_refused("got Network", lambda: compressor().register(network))
    assert_refused(
        "register before torch.compile", lambda: compressor().register(torch.compile(model))
    )
    some = list(network.named_parameters())[1:]
    assert_refused(
        "got none for convolution.weight",
        lambda: dr.Compressor(CODEC, parameters=some).register(model),
    )
    assert_refused("call register(ddp_model) first", lambda: compressor().state_dict())
    registered = compressor()
    registered.register(model)
    assert_refused("one compressor per model", lambda: registered.register(model))
    assert_refused(
        "registered with a model of torch.distributed", lambda: registered.compress(torch.zeros(3))
    )
    assert_refused("got one that has a hook", lambda: compressor().register(model))
    assert_refused("save model.module.state_dict()", lambda: pickle.dumps(model))
    assert_refused("save model.module.state_dict()", lambda: copy.deepcopy(model))
    _refused_options_of_ddp()
    # tensors of the embedding's gradients have no place in DDP's buckets
    embedding = torch.nn.Embedding(100, 8, sparse=True)
    sparse, _ = distributed(embedding)
    assert_refused("sparse=False", lambda: sparse(torch.tensor([1, 2])).sum().backward())


def _refused_options_of_ddp():
    def register(network, **options):
        model = DistributedDataParallel(network, **options)
        dr.Compressor(CODEC, parameters=network.named_parameters()).register(model)

    network = Network()
    delayed = list(network.last.named_parameters())
    assert_refused(
        "expected no delay_all_reduce_named_params=",
        lambda: register(
            network,
            delay_all_reduce_named_params=[(f"last.{name}", one) for name, one in delayed],
            param_to_hook_all_reduce=network.first.weight,
        ),
    )
    skips = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    assert_refused(
        "expected skip_all_reduce_unused_params=False", lambda: register(network, **skips)
    )
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert_refused("expected DDP's own reducer", lambda: register(Network()))
    model = DistributedDataParallel(Network())
    model.mixed_precision = _MixedPrecision(torch.bfloat16)  # DDP sets it only with a GPU
    assert_refused(
        "got one that has mixed_precision=",
        lambda: dr.Compressor(CODEC, parameters=model.module.named_parameters()).register(model),
    )


def scenario_contiguous_gradients_are_encoded_without_a_copy(directory):
    for channels_last in (False, True):
        network = Network(channels_last=channels_last)
        model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS)
        adapter, buffers, members = compressor.adapter, [], []
        average, make = adapter.average, adapter.host_path.member

        def watched(bucket, average=average, buffers=buffers):
            buffers.append(bucket.buffer())
            return average(bucket)

        def member(*arguments, make=make, members=members):
            members.append(make(*arguments))
            return members[-1]

        adapter.average, adapter.host_path.member = watched, member
        loss_of(model, 0, dist.get_rank()).backward()
        memory = [
            range(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size())
            for one in buffers
        ]
        copied = {
            one.name
            for one in members
            if not any(one.gradient.ctypes.data in addresses for addresses in memory)
        }
        assert len(members) == 3, members
        assert copied == ({"convolution.weight"} if channels_last else set()), copied


def scenario_members_of_other_groups(directory):
    """PyTorch names groups by their number on a rank, which differs here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pair, _ = dist.new_group([0, size - 1]), dist.new_group([0], use_local_synchronization=True)
    if rank in (0, size - 1):
        network = Network()
        model, _ = distributed(
            network, CODEC, ddp={"process_group": pair}, communicator=dr.Hierarchical(dr.GTopK(), 1)
        )
        loss_of(model, 0, rank).backward()
        found = torch.cat([one.grad.reshape(-1) for one in network.parameters()])
        other = found.clone()
        dist.broadcast(other, 0, pair)
        assert torch.equal(found, other)


def scenario_timeout_of_a_group_without_the_host(directory):
    seconds = datetime.timedelta(seconds=37)
    group = dist.new_group(timeout=seconds, backend="cuda:gloo")
    assert ranks_and_timeout(group) == (list(range(dist.get_world_size())), seconds)


def scenario_groups_of_models_that_are_gone_are_freed(directory):
    registered = len(dist.distributed_c10d._world.pg_map)
    for closes in (False, True):
        model, compressor = distributed(Network(), communicator=dr.Hierarchical(dr.Allgather(), 1))
        loss_of(model, 0, dist.get_rank()).backward()
        transport = compressor.adapter.transport
        groups = [weakref.ref(one._group) for one in (transport, *transport.by_host(1)) if one]
        del transport
        if closes:
            compressor.close()
        else:
            del model, compressor
        gc.collect()
        assert len(groups) == 3 and not any(one() for one in groups), (closes, groups)
    assert len(dist.distributed_c10d._world.pg_map) == registered


def scenario_steps_that_are_discarded_have_ended(directory):
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS)
    for number in range(2):
        loss_of(model, number, dist.get_rank()).backward()
    adapter = compressor.adapter
    heads, restart = adapter.transport._heads, adapter.scheduler.restart
    restarts = []
    adapter.transport._heads = lambda *arguments: time.sleep(0.3) or heads(*arguments)
    adapter.scheduler.restart = lambda: restarts.append(0) or restart()

    def stumble(gradient):
        raise LookupError("a bad batch")

    network.convolution.weight.register_hook(stumble)
    with pytest.raises(LookupError):
        loss_of(model, 2, dist.get_rank()).backward()
    jobs = list(adapter._pass.jobs)
    assert jobs and not all(job.ended.is_set() for job in jobs)
    adapter.forget_steps()
    assert all(job.ended.is_set() for job in jobs) and len(restarts) == 1


def scenario_all_ranks_get_the_whole_error_of_one(directory):
    last = dist.get_world_size() - 1

    def scale():
        if dist.get_rank() == last:
            raise KeyError("no scale today " + 100 * "and tomorrow ")
        return 8.0

    model, _ = distributed(Network(), loss_scale=scale)
    with pytest.raises((KeyError, PeerFailedError), match="today (and tomorrow ){100}"):
        loss_of(model, 0, dist.get_rank()).backward()


def scenario_closed(directory):
    network = Network()
    model, compressor = distributed(network, CODEC)
    loss_of(model, 0, dist.get_rank()).backward()
    slots = compressor.adapter.slots
    compressor.close()
    assert not any(slot.state for slot in slots.values())
    assert_refused(
        "expected one that is not closed, got one after close()",
        lambda: loss_of(model, 1, dist.get_rank()).backward(),
    )


def scenario_residuals_stay_in_join_after_a_batch_without_synchronization(directory):
    network = Network()
    model, compressor = distributed(network, CODEC)
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = 4 if rank == size - 1 else 3  # two of each step
    with model.join():
        for number in range(batches):
            with contextlib.nullcontext() if number % 2 else model.no_sync():
                loss_of(model, number, rank).backward()
            if number == 1:
                kept = compressor.state_dict()["parameters"]
    after = compressor.state_dict()["parameters"]
    assert compressor.stats()["branch.weight"]["steps"] == 2
    for name, saved in kept.items():
        for kind, memory in saved["memory"].items():
            assert memory.any(), name
            assert torch.equal(memory, after[name]["memory"][kind]) == (rank < size - 1), name


class Checkpointed(Network):
    """A network that computes all layers but the last again, in backward passes of their own."""

    def forward(self, images, branch=True):
        def start(images):
            return self.first(self.convolution(images).tanh().flatten(1)).tanh()

        hidden = checkpoint(start, images.requires_grad_(), use_reentrant=True)
        hidden = checkpoint(lambda x: self.branch(x).tanh(), hidden, use_reentrant=True)
        return self.last(hidden)


def scenario_reentrant_checkpoints_are_one_step(directory):
    networks, ended = (Network(), Checkpointed()), []
    for network in networks:
        model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS)
        adapter = compressor.adapter
        step_ends = adapter.scheduler.step_ends

        def step_ended(*arguments, adapter=adapter, step_ends=step_ends):
            ended.append(len(adapter._buckets_of_pass()))
            step_ends(*arguments)

        adapter.scheduler.step_ends = step_ended
        for number in range(3):
            model.zero_grad()
            loss_of(model, number, dist.get_rank()).backward()
    assert len(ended) == 6 and min(ended[1:3]) > 1, ended
    assert ended[3:] == ended[:3], ended
    for (name, one), (_, two) in zip(*(network.named_parameters() for network in networks)):
        assert torch.equal(one.grad, two.grad), name


def scenario_join_that_divides_by_the_ranks_left_is_refused(directory):
    model, _ = distributed(Network())

    def train():
        with model.join(divide_by_initial_world_size=False):
            loss_of(model, 0, dist.get_rank()).backward()

    assert_refused("join(divide_by_initial_world_size=True)", train)
