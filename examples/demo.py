"""The main job: a small network on Fashion-MNIST under ``horovodrun -np 2``, with and without DeepReduce.

``make demo`` runs this. It prints a table and leaves results/demo.json and results/demo.png.
"""

import argparse
import json
import os
import pathlib
import sys
import time

from ranks import ROOT, launch

RESULTS = ROOT / "results"


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the 60,000 images (default 3)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, to see the spread (default 1)")
    parser.add_argument("--only", help="comma-separated rows to run, of those that the table shows")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "demo.json", help="where the figures go (default results/demo.json)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(options):
    """What every rank runs."""
    import horovod.torch as hvd
    import torch
    from fashion import dense_bytes, instances, load, train

    import deepreduce_hvd as dr
    from deepreduce_hvd.statistics import totals

    hvd.init()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    data = load()
    rows = {
        "none": (None, lambda network, chosen: dense_bytes(network)),
        "fp16": (lambda network: hvd.Compression.fp16, lambda network, chosen: dense_bytes(network, 2)),
    }
    for name, codec in instances().items():
        rows[name] = (
            lambda network, codec=codec: dr.Compressor(codec, parameters=network.named_parameters()),
            lambda network, chosen: totals(chosen.stats())["sent_bytes"],
        )
    if options.only:
        wanted = [name.strip() for name in options.only.split(",")]
        unknown = [name for name in wanted if name not in rows]
        if unknown:
            raise SystemExit(f"--only: expected some of {', '.join(rows)}, got {', '.join(unknown)}")
        rows = {name: rows[name] for name in wanted}

    results = []
    for number, (name, (compression, count_bytes)) in enumerate(rows.items(), 1):
        accuracies, seconds, sent = [], [], 0.0
        for seed in range(options.seeds):
            started = time.perf_counter()

            def progress(step, steps, loss):
                if hvd.rank() == 0 and (step % 200 == 0 or step == steps):
                    print(f"[{number}/{len(rows)}] {name:<16} step {step:>5}/{steps}  loss {loss:.3f}  {time.perf_counter() - started:5.1f} s", flush=True)

            network, chosen, step_seconds, result = train(data, compression, options.epochs, seed, progress)
            accuracies.append(result)
            seconds.append(step_seconds)
            own = torch.tensor([float(count_bytes(network, chosen))], dtype=torch.float64)
            sent += float(hvd.allreduce(own, name="sent")) / options.seeds
        row = {
            "name": name, "accuracy": sum(accuracies) / len(accuracies), "accuracies": accuracies, "bytes_a_step": sent,
            "share_of_dense": sent / dense_bytes(network), "seconds_a_step": sorted(seconds)[len(seconds) // 2],
        }  # fmt: skip
        if hasattr(chosen, "stats"):
            figures = totals(chosen.stats())
            row["sections"] = {field: figures[field] for field in ("header_bytes", "index_bytes", "value_bytes", "order_bytes")}
        results.append(row)
        if hvd.rank() == 0:
            print(f"[{number}/{len(rows)}] {name:<16} accuracy {row['accuracy']:.4f}, {sent:,.0f} bytes a step\n", flush=True)
    if hvd.rank() == 0:
        pairs = next((row["bytes_a_step"] for row in results if row["name"] == "Top-r pairs"), None)
        for row in results:
            row["share_of_top_r_pairs"] = None if pairs is None else row["bytes_a_step"] / pairs
        options.output.parent.mkdir(exist_ok=True)
        figures = {
            "data": "Fashion-MNIST", "ranks": hvd.size(), "epochs": options.epochs, "seeds": options.seeds,
            "bytes": "handed to collectives by each rank in the last step, mean over ranks and seeds", "rows": results,
        }  # fmt: skip
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def table(rows):
    """The figures as text."""
    lines = [f"{'compression':<17}{'accuracy':>9}{'bytes a step':>14}{'of dense':>10}{'of Top-r pairs':>16}{'ms a step':>11}"]
    for row in rows:
        of_pairs = "-" if row["share_of_top_r_pairs"] is None else f"{row['share_of_top_r_pairs']:.3f}"
        lines.append(
            f"{row['name']:<17}{row['accuracy']:>9.4f}{row['bytes_a_step']:>14,.0f}{row['share_of_dense']:>10.4f}{of_pairs:>16}"
            f"{1e3 * row['seconds_a_step']:>11.1f}"
        )
    return "\n".join(lines)


def draw(figures, path):
    """Accuracy against bytes a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for row in figures["rows"]:
        ours = row["name"] not in ("none", "fp16", "Top-r pairs")
        axes.plot(row["bytes_a_step"], 100 * row["accuracy"], "o" if ours else "s", color="tab:blue" if ours else "tab:gray", markersize=8)
        if len(row["accuracies"]) > 1:
            axes.vlines(row["bytes_a_step"], 100 * min(row["accuracies"]), 100 * max(row["accuracies"]), color="tab:blue" if ours else "tab:gray")
    # names beside their points, pushed apart where points are close
    placed = []
    low, high = axes.get_ylim()
    for row in sorted(figures["rows"], key=lambda row: row["accuracy"]):
        height = 100 * row["accuracy"]
        while any(abs(height - other) < 0.045 * (high - low) and 0.4 < row["bytes_a_step"] / x < 2.5 for x, other in placed):
            height += 0.01 * (high - low)
        placed.append((row["bytes_a_step"], height))
        axes.annotate(row["name"], (row["bytes_a_step"], 100 * row["accuracy"]), (row["bytes_a_step"] * 1.08, height), fontsize=9, va="center")
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.5)
    axes.set_xlabel("bytes a rank hands to the collectives in a step (log scale)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"Fashion-MNIST, {figures['ranks']} ranks, {figures['epochs']} epochs: accuracy against bytes")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main():
    options = parse()
    if options.worker:
        worker(options)
        return 0
    started = time.perf_counter()
    print(f"training with {options.processes} ranks; about 45 s a row on 2 cores\n", flush=True)
    status = launch(__file__, options.processes, sys.argv[1:])
    if status != 0:
        return status
    figures = json.loads(options.output.read_text())
    picture = options.output.with_suffix(".png")
    draw(figures, picture)
    print(table(figures["rows"]))
    print(f"\nfigures: {options.output}  picture: {picture}  ({time.perf_counter() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
