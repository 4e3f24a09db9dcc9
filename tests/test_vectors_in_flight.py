"""Test sums of sparse vectors that are in flight together, on ranks that differ in their order."""

import itertools
import types

import numpy as np
import pytest
from ranks_in_any_order import NamedTransport, Network, run
from simulated_ranks import same_bits

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import auto
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.given_vectors import GivenVector, GivenVectorSum
from deepreduce_hvd.recent import Recent

D = 3000


@pytest.fixture
def changing_links(monkeypatch):
    """The links are fast or slow at random, so ranks that measure twice find other numbers."""
    random = np.random.default_rng(5)
    times = itertools.accumulate(10.0 ** random.integers(-7, 0) for _ in itertools.count())
    monkeypatch.setattr(auto, "_PROBE_BYTES", 100)  # so that the bytes of small vectors count
    monkeypatch.setattr(auto, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))


def start(network, rank, communicator, name, number, step):
    """Start the sum ``name`` on one rank; return its exchange."""
    indices, values = vector_of(rank, number, step)
    vector = GivenVector(name, indices, values, D, rank, step, name)
    total = GivenVectorSum(communicator, dr.Rice(), dr.RawValue(), {})
    return Exchange(total, vector, NamedTransport(network, rank), f"{name}.{step}")


def vector_of(rank, number, step):
    random = np.random.default_rng((rank, number, step))
    count = int(np.random.default_rng((number, step)).choice([1, 30, 900, D]))
    indices = np.sort(random.choice(D, count, replace=False)).astype(np.uint32)
    return indices, random.integers(1, 100, count).astype(np.float32)  # their sums are exact


def test_random_programs(changing_links):
    schemes = set().union(*(schemes_of_a_program(seed) for seed in range(16)))
    assert schemes == {"Allgather", "SplitAllgather", "RecursiveDoubling"}


def schemes_of_a_program(seed):
    """Compare sums and choices of all ranks; return the chosen schemes.

    Some ranks replace their communicator, as ranks that join an elastic job do.
    """
    random = np.random.default_rng(seed)
    size, together = int(random.integers(2, 6)), int(random.integers(2, 5))
    one_for_all = bool(random.integers(2))
    communicators = [[dr.Auto() for _ in range(together)] for _ in range(size)]
    schemes = set()
    for step in range(6):
        network = Network(size)
        if random.integers(3) == 0:
            communicators[random.integers(size)] = [dr.Auto() for _ in range(together)]
        programs = []
        for rank in range(size):

            def program(number, rank=rank, step=step, network=network):
                communicator = communicators[rank][0 if one_for_all else number]
                return start(network, rank, communicator, f"v{number}", number, step)

            order = random.permutation(together).tolist()
            programs.append([lambda number=n, program=program: program(number) for n in order])
        started = run(programs, random)
        for number in range(together):
            expected = np.zeros(D, dtype=np.float32)
            for rank in range(size):
                indices, values = vector_of(rank, number, step)
                expected[indices] += values
            of_ranks = [
                next(one for one in exchanges if one.name == f"v{number}.{step}")
                for exchanges in started
            ]
            for exchange in of_ranks:
                indices, values = exchange.finish().sparse(0, 1.0)
                np.testing.assert_array_equal(indices, np.flatnonzero(expected))
                same_bits(values, expected[indices])
            chosen = {exchange.bucket.scheme for exchange in of_ranks}
            assert len(chosen) == 1, chosen
            schemes.add(chosen.pop().partition(":")[0])
    return schemes


def test_links_are_measured_once(changing_links):
    """Each sum that is in flight before the first one ends measures; later ones do not."""
    random = np.random.default_rng(0)
    communicators = [dr.Auto() for _ in range(3)]
    for step in range(4):
        network = Network(3)
        programs = [
            [
                lambda rank=rank, number=number, network=network, step=step: start(
                    network, rank, communicators[rank], f"v{number}", number, step
                )
                for number in random.permutation(3)
            ]
            for rank in range(3)
        ]
        run(programs, random)
        broadcasts = [
            name for name, calls in network.given.items() if calls[0][0][0] == "broadcast"
        ]
        assert len(broadcasts) <= (3 if step == 0 else 0), broadcasts


def test_sums_without_a_name_learn_from_each_other():
    """Random sizes and codecs; each call has a label of its own, as calls without a name have."""
    random = np.random.default_rng(1)
    communicators = [dr.Auto() for _ in range(2)]
    sums = {}  # kind -> number of elements of its last sum
    for step in range(60):
        network = Network(2)
        d, count = int(random.choice([2000, 3000])), int(random.choice([100, 500]))
        index = dr.RawIndex() if random.integers(2) else dr.Rice()
        places = [np.sort(random.choice(d, count, replace=False)) for _ in range(2)]

        def program(rank, step=step, network=network, d=d, index=index, places=places):
            ones = np.ones(places[rank].size, dtype=np.float32)
            vector = GivenVector(f"number {step}", places[rank].astype(np.uint32), ones, d, rank)
            total = GivenVectorSum(communicators[rank], index, dr.RawValue(), {})
            return Exchange(total, vector, NamedTransport(network, rank), f"number.{step}")

        started = run([[lambda rank=rank: program(rank)] for rank in range(2)], random)
        kind = d, count, repr(index)
        for (exchange,) in started:
            exchange.finish()
            assert exchange.bucket.scheme.endswith(f"union {sums.get(kind, 'not known yet')}")
        if kind not in sums:  # Allgather, the choice of two ranks, seldom counts the elements
            sums[kind] = np.union1d(*places).size
    assert len(sums) == 8


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(auto, "_MOST_KINDS", 5)
    random = np.random.default_rng(2)
    communicator = dr.Auto()
    for step in range(20):
        exchange = start(Network(1), 0, communicator, f"v{step % 4 * random.integers(9)}", 0, step)
        exchange.finish()
    (facts,) = communicator._vector_facts.values()
    assert len(facts.sums) == 5


def test_recent_keeps_the_last_keys():
    random = np.random.default_rng(3)
    table, last = Recent(7), []
    for number in range(500):
        key = int(random.integers(12))
        table[key] = number
        last = [*(pair for pair in last if pair[0] != key), (key, number)][-7:]
        assert list(table.items()) == last
