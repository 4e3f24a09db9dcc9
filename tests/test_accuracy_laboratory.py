"""Test the accuracy laboratory: virtual ranks, training, the equivalence test and its summary."""

import importlib.util
import json
import math
import multiprocessing
import pathlib

import candidates
import numpy as np
import pytest
import report
import runs
import scipy.stats
import tasks
import torch
import training
from virtual_ranks import VirtualRanks

import deepreduce_hvd as dr

# benchmarks/ has another run.py
_location = pathlib.Path(report.__file__).with_name("run.py")
_specification = importlib.util.spec_from_file_location("accuracy_run", _location)
command = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(command)


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
            "task": "small", "candidate": candidate, "ranks": 4, "seed": seed, "total_steps": 60,
            "learning_rate": rate, "metric": metric, "bytes": 10.0,
        }  # fmt: skip

    plain, other = report.summarize(
        [
            row("none", 0.1, 0, 0.90) | {"loss": 0.3}, row("none", 0.1, 1, 0.92) | {"loss": 0.5},
            row("none", 0.2, 0, 0.95) | {"loss": 0.1},
            row("none", 0.2, 1, None), row("zip", 0.1, 0, 0.80), row("zip", 0.2, 0, 0.89),
            row("zip", 0.2, 1, 0.93),
        ]
    )  # fmt: skip
    assert plain["learning_rate"] == 0.1 and "gain" not in plain
    assert other["learning_rate"] == 0.2 and other["gain"] == pytest.approx(0.0)
    assert plain["by_seed"] == {0: 0.90, 1: 0.92}
    assert plain["other_rates"] == {0.2: {0: 0.95, 1: None}}
    assert plain["training_loss"] == pytest.approx(0.4) and other["training_loss"] is None
    assert other["margin"] == Small.margin
    assert other["gains"] == {0: pytest.approx(-0.01), 1: pytest.approx(0.01)}
    plain, diverged = report.summarize(
        [row("none", 0.1, seed, 0.9) for seed in range(3)]
        + [
            row("zip", 0.1, seed, 0.95 if seed else None) | {"bytes": 20.0 if seed else 99.0}
            for seed in range(3)
        ]
    )
    assert "gain" not in diverged and diverged["by_seed"][0] is None
    assert diverged["bytes_per_step"] == 20
    assert diverged["gains"] == {1: pytest.approx(0.05), 2: pytest.approx(0.05)}


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
def test_some_steps_of_a_task_are_the_same_again_and_lower_the_loss(name):
    task = _task(name)
    task.total_steps = 30 if name == "ncf" else 4
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


@pytest.mark.slow
def test_several_jobs_write_a_row_per_run_and_none_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks.TASKS["ncf"], "total_steps", 3)
    keys = [("ncf", "none", 4, seed, 0.002, 3) for seed in range(3)]
    keys.append(("ncf", "no such candidate", 4, 0, 0.002, 3))
    path = tmp_path / "runs.jsonl"
    assert runs.run_all(path, keys, jobs=2) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert sum("hit rate at 10 0." in line for line in lines) == 3
    assert sum("failed: KeyError" in line for line in lines) == 1
    assert any(line.endswith("1 min left") for line in lines)
    rows = runs.known(path)
    assert set(rows) == set(keys[:3]) and len(path.read_text().splitlines()) == 3
    task = tasks.TASKS["ncf"]()
    outcome = training.train(task, candidates.CANDIDATES["none"], 4, 2, 0.002)
    assert rows[keys[2]].items() >= outcome.items()
    # the command does not repeat any of them
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    arguments = ["--tasks=ncf", "--candidates=none", "--seeds=0-2", "--rates=0.002", "--jobs=2"]
    assert command.main(arguments, path) == 0
    assert "3 runs, 3 of them known" in capsys.readouterr().out
    assert runs.known(path) == rows
    assert (tmp_path / "accuracy-lab.png").stat().st_size > 10_000
    entries = json.loads((tmp_path / "accuracy-lab.json").read_text())
    assert len(entries) == 1
    # nor those in the results, without the file of runs
    assert command.main(arguments, tmp_path / "other.jsonl") == 0
    assert "3 runs, 3 of them known" in capsys.readouterr().out
    assert json.loads((tmp_path / "accuracy-lab.json").read_text()) == entries


def test_recorded_runs_have_the_same_summary():
    def rounded(text):
        return json.loads(text, parse_float=lambda number: round(float(number), 9))

    entries = rounded((report.RESULTS / "accuracy-lab.json").read_text())
    assert rounded(json.dumps(report.summarize(report.recorded().values()))) == entries


def test_an_interrupt_ends_the_runs_in_progress(tmp_path, monkeypatch):
    def interrupted(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.concurrent.futures, "as_completed", interrupted)
    keys = [("ncf", "none", 4, seed, 0.002, 10**6) for seed in range(4)]
    with pytest.raises(KeyboardInterrupt):
        runs.run_all(tmp_path / "runs.jsonl", keys, jobs=2)
    assert not multiprocessing.active_children()


def test_the_time_left_is_that_of_runs_of_the_same_task():
    rows = [{"task": "vgg", "seconds": 10}, {"task": "vgg", "seconds": 20}]
    rows.append({"task": "ncf", "seconds": 6})
    keys = [("vgg",), ("ncf",), ("lstm",)]
    assert runs.remaining(keys, rows, jobs=2) == pytest.approx((15 + 6 + 12) / 2)


def _row(candidate, rate, seed, metric, task="ncf", ranks=4):
    return {
        "task": task, "candidate": candidate, "ranks": ranks, "seed": seed,
        "total_steps": tasks.TASKS[task].total_steps, "learning_rate": rate, "metric": metric,
        "bytes": 10.0 if candidate == "none" else 1.0,
    }  # fmt: skip


def test_the_best_rate_is_that_of_uncompressed_training():
    rows = [
        _row("none", 1.0, 0, 0.5), _row("none", 2.0, 0, 0.6), _row("none", 2.0, 1, 0.6),
        _row("none", 4.0, 0, None), _row("default", 1.0, 0, 0.9),
        _row("none", 0.5, 0, 2.5, "lstm"), _row("none", 1.0, 0, 2.9, "lstm"),
        _row("none", 8.0, 0, None, "vgg"),
    ]  # fmt: skip

    def rates(name, ranks=4, text="best"):
        return command.rates_of(text, tasks.TASKS[name], ranks, rows)

    assert rates("ncf") == [2.0] and rates("lstm") == [0.5]
    assert rates("ncf", text=None) == tasks.TASKS["ncf"].learning_rates
    assert rates("ncf", text="3,0.5") == [3, 0.5]
    for name, ranks in (("ncf", 16), ("vgg", 4), ("resnet", 4)):
        with pytest.raises(
            SystemExit, match=f"got none; run first:\n.*--tasks {name} .*none --ranks {ranks}"
        ):
            rates(name, ranks)


def test_a_report_of_no_runs_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(SystemExit):
        command.main(["--report"], tmp_path / "runs.jsonl")
    assert "got none; run without --report first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_unknown_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--tasks", "vgg;bert"])
    assert "transformer; resnet; vgg; lstm; plain-lstm; ncf, got 'bert'" in capsys.readouterr().err


def test_the_plot_has_a_panel_per_task_and_one_color_per_candidate(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report.pyplot, "close", drawn.append)
    draw = np.random.default_rng(0)
    names = list(candidates.CANDIDATES)[:10]
    rows = [
        _row(name, 1.0, seed, draw.uniform(), task)
        for task in tasks.TASKS for name in names for seed in range(2)
        if (task, name) != ("vgg", names[1])
    ]  # fmt: skip
    report.plot(report.summarize(rows), tmp_path / "plot.png")
    (figure,) = drawn
    panels = [panel for panel in figure.axes if panel.get_title()]
    assert [panel.get_title() for panel in panels] == list(tasks.TASKS)
    assert panels[0].get_subplotspec().get_gridspec().nrows == 2
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"uncompressed", *names[1:]}
    colors = [
        {line.get_color() for line in panel.lines if line.get_ls() == "None"} for panel in panels
    ]
    assert len(colors[0]) == 9 and colors[0] == colors[1] and len(colors[0] - colors[2]) == 1
    assert all(len(panel.patches) == 1 for panel in panels)  # the band of the uncompressed seeds
    report.pyplot.figure(figure)
    monkeypatch.undo()
    report.pyplot.close(figure)
