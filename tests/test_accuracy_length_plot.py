"""Test the plot of the metric by the number of steps."""

import length_plot
import numpy as np
import report
import tasks


def _rows(candidate, length, metrics, task="ncf", ranks=4):
    return [
        {
            "task": task, "candidate": candidate, "ranks": ranks, "seed": seed,
            "total_steps": length * tasks.TASKS[task].total_steps, "learning_rate": 1.0,
            "metric": metric, "bytes": 1.0,
        }
        for seed, metric in enumerate(metrics)
    ]  # fmt: skip


def _panels(rows, path, monkeypatch):
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(length_plot.pyplot, "close", drawn.append)
        length_plot.plot_lengths(report.summarize(rows), path)
    for figure in drawn:
        length_plot.pyplot.close(figure)
    return [panel for figure in drawn for panel in figure.axes]


def _lines(panel, label):
    """Return the points of the lines through means, {steps: metric}."""
    (line,) = (line for line in panel.lines if line.get_label() == label)
    return dict(zip(map(float, line.get_xdata()), np.round(line.get_ydata(), 9)))


def test_a_panel_has_the_means_of_both_over_the_seeds_that_both_have(tmp_path, monkeypatch):
    rows = _rows("none", 1, [0.2, 0.4, 0.9]) + _rows("default", 1, [0.1, 0.2])
    rows += _rows("none", 2, [0.5, 0.7]) + _rows("none", 2, [0.1], ranks=16)
    rows += _rows("none", 4, [None]) + _rows("none", 1, [0.3], "vgg") + _rows("5 %", 2, [0.1])
    (panel,) = _panels(rows, tmp_path / "plot.png", monkeypatch)
    own = tasks.TASKS["ncf"].total_steps
    assert panel.get_title() == "ncf" and (tmp_path / "plot.png").stat().st_size > 1000
    assert _lines(panel, "uncompressed") == {own: 0.3, 2 * own: 0.6}
    assert _lines(panel, "default") == {own: 0.15}
    points = [line for line in panel.lines if line.get_linestyle() == "None"]
    assert sorted(len(line.get_xdata()) for line in points) == [2, 2, 2]


def test_tasks_with_one_number_of_steps_have_no_picture(tmp_path, monkeypatch):
    assert not _panels(_rows("none", 1, [0.5]), tmp_path / "plot.png", monkeypatch)
    assert not list(tmp_path.iterdir())
