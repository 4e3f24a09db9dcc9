"""Measure whole training steps on 2 hosts with fixed settings and with ``schedule="auto"``.

    python benchmarks/auto_schedule.py [--links 100mbit,1gbit,10gbit,unshaped] [--turns 16]

Every link is one job of Horovod with PyTorch, one of PyTorch's DDP and one of Horovod with
TensorFlow, each on two hosts (network namespaces of this machine). Each row trains the same
network, of 8.6 million parameters unless ``--features`` gives another size, with a real forward and
backward pass. The rows of a job run in turns of a few steps. Writes results/auto-schedule.json and
.png. Needs root, iproute2 and openssh-server.
"""

import argparse
import pathlib
import sys
import time

from auto_schedule_rows import AUTO, FRAMEWORKS
from jobs import run_job
from measure import split_choices, write
from network import Network, NetworkError, problems

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
LINKS = {
    "10mbit": "10 Mb/s", "100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s",
    "unshaped": "unshaped",
}  # fmt: skip
_MEASURED = "100mbit,1gbit,10gbit,unshaped"
_LONGEST = 900  # maximum seconds of one job
_COLORS = ("#cbd5e0", "#a0aec0", "#d69e2e", "#ed8936")  # of fixed rows


def draw(rows, path):
    """Plot milliseconds per step by link, for each framework."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = [link for link in LINKS if any(row["link"] == link for row in rows)]
    figure, parts = pyplot.subplots(1, 3, sharey=True, figsize=(18, 4.5), layout="constrained")
    for axes, framework in zip(parts, FRAMEWORKS.values()):
        width = 0.8 / len(framework.rows)
        for place, name in enumerate(framework.rows):
            own = {row["link"]: row for row in rows if row["row"] == name}
            axes.bar(
                [
                    links.index(link) + (place - len(framework.rows) / 2 + 0.5) * width
                    for link in own
                ],
                [1e3 * row["seconds"] for row in own.values()],
                width,
                label=name.rpartition(": ")[2],
                color="#2b6cb0" if name in AUTO else _COLORS[place],
            )
        axes.set_yscale("log")
        axes.set_xticks(range(len(links)), [LINKS[link] for link in links])
        axes.legend()
        axes.grid(axis="y", which="both", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_title(framework.title)
    parts[0].set_ylabel("milliseconds per step")
    figure.suptitle("Training steps on 2 hosts")
    figure.savefig(path, dpi=110)


def measured(network, link, framework, turns, features):
    """Return the rows of one job, and print them."""
    how, rows = FRAMEWORKS[framework], []
    words = [HERE / how.worker, framework, turns, features]
    run_job(network, words, _LONGEST, rows.append, how.launcher)
    best = min(row["seconds"] for row in rows if row["row"] not in AUTO)
    for row in rows:
        row.update(link=link, against_best_fixed=row["seconds"] / best)
        print(
            f"{LINKS[link]:<10}{row['row']:<38}{1e3 * row['seconds']:>10.1f} ms"
            f"{row['against_best_fixed']:>8.2f}  {row['chosen']}",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--links", default=_MEASURED, help=f"comma-separated, of {', '.join(LINKS)}"
    )
    parser.add_argument("--turns", type=int, default=16, help="turns of each row, of 4 steps")
    parser.add_argument("--features", type=int, default=2048, help="of the first linear layer")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="comma-separated")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "auto-schedule.json")
    arguments = parser.parse_args()
    split_choices(parser, arguments, "links", LINKS, ",")
    split_choices(parser, arguments, "frameworks", FRAMEWORKS, ",")
    if found := problems():
        sys.exit("\n".join(found))
    rows, started = [], time.perf_counter()
    with Network(2) as network:
        for link in arguments.links:
            network.shape(None if link == "unshaped" else link)
            for framework in arguments.frameworks:
                rows += measured(network, link, framework, arguments.turns, arguments.features)
    write(arguments.output, {"rows": rows})
    draw(rows, arguments.output.with_suffix(".png"))
    print(f"{arguments.output} written; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"auto_schedule.py: {error}")
