"""The accuracy laboratory: train tasks to the end with and without compression, and compare.

    python benchmarks/accuracy/run.py --tasks transformer --candidates "none;default" --seeds 0-2

Ranks are simulated in one process, with the real codecs, memories and communicators. A run whose
outcome is in build/accuracy/runs.jsonl is not repeated. ``--report`` only summarizes these runs.
"""

import argparse
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch
from candidates import CANDIDATES
from report import report
from tasks import TASKS
from training import train

RUNS = pathlib.Path(__file__).resolve().parent.parent.parent / "build" / "accuracy" / "runs.jsonl"
_KEY = ("task", "candidate", "ranks", "seed", "learning_rate", "steps_at_4")


def known():
    """Return {key: outcome} of the runs so far."""
    if not RUNS.exists():
        return {}
    rows = map(json.loads, RUNS.read_text().splitlines())
    return {tuple(row[name] for name in _KEY): row for row in rows}


def seeds_of(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default=";".join(TASKS))
    parser.add_argument("--candidates", default=";".join(CANDIDATES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", default="0", help="such as 0 or 0-4")
    parser.add_argument("--rates", help="peak learning rates, such as 0.004,0.008")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    if options.report:
        report(known().values())
        return
    torch.set_num_threads(1)
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    for name in options.tasks.split(";"):
        task = TASKS[name]()
        rates = task.learning_rates
        if options.rates:
            rates = [float(rate) for rate in options.rates.split(",")]
        for seed in seeds_of(options.seeds):
            for candidate in options.candidates.split(";"):
                for rate in rates:
                    key = name, candidate, options.ranks, seed, rate, task.total_steps
                    if key in known():
                        continue
                    started = time.monotonic()

                    def progress(done, total, loss):
                        if done % 100 == 0 or done == total:
                            seconds = time.monotonic() - started
                            print(
                                f"{name}, {candidate}, {options.ranks} ranks, seed {seed}, rate {rate}: step {done} of {total}, loss {loss:.3f}, {seconds:.0f} s",
                                flush=True,
                            )

                    outcome = train(
                        task, CANDIDATES[candidate], options.ranks, seed, rate, progress
                    )
                    row = {**dict(zip(_KEY, key)), **outcome}
                    with RUNS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    report(known().values())


if __name__ == "__main__":
    main()
