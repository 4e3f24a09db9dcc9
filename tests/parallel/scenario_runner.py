"""Runs the scenarios of a worker, whatever its framework."""

import json
import pathlib
import time
import traceback


def run_all(namespace, directory, hvd, barrier):
    """Runs every scenario_* of a module on this rank and writes what happened."""
    outcomes = {}
    for name, scenario in list(namespace.items()):
        if not name.startswith("scenario_"):
            continue
        print(f"{time.strftime('%X')} {name}", flush=True)  # shown when a job ends without its report
        try:
            scenario(pathlib.Path(directory))
            outcomes[name[len("scenario_") :]] = None
        except Exception:
            outcomes[name[len("scenario_") :]] = traceback.format_exc()
        # the next scenario starts together on all ranks, whatever happened in this one
        barrier()
    path = pathlib.Path(directory) / f"report.{hvd.size()}.{hvd.rank()}.json"
    path.write_text(json.dumps(outcomes))
