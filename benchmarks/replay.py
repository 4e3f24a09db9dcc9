"""Replay the steps of well-known networks on 2 hosts, with backward passes that sleep.

    python benchmarks/replay.py [--networks resnet50,vgg16,bert_base,lstm] [--links 1gbit,10gbit] [--seconds 90]

Backward sleeps for the seconds of each layer, in place of a GPU, and then gives a real gradient of
the layer's size to the hooks. Encoding, exchange and decoding are real. The sizes are those of the
architectures. The seconds of forward and backward together are fixed (of the scale that is
published for one V100 in float32) and are divided among the layers in proportion to their
multiplications.

Every network and link is one job of two hosts (network namespaces of this machine). The rows of a
job run in turns. A partial run changes only its own lines of results/replay.json. Needs root,
iproute2 and openssh-server.
"""

import argparse
import json
import math
import pathlib
import sys
import time

from jobs import run_job
from measure import split_choices, write
from network import Network, NetworkError, problems
from replay_worker import LOCAL, TOTALS

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
WORKER = pathlib.Path(__file__).with_name("replay_worker.py")
NETWORKS = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "bert_base": "BERT-base", "lstm": "LSTM"}
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s"}
_LONGEST = 900  # maximum seconds of one job


def draw(rows, path):
    """Plot the exposed seconds of all rows, a panel for each network and link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    places = list(dict.fromkeys((row["network"], row["link"]) for row in rows))
    columns = min(len(places), 4)
    lines = -(-len(places) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(places) :]:
        axis.set_visible(False)
    for axis, place in zip(axes.flat, places):
        own = [row for row in rows if (row["network"], row["link"]) == place]
        names = [row["row"] for row in own]
        colors = ["#2b6cb0" if name == "auto" else "#a0aec0" for name in names]
        axis.barh(names, [row["seconds"] for row in own], color=colors, label="measured")
        known = [row for row in own if row["predicted"]]
        axis.plot(
            [row["predicted"] for row in known],
            [row["row"] for row in known],
            "|", color="black", ms=9, label="predicted",
        )  # fmt: skip
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_title(f"{NETWORKS[place[0]]}, {LINKS[place[1]]}")
        axis.grid(axis="x", which="both", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0][0].legend()
    figure.supxlabel("seconds per step")
    figure.savefig(path, dpi=100)


def compared(own):
    """Add to the rows of a job what compares them with each other."""
    by_name = {row["row"]: row for row in own}
    local = by_name[LOCAL]["seconds"]
    best = min(row["seconds"] for row in own if row["row"] not in ("auto", LOCAL))
    for row in own:
        row["against_best_fixed"] = row["seconds"] / best
        row["against_none"] = row["seconds"] / by_name["none"]["seconds"]
        row["exposed"] = row["seconds"] - local
        row["exposed_against_optimum"] = row["exposed"] / (row["optimum"] - local)
        row["predicted_against_measured"] = row["predicted"] and row["predicted"] / row["seconds"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(TOTALS), help="comma-separated")
    parser.add_argument("--links", default="1gbit,10gbit", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=90, help="of the turns of a job")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "replay.json")
    arguments = parser.parse_args()
    split_choices(parser, arguments, "networks", NETWORKS, ",")
    split_choices(parser, arguments, "links", LINKS, ",")
    if found := problems():
        sys.exit("\n".join(found))
    known = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    rows = {(row["network"], row["link"], row["row"]): row for row in known}
    started = time.perf_counter()
    with Network(2) as network:
        for link in arguments.links:
            network.shape(link)
            for name in arguments.networks:
                own = []
                run_job(network, [WORKER, name, arguments.seconds], _LONGEST, own.append)
                compared(own)
                print(f"\n{NETWORKS[name]}, {LINKS[link]}")
                for row in own:
                    row.update(network=name, link=link)
                    rows[name, link, row["row"]] = row
                    print(
                        f"{row['row']:<18}{1e3 * row['seconds']:>9.1f}"
                        f" ms{1e3 * row['exposed']:>9.1f}"
                        f" exposed{row['against_best_fixed']:>8.2f}{row['predicted_against_measured'] or math.nan:>8.2f}{row['messages']:>5}"
                        f"  {row['chosen']}",
                        flush=True,
                    )
                ordered = sorted(
                    rows.values(),
                    key=lambda row: (_place(row["network"], NETWORKS), _place(row["link"], LINKS))
                )  # fmt: skip
                write(arguments.output, {"rows": ordered})
    draw(ordered, arguments.output.with_suffix(".png"))
    print(f"{arguments.output} written; {time.perf_counter() - started:.0f} s")


def _place(name, table):
    return list(table).index(name)


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"replay.py: {error}")
