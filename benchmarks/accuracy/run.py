"""The accuracy laboratory: train tasks to the end with and without compression, and compare.

    export PYTHONPATH=examples
    python benchmarks/accuracy/run.py --tasks "lstm;vgg" --candidates none --jobs 2
    python benchmarks/accuracy/run.py --tasks "lstm;vgg" --seeds 0-2 --rates best --jobs 2

Ranks are simulated in one process, with the real codecs, memories and communicators. A run whose
outcome is in build/accuracy/runs.jsonl or results/accuracy-lab.json is not repeated. ``--report``
only summarizes these runs.
"""

import argparse
import itertools
import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from candidates import CANDIDATES
from report import recorded, report, tuned_rate
from runs import known, run_all
from tasks import TASKS

RUNS = pathlib.Path(__file__).resolve().parent.parent.parent / "build" / "accuracy" / "runs.jsonl"


def seeds_of(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def rates_of(text, task, ranks, rows, steps=None, factor=1):
    """Return the learning rates to try.

    Args:
        text: value of ``--rates``, or None.
        task: class of the task.
        ranks: number of ranks.
        rows: outcomes of the runs so far.
        steps: number of steps, or None for the task's own.
        factor: how many times the batch is as large as the task's own.
    """
    if text is None:
        return task.learning_rates
    if text != "best":
        return [float(rate) for rate in text.split(",")]
    rate = tuned_rate(rows, task.name, ranks, steps or task.total_steps, factor)
    if rate is None:
        of_steps = f" --steps {steps}" if steps else ""
        raise SystemExit(
            f"--rates best: expected uncompressed runs of {task.name} with {ranks} ranks and "
            f"{steps or task.total_steps} steps that do not diverge, got none; run first:\n"
            f"  make accuracy ACCURACY_OPTIONS='--tasks {task.name} --candidates none "
            f"--ranks {ranks}{of_steps}'"
        )
    return [rate]


def keys_of(options, rows):
    """Return the keys of all runs that the options ask for, in their order."""
    keys = []
    for name in options.tasks.split(";"):
        task = TASKS[name]
        most = task.batch * options.batch_factor
        if options.ranks > most:
            raise SystemExit(
                f"--ranks: expected at most {most} for {name}, whose batches have {most} samples,"
                f" got {options.ranks}"
            )
        for seed, candidate, rate in itertools.product(
            seeds_of(options.seeds),
            options.candidates.split(";"),
            rates_of(options.rates, task, options.ranks, rows, options.steps, options.batch_factor),
        ):
            size = options.steps or task.total_steps, options.batch_factor
            keys.append((name, candidate, options.ranks, seed, rate, *size))
    return keys


def names(table):
    """Return a function that checks an argument: names in ``table``, separated by semicolons."""

    def check(text):
        for name in text.split(";"):
            if name not in table:
                raise argparse.ArgumentTypeError(
                    f"expected names out of {'; '.join(table)}, got {name!r}"
                )
        return text

    return check


def main(arguments=None, path=RUNS):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=names(TASKS), default=";".join(TASKS))
    parser.add_argument("--candidates", type=names(CANDIDATES), default=";".join(CANDIDATES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--batch-factor", type=int, default=1,
        help="how many times the batch is as large as the task's own (default: 1)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="number of steps; default: those of each task")
    parser.add_argument("--seeds", default="0", help="such as 0 or 0-4")
    parser.add_argument(
        "--rates",
        help="peak learning rates, such as 0.004,0.008; or best: the one that is best for "
        "uncompressed training in the runs so far; default: those of each task",
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--verbose", action="store_true", help="print the progress within runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    failed = 0
    if not options.report:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {**recorded(), **known(path)}
        keys = keys_of(options, rows.values())
        to_do = [key for key in keys if key not in rows]
        print(f"{len(keys)} runs, {len(keys) - len(to_do)} of them known", flush=True)
        failed = run_all(path, to_do, options.jobs, options.verbose)
    if rows := {**recorded(), **known(path)}:
        report(rows.values())
    elif options.report:
        parser.error(f"--report: expected runs in {path}, got none; run without --report first")
    return f"{failed} runs failed, see above" if failed else 0


if __name__ == "__main__":
    sys.exit(main())
