"""Run a random walk over the API on stock Horovod and PyTorch.

    export PYTHONPATH=tests/support
    horovodrun -np 2 python tests/random_walk/torch_walk.py --seeds 17 --steps 3

runs one seed, and ``--seeds 0-119`` runs many in one job. Each seed determines a random program,
and everything is compared with an oracle. A seed that fails prints its program and the step. If
only one rank meets an error, the others hang, which is also a failure.
"""

import argparse
import faulthandler
import gc
import os
import re
import sys
import threading
import time
import warnings
import weakref

import horovod.torch as hvd
import torch
import torch_generator
from torch_trainer import Trainer

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import encoding_threads
from deepreduce_hvd.torch.transport import HorovodTransport


def say(text):
    print(text, flush=True)


class Watchdog:
    """Ends the process if a seed takes too long, with its program and the stacks of all threads."""

    def __init__(self, seconds):
        self.seconds = seconds
        self._timer = None
        self._trainer = None

    def start(self, trainer):
        self.stop()
        self._trainer = trainer
        self._timer = threading.Timer(self.seconds, self._end)
        self._timer.daemon = True
        self._timer.start()
        # in case the timer's thread does not get the GIL; the last line printed names the seed
        faulthandler.dump_traceback_later(self.seconds + 10, exit=True)

    def stop(self):
        if self._timer is not None:
            self._timer.cancel()
        self._trainer = None
        faulthandler.cancel_dump_traceback_later()

    def _end(self):
        trainer = self._trainer
        if trainer is not None:
            where = f"seed {trainer.program.seed}, step {trainer.number}"
            say(f"rank {hvd.rank()}, {where}: hangs, after {self.seconds} s\n{trainer.program}")
            faulthandler.dump_traceback()
            os._exit(1)


def run(program, watchdog, known, made):
    """Run one program on this rank.

    Args:
        program: a :class:`~torch_program.Program`.
        watchdog: a :class:`Watchdog`.
        known, made: see :class:`~torch_user.User`.

    Returns:
        "done", "refused" or "failed", the same on all ranks.
    """
    trainer = Trainer(program, known, made)
    watchdog.start(trainer)
    refused = False
    try:
        trainer.build()
        for number in range(len(program.steps)):
            trainer.step(number)
            ended = agree(trainer)
            if ended:
                return ended
    except dr.InvalidArgumentError as error:
        refused = program.refused is not None and re.search(program.refused, str(error))
        if not refused:
            trainer.fail_with(error)
    except Exception as error:
        trainer.fail_with(error)
    else:
        trainer.expect(program.refused is None, "was not refused:", program.refused)
    return agree(trainer, bool(refused)) or "done"


def agree(trainer, refused=False):
    """Compare the replicas of all ranks after a step, and find ranks with problems.

    Returns:
        None to continue, or what :func:`run` returns.
    """
    own = [bool(trainer.problems), refused, *trainer.hashes()]
    rows = hvd.allgather(torch.tensor([own], dtype=torch.int64), f"{trainer.label}.agree")
    if not rows[:, :2].any():
        for column, (name, ranks) in enumerate(trainer.ranks.items(), start=2):
            hashes = set(rows[list(ranks), column].tolist())
            trainer.expect(len(hashes) == 1, f"replicas of {name} differ: {rows[:, column]}")
    if rows[:, 0].any() or trainer.problems:
        for problem in trainer.problems:
            where = f"rank {hvd.rank()}, seed {trainer.program.seed}, step {trainer.number}"
            say(f"{where}: {problem}")
        return "failed"
    return "refused" if rows[:, 1].any() else None


def seeds_of(text):
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0-9", help="such as 17, 0-119 or 3,5,8-9")
    parser.add_argument("--steps", type=int, help="at most so many steps of each")
    parser.add_argument("--hang-seconds", type=float, default=90.0, help="a longer seed hangs")
    parser.add_argument("--seconds", type=float, help="begin no seed after so many")
    parser.add_argument("--most-failures", type=int, default=5, help="after which the walk ends")
    arguments = parser.parse_args()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    torch.set_num_threads(1)
    encoding_threads.FEWEST_ELEMENTS = 0  # the walk's gradients are small
    warnings.simplefilter("ignore")
    # Horovod lets a set of ranks be added only once. The sets that Hierarchical needs are added
    # first, so that no seed depends on earlier seeds.
    for ranks_per_host in (1, hvd.size()):
        HorovodTransport().by_host(ranks_per_host)
    gc.collect()
    gc.freeze()
    watchdog = Watchdog(arguments.hang_seconds)
    known, counts, failed, alive = {}, {}, [], []
    started = time.perf_counter()
    for seed in seeds_of(arguments.seeds):
        late = arguments.seconds is not None and time.perf_counter() - started > arguments.seconds
        if hvd.broadcast(torch.tensor([int(late)]), 0, f"walk.{seed}.late"):
            break
        if hvd.rank() == 0:
            say(f"{time.strftime('%X')} seed {seed}")
        program = torch_generator.make(seed, hvd.size(), arguments.steps)
        made = weakref.WeakSet()
        ended = run(program, watchdog, known, made)
        watchdog.stop()
        counts[ended] = counts.get(ended, 0) + 1
        # PyTorch's engine keeps state from an error in backward until the next backward
        torch.ones((), requires_grad=True).mul(1).backward()
        gc.collect()
        if made:
            alive.append(seed)
        if ended == "failed":
            failed.append(seed)
            if hvd.rank() == 0:
                say(str(program))
            if len(failed) >= arguments.most_failures:
                break
    if hvd.rank() == 0:
        took = time.perf_counter() - started
        say(f"{sum(counts.values())} seeds on {hvd.size()} ranks in {took:.0f} s: {counts}")
        say(f"failed: {failed}; compressors that stay alive: {alive}")
    hvd.barrier()
    sys.exit(1 if failed or alive else 0)


if __name__ == "__main__":
    main()
