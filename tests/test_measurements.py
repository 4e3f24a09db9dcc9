"""What ``schedule="auto"`` and profiles measure of a codec, against direct encoding."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.measured_profile import Costs, measured_profile
from deepreduce_hvd.planning.measurements import curve_of, network_tables
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.schedule import Link, Network, Parameter, Profile, optimal_plan

CODECS = {
    "the default": dr.recommended_codec(),
    "pairs": dr.Codec(dr.TopK(0.002)),
    "QSGD": dr.Codec(dr.TopK(0.02), index=dr.EliasFano(), value=dr.QSGD(4)),
    "RandomK": dr.Codec(dr.RandomK(0.05), index=dr.Rice(), value=dr.Float16()),
}


@pytest.mark.parametrize("name", CODECS)
def test_payloads_at_other_densities_are_predicted_from_one(name):
    codec = CODECS[name]
    curve, ratio = curve_of(codec), codec.sparsifier.ratio
    gradient = np.random.default_rng(7).standard_normal(300_000, np.float32)
    step = codec.sparsifier.schedule_steps

    def payload(density):
        denser = dr.Codec(codec.sparsifier.with_ratio(density), codec.index, codec.value)
        return denser.encode(gradient, step=step).size

    points = Costs(0.0, 0.0, payload(ratio)).points(ratio, curve.growth)
    parameter = Parameter("p", gradient.size, 0.0, 0.0, 0.0, points)
    assert parameter.payload_bytes[0] == (ratio, payload(ratio))
    for density in (0.1, 0.25, 0.5):
        assert parameter.payload(density) == pytest.approx(payload(density), rel=0.05)
    assert curve.seconds_per_kept_element >= 0


def test_one_bit_per_value_carries_most_at_half_of_the_elements():
    # of a normal distribution, sign x mean of the largest 54 % keeps most of the energy
    assert curve_of(dr.recommended_codec()).max_density == 0.5
    assert curve_of(dr.Codec(dr.TopK(0.01))).max_density == 1.0


def test_a_codec_that_is_already_dense():
    curve = curve_of(dr.Codec(dr.TopK(1.0)))
    assert curve == (((1.0, 1.0),), 1.0, 0.0)


def test_what_is_known_of_payloads():
    growth = ((0.01, 1.0), (0.1, 7.0))
    assert Costs(0.0, 0.0, None).points(0.01, growth) == ()
    assert Costs(0.0, 0.0, 90).points(0.01, growth) == ((0.01, 90), (0.1, 40 + 7 * 50))
    assert Costs(0.0, 0.0, 90).points(0.3) == ((0.3, 90),)


class Sent(NamedTuple):
    """A slot after a step."""

    shape: tuple[int, ...]
    payload: np.ndarray

    def statistics(self):
        return {"sent_values": dr.inspect(self.payload)["k"]}


#: {codec without a ratio: what makes one of random settings}
WITHOUT_RATIO = {
    "a threshold": lambda draw: dr.Codec(dr.Threshold(draw.uniform(0.5, 4.0)), index=dr.Rice()),
    "all elements": lambda draw: dr.Codec(dr.NoneSparsifier(), value=dr.Deflate()),
    "a number of elements": lambda draw: dr.Codec(dr.TopK(k=draw.randint(1, 300))),
}


@pytest.mark.parametrize("what", WITHOUT_RATIO)
@pytest.mark.parametrize("seed", range(12))
def test_a_plan_keeps_a_codec_without_a_ratio(what, seed):
    """The ranks' profiles are merged, and the job takes the plan of the merged one."""
    draw, ranks = random.Random(seed), 3
    codec = WITHOUT_RATIO[what](draw)
    names = [f"p{number}" for number in range(draw.randint(1, 6))]
    shapes = {name: (draw.randint(1_000, 9_000),) for name in names}
    policies = {name: Policy("codec", codec, dr.Residual()) for name in names}
    ready = dict(zip(names, sorted(draw.uniform(0, 0.01) for _ in names)))
    profiles, sizes = [], []
    for rank in range(ranks):
        values = np.random.default_rng([seed, rank])
        slots, costs = {}, {}
        for number, (name, shape) in enumerate(shapes.items()):
            # layers differ in scale, so a threshold sends much of some and nothing of others
            gradient = 10.0 ** (1 - number % 3) * values.standard_normal(shape)
            slots[name] = Sent(shape, codec.encode(gradient.astype(np.float32)))
            costs[name] = Costs(1e-4, 1e-4, slots[name].payload.size)
        times = SimpleNamespace(ready=ready, rest=0.01)
        profiles.append(measured_profile(policies, times, slots, ranks, (), costs))
        sizes.append({name: slot.payload.size for name, slot in slots.items()})
    loaded = [Profile.from_json(one.to_json()) for one in profiles]
    assert loaded == profiles
    merged = Profile.merged(loaded)
    assert merged.density == max(one.density for one in profiles)
    for part in merged.parameters:
        assert part.payload(merged.density) == max(one[part.name] for one in sizes)
    network = Network(ranks, Link.of_rate("random", 10 ** draw.uniform(7, 10)))
    plan = optimal_plan(merged, network)
    layout.expect_schedule(plan, policies, dr.Allgather())
    made = layout.of_plan(policies, 0, plan)
    for message in plan.messages:
        for name in message.members:
            kept = message.way == "codec"
            assert made.policies[name] == (
                policies[name] if kept else Policy(message.way, None, dr.Residual())
            )
    assert layout.differences_of(plan, policies, ranks) == []


def test_a_plan_for_another_codec_without_a_ratio_is_refused():
    policies = {"one": Policy("codec", dr.Codec(dr.Threshold(0.1)), dr.Residual())}
    profile = Profile((Parameter("one", 1_000_000, 0.01),), codec=repr(dr.Codec(dr.Threshold(0.2))))
    plan = optimal_plan(profile, Network(2, Link.parse("10mbit")))
    message = (
        r"plan: expected one that was made for Codec\(Threshold.*0.1\).*got one for Codec.*0.2"
    )
    with pytest.raises(dr.InvalidArgumentError, match=message):
        layout.of_plan(policies, 0, plan)


class Recorder:
    """Figures and a transport of one rank, which note the bytes of each sum."""

    merges_sums = True

    def __init__(self, rank=0):
        self.rank = rank
        self.sums = []
        self.last = None  # what was summed last

    def name(self, label):
        return label

    lasting_name = name

    def slowest(self, transport, seconds):
        return seconds

    def allgather(self, array, name):
        return 0

    def allreduce(self, array, name):
        return 0

    def allreduce_in_place(self, array, name):
        self.sums.append((name.rpartition(".")[0], array.nbytes))
        self.last = array
        return 0

    def test(self, handle):
        return True

    def wait(self, handle):
        pass


def test_sums_are_timed_as_horovod_makes_them():
    """It merges gradients, with copies, but sends one of 64 MiB alone."""
    many, one = Recorder(), Recorder()
    for recorder, gradients in ((many, [1 << 22] * 8), (one, [1 << 24])):
        tables = network_tables(recorder, recorder, gradients)
        assert [size for size, _ in tables["allreduce"].points][-1] == 1 << 26
    largest = ("allreduce.67108864", 1 << 26)
    assert largest not in many.sums and ("allreduce.67108864", 1 << 25) in many.sums
    assert largest in one.sums and ("allreduce.16777216", 1 << 23) in one.sums
    # in float16, the same gradient has half of the bytes
    assert ("allreduce_fp16.67108864", 1 << 25) in one.sums


def test_each_rank_sums_values_of_its_own():
    """Horovod sums equal float16 values faster (benchmarks/float16_sums.py)."""
    one, other = Recorder(0), Recorder(1)
    for recorder in (one, other):
        network_tables(recorder, recorder, [1 << 16])
        assert recorder.last.dtype == np.float16
    assert (one.last != other.last).mean() > 0.99
