"""Test the accuracy laboratory's command, its file of runs, its summary and its plot."""

import importlib.util
import json
import multiprocessing
import pathlib

import candidates
import numpy as np
import pytest
import report
import runs
import scipy.stats
import tasks
import training
from test_accuracy_laboratory import Small

# benchmarks/ has another run.py
_location = pathlib.Path(report.__file__).with_name("run.py")
_specification = importlib.util.spec_from_file_location("accuracy_run", _location)
command = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(command)


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


@pytest.mark.slow
def test_several_jobs_write_a_row_per_run_and_none_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks.TASKS["ncf"], "total_steps", 3)
    keys = [("ncf", "none", 4, seed, 0.002, 3, 1) for seed in range(3)]
    keys.append(("ncf", "no such candidate", 4, 0, 0.002, 3, 1))
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
    keys = [("ncf", "none", 4, seed, 0.002, 10**6, 1) for seed in range(4)]
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


def test_a_run_with_a_larger_batch_is_another_run(tmp_path, monkeypatch, capsys):
    """It has its own key, learning rate and comparison, and trains with as many samples."""
    seen = []

    class Counted(Small):
        batch, total_steps = 16, 2

        def batches(self, size, seed):
            seen.append(self.batch)
            return super().batches(size, seed)

    monkeypatch.setitem(runs.TASKS, "small", Counted)
    path = tmp_path / "runs.jsonl"
    for factor in (1, 8):
        row = runs.run(path, ("small", "none", 2, 0, 0.05, 2, factor))
        assert row["batch_factor"] == factor and seen[-1] == 16 * factor
    assert len(runs.known(path)) == 2
    assert runs.described(("small", "none", 2, 0, 0.05, 2, 8)) == (
        "small, none, 2 ranks, 8 x batch, seed 0, rate 0.05"
    )
    old = _row("none", 1.0, 0, 0.5)
    assert runs.key_of(old) == runs.key_of(old | {"batch_factor": 1})
    large = [
        _row(name, rate, 0, metric) | {"batch_factor": 8}
        for name, rate, metric in (("none", 2.0, 0.7), ("none", 4.0, 0.8), ("default", 4.0, 0.75))
    ]
    rows = [old, _row("default", 1.0, 0, 0.55), *large]
    assert command.rates_of("best", tasks.TASKS["ncf"], 4, rows) == [1.0]
    assert command.rates_of("best", tasks.TASKS["ncf"], 4, rows, factor=8) == [4.0]
    entries = report.summarize(rows)
    gains = {one["batch_factor"]: one["gain"] for one in entries if one["candidate"] == "default"}
    assert gains == {1: pytest.approx(0.05), 8: pytest.approx(-0.05)}
    # the command asks for such a run, and does not repeat it
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--tasks=ncf", "--candidates=none;default", "--batch-factor=8", "--rates=4"]
    assert command.main(arguments, path) == 0
    assert "2 runs, 2 of them known" in capsys.readouterr().out
    assert {row["batch_factor"] for row in report.recorded().values()} == {1, 8}


def test_a_run_can_have_another_number_of_steps_than_its_task(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    own = tasks.TASKS["ncf"].total_steps
    rows = [_row("none", 1.0, 0, 0.5), _row("none", 3.0, 0, 0.4)]
    rows += [row | {"total_steps": 2 * own, "metric": 1 - row["metric"]} for row in rows]
    ncf = tasks.TASKS["ncf"]
    assert command.rates_of("best", ncf, 4, rows) == [1.0]
    assert command.rates_of("best", ncf, 4, rows, 2 * own) == [3.0]
    with pytest.raises(SystemExit, match=f"and {3 * own} steps .*\n.*--ranks 4 --steps {3 * own}"):
        command.rates_of("best", ncf, 4, rows, 3 * own)
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--tasks=ncf", "--candidates=none", f"--steps={2 * own}", "--rates=1,3"]
    assert command.main(arguments, path) == 0
    assert "2 runs, 2 of them known" in capsys.readouterr().out
    lengths = {
        row["total_steps"]: row["length"]
        for row in json.loads((tmp_path / "accuracy-lab.json").read_text())
    }
    assert lengths == {own: 1, 2 * own: 2}
    assert f"ncf, none, 4 ranks, {2 * own} steps, seed 0" in runs.described(runs.key_of(rows[-1]))


def test_rates_are_compared_over_the_seeds_that_both_have():
    """Seed 0 is lucky with rate 0.3, which is worse with the others."""
    rows = [_row("none", 0.1, 0, 0.5), _row("none", 0.4, 0, 0.6)]
    rows += [_row("none", 0.2, seed, 0.7) for seed in range(5)]
    rows += [_row("none", 0.3, seed, 0.75 if seed == 0 else 0.65) for seed in range(3)]
    (entry,) = report.summarize(rows)
    assert entry["learning_rate"] == 0.2 and len(entry["by_seed"]) == 5


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
    assert (
        "transformer; resnet; vgg; lstm; plain-lstm; ncf; adagrad-ncf, got 'bert'"
        in capsys.readouterr().err
    )


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


def test_more_ranks_than_samples_are_refused(tmp_path):
    batch = tasks.TASKS["transformer"].batch
    with pytest.raises(SystemExit, match=f"at most {batch} for transformer.* got {batch + 1}"):
        command.main(["--tasks", "transformer", "--ranks", str(batch + 1)], tmp_path / "runs.jsonl")
