"""Runs of the accuracy laboratory: train in several processes, and keep every outcome in a file.

The file has one line of JSON per run. A run is named by its key: task, candidate, ranks, seed, peak
learning rate, number of steps, and how many times its batch is as large as the task's own.
"""

import concurrent.futures
import fcntl
import functools
import json
import multiprocessing
import os
import threading
import time

import torch
from candidates import CANDIDATES
from tasks import TASKS
from training import train

_KEY = ("task", "candidate", "ranks", "seed", "learning_rate", "total_steps", "batch_factor")


def known(path):
    """Return {key: outcome} of the runs so far."""
    if not path.exists():
        return {}
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        rows = [json.loads(line) for line in file]
    return {key_of(row): row for row in rows}


def key_of(row):
    """Return the key of the run that ``row`` is the outcome of."""
    # the first runs have no batch factor
    return tuple(row.get(name, 1) if name == "batch_factor" else row[name] for name in _KEY)


def _append(path, row):
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def described(key):
    name, candidate, ranks, seed, rate, steps, factor = key
    batch = "" if factor == 1 else f", {factor} x batch"
    length = "" if steps == TASKS[name].total_steps else f", {steps} steps"
    return f"{name}, {candidate}, {ranks} ranks{batch}{length}, seed {seed}, rate {rate:g}"


@functools.cache
def _task(name, total_steps, factor):
    task = TASKS[name]()
    task.total_steps = total_steps
    task.batch *= factor
    return task


def run(path, key, verbose=False):
    """Train once, and append the outcome to the runs.

    Args:
        path: file of the runs.
        key: what to train.
        verbose: whether to print the progress every 100 steps.

    Returns:
        The outcome, as in the file.
    """
    torch.set_num_threads(1)
    name, candidate, ranks, seed, rate, total_steps, factor = key
    started = time.monotonic()

    def progress(done, total, loss):
        if done % 100 == 0 or done == total:
            seconds = time.monotonic() - started
            print(
                f"{described(key)}: step {done} of {total}, loss {loss:.3f}, {seconds:.0f} s",
                flush=True,
            )

    outcome = train(
        _task(name, total_steps, factor),
        CANDIDATES[candidate],
        ranks,
        seed,
        rate,
        progress if verbose else None,
    )
    row = {**dict(zip(_KEY, key)), **outcome, "seconds": round(time.monotonic() - started, 1)}
    _append(path, row)
    return row


def run_all(path, keys, jobs, verbose=False):
    """Run all of ``keys``, each in one of ``jobs`` processes, and print a line for each.

    Returns:
        Number of runs that failed. A failed run has no line in the file.
    """
    waiting, rows, failed = set(keys), [], 0
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        futures = {pool.submit(run, path, key, verbose): key for key in keys}
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            key = futures[future]
            waiting.remove(key)
            line = f"[{number}/{len(keys)}] {described(key)}: "
            if error := future.exception():
                failed += 1
                line += f"failed: {type(error).__name__}: {error}"
            else:
                rows.append(row := future.result())
                line += f"{_metric(row)}, {row['seconds']:.0f} s"
            if rows and waiting:
                line += f"; {_duration(remaining(waiting, rows, jobs))} left"
            print(line, flush=True)
    except BaseException:
        # an interrupt: the pool would wait for the runs in progress, and for those next in its
        # queue
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _end_with_parent():
    """End this process when its parent ends, also when that is killed."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _metric(row):
    if row["metric"] is None:
        return f"diverged in step {row['steps']}"
    return f"{TASKS[row['task']].metric} {row['metric']:.4f}"


def remaining(keys, rows, jobs):
    """Estimate the time until all of ``keys`` have run.

    A run is expected to take as long as the mean of its task so far, or of all tasks if its task
    has no outcome yet.

    Args:
        keys: runs that have not ended.
        rows: outcomes of this laboratory session.
        jobs: number of runs at a time.

    Returns:
        Seconds.
    """
    by_task = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row["seconds"])
    everything = [row["seconds"] for row in rows]
    expected = [by_task.get(key[0], everything) for key in keys]
    return sum(sum(seconds) / len(seconds) for seconds in expected) / jobs


def _duration(seconds):
    minutes = max(round(seconds / 60), 1)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
