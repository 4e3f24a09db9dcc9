"""Test the accuracy laboratory: virtual ranks, training, tasks and densities of layers."""

import json
import math

import candidates
import layerwise
import numpy as np
import pytest
import report
import tasks
import torch
import training
from virtual_ranks import VirtualRanks

import deepreduce_hvd as dr
from deepreduce_hvd.adapters import embedding_tables


class Small(tasks.Task):
    """Linear regression, which trains within a second."""

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
        for _ in range(self.total_steps):
            yield [torch.randn(16, 50, generator=generator) for _ in range(size)]

    def loss(self, model, batch):
        return (model(batch) - batch @ self._truth).square().mean()

    def evaluate(self, model):
        generator = torch.Generator().manual_seed(77)
        with torch.no_grad():
            return -float(self.loss(model, torch.randn(400, 50, generator=generator)))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_nothing_is_lost_over_a_training(size):
    """The mean of what was sent plus the mean residual is the mean of all gradients."""
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


def test_tensors_with_codecs_of_their_own_are_sent_with_them():
    """Each tensor has as many elements as its codec selects; one without a codec has all."""
    draw = np.random.default_rng(2)
    codecs = {"first": dr.Codec(dr.TopK(0.01)), "third": dr.Codec(dr.TopK(0.1))}
    shapes = dict.fromkeys(("first", "second", "third", "fourth"), 2000)
    codecs["fourth"] = dr.Codec(dr.TopK(0.01))
    ranks = VirtualRanks(2, shapes, codecs)
    assert [names for *_, names in ranks._parts()] == [["fourth", "first"], ["third"]]
    gradients = [{name: draw.laplace(size=d).astype(np.float32) for name, d in shapes.items()}] * 2
    sent = {name: np.flatnonzero(mean) for name, mean in ranks.mean(gradients).items()}
    assert {name: len(places) for name, places in sent.items()} == {
        "first": 20, "second": 2000, "third": 200, "fourth": 20
    }  # fmt: skip
    for name, codec in codecs.items():
        expected = np.sort(np.argsort(-np.abs(gradients[0][name]))[: len(sent[name])])
        assert np.array_equal(sent[name], expected), codec


def test_densities_of_layers_are_in_proportion_to_the_next_layer():
    elements = {"last": 4000, "middle": 2000, "small": 100, "first": 3000}
    seconds = {"last": 9.0, "middle": 1.0, "small": 3.0, "first": 2.0}
    found = layerwise.densities(elements, seconds, 0.1)
    kept = {name: share * elements[name] for name, share in found.items()}
    assert sum(kept.values()) == pytest.approx(910, rel=1e-6)
    assert found["first"] == 0.001 and found["small"] == 1  # the bounds
    assert kept["last"] / 1.0 == pytest.approx(kept["middle"] / 3.0)


def test_layers_of_a_network_have_their_multiplications_and_their_codecs():
    task = tasks.TASKS["resnet"]()
    task.batch = 2
    torch.manual_seed(5)
    codecs = layerwise.layerwise_codecs(task, lambda share: dr.Codec(dr.TopK(share)), 0.01)
    first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(1))  # a training draws the same weights
    counts = layerwise.multiplications(task)
    assert counts["stem.weight"] == 2 * 16 * 9 * 14 * 14
    assert counts["blocks.2.short.weight"] == 2 * 64 * 32 * 4 * 4
    assert counts["output.weight"] == 2 * 64 * 10
    shares = {name: codec.sparsifier.ratio for name, codec in codecs.items()}
    assert next(iter(shares)) == "blocks.2.short.weight" and len(shares) == 7
    # both hide behind a layer with as many multiplications
    assert 18432 * shares["blocks.2.first.weight"] == pytest.approx(
        36864 * shares["blocks.2.second.weight"] * counts["blocks.1.second.weight"]
        / counts["blocks.2.first.weight"]
    )  # fmt: skip
    assert min(shares.values()) == shares["blocks.0.first.weight"] == 0.001
    outcome = training.train(_few(task), candidates.CANDIDATES["LAGS"], 2, 0, 0.1)
    assert np.isfinite(outcome["metric"])


def _few(task):
    task.batch, task.total_steps = 16, 2
    task._test = [part[:100] for part in task._test]
    return task


def test_a_run_is_the_same_again_and_learns():
    task = Small()
    plain = candidates.CANDIDATES["none"]
    prepared = candidates.Candidate(dr.Codec(dr.TopK(0.1)), prepared=True)
    for candidate in (plain, prepared):
        first = training.train(task, candidate, 4, seed=1, learning_rate=0.05)
        assert first == training.train(task, candidate, 4, seed=1, learning_rate=0.05)
        start = task.evaluate(task.model())
        assert first["metric"] > 0.3 * start and first["steps"] == 60


def test_a_run_that_diverges_has_no_metric():
    outcome = training.train(Small(), candidates.CANDIDATES["none"], 2, 0, learning_rate=1e6)
    assert outcome["metric"] is None


@pytest.mark.parametrize("before", [False, True])
def test_gradients_are_clipped_before_or_after_compression(before):
    """Gradients are clipped on each rank, or after compression.

    Ranks clip to the norm times the square root of their number. The mean is clipped to the norm.
    """
    norms, steps = [], []

    class Recording(VirtualRanks):
        def mean(self, gradients):
            norms.extend(math.sqrt(sum(float(g @ g) for g in own.values())) for own in gradients)
            return super().mean(gradients)

    class Clipped(Small):
        total_steps, clip = 3, 0.01

        def optimizer(self, model, learning_rate):
            optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
            optimizer.register_step_pre_hook(lambda *_: steps.append(_norm(model)))
            return optimizer

    def _norm(model):
        return float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())

    candidate = candidates.Candidate(clips_before=before)
    training.train(Clipped(), candidate, 4, 0, 0.1, make_ranks=Recording)
    assert len(norms) == 12 and len(steps) == 3
    if before:
        assert norms == pytest.approx([0.02] * 12, rel=1e-3) and max(steps) < 0.02
        assert steps != pytest.approx([0.01] * 3, rel=1e-3)
    else:
        assert min(norms) > 0.1 and steps == pytest.approx([0.01] * 3, rel=1e-3)


@pytest.mark.parametrize("task", tasks.TASKS.values(), ids=lambda task: task.name)
def test_schedules_rise_and_end_at_zero(task):
    one = task.__new__(task)
    rates = [one.rate(step, 100) for step in range(100)]
    assert max(rates) == 1 and rates[0] < 0.5 and rates[-1] < 0.01


def _task(name):
    """Return a task that evaluates on no more than 1000 images."""
    task = tasks.TASKS[name]()
    if name in ("resnet", "vgg"):
        task._test = [part[:1000] for part in task._test]
    return task


@pytest.mark.parametrize(
    ("name", "shape", "chance"),
    [
        ("transformer", (12, 65), (math.log2(128), 1.0)),
        ("resnet", (32, 1, 28, 28), (0.1, 0.06)),
        ("vgg", (32, 1, 28, 28), (0.1, 0.06)),
        ("lstm", (12, 65), (math.log2(128), 1.0)),
        ("plain-lstm", (12, 65), (math.log2(128), 1.0)),
        ("ncf", (64 * 5,), (0.1, 0.04)),
        ("adagrad-ncf", (128 * 5,), (0.1, 0.04)),
    ],
)
def test_a_task_has_its_shapes_and_starts_at_chance(name, shape, chance):
    task = _task(name)
    assert task.name == name and len(task.learning_rates) >= 2
    batches = next(task.batches(4, seed=0))
    assert len(batches) == 4
    for batch in batches:
        first = batch[0] if isinstance(batch, tuple) else batch
        assert first.shape == shape
    torch.manual_seed(0)
    model = task.model()
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert 70_000 < sum(sizes) < 500_000
    assert sum(size for size in sizes if size >= 1024) > 0.95 * sum(sizes)
    expected, tolerance = chance
    assert task.evaluate(model) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_default_is_that_of_a_compressor(name):
    hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    hvd.init()
    task, candidate = _task(name), candidates.CANDIDATES["default"]
    model = task.model()
    shapes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    ranks = VirtualRanks(2, shapes, candidate.codec(task), dense_below=candidate.dense_below)
    policies = dr.Compressor(parameters=model.named_parameters()).policies
    assert ranks.codecs == {
        name: policy.codec for name, policy in policies.items() if not policy.dense
    }
    assert len(set(ranks.codecs.values())) == 2


@pytest.mark.parametrize("name", tasks.TASKS)
def test_some_steps_of_a_task_are_the_same_again_and_lower_the_loss(name):
    task = _task(name)
    task.total_steps = 30 if name.endswith("ncf") else 4
    losses = []
    outcomes = [
        training.train(
            task, candidates.CANDIDATES["none"], 4, 5, task.learning_rates[0],
            lambda done, total, loss: losses.append(loss),
        )
        for _ in range(2)
    ]  # fmt: skip
    assert outcomes[0] == outcomes[1]
    first, second = np.split(np.array(losses), 2)
    assert np.array_equal(first, second) and first[-1] < first[0]


def test_the_recommender_trains_on_unrated_items_and_other_weights_per_seed():
    task = tasks.TASKS["ncf"]()
    users, items, truth = next(task.batches(1, seed=0))[0]
    rated = task._rated[users, items]
    assert rated[truth == 1].all() and not rated[truth == 0].any()
    assert truth.view(-1, 5).sum(1).eq(1).all()
    held_out = {tuple(pair) for pair in task._test}
    assert not held_out & set(zip(users[truth == 1].tolist(), items[truth == 1].tolist()))
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = task.model()
        weights.append(
            torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        )
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    task.loss(model, (users, items, truth)).backward()
    assert not any(parameter.grad.is_sparse for parameter in model.parameters())


def test_the_figures_of_embedding_tables_on_the_pages():
    """Those in docs/accuracy.md and docs/choosing.md that no training prints."""
    task = tasks.TASKS["ncf"]()
    model = task.model()
    task.loss(model, next(task.batches(4, 0))[0]).backward()
    tables = [layer for layer in model.modules() if isinstance(layer, torch.nn.Embedding)]
    gradients = [layer.weight.grad.numpy().ravel() for layer in tables]
    shares = [round(100 * np.count_nonzero(one) / one.size) for one in gradients]
    assert (min(shares), max(shares)) == (6, 17)
    for layer in tables:  # so a compressor with the default codec warns about them
        rows = layer.weight.grad.numpy()
        assert embedding_tables.uses_few(np.count_nonzero(rows.any(axis=1)), len(rows))

    fullest = max(gradients, key=np.count_nonzero)
    count = np.count_nonzero(fullest)

    def size(index, value):
        return dr.Codec(dr.Threshold(0), index=index, value=value).encode(fullest).size

    bits = [8 * (size(one, dr.RawValue()) - 4 * count) / count for one in (dr.RLE(), dr.Rice())]
    assert np.round(bits, 1).tolist() == [0.6, 4.2]
    four_bits = dr.LloydMax(bits=4)
    assert 1.7 < size(dr.Rice(), four_bits) / size(dr.RLE(), four_bits) < 2.2


def test_the_figures_of_the_first_five_seeds_on_the_page():
    """docs/accuracy.md says why two comparisons have more seeds than five."""
    rows = json.loads((report.RESULTS / "accuracy-lab.json").read_text())

    def first_gains(task, ranks, steps):
        (gains,) = (
            row["gains"]
            for row in rows
            if (row["task"], row["ranks"], row["total_steps"]) == (task, ranks, steps)
            and (row["candidate"], row["batch_factor"]) == ("default", 1)
        )
        return [gains[str(seed)] for seed in range(5)]

    long = first_gains("transformer", 4, 4000)
    assert round(report.not_worse(long, tasks.TASKS["transformer"].margin), 3) == 0.069
    assert round(np.mean(first_gains("resnet", 16, 600)), 4) == -0.0021
