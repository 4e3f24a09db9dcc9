"""Formulas of traffic against the bytes that the simulator counts, links and tables."""

import math

import numpy as np
import pytest
from simulated_ranks import jobs_of
from traffic import SCHEMES

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.costs import (
    COMMUNICATORS,
    hierarchical,
    levels_of,
    speedup_bound,
    traffic,
    value_bits_of,
)
from deepreduce_hvd.schedule.links import Link, Network
from deepreduce_hvd.schedule.tables import Table

ELEMENTS = 20_000


def counted(name, k, ranks, communicator=None):
    """Return a simulator after one exchange of k random elements per rank, close to the bound."""
    sparsifier = dr.RandomK(k=k) if name == "SharedRandomK" else dr.TopK(k=k)
    codec = dr.Codec(sparsifier, dr.Rice(), dr.RawValue())
    gradients = [
        np.random.default_rng([rank, k]).standard_normal(ELEMENTS).astype(np.float32)
        for rank in range(ranks)
    ]
    simulator = Simulator(ranks)
    simulator.run(communicator or SCHEMES[name], jobs_of(codec, dr.Residual(), gradients))
    return simulator


def test_every_communicator_has_a_formula():
    assert set(COMMUNICATORS) == {"Allreduce", *SCHEMES}
    assert set(SCHEMES) - {"GTopK tree"} == set(dr.communicators.__all__) - {
        "Auto", "Communicator", "Hierarchical", "Transport"
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 7, 8, 16])
@pytest.mark.parametrize("k", [200, 2_000])
@pytest.mark.parametrize("name", SCHEMES)
def test_formulas_are_what_the_simulator_counts(name, k, ranks):
    expected = traffic(name, k, ELEMENTS, ranks)
    simulator = counted(name, k, ranks)
    received = int(simulator.received_bytes.max())
    assert simulator.rounds == expected.collectives
    messages = int(simulator.messages.max())
    if name in ("RecursiveDoubling", "GTopK") and ranks & (ranks - 1):
        # the last message of the longest chain goes to a rank that receives nothing else
        last = int(simulator.received_bytes[1 << (ranks.bit_length() - 1) :].max())
        assert received <= 1.04 * expected.received_bytes <= 1.08 * (received + last)
        assert messages + 1 == expected.messages
        return
    if name == "GTopK tree":  # rank 0 receives the sums, and the others the broadcast
        received *= 2
    assert received == pytest.approx(expected.received_bytes, rel=0.04)
    if name not in ("CLTK", "SharedRandomK"):  # the simulator counts a tree for an allreduce
        assert messages == expected.messages


@pytest.mark.parametrize("ranks_per_host, hosts", [(2, 2), (3, 4)])
def test_hierarchical(ranks_per_host, hosts):
    simulator = counted(
        "Hierarchical", 200, ranks_per_host * hosts, dr.Hierarchical(dr.Allgather(), ranks_per_host)
    )
    across = traffic("Allgather", 200, ELEMENTS, hosts)
    result = 40 + 8 * 200 * hosts  # RawIndex and RawValue, at most
    within, between = hierarchical(across, ELEMENTS, ranks_per_host, result)
    assert between == across
    assert int(simulator.received_bytes[1]) == pytest.approx(within.received_bytes, rel=0.04)
    reduced = within.received_bytes - result
    assert int(simulator.received_bytes[0]) == pytest.approx(
        reduced + across.received_bytes, rel=0.04
    )
    assert hierarchical(across, ELEMENTS, 1, result)[0].received_bytes == 0


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_published_formulas(ranks):
    alpha, beta, k, d, steps = 1e-3, 1e-8, 1_000, 1_000_000, math.log2(ranks)
    message = traffic("GTopK", k, d, 2).received_bytes
    assert traffic("Allreduce", k, d, ranks).seconds(alpha, beta) == pytest.approx(
        2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * 4 * d * beta
    )
    assert traffic("Allgather", k, d, ranks).seconds(alpha, beta) == pytest.approx(
        steps * alpha + (ranks - 1) * message * beta
    )
    assert traffic("GTopK tree", k, d, ranks).seconds(alpha, beta) == pytest.approx(
        2 * steps * alpha + 2 * steps * message * beta
    )


def test_float16_takes_longer_on_other_networks_too():
    """A byte of a float16 sum takes as much longer as on the network that was measured."""
    table, half = (Table(((1.0, 1.0), (100.0, end))) for end in (100.0, 300.0))
    link = Link.of_tables(table, table, 2, 1, half)
    more = half.fit().beta - table.fit().beta
    for hosts, other in ((4, link), (2, Link.parse("1mbit", link)), (3, Link.parse("1mbit", link))):
        network = Network(hosts, other)
        difference = network.allreduce(1e6, half=True) - network.allreduce(1e6)
        assert difference == pytest.approx(1e6 * more * 2 * (hosts - 1) / hosts)


def test_one_rank_and_unknown_communicators():
    assert all(traffic(name, 10, 100, 1).received_bytes == 0 for name in COMMUNICATORS)
    with pytest.raises(InvalidArgumentError, match="expected one of Allreduce"):
        traffic("Star", 10, 100, 2)
    assert [levels_of(ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("wrong", ["k", "d", "value_bits", "ranks"])
def test_wrong_traffic(wrong):
    arguments = {"communicator": "GTopK", "k": 10, "d": 100, "ranks": 4, "value_bits": 1.0}
    for bad in (-1, math.nan, 10**400, None, "4"):
        with pytest.raises(InvalidArgumentError, match=f"traffic {wrong}: expected"):
            traffic(**{**arguments, wrong: bad})


def test_speedup_bound_is_reached_by_complete_overlap():
    for forward, backward, exchange in ((1, 2, 2), (0.5, 1, 4), (3, 5, 1)):
        apart = forward + backward + exchange
        together = forward + max(backward, exchange)
        assert speedup_bound(forward, backward, exchange) == pytest.approx(apart / together)
    assert speedup_bound(1, 2, 0) == 1.0
    with pytest.raises(InvalidArgumentError, match="speedup_bound exchange"):
        speedup_bound(1, 2, -1)


def test_fits_find_the_line_and_its_error():
    sizes = [1e3, 1e4, 1e5, 1e6]
    fit = Table(tuple((size, 2e-4 + 3e-9 * size) for size in sizes)).fit()
    assert fit.alpha == pytest.approx(2e-4) and fit.beta == pytest.approx(3e-9)
    assert fit.error < 1e-9
    bent = Table(tuple((size, 1e-9 * size**1.2) for size in sizes)).fit()
    assert bent.alpha >= 0 and bent.beta >= 0 and bent.error > 0.01
    falling = Table(((1e3, 2e-3), (1e6, 1e-3))).fit()
    assert falling.beta == 0 and falling.alpha > 0


def test_small_messages_that_pass_in_a_burst_do_not_change_the_rate():
    # 100 Mb/s, where 16 KiB pass at once
    per_byte = 8e-8
    points = [(1 << 10, 1e-3), (1 << 14, 1.1e-3)]
    points += [(size, 1e-3 + per_byte * (size - (1 << 14))) for size in (1 << 18, 1 << 22)]
    fit = Table(tuple(points)).fit()
    assert fit.beta == pytest.approx(per_byte, rel=0.01) and 9e-4 < fit.alpha < 1e-3


@pytest.mark.parametrize("per_byte", [8e-8, 8e-9])
@pytest.mark.parametrize("burst", [1 << 14, 1 << 18])
def test_small_messages_that_pass_in_a_burst_do_not_change_the_latency(burst, per_byte):
    sizes, latency = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26], 1e-3
    fit = Table(tuple((size, latency + per_byte * max(size - burst, 0)) for size in sizes)).fit()
    assert fit.beta == pytest.approx(per_byte, rel=0.01)
    assert fit.alpha == pytest.approx(latency, rel=0.1)


def test_tables_between_and_beyond_their_points():
    table = Table(((100, 1.0), (200, 2.0), (400, 2.0)))
    assert table.seconds(150) == 1.5 and table.seconds(10) == 1.0
    assert table.seconds(500) == pytest.approx(2.0 + 100 * table.fit().beta)
    assert table.seconds(np.array([100, 200])).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "points", [((1, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (2, math.nan)), ((1, 0.0), (2, 1.0))]
)
def test_wrong_tables(points):
    with pytest.raises(InvalidArgumentError, match="expected"):
        Table(points)


def test_links_by_name():
    link = Link.parse("10Gbit:25us")
    assert (link.gather_latency, link.reduce_latency) == (2.5e-5, 2.5e-5)
    assert link.gather_seconds_per_byte == 8e-10 == link.reduce_seconds_per_byte
    like = Link("x", 1.0, 2.0, 3.0, 4.0)
    assert Link.parse("1gbit", like).reduce_latency == 3.0
    for text in ("fast", "0gbit", "1gbit:fast", "1 GB"):
        with pytest.raises(InvalidArgumentError, match="expected a rate such as"):
            Link.parse(text)


def test_measured_tables_serve_where_they_were_measured_and_their_fits_elsewhere():
    gather = Table(((1e3, 1e-3), (1e6, 1.1e-2)))
    reduce = Table(((1e3, 2e-3), (1e6, 3.1e-2)))
    link = Link.of_tables(gather, reduce, 2, 1)
    here = Network(2, link)
    assert here.allgather(1e6) == 1.1e-2 and here.allreduce(1e6) == 3.1e-2
    there = Network(8, link)
    of_gather, of_reduce = gather.fit(), reduce.fit()
    assert there.allgather(1e6) == pytest.approx(3 * of_gather.alpha + 7 * 1e6 * of_gather.beta)
    assert there.allreduce(1e6) == pytest.approx(
        7 * of_reduce.alpha + 2 * 7 / 8 * 1e6 * of_reduce.beta
    )


def test_networks():
    link = Link.of_rate("x", 8e6, 0.5)  # 1 microsecond per byte
    assert Network(1, link, 4).allreduce(1000) == 0 and Network(1, link).allgather(9) == 0
    network = Network(2, link, 2)
    assert network.ranks == 4
    assert network.allgather(100) == pytest.approx(2 * 0.5 + 2 * 100e-6)
    assert network.allreduce(100) == pytest.approx(6 * 0.5 + 1.5 * 100e-6)
    assert network.exchange("Allgather", 10, 100, 50) == network.allgather(50)
    assert network.exchange("Allreduce", 10, 100, 50) == network.allreduce(400)
    with pytest.raises(InvalidArgumentError, match="hosts"):
        Network(0, link)


def test_exchanges_of_other_communicators_use_the_payload():
    link = Link.of_rate("x", 8e6, 0.0)
    payload = dr.communicators.auto.message_bytes(100, 10_000, 4)
    assert value_bits_of(payload, 100, 10_000) == pytest.approx(4)
    for name in ("SplitAllgather", "RecursiveDoubling", "GTopK"):
        expected = traffic(name, 100, 10_000, 4, 4).seconds(0.0, 1e-6)
        assert Network(4, link).exchange(name, 100, 10_000, payload) == pytest.approx(expected)
        # through the link of a host goes what two ranks receive from the other host
        shared = traffic(name, 100, 10_000, 4, 4).seconds(0.0, 1e-6) * 2 * 2 / 3
        assert Network(2, link, 2).exchange(name, 100, 10_000, payload) == pytest.approx(shared)
