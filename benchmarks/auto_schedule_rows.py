"""The rows of benchmarks/auto_schedule.py, by framework, and how a job prints them."""

import json
import statistics
from typing import NamedTuple

DDP, TENSORFLOW = "DDP: ", "TensorFlow: "  # prefixes of the names of rows
#: the row of each framework whose settings are chosen in the job
AUTO = ("auto", f"{DDP}auto", f"{TENSORFLOW}auto")


class Framework(NamedTuple):
    """What trains the rows of a job.

    Attributes:
        title: its name in the plot.
        launcher: of :func:`jobs.run_job`.
        worker: file of the program of a rank.
        rows: names of the rows.
    """

    title: str
    launcher: str
    worker: str
    rows: tuple[str, ...]


FRAMEWORKS = {
    "Horovod": Framework(
        "Horovod", "horovodrun", "auto_schedule_worker.py",
        ("none", "fp16", "64 MiB buckets", "one message per gradient", "auto"),
    ),
    "DDP": Framework(
        "PyTorch's DDP", "torchrun", "auto_schedule_worker.py",
        (f"{DDP}none", f"{DDP}fp16", f"{DDP}DDP's buckets", f"{DDP}auto"),
    ),
    "TensorFlow": Framework(
        "Horovod with TensorFlow", "horovodrun", "auto_schedule_tensorflow_worker.py",
        tuple(
            f"{TENSORFLOW}{name}"
            for name in ("none", "fp16", "one message", "one message per gradient", "auto")
        ),
    ),
}  # fmt: skip


def print_rows(seconds, before, adapter, scheduler):
    """Print the rows of a job as :func:`jobs.run_job` expects them.

    Args:
        seconds: what :func:`turns.seconds_in_turns` returned.
        before: number of steps until a plan was chosen.
        adapter, scheduler: those of the compressor that chose it.
    """
    for name, own in seconds.items():
        chooses = name in AUTO
        print("ROW " + json.dumps({
            "row": name, "seconds": statistics.median(own), "fastest": min(own),
            "slowest": max(own), "steps": len(own), "steps_to_decide": before if chooses else None,
            "chosen": adapter.notes()[0] if chooses else "",
            "trials": [
                {"rule": trial.rule, "predicted": trial.predicted, "measured": trial.measured}
                for trial in (scheduler.trials if chooses else [])
            ],
        }), flush=True)  # fmt: skip
