"""More scenarios of torch_schedule.py: plans that are given from the first step on."""

import horovod.torch as hvd
import random_plans
import torch
from torch_gradients_tools import expect
from torch_tools import assert_equal_everywhere, backward, distributed, model

import deepreduce_hvd as dr
from deepreduce_hvd.schedule import Message, Plan

CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.LloydMax(bits=1))


def plan_of(messages):
    """Return a plan with these messages and no predictions."""
    return random_plans.plan_of(messages, hvd.size(), repr(CODEC))


def scenario_a_plan_of_policies_equals_the_policies(directory):
    """A fixed plan trains like the same policies by name, and twice in the same way.

    With a residual, float16 messages of a plan are other ones: they lose nothing.
    """

    def train(memory, codec=CODEC, **options):
        network = model()
        optimizer, compressor = distributed(
            network, codec, memory, compressor_options={"dense_below": 0, **options}
        )
        for step in range(4):
            network.zero_grad()
            backward(network, step)
            optimizer.step()
        return network, compressor

    names = [name for name, _ in model().named_parameters()][::-1]
    denser = dr.Codec(dr.TopK(0.2), index=CODEC.index, value=CODEC.value)
    for memory, way in ((dr.NoMemory(), "fp16"), (dr.Residual(), "dense")):
        plan = plan_of(
            [
                Message(tuple(names[:2]), "codec", 0.2, "Allgather"),
                Message((names[2],), way),
                Message((names[3],), "dense"),
                Message(tuple(names[4:]), "codec", 0.05, "Allgather"),
            ]
        )
        ways = {names[0]: denser, names[1]: denser, names[2]: way, names[3]: "dense", "*": CODEC}
        path = f"{directory}/plan.{hvd.size()}.{hvd.rank()}.json"
        plan.save(path)
        planned, compressor = train(memory, schedule=Plan.load(path))
        expect(compressor.plan == plan, "the plan is", compressor.plan)
        others = train(memory, schedule=plan), train(memory, codec=ways)
        for other, _ in others:
            for (name, one), (_, two) in zip(planned.named_parameters(), other.named_parameters()):
                expect(torch.equal(one, two), name, "differs", memory)


def scenario_a_plan_from_the_profile_of_the_default(directory):
    """The default compresses small tensors only without a schedule, so a profile omits them."""
    large, plan = ["0.weight", "2.weight"], None
    for _ in range(2):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 48), torch.nn.LayerNorm(48), torch.nn.Linear(48, 40)
        )
        names = [name for name, _ in network.named_parameters()]
        optimizer, compressor = distributed(
            network,
            lambda name, shape: None,  # the default
            compressor_options={"dense_below": None, "schedule": plan},
        )
        for step in range(52):  # the warm-up and more
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step * hvd.size() + hvd.rank())
            network(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
        compressed = [
            name for name, row in compressor.stats().items() if row["path"] == "compressed"
        ]
        expect(compressed == (names if plan is None else large), plan, compressed)
        profile = compressor.profile()
        expect({part.name for part in profile.parameters} == set(large), profile.parameters)
        expect(profile.density == 0.01, "the density is", profile.density)
        # what larger densities cost was measured, so that a plan can use them
        expect(profile.max_density < 1, "the largest density is", profile.max_density)
        points = [len(part.payload_bytes) for part in profile.parameters]
        expect(min(points) > 1, "points of payload sizes:", points)
        plan = plan_of([Message(tuple(large[::-1]), "codec", 0.01, "Allgather")])
        assert_equal_everywhere(network.named_parameters(), "default")
