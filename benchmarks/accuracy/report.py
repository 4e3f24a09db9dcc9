"""Summarize the accuracy laboratory's runs: a table, results/accuracy-lab.json and two plots.

For each task and candidate, the learning rate counts that is best in most comparisons with its
other rates, over the seeds that both have. The margin is the task's own. t-tests, paired by seed,
give two p-values: that the candidate is worse than uncompressed training by more than the margin,
and that it differs by more than the margin in either direction (two one-sided tests, TOST;
Schuirmann 1987). Below 0.05 it is not worse, or equivalent.
"""

import json
import pathlib

import matplotlib
import numpy as np
import runs
import scipy.stats
from length_plot import plot_lengths
from tasks import TASKS

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from matplotlib.lines import Line2D

RESULTS = pathlib.Path(__file__).resolve().parent.parent.parent / "results"


def not_worse(differences, margin):
    """Return the p-value of a one-sided t-test; None with fewer than two seeds.

    Args:
        differences: gain over uncompressed training with each seed.
        margin: loss that counts as none. The hypothesis to reject is a mean of -margin or less.
    """
    if len(differences) < 2:
        return None
    mean, error = np.mean(differences), scipy.stats.sem(differences)
    if error == 0:
        return float(mean <= -margin)
    return float(scipy.stats.t.sf((mean + margin) / error, len(differences) - 1))


def equivalent(differences, margin):
    """Return the larger p-value of the two one-sided tests; None with fewer than two seeds."""
    if len(differences) < 2:
        return None
    return max(not_worse(np.multiply(sign, differences), margin) for sign in (1, -1))


#: what a candidate and uncompressed training have in common when they are compared
_PLACE = "task", "ranks", "total_steps", "batch_factor"


def _by_candidate(rows):
    """Return {(task, ranks, steps, batch factor, candidate): {learning rate: {seed: row}}}."""
    found = {}
    for row in rows:
        place = row["task"], row["ranks"], row["total_steps"], row.get("batch_factor", 1)
        place += (row["candidate"],)
        found.setdefault(place, {}).setdefault(row["learning_rate"], {})[row["seed"]] = row
    return found


def _best_rate(task, rates):
    """Return the learning rate that is best in most comparisons with another one.

    Two rates are compared by their means over the seeds that both have.

    Args:
        task: name of the task.
        rates: {learning rate: {seed: row}}, not empty.
    """

    def is_best(rate, other):
        shared = rates[rate].keys() & rates[other].keys()
        return _quality(task, rates[rate], shared) >= _quality(task, rates[other], shared)

    def rank(rate):
        return sum(is_best(rate, other) for other in rates), len(rates[rate])

    return max(rates, key=rank)


def _quality(task, by_seed, seeds):
    """Return the mean of the metric over ``seeds``; -inf if a run diverged. Larger is better."""
    values = [by_seed[seed]["metric"] for seed in seeds or by_seed]
    if any(value is None for value in values):
        return -np.inf
    return np.mean(values) if TASKS[task].larger_is_better else -np.mean(values)


def tuned_rate(rows, task, ranks, steps, factor=1):
    """Return the learning rate that is best for uncompressed training; None if there is none."""
    rates = _by_candidate(rows).get((task, ranks, steps, factor, "none"), {})
    best = _best_rate(task, rates) if rates else None
    return None if best is None or _quality(task, rates[best], ()) == -np.inf else best


def summarize(rows):
    """Return one entry per task, number of ranks, steps, batch factor and candidate."""
    entries = []
    for (name, ranks, steps, factor, candidate), rates in sorted(_by_candidate(rows).items()):
        best = _best_rate(name, rates)
        rows_of_best = list(rates[best].values())
        # a run that diverged ended in the density warm-up, or soon after
        finished = [row for row in rows_of_best if row["metric"] is not None] or rows_of_best
        entries.append({
            "task": name, "metric": TASKS[name].metric, "ranks": ranks, "total_steps": steps,
            "length": steps / TASKS[name].total_steps,
            "batch_factor": factor, "samples": TASKS[name].batch * factor // ranks,
            "candidate": candidate, "learning_rate": best,
            "by_seed": _metrics(rates[best]),
            "other_rates": {
                rate: _metrics(rates[rate]) for rate in sorted(rates) if rate != best
            },
            "training_loss": _mean([row["loss"] for row in finished if "loss" in row]),
            "bytes_per_step": _mean([row["bytes"] for row in finished]),
        })  # fmt: skip
    for entry in entries:
        _compare(entry, entries)
    return entries


def recorded():
    """Return the runs in results/accuracy-lab.json, as {key: outcome}.

    The file has means of bytes and losses over seeds, which are given to each of them.
    """
    path = RESULTS / "accuracy-lab.json"
    rows = {}
    for entry in json.loads(path.read_text()) if path.exists() else ():
        rates = {entry["learning_rate"]: entry["by_seed"], **entry["other_rates"]}
        for rate, by_seed in rates.items():
            for seed, metric in by_seed.items():
                row = {name: entry[name] for name in ("candidate", *_PLACE)}
                row.update(seed=int(seed), learning_rate=float(rate), metric=metric)
                row["bytes"] = entry["bytes_per_step"]
                if entry["training_loss"] is not None:
                    row["loss"] = entry["training_loss"]
                rows[runs.key_of(row)] = row
    return rows


def _metrics(by_seed):
    return {seed: row["metric"] for seed, row in sorted(by_seed.items())}


def _mean(values):
    return float(np.mean(values)) if values else None


def _compare(entry, entries):
    plain = next(
        (
            other
            for other in entries
            if other["candidate"] == "none" and all(other[key] == entry[key] for key in _PLACE)
        ),
        None,
    )
    if plain is None or entry is plain:
        return
    task = TASKS[entry["task"]]
    sign = 1 if task.larger_is_better else -1
    shared = [seed for seed in entry["by_seed"] if seed in plain["by_seed"]]
    pairs = {seed: (entry["by_seed"][seed], plain["by_seed"][seed]) for seed in shared}
    entry["gains"] = {
        seed: sign * (own - other)
        for seed, (own, other) in pairs.items()
        if own is not None and other is not None
    }
    if not pairs or len(entry["gains"]) < len(pairs):
        return  # a run that diverged is no gain of the others
    differences = list(entry["gains"].values())
    entry.update(
        gain=float(np.mean(differences)),
        margin=task.margin,
        p=equivalent(differences, task.margin),
        p_not_worse=not_worse(differences, task.margin),
    )


def plot(entries, path):
    """Draw bytes per step against the metric, one panel per task, with every seed's point.

    Runs with another number of steps than the task's own, or a larger batch, are left out. A
    candidate has the same color, and a number of ranks the same marker, in all panels. Uncompressed
    training is a horizontal line, with a band of one standard deviation of its seeds.
    """
    entries = [entry for entry in entries if entry["length"] == 1 and entry["batch_factor"] == 1]
    names = [name for name in TASKS if any(entry["task"] == name for entry in entries)]
    if not names:
        return
    candidates = sorted({entry["candidate"] for entry in entries} - {"none"})
    ranks = sorted({entry["ranks"] for entry in entries})
    maps = ["tab10"] if len(candidates) <= 10 else ["tab20", "tab20b", "tab20c"]
    palette = [color for name in maps for color in pyplot.get_cmap(name).colors]
    colors = {name: palette[number % len(palette)] for number, name in enumerate(candidates)}
    markers = dict(zip(ranks, "os^DvP*X" * len(ranks)))
    lines = dict(zip(ranks, ["-", "--", ":", "-."] * len(ranks)))
    rows = 1 if len(names) <= 3 else 2
    columns = -(-len(names) // rows)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels.flat, names):
        for entry in (entry for entry in entries if entry["task"] == name):
            values = [value for value in entry["by_seed"].values() if value is not None]
            if entry["candidate"] == "none":
                _draw_uncompressed(panel, values, lines[entry["ranks"]])
            elif values:
                style = {"color": colors[entry["candidate"]], "marker": markers[entry["ranks"]]}
                x = entry["bytes_per_step"]
                panel.plot([x] * len(values), values, ls="", ms=4, alpha=0.5, mew=0, **style)
                panel.plot([x], [np.mean(values)], ls="", ms=8, mec="white", mew=0.8, **style)
        panel.set_xscale("log")
        low, high = panel.get_xlim()
        if high < 4 * low:  # differences of a few bytes would fill the panel
            low, high = low / 2, 2 * high
            panel.set_xlim(low, high)
        panel.xaxis.set_major_locator(
            ticker.LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,))
        )
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.xaxis.set_minor_formatter("")
        panel.set_xlabel("bytes per rank and step")
        better = "larger" if TASKS[name].larger_is_better else "smaller"
        panel.set_ylabel(f"{TASKS[name].metric} ({better} is better)")
        panel.set_title(name)
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    handles = [
        Line2D([], [], color="black", ls=lines[size], label=_label("uncompressed", size, ranks))
        for size in ranks
        if any(entry["candidate"] == "none" and entry["ranks"] == size for entry in entries)
    ]
    handles += [
        Line2D([], [], color=colors[name], marker="o", ms=8, ls="", label=name)
        for name in candidates
    ]
    if len(ranks) > 1:
        handles += [
            Line2D([], [], color="gray", marker=markers[size], ls="", label=_ranks(size))
            for size in ranks
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns - 1, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(text, size, ranks):
    return f"{text}, {_ranks(size)}" if len(ranks) > 1 else text


def _ranks(size):
    return f"{size} ranks" if size > 1 else "1 rank"


def _draw_uncompressed(panel, values, line):
    if not values:
        return
    mean = np.mean(values)
    panel.axhline(mean, color="black", lw=1, ls=line)
    if len(values) > 1:
        spread = np.std(values, ddof=1)
        panel.axhspan(mean - spread, mean + spread, color="black", alpha=0.1, lw=0)


def report(rows):
    """Print the table, and write the figures and two plots."""
    entries = summarize(rows)
    print(f"{'task':12} {'ranks':>5} {'steps':>6} {'batch':>5}  {'candidate':32} {'rate':>7} {'mean':>8} {'gain':>8} {'p':>6} {'bytes':>9} {'loss':>6}  seeds")  # fmt: skip
    for entry in entries:
        values = [value for value in entry["by_seed"].values() if value is not None]
        mean = f"{np.mean(values):8.4f}" if values else "diverged"
        gain = f"{entry['gain']:+8.4f}" if "gain" in entry else " " * 8
        p = f"{entry['p']:6.3f}" if entry.get("p") is not None else " " * 6
        loss = entry["training_loss"]
        loss = " " * 6 if loss is None else f"{loss:6.4f}"
        print(
            f"{entry['task']:12} {entry['ranks']:5} {entry['total_steps']:6} {entry['batch_factor']:5}  "
            f"{entry['candidate']:32} {entry['learning_rate']:7.4f} {mean} {gain} {p} "
            f"{entry['bytes_per_step']:9.0f} {loss}  {len(values)}"
        )
    (RESULTS / "accuracy-lab.json").write_text(
        "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n"
    )
    plot(entries, RESULTS / "accuracy-lab.png")
    plot_lengths(entries, RESULTS / "accuracy-lengths.png")
