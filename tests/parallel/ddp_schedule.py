"""``schedule="auto"`` and plans that change, with PyTorch's DDP. Scenarios of ddp_scenarios.py."""

import json
import pathlib
import random
from unittest import mock

import numpy as np
import random_plans
import torch
import torch.distributed as dist
from ddp_tools import (
    CODEC,
    SMALL_BUCKETS,
    Network,
    assert_equal_everywhere,
    distributed,
    gradients_of,
    loss_of,
)
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout, scheduler as scheduler_module
from deepreduce_hvd.planning.policies import rows_codec

#: the first step in which everything has been measured and all plans had their turns
_DECIDED = 170


def sum_over_ranks(tensor):
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total


def gathered(found):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def train_with_equal_times(model, network, compressor, steps, seconds=lambda step: 1.0):
    """Train as if every step took ``seconds(step)``, so that all decisions are known.

    Returns:
        The plan of each step as JSON text, "" for none, and the number of the scheduler's
        collectives after each.
    """
    scheduler, times = compressor.adapter.scheduler, compressor.adapter.times
    plans, calls = [], []
    step_ends = scheduler.step_ends
    for step in range(steps):

        def equal_times(*arguments, step=step):
            if times.seconds is not None:
                times.seconds = seconds(step)
            step_ends(*arguments)

        scheduler.step_ends = equal_times
        network.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        plans.append("" if compressor.plan is None else compressor.plan.to_json())
        calls.append(scheduler.figures.calls)
        if step % 20 == 0:
            assert_equal_everywhere([(n, p.grad) for n, p in network.named_parameters()], step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
    scheduler.step_ends = step_ends
    return plans, calls


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_measures_and_decides_alike(directory):
    """All ranks change plans at the same steps; the messages of plans are DDP's buckets."""
    network = Network()
    codec = dr.Codec(dr.TopK(0.05, warmup_steps=3), index=dr.Rice(), value=dr.LloydMax(bits=1))
    for _ in range(dist.get_rank()):  # ranks may create other numbers of compressors before
        dr.Compressor(codec, parameters=Network().named_parameters())
    model, compressor = distributed(network, codec, ddp=SMALL_BUCKETS, schedule="auto")
    buckets = []
    average = compressor.adapter.average

    def watched(bucket):
        if bucket.index() == 0:
            buckets.clear()
        buckets.append({id(one) for one in bucket.parameters()})
        return average(bucket)

    compressor.adapter.average = watched
    plans, _ = train_with_equal_times(model, network, compressor, _DECIDED)
    assert plans[0] == "" and plans[-1] != "" and len(set(plans)) > 2, set(map(len, plans))
    assert all(one == plans for one in gathered(plans)), "ranks had other plans"
    parameters = dict(network.named_parameters())
    for message in compressor.plan.messages:
        members = {id(parameters[name]) for name in message.members}
        assert any(members <= bucket for bucket in buckets), message
    assert len(compressor.plan.messages) > 1, compressor.plan
    trials = compressor.adapter.scheduler.trials
    assert {trial.measured for trial in trials} == {1.0}, trials
    most = max(trials, key=lambda trial: trial.kept)
    assert compressor.plan.step_seconds == most.predicted, (compressor.plan, trials)
    profile = compressor.profile()
    assert profile.hosts == dist.get_world_size() and profile.link() is not None, profile
    path = pathlib.Path(directory) / f"auto.{dist.get_world_size()}.{dist.get_rank()}.json"
    compressor.timeline(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"measured", "predicted"}, names


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_starts_again_when_steps_change(directory):
    """After steps that are much longer, the job measures again, on all ranks at once."""
    network = Network()
    model, compressor = distributed(network, CODEC, schedule="auto")
    _, calls = train_with_equal_times(
        model, network, compressor, _DECIDED + 200, lambda step: 1.0 if step <= _DECIDED else 10.0
    )
    rounds = np.flatnonzero(np.diff(calls) > 20)
    assert len(rounds) == 2 and rounds[0] < _DECIDED < rounds[1] < _DECIDED + 40, rounds
    assert all(one == calls for one in gathered(calls)), "ranks differ"


def scenario_auto_with_batches_for_some_ranks_only(directory):
    """Ranks in DDP's join() take part in what is measured and in all decisions."""
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS, schedule="auto")
    rank, most = dist.get_rank(), 0
    mine = 6 + 50 * rank  # rank 0 ends before anything is measured
    with model.join():
        for step in range(mine):
            network.zero_grad()
            loss_of(model, step, rank).backward()
            most = step
    assert most == mine - 1
    plans = gathered(None if compressor.plan is None else compressor.plan.to_json())
    assert plans[0] is not None and len(set(plans)) == 1, plans
    steps = {row["steps"] for row in compressor.stats().values()}
    assert steps == {6 + 50 * (dist.get_world_size() - 1)}, steps


def scenario_auto_with_an_embedding_table(directory):
    """It gets the codec "rows" in each plan, also if it is used for the first time after that."""
    for first_used in (1, 30):
        network = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
        model = DistributedDataParallel(network, **SMALL_BUCKETS)
        compressor = dr.Compressor(parameters=network.named_parameters(), schedule="auto")
        compressor.register(model)
        scheduler, draw = compressor.adapter.scheduler, random.Random(first_used)
        scheduler._begin(scheduler._watch, 10**9)  # this program changes the plans
        names, seen, ways = ["0.weight", "1.weight"], False, set()
        for step in range(60):
            plan = random_plans.random_plan(draw, names, dist.get_world_size())
            way = "codec"  # in no message
            for message in plan.messages:
                way = message.way if "0.weight" in message.members else way
            scheduler.layout = layout.of_plan(
                compressor.first_policies, compressor.fingerprint, plan
            )
            network.zero_grad()
            rows = (torch.arange(9) + 9 * step + dist.get_rank()) % 300
            factor = float(step >= first_used)
            (model(rows) * factor).pow(2).sum().backward()
            row = compressor.stats()["0.weight"]
            assert row["path"] == ("compressed" if seen or way == "codec" else way), (step, row)
            if seen:
                # the first time with what was left of earlier gradients
                assert not ways or row["sent_values"] == 9 * 8, (step, row)
                ways.add(way)
            seen = seen or (factor > 0 and way == "codec")
            assert (compressor.policies["0.weight"].codec == rows_codec()) == seen, step
            assert_equal_everywhere([(n, p.grad) for n, p in network.named_parameters()], step)
        assert ways == {"codec", "dense", "fp16"}, ways
        assert compressor.adapter.notes()[0].endswith("0.weight."), compressor.adapter.notes()
        compressor.close()


def scenario_auto_with_nothing_to_measure(directory):
    network = Network()
    model, compressor = distributed(network, CODEC, schedule="auto", dense_below=1 << 20)
    for step in range(15):
        network.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
    assert compressor.plan is None
    compressor.summary()


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_with_steps_that_are_regularly_longer(directory):
    """Such steps are no change: everything is measured once."""
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS, schedule="auto")
    _, calls = train_with_equal_times(
        model, network, compressor, _DECIDED + 60, lambda step: 1.0 if step % 4 else 3.0
    )
    rounds = np.flatnonzero(np.diff(calls) > 20)
    assert len(rounds) == 1 and compressor.plan is not None, rounds


def scenario_plans_that_change_in_every_step_lose_nothing(directory):
    """Sent + kept = what came in, while each step has another random plan."""
    size = dist.get_world_size()
    for seed in range(4):
        draw = random.Random(seed)
        network = Network()
        model, compressor = distributed(
            network, CODEC, ddp=draw.choice([{}, SMALL_BUCKETS]), schedule="auto", threads=seed % 2
        )
        scheduler = compressor.adapter.scheduler
        scheduler.step_ends = lambda *_: None
        names = [name for name, policy in compressor.policies.items() if not policy.dense]
        came_in, arrived, halved = {}, {}, set()
        for step in range(8):
            plan = random_plans.random_plan(draw, names, size)
            scheduler.layout = layout.of_plan(compressor.policies, compressor.fingerprint, plan)
            for message in plan.messages:
                if message.way == "fp16":
                    halved.update(message.members)
            network.zero_grad()
            for rank in range(size):
                own = gradients_of(network, lambda other: loss_of(other, step, rank).backward())
                for name, gradient in own.items():
                    came_in[name] = came_in.get(name, 0) + gradient.double()
            loss_of(model, step, dist.get_rank()).backward()
            assert compressor.plan == plan
            for name, parameter in network.named_parameters():
                arrived[name] = arrived.get(name, 0) + parameter.grad.double() * size
        for name, saved in compressor.state_dict()["parameters"].items():
            total = arrived[name]
            if saved["memory"]:
                total = total + sum_over_ranks(saved["memory"]["residual"]).view_as(total)
            near = 1e-3 if name in halved else 1e-6
            torch.testing.assert_close(
                total, came_in[name], rtol=0, atol=near * max(1, float(came_in[name].abs().max())),
                msg=lambda text, name=name, seed=seed: f"seed {seed}, {name}: {text}",
            )  # fmt: skip
