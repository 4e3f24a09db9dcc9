"""Measure whole training steps on 2 hosts with fixed settings and with ``schedule="auto"``.

    python benchmarks/auto_schedule.py [--links 100mbit,1gbit,10gbit,unshaped] [--steps 40]

Every link is one job of Horovod and one of PyTorch's DDP, each on two hosts (network namespaces of
this machine). Each row trains the same network, of 8.6 million parameters, with a real forward and
backward pass. The rows of a job run in turns, so that a slow moment of the machine meets all of
them. Writes results/auto-schedule.json and .png. Needs root, iproute2 and openssh-server.
"""

import argparse
import pathlib
import sys
import time

from auto_schedule_rows import AUTO, DDP, ROWS
from jobs import run_job
from measure import split_choices, write
from network import Network, NetworkError, problems

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s", "unshaped": "unshaped"}
_LONGEST = 900  # maximum seconds of one job
_COLORS = ("#cbd5e0", "#a0aec0", "#d69e2e", "#ed8936")  # of fixed rows


def draw(rows, path):
    """Plot milliseconds per step by link, for Horovod and for DDP."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = [link for link in LINKS if any(row["link"] == link for row in rows)]
    figure, both = pyplot.subplots(1, 2, sharey=True, figsize=(13, 4.5), layout="constrained")
    for axes, (launcher, names) in zip(both, ROWS.items()):
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            own = {row["link"]: row for row in rows if row["row"] == name}
            axes.bar(
                [links.index(link) + (place - len(names) / 2 + 0.5) * width for link in own],
                [1e3 * row["seconds"] for row in own.values()],
                width,
                label=name.removeprefix(DDP),
                color="#2b6cb0" if name in AUTO else _COLORS[place],
            )
        axes.set_yscale("log")
        axes.set_xticks(range(len(links)), [LINKS[link] for link in links])
        axes.legend()
        axes.grid(axis="y", which="both", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_title({"horovodrun": "Horovod", "torchrun": "PyTorch's DDP"}[launcher])
    both[0].set_ylabel("milliseconds per step")
    figure.suptitle("Training steps of 8.6 million parameters on 2 hosts")
    figure.savefig(path, dpi=110)


def measured(network, link, launcher, steps):
    """Return the rows of one job, and print them."""
    words = [HERE / "auto_schedule_worker.py", launcher, steps]
    rows = []
    run_job(network, words, _LONGEST, rows.append, launcher)
    best = min(row["seconds"] for row in rows if row["row"] not in AUTO)
    for row in rows:
        row.update(link=link, against_best_fixed=row["seconds"] / best)
        print(
            f"{LINKS[link]:<10}{row['row']:<26}{1e3 * row['seconds']:>10.1f} ms"
            f"{row['against_best_fixed']:>8.2f}  {row['chosen']}",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", default=",".join(LINKS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=40, help="measured steps per row")
    parser.add_argument("--launchers", default=",".join(ROWS), help="comma-separated")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "auto-schedule.json")
    arguments = parser.parse_args()
    split_choices(parser, arguments, "links", LINKS, ",")
    split_choices(parser, arguments, "launchers", ROWS, ",")
    if found := problems():
        sys.exit("\n".join(found))
    rows, started = [], time.perf_counter()
    with Network(2) as network:
        for link in arguments.links:
            network.shape(None if link == "unshaped" else link)
            for launcher in arguments.launchers:
                rows += measured(network, link, launcher, arguments.steps)
    write(arguments.output, {"rows": rows})
    draw(rows, arguments.output.with_suffix(".png"))
    print(f"{arguments.output} written; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"auto_schedule.py: {error}")
