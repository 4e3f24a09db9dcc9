"""Test the accuracy laboratory's figures of how much ranks agree."""

import json
import math

import agreement
import candidates
import numpy as np
import pytest
import training
from test_accuracy_laboratory import Small

import deepreduce_hvd as dr


def slow_figures(gradients, residuals, selected, sent):
    """Compute the figures of one step element by element."""
    size, d = len(gradients), len(sent)

    def mean(rows):
        return [sum(row[place] for row in rows) / size for place in range(d)]

    def norm(values):
        return math.sqrt(sum(value * value for value in values))

    def cosine(rows):
        cosines = [
            sum(a * b for a, b in zip(rows[one], rows[other]))
            / (norm(rows[one]) * norm(rows[other]))
            for one in range(size)
            for other in range(one)
        ]
        return sum(cosines) / len(cosines)

    whole = [[a + b for a, b in zip(*pair)] for pair in zip(gradients, residuals)]
    left, gradient = mean(residuals), mean(gradients)
    total = [a + b for a, b in zip(left, gradient)]
    missing = [a - b for a, b in zip(total, sent)]
    voters = [sum(place in own for own in selected) for place in range(d)]
    chosen = [count for count in voters if count]
    return {
        "share_sent": sum(value != 0 for value in sent) / d,
        "energy_sent": 1 - (norm(missing) / norm(total)) ** 2,
        "residual_to_gradient": norm(left) / norm(gradient),
        "steps_in_residual": sum(map(abs, left)) / sum(map(abs, sent)),
        "cosine": cosine(gradients),
        "cosine_with_residual": cosine(whole),
        "ranks_that_select": sum(chosen) / len(chosen),
    }


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_a_slow_program(seed):
    draw = np.random.default_rng(seed)
    size, d = draw.integers(2, 9), draw.integers(3, 60)
    shared = draw.normal(size=d)
    gradients = draw.uniform(0, 2) * shared + draw.normal(size=(size, d))
    residuals = draw.laplace(size=(size, d))
    selected = [draw.choice(d, draw.integers(1, d), replace=False) for _ in range(size)]
    sent = np.where(draw.random(d) < 0.5, draw.normal(size=d), 0)
    sent[draw.integers(d)] = 1.5
    found = agreement.figures(gradients, residuals, selected, sent)
    expected = slow_figures(*(part.tolist() for part in (gradients, residuals)), selected, sent)
    assert found == pytest.approx(expected)


def test_figures_of_equal_and_of_opposite_ranks():
    gradient = np.array([3.0, 0, 0, 4])
    same = agreement.figures(
        np.stack([gradient] * 3), np.zeros((3, 4)), [[3]] * 3, np.array([0, 0, 0, 4.0])
    )
    assert same == pytest.approx({
        "share_sent": 0.25, "energy_sent": 0.64, "residual_to_gradient": 0, "steps_in_residual": 0,
        "cosine": 1, "cosine_with_residual": 1, "ranks_that_select": 3,
    })  # fmt: skip
    other = agreement.figures(
        np.stack([gradient, -2 * gradient]), np.ones((2, 4)), [[0], [3]], np.ones(4)
    )
    assert other["cosine"] == pytest.approx(-1) and other["ranks_that_select"] == 1
    assert other["steps_in_residual"] == 1


@pytest.mark.parametrize(
    "communicator", [dr.Allgather(), dr.GTopK(), dr.CLTK()], ids=lambda one: type(one).__name__
)
def test_watching_does_not_change_a_training(communicator, monkeypatch):
    """The figures are those of the requested steps, and watching does not change the training."""
    monkeypatch.setattr(agreement, "_FIRST", 10)
    monkeypatch.setattr(agreement, "_EVERY", 5)
    codec = dr.Codec(dr.TopK(0.02, warmup_steps=8), index=dr.Rice(), value=dr.LloydMax(1))
    candidate = candidates.Candidate(codec, communicator=communicator)
    losses, samples = [], []

    def train(make_ranks, *arguments):
        losses.append([])
        return training.train(
            Small(), candidate, 4, 0, 0.05, lambda *now: losses[-1].append(now[2]), make_ranks
        )

    plain = train(agreement.VirtualRanks)
    watched = train(lambda *a, **settings: agreement.WatchedRanks(samples, *a, **settings))
    assert watched == plain and losses[0] == losses[1]
    assert len(samples) == (60 - 10) // 5
    share = 30 / 1500
    for one in samples:
        at_most = share * (4 if isinstance(communicator, dr.Allgather) else 1)
        assert share / 2 < one["share_sent"] <= at_most and 1 <= one["ranks_that_select"] <= 4
    found = agreement.watch(Small(), candidate, 4, 0.05, 20)
    expected = {name: np.mean([one[name] for one in samples[:3]]) for name in samples[0]}
    assert found == pytest.approx(expected, rel=5e-4)
    assert all(float(f"{value:.4g}") == value for value in found.values())


def test_the_command_writes_a_row_per_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(agreement, "RESULTS", tmp_path)
    monkeypatch.setitem(agreement.TASKS, "small", Small)
    monkeypatch.setattr(agreement, "_FIRST", 20)
    monkeypatch.setattr(agreement, "RUNS", (("small", "no warm-up", 4, 8, 0.05, 25),))
    monkeypatch.setattr("sys.argv", ["agreement.py"])
    agreement.main()
    (row,) = json.loads((tmp_path / "accuracy-agreement.json").read_text())
    assert (row["task"], row["ranks"], row["last_step"]) == ("small", 4, 25)
    assert row["samples"] == 8 * Small.batch // 4
    assert f"cosine {row['cosine']}" in capsys.readouterr().out


def test_the_runs_are_of_candidates_and_tasks_that_there_are():
    for task, candidate, _, _, rate, steps in agreement.RUNS:
        assert candidate in candidates.CANDIDATES and rate in agreement.TASKS[task].learning_rates
        assert 75 <= steps < agreement.TASKS[task].total_steps
