"""Test calls that encode and sum several tensors, as graphs and without.

Random programs are compared with the core on the host.
"""

import numpy as np
import pytest
from emulation import SCHEDULES, placed, set_schedule
from emulation_graphs import DirectEncodings, DirectSums, RecordedEncodings, RecordedSums, repeats

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

CODECS = (
    dr.Codec(dr.TopK(0.02), index=dr.Rice(), value=dr.LloydMax(bits=1)),
    dr.Codec(dr.NoneSparsifier(), value=dr.LloydMax(bits=4)),
    dr.Codec(dr.TopK(0.1), index=dr.EliasFano(), value=dr.Float16()),
    dr.Codec(dr.Threshold(1.0), index=dr.Bitmap(), value=dr.QSGD(bits=4)),
    dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.02), value=dr.FitPoly()),
    dr.Codec(dr.ChunkTopK(0.15)),
)
DENSE_PAYLOAD = 4 * 1000  # bytes, of more than all payloads that are summed here
MEMORIES = (dr.NoMemory(), dr.Residual(), dr.MomentumCorrection(0.9), dr.LowPass(0.3))


def sizes_of(random):
    """Return numbers of elements, some of which are similar, so that launches are merged."""
    around = random.choice([1, 5, 64, 700, 3001], int(random.integers(1, 13)))
    return [int(random.integers(d, d + d // 2 + 1)) for d in around]


def some_of(random, choices, count):
    """Return ``count`` random choices, among few or many of them."""
    few = random.permutation(len(choices))[: random.integers(1, len(choices) + 1)]
    return [choices[few[random.integers(len(few))]] for _ in range(count)]


@pytest.mark.parametrize("kind", [RecordedEncodings, DirectEncodings])
@pytest.mark.parametrize("seed", range(12))
def test_the_gradients_of_each_launch_are_encoded(seed, kind):
    random = np.random.default_rng(seed)
    set_schedule(*SCHEDULES[seed % len(SCHEDULES)])
    sizes = sizes_of(random)
    count = len(sizes)
    codecs = some_of(random, CODECS, count)
    memories = some_of(random, MEMORIES, count)
    states = [
        tuple(placed(np.zeros(d, np.float32)) for _ in memory.state)
        for memory, d in zip(memories, sizes)
    ]
    calls = kind(codecs, memories, sizes, states)
    expected_states = [tuple(part.copy() for part in state) for state in states]
    for step in range(3):
        # in other places each time, and of any alignment
        gradients = [
            placed(
                (random.standard_normal(d) * random.choice([0, 1, 1e-3])).astype(np.float32),
                misalignment=int(random.integers(4)),
            )
            for d in sizes
        ]
        if random.random() < 0.3:
            gradients[random.integers(count)][0] = np.nan
        made = calls.launch(gradients, seed, step)
        for i in range(count):
            expected, _ = encode_numpy(
                codecs[i], memories[i], gradients[i], expected_states[i], 0.0, seed, step, i, 0
            )
            payload, header = made[i]
            np.testing.assert_array_equal(payload, expected)
            np.testing.assert_array_equal(header, expected[: container.HEADER.size])
            for mine, other in zip(states[i], expected_states[i]):
                np.testing.assert_array_equal(mine.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("kind", [RecordedSums, DirectSums])
@pytest.mark.parametrize("seed", range(12))
def test_the_payloads_of_each_launch_are_summed(seed, kind):
    random = np.random.default_rng(100 + seed)
    set_schedule(*SCHEDULES[seed % len(SCHEDULES)])
    codec, ranks = CODECS[seed % len(CODECS)], int(random.integers(1, 5))
    sizes = sizes_of(random)
    steps = []
    for _ in range(3):
        gradients = [random.standard_normal((ranks, d)).astype(np.float32) for d in sizes]
        if random.random() < 0.3:
            gradients[0][-1, 0] = np.inf
        steps.append([[codec.encode(one) for one in of_ranks] for of_ranks in gradients])
    most_sizes = [
        [max(step[i][rank].size for step in steps) for rank in range(ranks)]
        for i in range(len(sizes))
    ]
    calls = kind(codec, sizes, most_sizes)
    for number, step in enumerate(steps):
        outs = [placed(random.standard_normal(d).astype(np.float32)) for d in sizes]
        expected = [
            decode_sum_numpy(payloads, out.copy(), 1 / (1 + number))
            for payloads, out in zip(step, outs)
        ]
        there = [
            [placed(payload, int(random.integers(8))) for payload in payloads] for payloads in step
        ]
        calls.launch(there, outs, 1 / (1 + number))
        for out, one in zip(outs, expected):
            np.testing.assert_array_equal(out, one)


@pytest.mark.parametrize("codec", CODECS[:4], ids=str)
def test_tensors_of_similar_size_share_launches(codec):
    sizes, payload = [600 + 7 * i for i in range(20)], DENSE_PAYLOAD

    def encodings(sizes):
        states = [tuple(placed(np.zeros(d, np.float32)) for _ in range(1)) for d in sizes]
        return RecordedEncodings(
            [codec] * len(sizes), [dr.Residual()] * len(sizes), sizes, states
        ).size

    def sums(sizes):
        return RecordedSums(codec, sizes, [[payload] * 3] * len(sizes)).size

    for size_of in (encodings, sums):
        assert 5 < size_of(sizes) <= 1.2 * size_of(sizes[:1])
        # other sizes have grids of their own
        assert size_of([*sizes, 5000, 5001]) == 2 * size_of(sizes)


def test_tensors_whose_work_sorts_have_launches_of_their_own():
    codec = dr.Codec(dr.TopK(0.05), index=dr.RawIndex(), value=dr.FitPoly())
    sizes = [1000] * 3
    states = [(placed(np.zeros(d, np.float32)),) for d in sizes]
    many = RecordedEncodings([codec] * 3, [dr.Residual()] * 3, sizes, states)
    one = RecordedEncodings([codec], [dr.Residual()], sizes[:1], states[:1])
    assert many.size == 3 * one.size


def test_permutations_of_the_host_do_not_repeat():
    assert all(map(repeats, CODECS))
    assert not repeats(dr.Codec(dr.RandomK(0.1)))
