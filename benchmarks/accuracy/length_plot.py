"""Plot what the default and uncompressed training reach, by the number of steps."""

import matplotlib
import numpy as np
from tasks import TASKS

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

#: {candidate: (its name in the legend, color)}
_DRAWN = {"none": ("uncompressed", "black"), "default": ("default", "#2b6cb0")}


def plot_lengths(entries, path, ranks=4):
    """Draw steps against the metric, one panel per task, with every seed's point.

    Tasks that were run with one number of steps are left out. The lines connect means. Both
    candidates have the seeds that both have; if there are none, uncompressed training has all.

    Args:
        entries: entries of :func:`report.summarize`.
        path: path of the picture.
        ranks: number of ranks.
    """
    found = {
        (entry["task"], entry["candidate"], entry["total_steps"]): entry["by_seed"]
        for entry in entries
        if entry["ranks"] == ranks and entry["batch_factor"] == 1 and entry["candidate"] in _DRAWN
    }
    lengths = {
        name: sorted(
            steps for task, candidate, steps in found if (task, candidate) == (name, "none")
        )
        for name in TASKS
    }
    names = [name for name in TASKS if len(lengths[name]) > 1]
    if not names:
        return
    figure, (panels,) = pyplot.subplots(
        1, len(names), figsize=(3.4 * len(names), 3.2), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels, names):
        for candidate in _DRAWN:
            _draw(panel, name, candidate, lengths[name], found)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(ticker.FixedLocator(lengths[name]))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        better = "larger" if TASKS[name].larger_is_better else "smaller"
        panel.set_title(name)
        panel.set_xlabel("steps")
        panel.set_ylabel(f"{TASKS[name].metric}\n({better} is better)")
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(panel, name, candidate, lengths, found):
    label, color = _DRAWN[candidate]
    means = {}
    for steps in lengths:
        own = found.get((name, candidate, steps), {})
        other = found.get((name, "default", steps), {})
        values = [own[seed] for seed in own if seed in other or not other]
        values = [value for value in values if value is not None]
        if values:
            means[steps] = np.mean(values)
            panel.plot([steps] * len(values), values, "o", ms=4, alpha=0.4, mew=0, color=color)
    panel.plot(list(means), list(means.values()), "o-", ms=6, color=color, label=label)
