"""More scenarios of torch_schedule.py: the payload bytes in profiles are those that were sent."""

import horovod.torch as hvd
import torch
from scenario_runner import refused
from torch_gradients_tools import expect

import deepreduce_hvd as dr
from deepreduce_hvd.schedule import Link, Network, Plan, Profile
from deepreduce_hvd.schedule.rules import predict


def _job(codec, memory=None, schedule=None):
    """Return (compressor, function that trains a number of steps)."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(90, 100), torch.nn.ReLU(), torch.nn.Linear(100, 40)
    )
    compressor = dr.Compressor(
        codec, memory, parameters=network.named_parameters(), dense_below=1024, schedule=schedule
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=network.named_parameters(),
        compression=compressor,
    )

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            network(torch.randn(8, 90)).square().mean().backward()
            optimizer.step()

    return compressor, train


def _top(ratio, **options):
    return dr.Codec(dr.TopK(ratio, **options), index=dr.Rice(), value=dr.LloydMax(bits=1))


def scenario_profiles_have_the_bytes_that_were_sent(directory):
    """At the density that was sent, with a ratio and without one. A job takes a plan from them."""
    cases = {
        "a ratio": (_top(0.01), None),
        "a ratio after its warm-up": (_top(0.02, warmup_steps=7), None),
        "some elements": (
            dr.Codec(dr.TopK(k=500), index=dr.Rice(), value=dr.LloydMax(bits=1)),
            None,
        ),
        "a threshold": (dr.Codec(dr.Threshold(1e-4), index=dr.Rice()), None),
        "all elements": (dr.Codec(dr.NoneSparsifier(), value=dr.QSGD(bits=8)), dr.NoMemory()),
    }
    for what, (codec, memory) in cases.items():
        compressor, train = _job(codec, memory)
        train(10)
        profile, rows = compressor.profile(), compressor.stats()
        expect([one.name for one in profile.parameters] == ["2.weight", "0.weight"], what)
        sent = elements = 0
        for one in profile.parameters:
            row = rows[one.name]
            size = sum(row[part] for part in ("header_bytes", "index_bytes", "value_bytes"))
            size += row["order_bytes"]
            expect(abs(one.payload(profile.density) / size - 1) < 0.02, what, one, row)
            sent, elements = sent + row["sent_values"], elements + one.elements
        expect(abs(profile.density * elements / sent - 1) < 0.02, what, profile.density, sent)
        profiles = [Profile.from_json(text) for text in hvd.allgather_object(profile.to_json())]
        merged = Profile.merged(profiles)
        largest = max(one.density for one in profiles)
        expect(merged.density == largest, what, merged.density, largest)
        network = Network(2, Link.parse("10mbit"))
        plan = Plan.of(merged, network, predict("codec", merged, network)[1])
        planned, train = _job(codec, memory, plan)
        train(2)
        paths = {row["path"] for name, row in planned.stats().items() if "weight" in name}
        expect(paths == {"compressed"}, what, paths)
        if not merged.has_ratio:
            slots = [planned.adapter.slots[one.name] for one in merged.parameters]
            codecs = {slot.policy.codec for slot in slots}
            expect(codecs == {codec}, what, codecs)


def scenario_profiles_of_one_density_only(directory):
    """While the density falls, or with several of them, no profile would be true."""
    compressor, train = _job(_top(0.01, warmup_steps=5))
    train(4)
    compressor.adapter.slots["0.weight"].encode_seconds += 1000.0  # as in a slow warm-up
    train(1)
    with refused(r"steps after the warm-up of 5 steps, got step 5 for 2\.weight"):
        compressor.profile()
    train(2)
    slowest = max(one.encode_seconds for one in compressor.profile().parameters)
    expect(slowest < 1, "the warm-up counts, encoding took", slowest)
    threshold = dr.Codec(dr.Threshold(0), index=dr.Rice())
    for other in (_top(0.25), threshold):
        compressor, train = _job({"2.*": _top(0.01), "*": other})
        train(3)
        with refused(r"expected compressed gradients of one density, got the codecs Codec\("):
            compressor.profile()
    compressor, train = _job({"2.*": _top(0.01), "*": dr.Codec(dr.TopK(0.01))})
    train(3)
    expect(compressor.profile().density == 0.01, "two codecs of one density")
