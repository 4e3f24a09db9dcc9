"""Measure how long ``schedule="auto"`` needs when a link changes in the middle of training.

    python benchmarks/changing_link.py [--links 1gbit,100mbit]

Two hosts (network namespaces of this machine) repeat the steps of a network of 1.4 million
parameters, whose backward pass sleeps for 0.1 s. When ``"auto"`` has chosen a plan, the links get
the second rate. Later, fixed rows take turns with ``"auto"`` at that rate. Writes
results/changing-link.json and .png. Needs root, iproute2 and openssh-server.
"""

import argparse
import pathlib
import statistics
import sys
import time

from changing_link_worker import FIXED
from jobs import run_job
from links import bits_per_second
from measure import write
from network import Network, NetworkError, problems

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
_LONGEST = 900  # maximum seconds of the job
#: steps in a row that must be as fast as the best fixed row, and how fast
_STEADY, _CLOSE = 10, 1.1
_TARGET = 100  # steps


def measured(first, second):
    """Run the job; return its steps and rows, and when the links changed."""
    rows, changed = [], []
    with Network(2, first) as network:

        def report(row):
            rows.append(row)
            if row["event"] == "decided":
                network.shape(second)
                changed.append(time.perf_counter())

        run_job(network, [HERE / "changing_link_worker.py"], _LONGEST, report)
    return rows, changed[0]


def summarize(rows, changed):
    """Return the figures of a job.

    Args:
        rows: what the job printed.
        changed: when the links changed, a time of ``time.perf_counter``.
    """
    steps = [row for row in rows if row["event"] == "step"]
    fixed = {row["row"]: row["seconds"] for row in rows if row["event"] == "row"}
    best = min(fixed[name] for name in FIXED)
    after = [row for row in steps if row["began"] >= changed]
    back = next(
        (
            number
            for number in range(len(after) - _STEADY + 1)
            if statistics.median(row["seconds"] for row in after[number : number + _STEADY])
            <= _CLOSE * best
        ),
        None,
    )
    final = after[-1]["plan"]
    settled = next(
        number
        for number in range(len(after))
        if all(row["plan"] == final and not row["trying"] for row in after[number:])
    )
    notes = {row["event"]: row["chosen"] for row in rows if "chosen" in row}
    return {
        "steps_until_fast": back, "steps_until_settled": settled, "target": _TARGET,
        "rows": fixed, "auto_against_best_fixed": fixed["auto"] / best,
        "chosen_before": notes["decided"], "chosen_after": notes["changed"],
        "before": [round(row["seconds"], 4) for row in steps if row["began"] < changed],
        "after": [round(row["seconds"], 4) for row in after],
    }  # fmt: skip


def draw(figures, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    before, after = figures["before"], figures["after"]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(range(-len(before), len(after)), [1e3 * one for one in before + after], color="#2b6cb0", label="auto")  # fmt: skip
    styles = dict(zip(FIXED, (":", "--", "-.")))
    for name in FIXED:
        axes.axhline(1e3 * figures["rows"][name], color="#a0aec0", ls=styles[name], label=name)
    axes.axvline(0, color="black", lw=0.8)
    axes.annotate(f" {figures['links'][1]}", (0, axes.get_ylim()[1]), va="top")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("steps after the change of the link")
    axes.set_ylabel("milliseconds per step")
    axes.legend(title="fixed rows: after the change")
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", default="1gbit,100mbit", help="two rates, comma-separated")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "changing-link.json")
    arguments = parser.parse_args()
    links = arguments.links.split(",")
    if len(links) != 2:
        parser.error(f"--links: expected two rates, got {arguments.links!r}")
    for link in links:
        bits_per_second(link)
    if found := problems():
        sys.exit("\n".join(found))
    rows, changed = measured(*links)
    figures = {"links": links, **summarize(rows, changed)}
    write(arguments.output, {"rows": [figures]})
    draw(figures, arguments.output.with_suffix(".png"))
    print(f"{links[0]}: {figures['chosen_before']}\n{links[1]}: {figures['chosen_after']}")
    for name, seconds in figures["rows"].items():
        print(f"{name:<16}{1e3 * seconds:8.1f} ms at {links[1]}")
    print(
        f"within {_CLOSE:g} times the fastest fixed row after {figures['steps_until_fast']} steps "
        f"(target: {_TARGET}), settled after {figures['steps_until_settled']}"
    )


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"changing_link.py: {error}")
