"""LAGS: the closed form and halving against a search on the model of a step."""

import dataclasses
import math

import numpy as np
import pytest
from schedule_profiles import random_network, random_profile

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import (
    Link,
    Message,
    Network,
    Parameter,
    Plan,
    Profile,
    Table,
    hidden_density,
    lags,
    timeline,
)
from deepreduce_hvd.schedule.dag import CODEC, COMPUTE, DENSE, NETWORK, Model

LEAST = 0.01


def test_closed_form():
    arguments = {"ranks": 4, "selection": 0.1, "max_compression": 1000}
    # (1.0 - 0.1 - 0.3) / (8 * 3 * 1e-3) = 25 elements
    assert hidden_density(1.0, 1000, 8, 0.3, 1e-3, **arguments) == pytest.approx(0.025)
    assert hidden_density(0.1, 1000, 8, 0.3, 1e-3, **arguments) == 0.001
    assert hidden_density(9e9, 1000, 8, 0.3, 1e-3, **arguments) == 1.0
    assert hidden_density(1.0, 1000, 8, 0.3, 0.0, **arguments) == 1.0
    assert hidden_density(1.0, 0, 8, 0.3, 1e-3, **arguments) == 1.0
    assert hidden_density(0.2, 1000, 8, 0.3, 0.0, **arguments) == 0.001


def test_lags_is_the_closed_form_where_payloads_are_proportional():
    # payloads of a header and exactly 8 bytes per kept element, at densities so close to each other
    # that they are linear between them, and a network that is free for every layer
    points = tuple((at, 40 + 80_000 * at) for at in np.geomspace(1e-4, 1, 200).tolist())
    parts = tuple(
        Parameter(name, 10_000, ready, 0.0, 0.0, points)
        for name, ready in (("c", 1.0), ("b", 2.0), ("a", 4.0))
    )
    network = Network(4, Link("x", 0.05, 1e-4, 1.0, 1e-2))
    messages = lags(Profile(parts), network)
    for message, hidden in zip(messages, (1.0, 2.0, 0.0)):
        expected = hidden_density(hidden, 10_000, 8, 2 * 0.05 + 3 * 40 * 1e-4, 1e-4, ranks=4)
        assert message.way == CODEC
        assert message.density == pytest.approx(expected, abs=5e-6)


def exchange_end(profile, network, messages, layer):
    events = [
        event for event in timeline(profile, network, messages).events if event.track == NETWORK
    ]
    return events[layer].end - profile.forward_seconds


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("encode", [0.0, 1.0])
def test_lags_against_a_search_on_the_model(seed, encode):
    profile, network = random_profile(seed, 7, encode), random_network(seed)
    chosen = lags(profile, network, max_compression=1 / LEAST)
    names = [part.name for part in profile.parameters]
    grid = np.linspace(LEAST, profile.max_density, 60)
    for layer, message in enumerate(chosen):
        rest = [Message((name,), CODEC, LEAST, "Allgather") for name in names[layer + 1 :]]
        part = profile.parameters[layer]
        following = (
            profile.parameters[layer + 1].ready_seconds - part.ready_seconds if rest else 0.0
        )

        def in_time(way, density):
            """Whether the exchange ends before the next gradient is computed."""
            one = Message((part.name,), way, density, "Allgather" if density else "Allreduce")
            messages = [*chosen[:layer], one, *rest]
            events = timeline(profile, network, messages).events
            own = [event for event in events if event.track == COMPUTE and event.name == part.name]
            # with encoding on the device, the next gradient is computed after it
            end = exchange_end(profile, network, messages, layer)
            return end <= own[-1].end - profile.forward_seconds + following + 1e-12

        if in_time(DENSE, None):
            assert message.way == DENSE
            continue
        good = [density for density in grid if in_time(CODEC, density)]
        best = max(good, default=LEAST)
        assert message.way == CODEC
        if profile.seconds_per_kept_element == 0:
            assert best <= message.density + 1e-9 <= best + (grid[1] - grid[0]) + 2e-9
        else:
            assert message.density == LEAST or in_time(CODEC, message.density * (1 - 1e-6))
            # if encoding delays backward, a denser payload can be in time again
            most = message.density == profile.max_density or not in_time(
                CODEC, message.density * (1 + 1e-5)
            )
            assert most or profile.encoding_delay > 0


@pytest.mark.parametrize("seed", range(15))
def test_the_rest_of_backward_is_used_without_a_later_end(seed):
    profile, network = random_profile(seed, 9), random_network(seed)
    names = [part.name for part in profile.parameters]
    least = [Message((name,), CODEC, LEAST, "Allgather") for name in names]
    chosen = lags(profile, network, max_compression=1 / LEAST, hide_behind="rest")
    last = len(names) - 1
    ready = Model(profile, network).prepared(CODEC, LEAST)[-1]
    limit = max(exchange_end(profile, network, least, last), ready)
    assert exchange_end(profile, network, chosen, last) <= limit * (1 + 1e-9)
    assert all(message.density is None or message.density >= LEAST for message in chosen)
    # between ranks of one host exchanges are free, so nothing needs to be compressed
    free = lags(profile, Network(1, network.link), max_compression=1 / LEAST, hide_behind="rest")
    assert all(message.density is None for message in free)


@pytest.mark.parametrize("hide_behind", ["next", "rest"])
def test_a_density_that_cannot_be_changed(hide_behind):
    profile, network = random_profile(0, 9, density=0.07), random_network(0)
    parts = tuple(dataclasses.replace(part, payload_bytes=()) for part in profile.parameters)
    one = dataclasses.replace(profile, parameters=parts, max_density=0.07, has_ratio=False)
    messages = lags(one, network, max_compression=1000, hide_behind=hide_behind)
    assert {message.density for message in messages} == {None, 0.07}
    Plan.of(one, network, messages)
    denser = [Message((part.name,), CODEC, 0.08, "Allgather") for part in one.parameters]
    with pytest.raises(InvalidArgumentError, match=r"expected the density 0\.07, .*, got 0\.08"):
        Plan.of(one, network, denser)


def test_measured_tables_that_are_not_monotone():
    table = Table(((10, 1.0), (20, 3.0), (30, 2.0), (40, 4.0)))
    assert table.largest(2.5) == 32.5 and table.largest(1.5) == 12.5
    assert table.largest(0.5) == -1.0 and table.largest(1.0) == 10
    assert table.largest(5.0) == pytest.approx(40 + 1 / table.fit().beta)


def test_free_networks_send_everything_dense():
    profile = random_profile(1, 5)
    assert all(message.way == DENSE for message in lags(profile, Network(1, Link.parse("1gbit"))))


def test_wrong_arguments():
    profile, network = random_profile(0, 2), random_network(0)
    with pytest.raises(InvalidArgumentError, match="max_compression"):
        lags(profile, network, max_compression=0.5)
    with pytest.raises(InvalidArgumentError, match="'next' or 'rest'"):
        lags(profile, network, hide_behind="all")
    with pytest.raises(InvalidArgumentError, match="hidden_density ranks"):
        hidden_density(0.5, 1000, 8, 0.1, 1e-3, ranks=0)
    with pytest.raises(InvalidArgumentError, match="hidden_density max_compression"):
        hidden_density(0.5, 1000, 8, 0.1, 1e-3, ranks=2, max_compression=math.inf)
    with pytest.raises(InvalidArgumentError, match="hidden_density latency"):
        hidden_density(0.5, 1000, 8, -0.1, 1e-3, ranks=2)
