"""Summarize the accuracy laboratory's runs: a table, results/accuracy-lab.json and a plot.

For each task and candidate, the learning rate with the best mean over the seeds counts. A candidate
is equivalent to uncompressed training if two one-sided t-tests, paired by seed, reject at 5 % that
the difference is larger than the margin: the task's own, or half of the standard deviation of the
uncompressed seeds if that is larger (TOST; Schuirmann 1987).
"""

import json
import pathlib

import matplotlib
import numpy as np
import scipy.stats
from tasks import TASKS

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = pathlib.Path(__file__).resolve().parent.parent.parent / "results"


def equivalent(differences, margin):
    """Return the larger p-value of the two one-sided tests; None with fewer than two seeds."""
    if len(differences) < 2:
        return None
    mean, error = np.mean(differences), scipy.stats.sem(differences)
    if error == 0:
        return float(abs(mean) >= margin)
    degrees = len(differences) - 1
    below = scipy.stats.t.sf((mean + margin) / error, degrees)
    above = scipy.stats.t.cdf((mean - margin) / error, degrees)
    return float(max(below, above))


def summarize(rows):
    """Return one entry per task, number of ranks, steps and candidate."""
    found = {}
    for row in rows:
        place = row["task"], row["ranks"], row["steps_at_4"], row["candidate"]
        found.setdefault(place, {}).setdefault(row["learning_rate"], {})[row["seed"]] = row
    entries = []
    for (name, ranks, steps, candidate), rates in sorted(found.items()):
        task = TASKS[name]
        sign = 1 if task.larger_is_better else -1

        def quality(rate, rates=rates, sign=sign):
            values = [row["metric"] for row in rates[rate].values()]
            diverged = any(value is None for value in values)
            return -np.inf if diverged else sign * np.mean(values)

        best = max(rates, key=quality)
        by_seed = {seed: row["metric"] for seed, row in sorted(rates[best].items())}
        entries.append({
            "task": name, "metric": task.metric, "ranks": ranks, "steps_at_4": steps,
            "candidate": candidate, "learning_rate": best, "rates_tried": sorted(rates),
            "by_seed": by_seed,
            "bytes_per_step": float(np.mean([row["bytes"] for row in rates[best].values()])),
        })  # fmt: skip
    for entry in entries:
        _compare(entry, entries)
    return entries


def _compare(entry, entries):
    place = "task", "ranks", "steps_at_4"
    plain = next(
        (
            other
            for other in entries
            if other["candidate"] == "none" and all(other[key] == entry[key] for key in place)
        ),
        None,
    )
    if plain is None or entry is plain:
        return
    seeds = [
        seed
        for seed, value in entry["by_seed"].items()
        if value is not None and plain["by_seed"].get(seed) is not None
    ]
    if not seeds:
        return
    sign = 1 if TASKS[entry["task"]].larger_is_better else -1
    gains = [sign * (entry["by_seed"][seed] - plain["by_seed"][seed]) for seed in seeds]
    values = [plain["by_seed"][seed] for seed in seeds]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    margin = max(TASKS[entry["task"]].margin, spread / 2)
    entry.update(gain=float(np.mean(gains)), margin=margin, p=equivalent(gains, margin))


def plot(entries, path):
    """Draw bytes per step against the metric, one panel per task, with every seed's point."""
    names = sorted({entry["task"] for entry in entries})
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(6 * len(names), 4.5), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels[0], names):
        for entry in (entry for entry in entries if entry["task"] == name):
            values = [value for value in entry["by_seed"].values() if value is not None]
            label = f"{entry['candidate']}, {entry['ranks']} ranks"
            panel.plot([entry["bytes_per_step"]] * len(values), values, "o", label=label)
        panel.set_xscale("log")
        panel.set_xlabel("bytes per rank and step")
        panel.set_ylabel(TASKS[name].metric)
        panel.set_title(name)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def report(rows):
    """Print the table and write the two files."""
    entries = summarize(rows)
    print(f"{'task':12} {'ranks':>5} {'steps':>6}  {'candidate':28} {'rate':>7} {'mean':>8} {'gain':>8} {'p':>6} {'bytes':>9}  seeds")  # fmt: skip
    for entry in entries:
        values = [value for value in entry["by_seed"].values() if value is not None]
        mean = f"{np.mean(values):8.4f}" if values else "diverged"
        gain = f"{entry['gain']:+8.4f}" if "gain" in entry else " " * 8
        p = f"{entry['p']:6.3f}" if entry.get("p") is not None else " " * 6
        print(
            f"{entry['task']:12} {entry['ranks']:5} {entry['steps_at_4']:6}  {entry['candidate']:28} {entry['learning_rate']:7.4f} {mean} {gain} {p} {entry['bytes_per_step']:9.0f}  {len(values)}"
        )
    (RESULTS / "accuracy-lab.json").write_text(json.dumps(entries, indent=1) + "\n")
    plot(entries, RESULTS / "accuracy-lab.png")
