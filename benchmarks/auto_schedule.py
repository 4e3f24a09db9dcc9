"""Measure whole training steps on 2 hosts with fixed settings and with ``schedule="auto"``.

    python benchmarks/auto_schedule.py [--links 100mbit,1gbit,10gbit,unshaped] [--steps 15]

Every link is one job of two hosts (network namespaces of this machine). Each row trains the same
network, of 8.6 million parameters, with a real forward and backward pass. The rows of a job run in
turns, so that a slow moment of the machine meets all of them. Writes results/auto-schedule.json and
.png. Needs root, iproute2 and openssh-server.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

from jobs import run_job
from measure import split_choices, write
from network import Network, NetworkError, problems

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s", "unshaped": "unshaped"}
ROWS = ("none", "fp16", "64 MiB buckets", "one message per gradient", "auto")
_LONGEST = 900  # maximum seconds of one job
_MOST_TO_DECIDE = 150  # maximum number of steps until auto has chosen


def work(steps):
    """Run the rows on one rank; the first rank prints a line for each."""
    import horovod.torch as hvd
    import torch
    from time_to_accuracy_worker import load, vgg

    import deepreduce_hvd as dr

    hvd.init()
    images, labels, _, _ = load()
    codec = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1))
    options = {
        "64 MiB buckets": {},
        "one message per gradient": {"bucket_bytes": 0},
        "auto": {"schedule": "auto"},
    }
    trained = {}
    for row in ROWS:
        torch.manual_seed(0)
        network = vgg()
        named = list(network.named_parameters())
        compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(row)
        if compression is None:
            compression = dr.Compressor(codec, parameters=named, **options[row])
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        trained[row] = network, optimizer, compression

    def step(row, number):
        network, optimizer, _ = trained[row]
        batch = slice(32 * number, 32 * number + 32)
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        return time.perf_counter() - started

    auto = trained["auto"][2]
    before = 0
    while before < _MOST_TO_DECIDE and (before < 10 or not _has_decided(auto)):
        step("auto", before)
        before += 1
    seconds = {row: [] for row in ROWS}
    for number in range(steps + 2):
        for row in ROWS:
            spent = step(row, number)
            # a step ends when the slowest rank has ended it
            slowest = float(hvd.allreduce(torch.tensor(spent), op=hvd.Max, name="seconds"))
            if number >= 2:
                seconds[row].append(slowest)
    if hvd.rank():
        return
    for row in ROWS:
        compression = trained[row][2]
        chosen = compression.adapter.schedule_notes()[:1] if row == "auto" else []
        trials = compression.adapter.scheduler.trials if row == "auto" else []
        print("ROW " + json.dumps({
            "row": row, "seconds": statistics.median(seconds[row]), "fastest": min(seconds[row]),
            "slowest": max(seconds[row]), "steps": steps,
            "steps_to_decide": before if chosen else None,
            "chosen": " ".join(chosen),
            "trials": [
                {"rule": trial.rule, "predicted": trial.predicted, "measured": trial.measured}
                for trial in trials
            ],
        }), flush=True)  # fmt: skip


def _has_decided(compressor):
    """Return whether the trials are over."""
    trials = compressor.adapter.scheduler.trials
    return (
        bool(trials) and compressor.plan is not None and not compressor.adapter.scheduler.is_trying
    )


def draw(rows, path):
    """Plot seconds per step by link, as multiples of the fastest fixed row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = [link for link in LINKS if any(row["link"] == link for row in rows)]
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(ROWS)
    for place, name in enumerate(ROWS):
        own = {row["link"]: row for row in rows if row["row"] == name}
        axes.bar(
            [links.index(link) + (place - len(ROWS) / 2 + 0.5) * width for link in own],
            [1e3 * row["seconds"] for row in own.values()],
            width,
            label=name,
            color="#2b6cb0"
            if name == "auto"
            else ("#cbd5e0", "#a0aec0", "#d69e2e", "#ed8936")[place],
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(links)), [LINKS[link] for link in links])
    axes.set_ylabel("milliseconds per step")
    axes.legend()
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title("Training steps of 8.6 million parameters on 2 hosts")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", default=",".join(LINKS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=15, help="measured steps per row")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "auto-schedule.json")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.steps)
        return
    split_choices(parser, arguments, "links", LINKS, ",")
    if found := problems():
        sys.exit("\n".join(found))
    rows, started = [], time.perf_counter()
    with Network(2) as network:
        for link in arguments.links:
            network.shape(None if link == "unshaped" else link)
            words = [pathlib.Path(__file__).resolve(), "--worker", "--steps", arguments.steps]
            own = []
            run_job(network, words, _LONGEST, own.append)
            best = min(row["seconds"] for row in own if row["row"] != "auto")
            for row in own:
                row.update(link=link, against_best_fixed=row["seconds"] / best)
                print(
                    f"{LINKS[link]:<10}{row['row']:<26}{1e3 * row['seconds']:>10.1f} ms"
                    f"{row['against_best_fixed']:>8.2f}  {row['chosen']}",
                    flush=True,
                )
            rows += own
    write(arguments.output, {"rows": rows})
    draw(rows, arguments.output.with_suffix(".png"))
    print(f"{arguments.output} written; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"auto_schedule.py: {error}")
