"""Test states of a compressor with fully_shard: joined, divided in another way, and checked."""

import copy
import random
import types
import zlib

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import deepreduce_hvd as dr
from deepreduce_hvd.checkpoints import sharded_checkpoint
from deepreduce_hvd.checkpoints.configuration import Configuration
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.torch.fsdp.groups import ShardSlot
from deepreduce_hvd.torch.slot import Slot

#: name -> (shape, dimension that is sharded)
SHAPES = {
    "matrix": ((7, 3), 0),
    "vector": ((2,), 0),
    "columns": ((3, 12), 1),
    "cube": ((5, 2, 4), 0),
}
CONFIGURATION = Configuration(77, {})
#: PyTorch's group, which divides nothing after the exchange
GROUP = types.SimpleNamespace(mp_policy=MixedPrecisionPolicy(), force_sum_reduction_for_comms=False)
POLICY = Policy("codec", dr.Codec(dr.TopK(0.1)), dr.Residual())


def place(rank, size):
    return types.SimpleNamespace(rank=rank, size=size)


def slots_of(shard, shards, dims):
    """Return the slots of one rank, with memories of zeros."""
    slots = {}
    for name, (shape, dim) in SHAPES.items():
        dim = dims.get(name, dim)
        start, stop = sharded_checkpoint.bounds(shape[dim], shard, shards)
        own = (*shape[:dim], stop - start, *shape[dim + 1 :])
        whole = Slot(
            name, torch.nn.Parameter(torch.zeros(shape)), zlib.crc32(name.encode()), POLICY, False
        )
        slots[name] = ShardSlot(
            whole,
            types.SimpleNamespace(
                sharded_size=torch.Size(own), fsdp_placement=types.SimpleNamespace(dim=dim)
            ),
            GROUP,
        )
    return slots


def job(hosts, shards, **dims):
    """Return {(host, shard): slots} of all ranks; ``dims`` replace those of :data:`SHAPES`."""
    return {
        (host, shard): slots_of(shard, shards, dims)
        for host in range(hosts)
        for shard in range(shards)
    }


def saved(ranks, hosts, shards, steps=4):
    for slots in ranks.values():
        for slot in slots.values():
            slot.steps = steps
    return [
        sharded_checkpoint.dump(slots, CONFIGURATION, place(host, hosts), place(shard, shards))
        for (host, shard), slots in ranks.items()
    ]


def load(ranks, hosts, shards, state):
    for (host, shard), slots in ranks.items():
        sharded_checkpoint.load(
            slots, state, CONFIGURATION, place(host, hosts), place(shard, shards), lambda rank: rank
        )


def whole_residuals(ranks, shards):
    """Return {(host, name): the residual of a whole parameter}."""
    hosts = {host for host, _ in ranks}
    return {
        (host, name): torch.cat(
            [ranks[host, shard][name].state[0].view(ranks[host, shard][name].shape) for shard in range(shards)],
            dim=dim,
        )
        for host in hosts
        for name, (_, dim) in SHAPES.items()
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_other_numbers_of_hosts_and_shards_keep_the_update(seed):
    """A sum stays the same, an average is of another number of hosts."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    # columns are divided evenly
    hosts, shards, new_hosts, new_shards = (draw.choice([1, 2, 3, 4]) for _ in range(4))
    old = job(hosts, shards)
    reduction = draw.choice(["sum", "average"])
    ratio = 1 if reduction == "sum" else new_hosts / hosts
    for slots in old.values():
        for slot in slots.values():
            slot.reduction = reduction if slot.shape.numel() else None
            if draw.random() < 0.7:  # the others stay zeros, which are saved as one number
                slot.state[0].copy_(torch.randint(-8, 8, slot.state[0].shape).float())
    all_states = saved(old, hosts, shards)
    draw.shuffle(all_states)
    new = job(new_hosts, new_shards)
    load(new, new_hosts, new_shards, all_states)
    before, after = whole_residuals(old, shards), whole_residuals(new, new_shards)
    for name, (shape, _) in SHAPES.items():
        expected = torch.zeros(new_hosts, *shape)
        for host in range(hosts):
            expected[host % new_hosts] += before[host, name]
        for host in range(new_hosts):
            scaled = (expected[host].double() * ratio).float()
            assert torch.equal(after[host, name], scaled), (name, host)
    assert {slot.steps for slots in new.values() for slot in slots.values()} == {4}


def test_other_dimensions_keep_the_sum():
    """Shards of equal sizes along another dimension have other elements."""
    torch.manual_seed(0)
    old, new = job(2, 2), job(2, 2, columns=0, cube=1)
    for slots in old.values():
        for slot in slots.values():
            slot.state[0].copy_(torch.randint(-8, 8, slot.state[0].shape).float())
    all_states = saved(old, 2, 2)
    load(new, 2, 2, all_states)
    before = whole_residuals(old, 2)
    for (host, shard), slots in new.items():
        for name, (shape, _) in SHAPES.items():
            dim = slots[name].dim
            start, stop = sharded_checkpoint.bounds(shape[dim], shard, 2)
            expected = before[host, name].narrow(dim, start, stop - start)
            assert torch.equal(slots[name].state[0].view(slots[name].shape), expected), name


def _with_memories(divisor):
    """Return the states of two hosts of two shards with memories of ones."""
    ranks = job(2, 2)
    for slots in ranks.values():
        for slot in slots.values():
            slot.state[0].fill_(1.0)
            slot.divided_after = divisor
    return saved(ranks, 2, 2)


@pytest.mark.parametrize("in_one_list", [False, True])
def test_memories_follow_what_the_averages_are_divided_by_after_the_exchange(in_one_list):
    states = _with_memories(2.0)
    (new,) = (slots for place, slots in job(2, 2).items() if place == (0, 0))
    sharded_checkpoint.load(
        new, states if in_one_list else states[0], CONFIGURATION, place(0, 2), place(0, 2), int
    )
    for slot in new.values():
        for divisor in (2.0, 4.0, 4.0, 1.0):
            slot.follow_division(divisor)
            assert bool((slot.state[0] == divisor / 2).all()) and slot.divided_after == divisor


@pytest.mark.parametrize(
    "group",
    [
        {"force_sum_reduction_for_comms": True},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
    ],
)
def test_states_of_earlier_versions_cannot_change_shards_that_are_divided_later(monkeypatch, group):
    states, empty = _with_memories(2.0), saved(job(2, 2), 2, 2)
    for state in (*states, *empty):
        del state["divided_after"]
    for name, value in group.items():
        monkeypatch.setattr(GROUP, name, value)
    load(job(1, 2), 1, 2, states)
    load(job(2, 1), 2, 1, empty)
    refused = pytest.raises(
        dr.InvalidArgumentError, match="number of shards, which was 2 and is 1, got states without"
    )
    with refused:
        load(job(2, 1), 2, 1, states)
    monkeypatch.undo()
    load(job(2, 1), 2, 1, states)


def test_a_single_state_of_another_dimension_is_refused():
    (own,) = job(1, 1).values()
    state = sharded_checkpoint.dump(own, CONFIGURATION, place(0, 1), place(0, 1))
    (other,) = job(1, 1, cube=2).values()
    with pytest.raises(
        dr.InvalidArgumentError, match="cube: expected shards along dimension 2, got .* 0; pass"
    ):
        sharded_checkpoint.load(
            other, state, CONFIGURATION, place(0, 1), place(0, 1), lambda rank: rank
        )


def _changed(change):
    all_states = copy.deepcopy(saved(job(2, 2), 2, 2))
    change(all_states)
    return all_states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all_states: all_states.pop(), "one state of each shard of each host"),
        (lambda all_states: all_states.clear(), "one state of each shard of each host"),
        (lambda all_states: all_states[1].pop("shard"), "a state of fully_shard"),
        (lambda all_states: all_states[1].update(shards=3), "one state of each shard"),
        (lambda all_states: all_states[1].pop("dims"), "a state of fully_shard"),
        (
            lambda all_states: all_states.__setitem__(1, dict.fromkeys("abcd")),
            "a state of fully_shard, .*, got a dictionary with the keys a, b, c, …$",
        ),
        (lambda all_states: all_states[1]["dims"].update(cube=1), "the same dims"),
        (lambda all_states: all_states[1].update(divided_after=3), "a state of fully_shard"),
        (
            lambda all_states: all_states[1]["divided_after"].update(cube=-1),
            "cube: expected None or a positive finite number in divided_after, got -1",
        ),
        (
            lambda all_states: [
                all_states[number]["divided_after"].update(cube=number) for number in (1, 2)
            ],
            "cube: expected the same divided_after in all states, got 1 and 2",
        ),
        (
            lambda all_states: [state["dims"].update(cube=3) for state in all_states],
            "cube: expected a dimension below 3",
        ),
        (lambda all_states: all_states[1].update(fingerprint=8), "same fingerprint"),
        (lambda all_states: all_states[0].pop("parameters"), "expected"),
        (lambda all_states: all_states[1].update(parameters=3), "expected"),
        (
            lambda all_states: all_states[1]["parameters"]["cube"].update(steps=5),
            "the same steps in all shards",
        ),
        (
            lambda all_states: all_states[3]["parameters"]["cube"].update(memory=None),
            "shard 1 of 2",
        ),
        (
            lambda all_states: all_states[3]["parameters"]["cube"]["memory"].update(
                residual=torch.zeros(3)
            ),
            r"array of shape \(2, 2, 4\)",
        ),
        (lambda all_states: all_states[2]["parameters"].pop("cube"), "same parameters"),
        (lambda all_states: all_states[1]["parameters"].pop("cube"), "same parameters"),
        (lambda all_states: all_states[1]["parameters"].update(other={}), "same parameters"),
    ],
)
def test_states_that_do_not_fit_change_nothing(change, message):
    all_states = _changed(change)
    ranks = job(2, 2)
    for slots in ranks.values():
        for slot in slots.values():
            slot.state[0].fill_(3.0)
    with pytest.raises(dr.InvalidArgumentError, match=message):
        load(ranks, 2, 2, all_states)
    for slots in ranks.values():
        for slot in slots.values():
            assert bool((slot.state[0] == 3.0).all()) and not slot.steps
