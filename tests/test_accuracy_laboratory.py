"""The accuracy laboratory: virtual ranks, training, the test of equivalence and its summary."""

import candidates
import numpy as np
import pytest
import report
import scipy.stats
import tasks
import torch
import training
from virtual_ranks import VirtualRanks

import deepreduce_hvd as dr


class Small(tasks.Task):
    """Linear regression, which ends within a second."""

    name = "small"
    metric = "negative loss"
    total_steps = 60
    learning_rates = (0.05,)

    def __init__(self):
        self._truth = torch.randn(50, 30, generator=torch.Generator().manual_seed(9))

    def model(self):
        return torch.nn.Linear(50, 30)

    def optimizer(self, model, learning_rate):
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)

    def batches(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.steps(size)):
            yield [torch.randn(16, 50, generator=generator) for _ in range(size)]

    def loss(self, model, batch):
        return (model(batch) - batch @ self._truth).square().mean()

    def evaluate(self, model):
        generator = torch.Generator().manual_seed(77)
        with torch.no_grad():
            return -float(self.loss(model, torch.randn(400, 50, generator=generator)))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_nothing_is_lost_over_a_training(size):
    """Mean of what was sent, plus the mean residual, is the mean of all gradients."""
    draw = np.random.default_rng(size)
    shapes = {"large": 3000, "small": 10}
    codec = dr.Codec(dr.TopK(0.02), index=dr.Rice(), value=dr.QSGD(4))
    ranks = VirtualRanks(size, shapes, codec)
    assert list(ranks.compressed) == ["large"]
    total = {name: np.zeros(d) for name, d in shapes.items()}
    received = {name: np.zeros(d) for name, d in shapes.items()}
    for _ in range(12):
        gradients = [
            {name: draw.laplace(size=d).astype(np.float32) for name, d in shapes.items()}
            for _ in range(size)
        ]
        for name, mean in ranks.mean(gradients).items():
            received[name] += mean
            total[name] += np.mean([own[name] for own in gradients], axis=0)
    residual = np.mean([state["large"][0] for state in ranks._states], axis=0)
    np.testing.assert_allclose(received["large"] + residual, total["large"], atol=1e-4)
    np.testing.assert_allclose(received["small"], total["small"], rtol=1e-5, atol=1e-5)
    assert 4 * 10 < ranks.sent_bytes / ranks.steps < 4 * 3010 / 20


def test_a_run_is_the_same_again_and_learns():
    task = Small()
    plain = candidates.CANDIDATES["none"]
    prepared = candidates.Candidate(dr.Codec(dr.TopK(0.1)), prepared=True)
    for candidate in (plain, prepared):
        first = training.train(task, candidate, 4, seed=1, learning_rate=0.05)
        assert first == training.train(task, candidate, 4, seed=1, learning_rate=0.05)
        start = task.evaluate(task.model())
        assert first["metric"] > 0.3 * start and first["steps"] == 60
    assert training.train(task, plain, 8, seed=1, learning_rate=0.05)["steps"] == 30


def test_a_run_that_diverges_has_no_metric():
    outcome = training.train(Small(), candidates.CANDIDATES["none"], 2, 0, learning_rate=1e6)
    assert outcome["metric"] is None


@pytest.mark.parametrize("seed", range(5))
def test_equivalence_is_that_of_two_one_sided_tests(seed):
    draw = np.random.default_rng(seed)
    differences, margin = draw.normal(0.001, 0.002, 5), draw.uniform(0.001, 0.01)
    above = scipy.stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = scipy.stats.ttest_1samp(differences, margin, alternative="less").pvalue
    assert report.equivalent(differences, margin) == pytest.approx(max(above, below))
    assert report.equivalent([0.1], 1) is None
    assert report.equivalent([0.1, 0.1], 1) == 0 and report.equivalent([0.1, 0.1], 0.1) == 1


def test_the_summary_takes_the_best_learning_rate_and_compares_by_seed(monkeypatch):
    monkeypatch.setitem(report.TASKS, "small", Small)

    def row(candidate, rate, seed, metric):
        return {
            "task": "small", "candidate": candidate, "ranks": 4, "seed": seed, "steps_at_4": 60,
            "learning_rate": rate, "metric": metric, "bytes": 10.0,
        }  # fmt: skip

    plain, other = report.summarize(
        [
            row("none", 0.1, 0, 0.90), row("none", 0.1, 1, 0.92), row("none", 0.2, 0, 0.95),
            row("none", 0.2, 1, None), row("zip", 0.1, 0, 0.80), row("zip", 0.2, 0, 0.89),
            row("zip", 0.2, 1, 0.93),
        ]
    )  # fmt: skip
    assert plain["learning_rate"] == 0.1 and "gain" not in plain
    assert other["learning_rate"] == 0.2 and other["gain"] == pytest.approx(0.0)
    assert other["margin"] == pytest.approx(np.std([0.90, 0.92], ddof=1) / 2)


@pytest.mark.parametrize("task", tasks.TASKS.values(), ids=lambda task: task.name)
def test_schedules_rise_and_end_at_zero(task):
    one = task.__new__(task)
    rates = [one.rate(step, 100) for step in range(100)]
    assert max(rates) == 1 and rates[0] < 0.5 and rates[-1] < 0.01
