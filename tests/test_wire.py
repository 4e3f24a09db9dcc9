"""Test the probe in Horovod's reduction, and the names of collectives."""

import itertools
import re

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.coordination import collective_names

FINGERPRINT = 0x89ABCDEF


def reduced(probes, before=1.0, after=1.0):
    """Return the result of Horovod's float32 allreduce of the probes.

    It applies factors before and after the sum, which is in the order of ranks.
    """
    rows = np.array(probes, dtype=np.float32)
    np.testing.assert_array_equal(rows, probes)  # exact in float32
    return (np.add.accumulate(rows * np.float32(before))[-1] * np.float32(after)).tolist()


def probes_of(steps, fingerprint=FINGERPRINT):
    return [wire.probe(rank, fingerprint, step) for rank, step in enumerate(steps)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 100, 1024, 4096])
@pytest.mark.parametrize("step", [0, 1, 65536, 10**9, 2**40 + 5])
def test_the_scale_of_every_reduction(ranks, step):
    present = list(range(ranks))
    probes = probes_of([step] * ranks)
    for before, after in (
        (1, 1),
        (1, 1 / ranks),
        (1 / 3, 3 / ranks),
        (1 / 7.7, 7.7),
        (0.25, 4 / ranks),
    ):
        scale = wire.scale_of("w", reduced(probes, before, after), present, FINGERPRINT, step)
        assert scale == pytest.approx(before * after, rel=max(1e-6, ranks * 2**-25))


@pytest.mark.parametrize("ranks", [2, 3, 8, 100])
@pytest.mark.parametrize("other", [1, 2, 3, 10, 100, 1000, 12345, 65536, 2**31, 2**32 - 1, 2**33])
def test_every_rank_sees_that_one_is_at_another_step(ranks, other):
    present = list(range(ranks))
    for step, odd in itertools.product((0, 7, 70000), {0, ranks - 1}):
        steps = [step + other * (rank == odd) for rank in range(ranks)]
        total = reduced(probes_of(steps), 1, 1 / ranks)
        for own in steps:
            with pytest.raises(
                dr.InvalidArgumentError,
                match=f"on every rank, at the same step, .*at step {own}\\)",
            ):
                wire.scale_of("w", total, present, FINGERPRINT, own)


def test_every_rank_sees_another_configuration():
    total = reduced([wire.probe(0, FINGERPRINT, 5), wire.probe(1, FINGERPRINT ^ 1, 5)])
    for fingerprint in (FINGERPRINT, FINGERPRINT ^ 1):
        with pytest.raises(
            dr.InvalidArgumentError,
            match=(
                f"the same compressor configuration.*here configuration {fingerprint:08x} at step 5"
            ),
        ):
            wire.scale_of("w", total, [0, 1], fingerprint, 5)


@pytest.mark.parametrize("ranks", [2, 3, 8, 100])
@pytest.mark.parametrize("seed", range(5))
def test_every_rank_sees_another_loss_scale(ranks, seed):
    random = np.random.default_rng(seed)
    scales = [None, *2.0 ** np.arange(-20, 41), *random.uniform(0.1, 1e6, 20)]
    for _ in range(40):
        own, other = random.choice(len(scales), 2, replace=False)
        odd, step = random.integers(ranks), random.integers(10**6)
        given = [scales[other if rank == odd else own] for rank in range(ranks)]
        total = reduced(
            [wire.probe(rank, FINGERPRINT, step, one) for rank, one in enumerate(given)],
            1,
            1 / ranks,
        )
        for one in {*given}:
            shown = "broadcast it" if one is None else f"; the loss scale here is {one:g}"
            with pytest.raises(
                dr.InvalidArgumentError, match=f"on every rank.*{re.escape(shown)}$"
            ):
                wire.scale_of("w", total, list(range(ranks)), FINGERPRINT, step, one)


def test_equal_loss_scales_change_no_result():
    for scale in (1.0, 2.0**-20, 65536.0, 0.3, 1e300):
        probes = [wire.probe(rank, FINGERPRINT, 7, scale) for rank in range(5)]
        found = wire.scale_of("w", reduced(probes, 1, 0.2), list(range(5)), FINGERPRINT, 7, scale)
        assert found == pytest.approx(0.2, rel=1e-6)


def test_ranks_that_are_absent_must_be_known():
    probes = probes_of([4, 4, 4])
    probes[2] = [0.0] * 4
    total = reduced(probes, 1, 1 / 3)
    assert wire.scale_of("w", total, [0, 1], FINGERPRINT, 4) == pytest.approx(1 / 3)
    with pytest.raises(dr.InvalidArgumentError, match="sum or average over the 3 ranks"):
        wire.scale_of("w", total, [0, 1, 2], FINGERPRINT, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_missing_rank_is_found(seed):
    """Any missing rank is found, also in the middle, and in process sets of any ranks."""
    random = np.random.default_rng(seed)
    for size in {2, 3, 5, 9, 4096, *(2 ** random.uniform(1, 12, 10)).astype(int).tolist()}:
        everyone = range(size if random.integers(2) else 10 * size)
        ranks = sorted(random.choice(everyone, size, replace=False).tolist())
        probes = np.array([wire.probe(rank, FINGERPRINT, 3) for rank in ranks])
        wire.scale_of("w", reduced(probes), ranks, FINGERPRINT, 3)
        closest = np.argsort(np.abs(probes[:, 1] - probes[:, 1].mean()))  # to the mean
        for missing in {0, size // 2, size - 1, *closest[:3].tolist()}:
            present = np.delete(probes, missing, axis=0)
            before, after = random.choice([(1, 1), (1, 1 / size), (1 / 3, 3 / size)])
            with pytest.raises(dr.InvalidArgumentError, match=f"average over the {size} ranks"):
                wire.scale_of("w", reduced(present, before, after), ranks, FINGERPRINT, 3)


def test_names_of_collectives_differ_as_labels_do():
    labels = [
        "a/b",
        "a_b",
        "a__b",
        "a.b",
        "a-b",
        "a_x2fb",
        "a b",
        "ab",
        "A/b",
        "é",
        "ë",
        "a/b:0",
        "a/b_0",
        "1",
        "1.1",
        "",
    ]
    numbers = (0, 1, 11)
    suffixes = ("", ".0", ".1", ".within.0", ".probe")
    names = [
        collective_names.collective_name(number, label) + suffix
        for number in numbers
        for label in labels
        for suffix in suffixes
    ]
    on_tensorflow = [
        "".join(one if one.isascii() and one.isalnum() else "_" for one in name) for name in names
    ]
    assert len(set(on_tensorflow)) == len(set(names)) == len(numbers) * len(labels) * len(suffixes)
    assert (
        collective_names.collective_name(3, "layer1.0/kernel_2")
        == "deepreduce.3.layer1_x2e0_x2fkernel__2"
    )


def test_numbers_are_never_given_twice():
    ranks = (70, 71)
    assert [collective_names.take_number(ranks) for _ in range(2)] == [0, 1]
    assert collective_names.take_number(ranks, at_least=10) == 10
    assert collective_names.next_number(ranks) == 11
    assert collective_names.take_number(ranks, at_least=5) == 11
    assert collective_names.take_number((70,)) == 0
