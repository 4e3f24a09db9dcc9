"""The part of the demos that all frameworks share: command line, rows, results, table and plot."""

import json
import sys
import time

from ranks import command_line, launch

import deepreduce_hvd as dr
from deepreduce_hvd.statistics import totals


def instances(warmup_steps=0):
    """Return {name: codec} of the instances of DeepReduce that the demos compare.

    All of them use the top 1 %. None is the default of a compressor.
    """
    top = dr.TopK(0.01, warmup_steps=warmup_steps)
    return {
        "Top-r pairs": dr.Codec(top),
        "Bloom P0": dr.Codec(top, index=dr.Bloom(fpr=1e-3, policy="p0")),
        "Bloom P2": dr.Codec(top, index=dr.Bloom(fpr=1e-3, policy="p2")),
        "Rice": dr.Codec(top, index=dr.Rice()),
        "FitPoly": dr.Codec(top, index=dr.RawIndex(), value=dr.FitPoly()),
        "FitPoly + Rice": dr.Codec(top, index=dr.Rice(), value=dr.FitPoly()),
        "QSGD + Bloom P0": dr.Codec(
            top, index=dr.Bloom(fpr="auto", policy="p0"), value=dr.QSGD(bits=4)
        ),
        "QSGD + Rice": dr.Codec(top, index=dr.Rice(), value=dr.QSGD(bits=4)),
        "default": None,
    }


def parse(description, output):
    parser = command_line(description, "the 60,000 images", 3, output)
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each row, to see the spread (default 1)"
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=0.05,
        help="the highest learning rate of the schedule, the same for all rows (default 0.05)",
    )
    parser.add_argument(
        "--warmup-steps",
        type=int,
        default=0,
        help="steps in which the ratio of Top-r decreases from 25 %% to 1 %% (default 0)",
    )
    parser.add_argument("--only", help="comma-separated names of the rows to run, as in the table")
    return parser.parse_args()


class Watch:
    """Print the progress of a training, and record the bytes that it sends."""

    def __init__(self, label, shown):
        self.label = label
        self.shown = shown
        self.compression = None
        self.sent = []
        self.started = time.perf_counter()

    def __call__(self, step, steps, loss):
        if isinstance(self.compression, dr.Compressor):
            self.sent.append(totals(self.compression.stats())["sent_bytes"])
        elif hasattr(self.compression, "bytes_per_step"):
            self.sent.append(self.compression.bytes_per_step())
        if self.shown and (step % 200 == 0 or step == steps):
            print(
                (
                    f"{self.label} step {step:>5}/{steps}  loss {loss:.3f}  "
                    f"{time.perf_counter() - self.started:5.1f} s"
                ),
                flush=True,
            )


def table(rows):
    """Return the results as text."""
    lines = [
        f"{'compression':<17}{'accuracy':>9}{'bytes per step':>16}{'of dense':>10}{'of Top-r pairs':>16}{'ms per step':>13}"
    ]
    for row in rows:
        of_pairs = (
            "-" if row["share_of_top_r_pairs"] is None else f"{row['share_of_top_r_pairs']:.3f}"
        )
        lines.append(
            f"{row['name']:<17}{row['accuracy']:>9.4f}{row['bytes_per_step']:>16,.0f}{row['share_of_dense']:>10.4f}{of_pairs:>16}"
            f"{1e3 * row['seconds_per_step']:>13.1f}"
        )
    return "\n".join(lines)


def draw(figures, path):
    """Plot accuracy against bytes: a small dot per seed, a large one for the mean of each row."""
    import matplotlib

    matplotlib.use("Agg")
    from adjustText import adjust_text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    names = []
    for row in figures["rows"]:
        ours = "sections" in row and row["name"] != "Top-r pairs"
        shape, color = ("o", "tab:blue") if ours else ("s", "tab:gray")
        axes.plot(row["bytes_per_step"], 100 * row["accuracy"], shape, color=color, markersize=8)
        if len(row["accuracies"]) > 1:
            seeds = [100 * accuracy for accuracy in row["accuracies"]]
            axes.plot(
                [row["bytes_per_step"]] * len(seeds),
                seeds,
                shape,
                color=color,
                markersize=3,
                alpha=0.6,
            )
            axes.vlines(row["bytes_per_step"], min(seeds), max(seeds), color=color, alpha=0.4)
        names.append(
            axes.text(row["bytes_per_step"], 100 * row["accuracy"], row["name"], fontsize=9)
        )
    axes.set_xscale("log")
    axes.margins(0.08)
    axes.set_xlabel("bytes per rank and step, passed to collectives (log scale)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        f"Fashion-MNIST, {figures['ranks']} ranks, {figures['epochs']} epochs: accuracy "
        "against bytes"
    )
    axes.grid(alpha=0.3)
    figure.tight_layout()
    adjust_text(
        names,
        x=[row["bytes_per_step"] for row in figures["rows"]],
        y=[100 * row["accuracy"] for row in figures["rows"]],
        ax=axes,
        expand=(1.15, 1.6),
        arrowprops={"arrowstyle": "-", "color": "gray", "linewidth": 0.6},
    )
    figure.savefig(path, dpi=120)


class Demo:
    """A demo: its command line, and a training for each row of its table.

    Args:
        description: text for ``--help``.
        script: file that runs on every rank.
        output: name of the results file.
        seconds_per_row: what a row takes on two cores, to be printed.
        launcher: "horovodrun" or "torchrun".
        baselines: names of the rows without DeepReduce, which the training knows.
        shown: names of the instances to compare; None for all.
    """

    def __init__(
        self, description, script, output, seconds_per_row, launcher="horovodrun",
        baselines=("none", "fp16"), shown=None,
    ):  # fmt: skip
        self._script = script
        self._seconds_per_row = seconds_per_row
        self._launcher = launcher
        self.options = parse(description, output)
        codecs = instances(self.options.warmup_steps)
        rows = dict.fromkeys(baselines)
        rows |= {name: {"codec": codecs[name]} for name in shown or codecs}
        #: {name: settings of the compressor, or None for a baseline} of the rows to train
        self.rows = self._chosen(rows)

    def _chosen(self, rows):
        """Return the rows of ``--only``; an unknown name ends the program."""
        if not self.options.only:
            return rows
        wanted = [name.strip() for name in self.options.only.split(",")]
        unknown = [name for name in wanted if name not in rows]
        if unknown:
            raise SystemExit(
                f"--only: expected some of {', '.join(rows)}, got {', '.join(unknown)}"
            )
        return {name: rows[name] for name in wanted}

    def compare(self, job):
        """Train each row with each seed, on every rank; rank 0 prints and writes the results.

        Args:
            job: the training, see :class:`fashion.Training`.
        """
        data = job.load()
        results = []
        for number, (name, settings) in enumerate(self.rows.items(), 1):
            label = f"[{number}/{len(self.rows)}] {name:<16}"
            row = self._row(job, data, label, name, settings)
            results.append(row)
            if job.rank == 0:
                print(
                    f"{label} accuracy {row['accuracy']:.4f}, {row['bytes_per_step']:,.0f} bytes"
                    " per step\n",
                    flush=True,
                )
        if job.rank == 0:
            self._write(results, job.size)

    def _row(self, job, data, label, name, settings):
        """Train one row with each seed; return its figures."""
        options = self.options
        accuracies, seconds, sent, sent_on_the_way = [], [], 0.0, 0.0
        for seed in range(options.seeds):
            watch = Watch(label, shown=job.rank == 0)

            def compression(network, watch=watch):
                watch.compression = (
                    job.baseline(name)
                    if settings is None
                    else dr.Compressor(**settings, parameters=job.parameters(network))
                )
                return watch.compression

            network, seconds_per_step, accuracy = job.train(
                data, compression, options.epochs, seed, watch, options.learning_rate
            )
            accuracies.append(accuracy)
            seconds.append(seconds_per_step)
            dense_bytes = job.dense_bytes(network)
            every = watch.sent or [dense_bytes / (2 if name == "fp16" else 1)]
            sent += job.mean(float(every[-1])) / options.seeds
            sent_on_the_way += job.mean(sum(every) / len(every)) / options.seeds
        row = {
            "name": name, "accuracy": sum(accuracies) / len(accuracies), "accuracies": accuracies,
            "bytes_per_step": sent,
            "bytes_per_step_over_training": sent_on_the_way,
            "share_of_dense": sent / dense_bytes,
            "seconds_per_step": sorted(seconds)[len(seconds) // 2],
        }  # fmt: skip
        if settings is not None:
            figures = totals(watch.compression.stats())
            row["sections"] = {
                field: figures[field]
                for field in ("header_bytes", "index_bytes", "value_bytes", "order_bytes")
            }
        return row

    def _write(self, rows, size):
        options = self.options
        pairs = next((row["bytes_per_step"] for row in rows if row["name"] == "Top-r pairs"), None)
        for row in rows:
            row["share_of_top_r_pairs"] = None if pairs is None else row["bytes_per_step"] / pairs
        options.output.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "data": "Fashion-MNIST", "ranks": size, "epochs": options.epochs,
            "seeds": options.seeds,
            "learning_rate": options.learning_rate, "warmup_steps": options.warmup_steps,
            "bytes": "passed to collectives by each rank in the last step (over training: in every 50th step), mean over ranks and seeds", "rows": rows,
        }  # fmt: skip
        options.output.write_text(json.dumps(figures, indent=1) + "\n")

    def _present(self):
        """Run the script on all ranks, print the table and draw the plot; return the exit
        status.
        """
        started, output = time.perf_counter(), self.options.output
        print(
            f"training with {self.options.processes} ranks; about {self._seconds_per_row} s a row"
            " on 2 cores\n",
            flush=True,
        )
        status = launch(self._script, self.options.processes, sys.argv[1:], self._launcher)
        if status != 0:
            return status
        figures = json.loads(output.read_text())
        picture = output.with_suffix(".png")
        draw(figures, picture)
        print(table(figures["rows"]))
        print(f"\nfigures: {output}  picture: {picture}  ({time.perf_counter() - started:.0f} s)")
        return 0

    def main(self, worker):
        """Run ``worker(demo)`` on every rank, the table and plot on the launching process.

        Returns:
            The exit status.
        """
        if self.options.worker:
            worker(self)
            return 0
        return self._present()
