"""Test plans and ``schedule="auto"`` on stock Horovod with PyTorch.

Started by test_torch_schedule.py under horovodrun.
"""

import json
import random
import sys
from unittest import mock

import horovod.torch as hvd
import numpy as np
import random_plans
import torch
import torch_auto_optimizers
import torch_given_plans
import torch_planned_tables
import torch_profiles
import torch_uncompressed
from scenario_runner import sample
from torch_given_plans import CODEC, plan_of
from torch_gradients_tools import expect, run_reporting
from torch_tools import (
    assert_equal_everywhere,
    backward,
    distributed,
    follow_layout,
    gradients,
    local_gradients,
    model,
)

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout, scheduler as scheduler_module
from deepreduce_hvd.schedule import Message

#: the first step in which everything has been measured and all plans had their turns
DECIDED = 170


def residuals(compressor, name):
    """Return the sum of the residuals of all ranks."""
    kept = compressor.state_dict()["parameters"][name]["memory"].get("residual")
    return 0.0 if kept is None else hvd.allreduce(kept.double(), op=hvd.Sum, name=f"kept.{name}")


def scenario_plans_that_change_in_every_step_lose_nothing(directory):
    """With another random plan in each step, what is sent plus what is kept equals the input."""
    for seed in sample(hvd.size(), range(6)):
        draw = random.Random(seed)
        network = model()
        optimizer, compressor = distributed(network, CODEC, compressor_options={"dense_below": 50})
        names = [name for name, policy in compressor.policies.items() if not policy.dense]
        came, arrived, halved = {}, {}, {}
        for step in range(8):
            plan = random_plans.random_plan(draw, names, hvd.size(), repr(CODEC))
            compressor.adapter.scheduler.layout = layout.of_plan(
                compressor.policies, compressor.fingerprint, plan
            )
            follow_layout(compressor)
            for message in plan.messages:
                if message.way == "fp16":
                    halved.update(dict.fromkeys(message.members, True))
            before = local_gradients(network, step)
            network.zero_grad()
            backward(network, step)
            optimizer.synchronize()
            for name, gradient in gradients(network):
                came[name] = came.get(name, 0) + before[name].double().view(-1)
                arrived[name] = arrived.get(name, 0) + gradient.double().view(-1) * hvd.size()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert_equal_everywhere(network.named_parameters(), f"plans {seed} {step}")
            paths = {name: row["path"] for name, row in compressor.stats().items()}
            for message in plan.messages:
                wanted = {"codec": "compressed"}.get(message.way, message.way)
                expect({paths[name] for name in message.members} == {wanted}, message, paths)
        for name in names:
            total = hvd.allreduce(came[name], op=hvd.Sum, name=f"came.{name}")
            difference = (arrived[name] + residuals(compressor, name).view(-1) - total).abs().max()
            limit = 1e-3 if name in halved else 1e-5  # sums of float16 round
            expect(float(difference) <= limit * float(total.abs().max() + 1), name, difference)


def scenario_plans_that_change_while_gradients_of_others_are_in_flight(directory):
    """Plans may change while one of several optimizers has gradients in flight."""
    for seed in range(8):
        draw, own = random.Random(seed), torch.Generator().manual_seed(seed * 10 + hvd.rank())
        weights = {
            f"w{n}": torch.nn.Parameter(torch.zeros(draw.choice((60, 3000)))) for n in range(8)
        }
        compressor = dr.Compressor(
            CODEC,
            parameters=weights.items(),
            bucket_bytes=draw.choice((0, 20_000, 1 << 26)),
            dense_below=0,
            threads=draw.randrange(3),
        )
        parts = [[*weights][:4], [*weights][4:]]
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD([weights[name] for name in part], lr=1.0),
                named_parameters=[(name, weights[name]) for name in part],
                compression=compressor,
            )
            for part in parts
        ]
        came = {name: torch.zeros(one.numel()) for name, one in weights.items()}
        under_way = [None, None]  # the weights whose gradients backward has not computed yet
        for _ in range(40):
            compressor.adapter.scheduler.layout = layout.of_plan(
                compressor.policies,
                compressor.fingerprint,
                random_plans.random_plan(draw, [*weights], hvd.size(), repr(CODEC)),
            )
            follow_layout(compressor)
            chosen = draw.randrange(2)
            left = under_way[chosen] or draw.sample(parts[chosen], 4)
            used, left = left[: draw.choice((2, 4))], left[2:]
            factors = {name: torch.randn(came[name].numel(), generator=own) for name in used}
            sum((weights[name] * factor).sum() for name, factor in factors.items()).backward()
            for name, factor in factors.items():
                came[name] += factor
            under_way[chosen] = left if len(used) == 2 else []
            if not under_way[chosen]:
                optimizers[chosen].step()
                optimizers[chosen].zero_grad()
                sizes = [slot.payload_bytes is None for slot in compressor.adapter.slots.values()]
                everywhere = hvd.allgather_object(sizes)
                expect(all(one == sizes for one in everywhere), "payloads:", everywhere)
        for optimizer in optimizers:
            optimizer.step()
        for name, weight in weights.items():
            total = hvd.allreduce(came[name].double(), op=hvd.Sum, name=f"came.{name}")
            arrived = -weight.detach().double() * hvd.size()
            difference = (arrived + residuals(compressor, name) - total).abs().max()
            expect(float(difference) <= 0.05, seed, name, difference)  # float16 rounds
        assert_equal_everywhere(weights.items(), f"in flight {seed}")


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_measures_and_decides_alike(directory):
    """All ranks change plans at the same steps.

    The profile, the timeline and the state are then available.
    """
    network = model()
    codec = dr.Codec(dr.TopK(0.05, warmup_steps=3), index=dr.Rice(), value=dr.LloydMax(bits=1))
    optimizer, compressor = distributed(
        network, codec, compressor_options={"dense_below": 50, "schedule": "auto"}
    )
    plans, times = [], compressor.adapter.times
    for step in range(DECIDED):
        network.zero_grad()
        backward(network, step)
        if times.seconds is not None:  # equal, and much longer than predicted: all plans take part
            times.seconds = 1.0
        optimizer.step()
        text = "" if compressor.plan is None else compressor.plan.to_json()
        plans.append(sum(text.encode()) if text else 0)
        if step % 20 == 0:
            assert_equal_everywhere(network.named_parameters(), f"auto {step}")
    expect(plans[0] == 0 and plans[-1] != 0, "there was a plan in steps", plans)
    everywhere = hvd.allgather_object(plans)
    expect(all(one == plans for one in everywhere), "ranks had other plans:", everywhere)
    trials = compressor.adapter.scheduler.trials
    expect({trial.measured for trial in trials} == {1.0}, "tried", trials)
    expect("fp16" not in {trial.rule for trial in trials}, "Gloo summed float16:", trials)
    most = max(trials, key=lambda trial: trial.kept)
    expect(compressor.plan.step_seconds == most.predicted, "used", compressor.plan, "of", trials)
    profile = compressor.profile()
    expect(profile.hosts == hvd.size() and profile.link() is not None, "the profile is", profile)
    expect(all(part.payload_bytes for part in profile.parameters), "payloads:", profile.parameters)
    path = f"{directory}/timeline.{hvd.size()}.{hvd.rank()}.json"
    compressor.timeline(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    expect(names == {"measured", "predicted"}, "processes are", names)
    expect(all(event.get("dur", 0) >= 0 for event in events), "durations:", events)
    state = compressor.state_dict()
    compressor.load_state_dict(state)
    kept = np.concatenate(
        [
            np.asarray(one["memory"].get("residual", [])).ravel()
            for one in state["parameters"].values()
        ]
    )
    expect(np.isfinite(kept).all(), "residuals")


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_starts_again_when_steps_change(directory):
    """If steps become much longer, all ranks measure again, at the same step."""
    network = model()
    optimizer, compressor = distributed(
        network, CODEC, compressor_options={"dense_below": 50, "schedule": "auto"}
    )
    scheduler, times = compressor.adapter.scheduler, compressor.adapter.times
    measured = []
    for step in range(DECIDED + 200):
        network.zero_grad()
        backward(network, step)
        if times.seconds is not None:  # as if the network had become slower
            times.seconds = 1.0 if step <= DECIDED else 10.0
        optimizer.step()
        calls = scheduler.figures.calls
        measured.append(calls)
    rounds = np.flatnonzero(np.diff(measured) > 20)
    expect(
        len(rounds) == 2 and rounds[0] < DECIDED < rounds[1] < DECIDED + 40,
        "measured after steps",
        rounds,
    )
    everywhere = hvd.allgather_object(measured)
    expect(all(one == measured for one in everywhere), "ranks differ")
    assert_equal_everywhere(network.named_parameters(), "again")


@mock.patch.object(scheduler_module, "_REST", 0)
def scenario_auto_starts_again_after_a_rest(directory):
    """Without any difference too, all ranks measure again, at the same step."""
    network = model()
    optimizer, compressor = distributed(
        network, CODEC, compressor_options={"dense_below": 50, "schedule": "auto"}
    )
    scheduler, times = compressor.adapter.scheduler, compressor.adapter.times
    measured = []
    for step in range(2 * DECIDED):
        network.zero_grad()
        backward(network, step)
        if times.seconds is not None:
            times.seconds = 1.0
        optimizer.step()
        measured.append(scheduler.figures.calls)
    rounds = np.flatnonzero(np.diff(measured) > 20)
    expect(len(rounds) > 1, "measured after steps", rounds)
    expect(all(one == measured for one in hvd.allgather_object(measured)), "ranks differ")
    assert_equal_everywhere(network.named_parameters(), "rest")


def scenario_void_steps_lose_nothing_after_parameters_went_dense(directory):
    """The residual of a parameter that becomes dense is sent once, whichever steps overflow."""
    for voids in ((4,), (5,), (6, 7), (4, 5, 8)):
        network = model()
        scale = 1024.0
        optimizer, compressor = distributed(
            network, CODEC, compressor_options={"dense_below": 50, "loss_scale": lambda: scale}
        )
        names = [name for name, policy in compressor.policies.items() if not policy.dense]
        plan = plan_of([Message(tuple(names[::-1]), "dense")])
        came, arrived = {}, {}
        for step in range(10):
            if step == 4:
                compressor.adapter.scheduler.layout = layout.of_plan(
                    compressor.policies, compressor.fingerprint, plan
                )
                follow_layout(compressor)
            scale = 2048.0 if step > 6 else 1024.0
            before = local_gradients(network, step)
            void = step in voids
            network.zero_grad()
            backward(network, step)
            optimizer.synchronize()
            if void:  # as if a rank had an overflow
                compressor.adapter.slots[names[0]].last_step.void = True
                continue
            for name, gradient in gradients(network):
                came[name] = came.get(name, 0) + before[name].double().view(-1) / scale
                got = gradient.double().view(-1) * hvd.size() / scale
                arrived[name] = arrived.get(name, 0) + got
        for name in names:
            total = hvd.allreduce(came[name], op=hvd.Sum, name=f"came.{name}")
            kept = residuals(compressor, name).view(-1) / scale
            difference = float((arrived[name] + kept - total).abs().max())
            expect(difference <= 1e-5 * float(total.abs().max() + 1e-9), voids, name, difference)


def scenario_a_frozen_parameter_that_goes_dense_stays_as_it_is(directory):
    """A frozen parameter that becomes dense keeps its residual until it is trained again."""
    network = model()
    optimizer, compressor = distributed(network, CODEC, compressor_options={"dense_below": 50})
    names = [name for name, policy in compressor.policies.items() if not policy.dense]
    frozen = dict(network.named_parameters())[names[0]]
    for step in range(8):
        if step == 2:
            frozen.requires_grad_(False)
            before = frozen.detach().clone()
        if step == 4:
            compressor.adapter.scheduler.layout = layout.of_plan(
                compressor.policies,
                compressor.fingerprint,
                plan_of([Message(tuple(names[::-1]), "dense")]),
            )
            follow_layout(compressor)
        if step == 6:
            expect(torch.equal(frozen, before), "a frozen parameter has changed")
            expect(bool(residuals(compressor, names[0]).any()), "the residual is gone")
            frozen.requires_grad_(True)
        network.zero_grad()
        backward(network, step)
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"frozen {step}")
    expect(not bool(residuals(compressor, names[0]).any()), "the residual was not sent")


def scenario_auto_with_nothing_to_measure(directory):
    """Without compressed gradients there is no plan. A parameter without elements is no layer."""
    for dense_below in (1 << 20, 0):
        network = model()
        network.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 3)))
        optimizer, compressor = distributed(
            network, CODEC, compressor_options={"schedule": "auto", "dense_below": dense_below}
        )
        for step in range(20):
            network.zero_grad()
            backward(network, step)
            optimizer.step()
        expect((compressor.plan is None) == bool(dense_below), "the plan is", compressor.plan)
        assert_equal_everywhere(network.named_parameters(), f"nothing {dense_below}")


def scenario_two_compressors_take_turns(directory):
    """Both get a plan, beside a third one that compresses nothing, and all ranks decide alike."""
    networks = [model(), torch.nn.Sequential(torch.nn.Linear(40, 60)), torch.nn.Linear(5, 5)]
    pairs = [
        distributed(network, CODEC, compressor_options={"schedule": "auto", "dense_below": 50})
        for network in networks
    ]
    trying = []
    for step in range(2 * DECIDED):
        for number, (network, (optimizer, _)) in enumerate(zip(networks, pairs)):
            network.zero_grad()
            if number:
                draw = torch.Generator().manual_seed(step + hvd.rank())
                size = network[0].in_features if number == 1 else 5
                network(torch.randn(4, size, generator=draw)).square().mean().backward()
            else:
                backward(network, step)
            optimizer.step()
        trying.append([one.adapter.scheduler.is_trying for _, one in pairs])
    expect(not any(sum(one) > 1 for one in trying), "two compressors tried plans in one step")
    plans = [one.plan for _, one in pairs]
    expect([plan is None for plan in plans] == [False, False, True], "the plans are", plans)
    everywhere = hvd.allgather_object(trying)
    expect(all(one == trying for one in everywhere), "ranks tried plans in other steps")
    for number, network in enumerate(networks):
        assert_equal_everywhere(network.named_parameters(), f"two compressors {number}")


def scenario_ranks_with_other_schedules_are_told(directory):
    network = model()
    schedule = "auto" if hvd.rank() else None
    optimizer, _ = distributed(network, CODEC, compressor_options={"schedule": schedule})
    try:
        backward(network, 0)
        optimizer.step()
    except dr.InvalidArgumentError as error:
        expect("schedule" in str(error) and "'auto'" in str(error), "the error is", error)
    else:
        raise AssertionError("expected an error about the schedules")


if __name__ == "__main__":
    parts = (
        torch_auto_optimizers,
        torch_given_plans,
        torch_planned_tables,
        torch_profiles,
        torch_uncompressed,
    )
    run_reporting(
        {**globals(), **{k: v for part in parts for k, v in vars(part).items()}}, sys.argv[1]
    )
