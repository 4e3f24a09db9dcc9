"""The model of a step against the published recurrences, by hand and for random profiles."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from schedule_profiles import random_network, random_profile

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import (
    Link,
    Message,
    Network,
    Parameter,
    Profile,
    Table,
    optimal_merge,
    speedup_bound,
    timeline,
)
from deepreduce_hvd.schedule.dag import (
    CODEC,
    COMPUTE,
    DENSE,
    FP16,
    NETWORK,
    THREADS,
    WAYS,
    Event,
    Model,
    Timeline,
)
from deepreduce_hvd.schedule.optimum import _Clocks
from deepreduce_hvd.schedule.rules import RULES, predict

#: 1 s per byte and no latency: a dense message of two ranks takes 4 s per element
LINK = Link("slow", 0.0, 1.0, 0.0, 1.0)
PROFILE = Profile(
    (Parameter("last", 1, 2.0, 0.5, 0.25, ((0.5, 3.0),)), Parameter("first", 2, 5.0, 0.5, 0.25, ((0.5, 4.0),))),
    forward_seconds=1.0,
    update_seconds=0.125,
    density=0.5,
)  # fmt: skip
TWO = Network(2, LINK)


def rows(found):
    return [(event.track, event.kind, event.start, event.end) for event in found.events]


def test_a_dense_step_by_hand():
    found = timeline(PROFILE, TWO, [Message(("last",)), Message(("first",))])
    assert rows(found) == [
        (COMPUTE, "forward", 0.0, 1.0),
        (COMPUTE, "backward", 1.0, 3.0),
        (COMPUTE, "backward", 3.0, 6.0),
        (NETWORK, "exchange", 3.0, 7.0),
        (NETWORK, "exchange", 7.0, 15.0),
        (COMPUTE, "update", 15.0, 15.125),
    ]
    assert found.step_seconds == 15.125
    assert found.waits() == {
        "forward": 1, "backward": 5, "encode": 0, "network": 9, "decode": 0, "update": 0.125
    }  # fmt: skip


def test_an_encoded_step_by_hand():
    messages = [Message((name,), CODEC, 0.5, "Allgather") for name in ("last", "first")]
    found = timeline(PROFILE, TWO, messages)
    # backward and encoding take turns on the device; both payloads are decoded, after backward
    assert rows(found) == [
        (COMPUTE, "forward", 0.0, 1.0),
        (COMPUTE, "backward", 1.0, 3.0),
        (COMPUTE, "encode", 3.0, 3.5),
        (COMPUTE, "backward", 3.5, 6.5),
        (COMPUTE, "encode", 6.5, 7.0),
        (NETWORK, "exchange", 3.5, 6.5),
        (NETWORK, "exchange", 7.0, 11.0),
        (COMPUTE, "decode", 7.0, 7.5),
        (COMPUTE, "decode", 11.0, 11.5),
        (COMPUTE, "update", 11.5, 11.625),
    ]
    assert found.waits()["network"] == pytest.approx(3.5)


def test_a_step_that_is_encoded_in_the_background_by_hand():
    profile = dataclasses.replace(
        PROFILE, encoding_delay=0.0, seconds_per_kept_element=1.0, density=0.25
    )
    messages = [Message((name,), CODEC, 0.5, "Allgather") for name in ("last", "first")]
    found = timeline(profile, TWO, messages)
    # 0.5 s for density 0.25, and 1 s for each of 0.25 x 1 and 0.25 x 2 more elements
    assert rows(found) == [
        (COMPUTE, "forward", 0.0, 1.0),
        (COMPUTE, "backward", 1.0, 3.0),
        (THREADS, "encode", 3.0, 3.75),
        (COMPUTE, "backward", 3.0, 6.0),
        (THREADS, "encode", 6.0, 7.0),
        (NETWORK, "exchange", 3.75, 6.75),
        (NETWORK, "exchange", 7.0, 11.0),
        *rows(found)[7:],
    ]
    decoding = [event for event in found.events if event.kind == "decode"]
    assert [event.start for event in decoding] == [6.75, 11.0]
    waits = found.waits()
    # of the second gradient's encoding, 0.75 s are beside a message and 0.25 s are not
    assert waits["encode"] == pytest.approx(0.0) and waits["backward"] == 5.0
    assert sum(waits.values()) == pytest.approx(found.step_seconds)


def test_a_step_that_encoding_delays_in_part_by_hand():
    profile = dataclasses.replace(PROFILE, encoding_delay=0.25)
    messages = [Message((name,), CODEC, 0.5, "Allgather") for name in ("last", "first")]
    found = timeline(profile, TWO, messages)
    # the first gradient is computed 0.125 s later
    assert [row for row in rows(found) if row[1] == "encode"] == [
        (THREADS, "encode", 3.0, 3.5),
        (COMPUTE, "encode", 3.0, 3.125),
        (THREADS, "encode", 6.125, 6.625),
        (COMPUTE, "encode", 6.125, 6.25),
    ]
    sent = [event.start for event in found.events if event.track == NETWORK]
    assert sent == [3.5, 6.625]


def test_waiting_for_the_threads_counts_as_encoding():
    events = (
        Event(COMPUTE, "backward", "a", 0.0, 4.0),
        Event(THREADS, "encode", "a", 4.0, 7.0),
        Event(NETWORK, "exchange", "b", 3.0, 5.0),
        Event(NETWORK, "exchange", "a", 7.0, 9.0),
        Event(COMPUTE, "decode", "a", 9.0, 10.0),
    )
    waits = Timeline(events, 10.0).waits()
    assert (waits["encode"], waits["network"], waits["decode"]) == (2.0, 3.0, 1.0)


def simulated_step(profile, network, messages):
    """Return the seconds of a step, from a queue of gradients for the encoder."""
    model, device, encoder, free, number = Model(profile, network), 0.0, 0.0, 0.0, 0
    ends, before = [], 0.0
    for message in messages:
        sent = 0.0
        for name in message.members:
            part = profile.parameters[number]
            assert part.name == name
            device += part.ready_seconds - before
            before = part.ready_seconds
            if message.way == CODEC:
                more = (message.density - profile.density) * part.elements
                seconds = part.encode_seconds + profile.seconds_per_kept_element * more
                encoder = sent = max(encoder, device) + seconds
                device += profile.encoding_delay * seconds
            else:
                converted = profile.to_fp16_seconds * part.elements if message.way == FP16 else 0.0
                device = sent = device + converted
            number += 1
        how = message.way, message.density, message.communicator
        first, last = number - len(message.members), number
        free = max(free, sent) + model.seconds(first, last, *how)
        ends.append((free, model.decode_seconds(first, last, *how)))
    for end, seconds in ends:
        device = max(device, end) + seconds
    return profile.forward_seconds + device + profile.update_seconds


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_against_a_simulation(seed):
    profile, network = random_profile(seed, 9, encode=9.0), random_network(seed)
    draw, names = random.Random(seed), [part.name for part in profile.parameters]
    messages = []
    while names:
        length = draw.randint(1, len(names))
        members, names = tuple(names[:length]), names[length:]
        way = draw.choice(WAYS)
        codec = (draw.uniform(0.01, 1.0), "Allgather") if way == CODEC else ()
        messages.append(Message(members, way, *codec))
    expected = simulated_step(profile, network, messages)
    assert timeline(profile, network, messages).step_seconds == pytest.approx(expected, rel=1e-12)
    assert _Clocks(Model(profile, network), messages).step_seconds() == pytest.approx(
        expected, rel=1e-12
    )


def test_float16_is_converted_on_the_device():
    half = dataclasses.replace(PROFILE, to_fp16_seconds=0.5, from_fp16_seconds=0.25)
    found = timeline(half, TWO, [Message(("last",), FP16), Message(("first",), FP16)])
    assert rows(found) == [
        (COMPUTE, "forward", 0.0, 1.0),
        (COMPUTE, "backward", 1.0, 3.0),
        (COMPUTE, "encode", 3.0, 3.5),
        (COMPUTE, "backward", 3.5, 6.5),
        (COMPUTE, "encode", 6.5, 7.5),
        (NETWORK, "exchange", 3.5, 5.5),
        (NETWORK, "exchange", 7.5, 11.5),
        (COMPUTE, "decode", 7.5, 7.75),
        (COMPUTE, "decode", 11.5, 12.0),
        (COMPUTE, "update", 12.0, 12.125),
    ]


def test_float16_has_a_table_of_its_own():
    table, half = (Table(((1.0, 1.0), (100.0, end))) for end in (100.0, 300.0))
    measured = dataclasses.replace(
        PROFILE, hosts=2, allgather=table, allreduce=table, allreduce_fp16=half
    )
    messages = [Message(("last", "first"), FP16)]
    network = Network(2, measured.link())
    plain = dataclasses.replace(measured, allreduce_fp16=None)
    slower = timeline(measured, network, messages).step_seconds
    faster = timeline(plain, Network(2, plain.link()), messages).step_seconds
    assert slower - faster == pytest.approx(half.seconds(6) - table.seconds(6)) and slower > faster
    assert network.allreduce(100.0) == 100.0 and network.allreduce(100.0, half=True) == 300.0


def test_serial_sends_after_backward():
    messages = [Message(("last",)), Message(("first",))]
    found = timeline(PROFILE, TWO, messages, overlap=False)
    assert [event[2:] for event in rows(found) if event[0] == NETWORK] == [(6, 10), (10, 18)]


def published_step(profile, seconds):
    """Return t = t_f + tau_c + t_c + t_u of one message per layer, from the recurrences."""
    ready = [part.ready_seconds for part in profile.parameters]
    start = ready[0]
    for layer in range(1, len(ready)):
        start = max(start + seconds[layer - 1], ready[layer])
    return profile.forward_seconds + start + seconds[-1] + profile.update_seconds


@pytest.mark.parametrize("seed", range(20))
def test_rules_follow_their_formulas(seed):
    profile = random_profile(seed, 12, encode=0, decode=0)
    network = random_network(seed)
    alpha, beta = network.reduce_line
    sizes = [4 * part.elements for part in profile.parameters]
    ranks, link = network.ranks, network.link
    for size in sizes:
        assert network.allreduce(size) == pytest.approx(
            2 * (ranks - 1) * link.reduce_latency
            + 2 * (ranks - 1) / ranks * size * link.reduce_seconds_per_byte
        )
    seconds = [alpha + beta * size for size in sizes]
    compute = profile.forward_seconds + profile.backward_seconds + profile.update_seconds
    step = {rule: predict(rule, profile, network)[0].step_seconds for rule in RULES}
    assert step["serial"] == pytest.approx(compute + sum(seconds))
    assert step["one message"] == pytest.approx(compute + alpha + beta * sum(sizes))
    assert step["WFBP"] == pytest.approx(published_step(profile, seconds))
    payloads = [part.payload(0.01) for part in profile.parameters]
    gathered = [network.allgather(size) for size in payloads]
    assert step["top-k"] == pytest.approx(published_step(profile, gathered))
    # one message per layer and no cost of selection: LAGS is not slower than top-k by what it adds
    assert step["LAGS"] <= step["top-k"] * (1 + 1e-9)
    assert step["dense"] <= min(step["WFBP"], step["MG-WFBP"], step["one message"]) * (1 + 1e-9)
    assert step["fp16"] <= step["dense"] * (1 + 1e-9)
    assert step["codec"] <= min(step["top-k"], step["buckets"]) * (1 + 1e-9)
    assert step["plan"] <= min(step.values()) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_step_is_the_finish_of_the_grouping(seed):
    profile, network = random_profile(seed, 15, decode=0), random_network(seed)
    model = Model(profile, network)
    grouping, finish = optimal_merge(
        model.prepared(CODEC, 0.01), model.payloads(0.01), network.allgather
    )
    found, messages = predict("codec", profile, network)
    assert [len(message.members) for message in messages] == grouping
    ends = [event.end for event in found.events if event.track == NETWORK]
    assert ends[-1] == pytest.approx(profile.forward_seconds + finish)


@pytest.mark.parametrize("seed", range(10))
def test_timelines_are_consistent(seed):
    profile, network = random_profile(seed, 10), random_network(seed)
    for rule in RULES:
        found, _ = predict(rule, profile, network)
        for track in (COMPUTE, NETWORK, THREADS):
            bars = [event for event in found.events if event.track == track]
            assert all(one.end <= two.start + 1e-12 for one, two in itertools.pairwise(bars)), rule
        assert sum(found.waits().values()) == pytest.approx(found.step_seconds)
        assert max(event.end for event in found.events) == found.step_seconds


def test_the_bound_on_the_speed_up_of_overlap():
    for seed in range(20):
        profile, network = random_profile(seed, 8, 0, 0), random_network(seed)
        profile = dataclasses.replace(profile, update_seconds=0.0)
        serial = predict("serial", profile, network)[0]
        exchange = sum(event.end - event.start for event in serial.events if event.track == NETWORK)
        bound = speedup_bound(profile.forward_seconds, profile.backward_seconds, exchange)
        overlapped = predict("WFBP", profile, network)[0].step_seconds
        assert serial.step_seconds / overlapped <= bound * (1 + 1e-9)


def test_merged_selection_is_after_the_group():
    messages = [Message(("last", "first"), CODEC, 0.5, "Allgather")]
    found = timeline(PROFILE, TWO, messages, merged_selection=True)
    model = Model(PROFILE, TWO)
    seconds = model.selection_per_step() * 3 * np.log2(3)
    (event,) = (event for event in found.events if event.kind == "encode")
    assert (event.start, event.end) == (6.0, 6.0 + seconds)


def test_decoding_grows_with_ranks_and_bytes():
    model = Model(PROFILE, Network(8, LINK))
    assert model.decode_seconds(0, 2, "codec", 0.5, "Allgather") == pytest.approx(8 * 0.5)
    assert model.decode_seconds(0, 2, "dense", None, "Allreduce") == 0
    share = model.payload(0, 2, 1.0) / model.payload(0, 2, 0.5)
    assert model.decode_seconds(0, 2, "codec", 1.0, "Allgather") == pytest.approx(8 * 0.5 * share)


def test_payloads_and_densities_are_inverse():
    profile = random_profile(3, 6)
    model = Model(profile, TWO)
    for density in (0.01, 0.05, 0.3, 0.9):
        total = sum(part.payload(density) for part in profile.parameters[1:4])
        assert model.payload(1, 4, density) == pytest.approx(total)
        assert model.density_of(1, 4, total) == pytest.approx(density)
        assert model.payloads(density)[2] == pytest.approx(profile.parameters[2].payload(density))
    assert model.density_of(0, 1, 1.0) == 0.0 and model.density_of(0, 1, 1e12) == 1.0


def test_measured_tables_are_used_between_the_measured_hosts():
    gather, reduce = Table(((1, 5.0), (9, 6.0))), Table(((1, 7.0), (99, 8.0)))
    profile = dataclasses.replace(PROFILE, hosts=2, allgather=gather, allreduce=reduce)
    network = Network(2, profile.link())
    found = timeline(profile, network, [Message(("last", "first"))])
    assert rows(found)[3][3] - rows(found)[3][2] == pytest.approx(reduce.seconds(12))


def test_allgathers_that_overlap_by_hand():
    table = Table(((1.0, 2.0), (9.0, 10.0)))  # 1 s, and 1 s per byte
    profile = dataclasses.replace(
        PROFILE, hosts=2, allgather=table, allreduce=table, gather_overlap=1.5
    )
    network = Network(2, profile.link())
    parts = [dataclasses.replace(part, ready_seconds=1.0) for part in profile.parameters]
    profile = dataclasses.replace(profile, parameters=tuple(parts))
    messages = [Message((name,), CODEC, 0.5, "Allgather") for name in ("last", "first")]
    exchanges = [
        event for event in timeline(profile, network, messages).events if event.track == NETWORK
    ]
    # payloads of 3 and 4 bytes take 4 s and 5 s; the second starts 1.5 s before the first ends
    assert [(one.start, one.end) for one in exchanges] == [(2.5, 6.5), (5.0, 10.0)]
    assert network.gather_occupied(3.0) == 2.5 and network.allgather(3.0) == 4.0
    assert network.gather_occupied(0.0) == 0.5
    # for other numbers of hosts, and for sums, nothing is known of overlaps
    other = Network(4, profile.link())
    assert other.gather_occupied(3.0) == other.allgather(3.0)
    dense = [Message(("last",)), Message(("first",))]
    ends = [event for event in timeline(profile, network, dense).events if event.track == NETWORK]
    assert ends[1].start == ends[0].end


@pytest.mark.parametrize("seed", range(10))
def test_clocks_and_rules_with_allgathers_that_overlap(seed):
    draw = random.Random(seed)
    table = Table(((1e3, 2e-4), (1e6, 2e-3)))
    profile = dataclasses.replace(
        random_profile(seed, 9), hosts=2, allgather=table, allreduce=table,
        gather_overlap=draw.uniform(1e-5, 3e-4),
    )  # fmt: skip
    network = Network(2, profile.link())
    assert Profile.from_json(profile.to_json()) == profile
    steps = {}
    for rule in set(RULES) - {"serial", "OMGS"}:
        found, messages = predict(rule, profile, network)
        steps[rule] = found.step_seconds
        clocks = _Clocks(Model(profile, network), messages)
        assert clocks.step_seconds() == pytest.approx(found.step_seconds, rel=1e-12)
    assert steps["plan"] <= min(steps.values()) * (1 + 1e-8)
    serial = dataclasses.replace(profile, gather_overlap=0.0)
    slower = predict("top-k", serial, Network(2, serial.link()))[0].step_seconds
    assert steps["top-k"] <= slower


def test_one_host_sends_nothing():
    found = timeline(PROFILE, Network(1, LINK), [Message(("last", "first"), FP16)])
    assert found.step_seconds == pytest.approx(6.125)
    assert not [event for event in found.events if event.track == NETWORK]


def test_wrong_messages():
    with pytest.raises(InvalidArgumentError, match="every parameter of the profile once"):
        timeline(PROFILE, TWO, [Message(("last",))])
    with pytest.raises(InvalidArgumentError, match="another order"):
        timeline(PROFILE, TWO, [Message(("first",)), Message(("last",))])
    for fields, text in (
        ({"way": "zip"}, "one of dense, fp16, codec"),
        ({"way": CODEC}, r"a number in \(0, 1\]"),
        ({"way": DENSE, "density": 0.1}, "no density"),
        ({"way": FP16, "communicator": "Allgather"}, "no density, and Allreduce"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            Message(("last",), **fields)
    with pytest.raises(InvalidArgumentError, match="rule: expected one of serial"):
        predict("fastest", PROFILE, TWO)
