"""Measure the seconds of training until a given test accuracy, on two hosts over shaped links.

    python benchmarks/time_to_accuracy.py [--links 100mbit,1gbit] [--rows "none;fp16;Top-r pairs;default"] [--limit 600]

Trains a VGG-like network of 8.6 M parameters on Fashion-MNIST, one rank per host and one thread per
rank. Writes results/time-to-accuracy.json and .png. Needs root (network namespaces), iproute2,
openssh-server and the data of ``make data``. Every row on every link is one job. A row that the
file has is not trained again; ``--again`` trains it anew. ``--report`` only draws. ``--tune``
trains uncompressed in one process with some learning rates.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

from jobs import run_job
from links import NetworkError
from measure import split_choices, write
from network import Network, problems

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
WORKER = pathlib.Path(__file__).with_name("time_to_accuracy_worker.py")
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s"}
ROWS = ("none", "fp16", "Top-r pairs", "default")
COLORS = {"none": "black", "fp16": "tab:gray", "Top-r pairs": "tab:orange", "default": "tab:blue"}
HOSTS = 2
LEARNING_RATES = (0.02, 0.05, 0.1)  # what --tune tries
FASTER_THAN_FP16 = {"100mbit": 8}  # link -> target for the default
#: a result belongs to these options; other values need another file
SETTINGS = ("steps", "every", "learning_rate", "seed", "features")


def summarize(entry, others, target):
    """Add to a row when it reached the target, or when it would have.

    Args:
        entry: a row with its curve, a list of [steps, seconds, accuracy].
        others: all rows; one of the same name on another link tells the steps that are needed.
        target: the accuracy.
    """
    entry["reached_step"], entry["reached_seconds"] = reached(entry, target)
    entry["computed_seconds"] = None
    if entry["reached_step"] is None:
        needed = [
            step
            for other in others
            if other["row"] == entry["row"] and (step := reached(other, target)[0]) is not None
        ]
        if needed:
            entry["computed_seconds"] = min(needed) * entry["seconds_per_step"]


def reached(entry, target):
    """Return the steps and seconds of the first point at the target; (None, None) if none is."""
    for step, seconds, accuracy in entry["curve"]:
        if accuracy >= target:
            return step, seconds
    return None, None


def train(network, link, row, options):
    """Train one row on one link; return its entry of the results."""
    points = []

    def report(point):
        points.append(point)
        print(
            f"{LINKS[link]}, {row}: step {point['step']} of {options.steps}, "
            f"{point['seconds']:.1f} s, accuracy {point['accuracy']:.4f}",
            flush=True,
        )

    # the last span may begin just before the limit; evaluations and the start take their time too
    longest = 3 * options.limit + 600
    run_job(network, [WORKER, "--row", row, "--limit", options.limit, *words(options)], longest, report)  # fmt: skip
    return entry_of(link, row, points)


def words(options):
    """Return the options that the worker shares, as words of its command."""
    return [
        word
        for name in SETTINGS
        for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
    ]


def entry_of(link, row, points):
    per_step = sorted(point["seconds_per_step"] for point in points)
    last = points[-1]
    return {
        "link": link, "row": row, "steps": last["step"], "seconds": last["seconds"],
        "seconds_per_step": per_step[len(per_step) // 2],  # median of the spans
        "fastest": per_step[0], "slowest": per_step[-1], "accuracy": last["accuracy"],
        "sent_bytes": round(sorted(point["sent_bytes"] for point in points)[len(points) // 2]),
        "curve": [
            [point["step"], round(point["seconds"], 2), point["accuracy"]] for point in points
        ],
    }  # fmt: skip


def tune(options):
    """Train uncompressed in one process, all images of a step at once; return a list of records."""
    found = []
    for rate in LEARNING_RATES:
        changed = argparse.Namespace(**{**vars(options), "learning_rate": rate})
        command = [sys.executable, str(WORKER), "--row", "none", "--limit", "inf", *words(changed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        points = [json.loads(line[4:]) for line in done.stdout.splitlines() if line[:4] == "ROW "]
        best = max(point["accuracy"] for point in points)
        found.append({"learning_rate": rate, "accuracy": points[-1]["accuracy"], "best": best})
        print(f"learning rate {rate}: accuracy {points[-1]['accuracy']:.4f}", flush=True)
    return found


def describe(entry, options):
    """Return one line about a row."""
    text = (
        f"{LINKS[entry['link']]:<10}{entry['row']:<13}{entry['seconds_per_step']:>8.3f} s "
        "per step, "
        f"{entry['steps']} steps, accuracy {entry['accuracy']:.4f}; "
    )
    if entry["reached_step"] is not None:
        return text + (
            f"{options.target:g} after {entry['reached_step']} steps and "
            f"{entry['reached_seconds']:.1f} s"
        )
    text += f"{options.target:g} not reached in {entry['seconds']:.0f} s"
    if entry["computed_seconds"] is not None:
        text += f" (computed from the steps on the other link: {entry['computed_seconds']:.0f} s)"
    return text


def verdicts(rows):
    """Return, per link with a target, how many times faster than fp16 the default is."""
    found = []
    for link, factor in FASTER_THAN_FP16.items():
        seconds = {
            row["row"]: row["reached_seconds"] or row["computed_seconds"]
            for row in rows
            if row["link"] == link
        }
        if seconds.get("fp16") and seconds.get("default"):
            value = seconds["fp16"] / seconds["default"]
            found.append(
                {"link": link, "faster_than_fp16": value, "target": factor, "met": value >= factor}
            )
    return found


def draw(rows, target, path):
    """Plot accuracy by seconds, a panel per link, each row's name at the end of its line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = [link for link in LINKS if any(row["link"] == link for row in rows)]
    figure, axes = pyplot.subplots(
        1, len(links), figsize=(8, 4), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    ends = {link: [] for link in links}
    for axis, link in zip(axes[0], links):
        for row in (row for row in rows if row["link"] == link):
            color = COLORS[row["row"]]
            _, seconds, accuracy = zip(*row["curve"])
            axis.plot(seconds, accuracy, color=color, linewidth=2)
            end, text = (seconds[-1], accuracy[-1]), row["row"]
            if row["computed_seconds"] is not None:
                computed = row["computed_seconds"], target
                axis.plot(*zip(end, computed), ":", color=color, linewidth=1.5)
                axis.plot(*computed, "o", color=color, fillstyle="none")
                end, text = computed, f"{text}: {computed[0]:.0f} s (computed)"
            elif row["reached_step"] is not None:
                axis.plot(row["reached_seconds"], reached_accuracy(row), "o", color=color)
                text += f": {row['reached_seconds']:.0f} s"
            ends[link].append((*end, text, row["row"]))
        axis.axhline(target, color="tab:red", linewidth=0.8, linestyle="--")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(f"2 hosts, {LINKS[link]}")
        axis.set_xlabel("seconds of training")
        axis.grid(True, alpha=0.3)
    first, last = axes[0][0].get_xlim()
    lowest = min(accuracy for row in rows for _, _, accuracy in row["curve"][1:] or row["curve"])
    span = 1 - lowest
    for axis, link in zip(axes[0], links):
        axis.set_xlim(first, last * (last / first) ** 0.2)
        axis.set_ylim(lowest, target + 0.75 * span)  # room for the names above the lines
        axis.set_yticks([tick / 10 for tick in range(1, 10) if tick / 10 >= lowest])
        axis.text(first * 1.1, target, f"{target:g}", color="tab:red", verticalalignment="bottom")
        shown = 0.0
        for seconds, accuracy, text, row in sorted(ends[link]):
            # names stand side by side where lines end at almost the same time
            shown = max(seconds, shown * (last / first) ** 0.07)
            axis.text(
                shown, max(accuracy, target) + 0.03 * span, text, rotation=70, fontsize=10,
                color=COLORS[row], rotation_mode="anchor",
                fontweight="bold" if row == "default" else None,
            )  # fmt: skip
    axes[0][0].set_ylabel("test accuracy")
    figure.savefig(path, dpi=200)


def reached_accuracy(row):
    """Return the accuracy of the point at which a row reached the target."""
    return next(accuracy for step, _, accuracy in row["curve"] if step == row["reached_step"])


def load(path, options):
    """Return the contents of the results file; those of other settings are refused."""
    settings = {name: getattr(options, name) for name in SETTINGS}
    if not path.exists():
        return {"settings": settings, "tuning": [], "rows": []}
    kept = json.loads(path.read_text())
    if kept["settings"] != settings:
        raise NetworkError(
            f"{path}: expected results of {settings}, got {kept['settings']}; name another --output"
        )
    return kept


def save(results, options):
    """Write the results file and its plot."""
    rows = results["rows"]
    rows.sort(key=lambda row: (list(LINKS).index(row["link"]), ROWS.index(row["row"])))
    for row in rows:
        summarize(row, rows, options.target)
    results["targets"] = [{"accuracy": options.target}, *verdicts(rows)]
    write(options.output, {key: results[key] for key in ("settings", "tuning", "targets", "rows")})
    if rows:
        draw(rows, options.target, options.output.with_suffix(".png"))


def options_of():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", default=",".join(LINKS), help="comma-separated")
    parser.add_argument("--rows", default=";".join(ROWS), help="semicolon-separated")
    parser.add_argument("--steps", type=int, default=500, help="of the learning rate's schedule")
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="maximum of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", type=int, default=2048, help="of the first linear layer")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds of training after which a row ends"
    )
    parser.add_argument("--target", type=float, default=0.86, help="accuracy to reach")
    parser.add_argument("--again", action="store_true", help="train rows that the file has")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--tune", action="store_true", help="only try learning rates")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=RESULTS / "time-to-accuracy.json",
        help="the plot goes beside it",
    )
    options = parser.parse_args()
    if min(options.steps, options.every, options.limit) <= 0:
        parser.error("--steps, --every and --limit: expected numbers above 0")
    split_choices(parser, options, "links", LINKS, ",")
    split_choices(parser, options, "rows", ROWS, ";")
    return options


def main():
    options = options_of()
    results = load(options.output, options)
    started = time.perf_counter()
    if options.tune:
        results["tuning"] = tune(options)
    elif not options.report:
        found = problems()
        if found:
            sys.exit("\n".join(found))
        for link in options.links:
            for row in options.rows:
                have = [
                    kept for kept in results["rows"] if (kept["link"], kept["row"]) == (link, row)
                ]
                if have and not options.again:
                    continue
                with Network(HOSTS, link) as network:
                    entry = train(network, link, row, options)
                results["rows"] = [kept for kept in results["rows"] if kept not in have] + [entry]
                # after every job, so that a failing job does not lose the results of others
                save(results, options)
    save(results, options)
    for row in results["rows"]:
        print(describe(row, options))
    for verdict in verdicts(results["rows"]):
        print(
            f"{LINKS[verdict['link']]}: the default reaches {options.target:g} "
            f"{verdict['faster_than_fp16']:.1f} times as fast as fp16; "
            f"target {verdict['target']} {'met' if verdict['met'] else 'MISSED'}"
        )
    print(f"{options.output} written; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"time_to_accuracy.py: {error}")
