"""Kill a rank at a random moment of training, many times, and count survivors that never end.

    # training with this package's compression
    python tests/parallel/killed_peer.py --runs 300
    # with Horovod alone, for comparison
    python tests/parallel/killed_peer.py --runs 300 --work plain
    # the worst moment: many collectives wait for the killed rank
    python tests/parallel/killed_peer.py --runs 1 --work waiting

Each run is a separate job, forked from this process. The frameworks are already imported, so a run
takes about a second. The ranks meet at Horovod's own rendezvous server, without horovodrun, which
would end the survivors. A survivor must end within ``--limit`` seconds. Otherwise the stacks of its
threads are printed.
"""

import argparse
import contextlib
import faulthandler
import functools
import io
import math
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback

import horovod.torch as hvd
import numpy as np
import torch
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

import deepreduce_hvd as dr
from deepreduce_hvd.torch.transport import HorovodTransport

_LAYERS = 40
_WARM_UP_STEPS = 3
_WAITING = 1000


def train(ready, compress=True):
    """Train forever; write a byte to ``ready`` after some steps."""
    hvd.init()
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(_LAYERS)))
    named = list(network.named_parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    options = (
        {"compression": dr.Compressor(parameters=named, dense_below=0, bucket_bytes=0)}
        if compress
        else {}
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)
    step = 0
    while True:
        optimizer.zero_grad()
        network(torch.randn(4, 32)).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if step == _WARM_UP_STEPS:
            os.write(ready, b"r")


def leave_collectives_waiting(ready):
    """Start collectives in which the last rank does not take part, until they fail."""
    hvd.init()
    transport = HorovodTransport()
    if hvd.rank() == hvd.size() - 1:
        os.write(ready, b"r")
        time.sleep(3600)
    started = []
    while True:
        started.append(transport.allgather(np.zeros(8, dtype=np.uint8), f"waiting.{len(started)}"))
        if len(started) == _WAITING:
            os.write(ready, b"r")
        if len(started) >= _WAITING:
            busy_until = time.perf_counter() + 1e-3
            # hold the GIL, like training
            while time.perf_counter() < busy_until:
                pass


WORK = {
    "train": train,
    "plain": functools.partial(train, compress=False),
    "waiting": leave_collectives_waiting,
}


def be_rank(environment, ready, work, log):
    """Run one rank, in a separate process."""
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(descriptor, "w"), all_threads=True)
    torch.set_num_threads(1)
    try:
        WORK[work](ready)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        hvd.shutdown()
    os._exit(1)


def run_once(ranks, work, delay, victim, limit, directory):
    """Run one job; return the survivors that did not end, {rank: stacks of its threads}."""
    start_read, start_write = os.pipe()
    ready_read, ready_write = os.pipe()
    plan = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    logs = [os.path.join(directory, f"rank.{rank}") for rank in range(ranks)]
    children = []
    for slot in plan:
        child = os.fork()
        if child == 0:
            os.close(start_write)  # a rank then ends if its launcher is gone
            port = int(os.read(start_read, 8))
            shared = create_run_env_vars("127.0.0.1", ["lo"], port)
            environment = {
                name: str(value) for name, value in {**shared, **create_slot_env_vars(slot)}.items()
            }
            be_rank(environment, ready_write, work, logs[slot.rank])
        children.append(child)
    with contextlib.redirect_stdout(io.StringIO()):
        rendezvous = RendezvousServer(0)
        port = rendezvous.start()
        rendezvous.init(plan)
    for _ in range(ranks):
        os.write(start_write, f"{port:8d}".encode())
    for _ in range(ranks):
        while not select.select([ready_read], [], [], 1)[0]:
            for rank, child in enumerate(children):
                if os.waitpid(child, os.WNOHANG)[0]:
                    with open(logs[rank]) as log:
                        raise RuntimeError(
                            f"rank {rank} ended before any was killed:\n{log.read()}"
                        )
        os.read(ready_read, 1)
    time.sleep(delay)
    os.kill(children[victim], signal.SIGKILL)
    left = dict(enumerate(children))
    deadline = time.monotonic() + limit
    while left and time.monotonic() < deadline:
        left = {
            rank: child for rank, child in left.items() if os.waitpid(child, os.WNOHANG)[0] == 0
        }
        time.sleep(0.005)
    stuck = {}
    for rank, child in left.items():
        os.kill(child, signal.SIGUSR1)
        time.sleep(1)
        with open(logs[rank]) as log:
            stuck[rank] = log.read()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for descriptor in (start_read, start_write, ready_read, ready_write):
        os.close(descriptor)
    return stuck


def in_a_child(function, *arguments):
    """Call ``function`` in a forked process; return its exit status.

    So this process keeps no threads of ``function``.
    """
    child = os.fork()
    if child == 0:
        try:
            os._exit(function(*arguments))
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", choices=WORK, default="train", help="what the ranks do")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit",
        type=float,
        default=60,
        help="seconds that a survivor may take to end, twice what Gloo waits at most",
    )
    options = parser.parse_args()
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(math.ceil(options.limit / 2))
    chance = random.Random(options.seed)
    deadlocks = 0
    with tempfile.TemporaryDirectory() as directory:

        def run(delay, victim):
            stuck = run_once(options.ranks, options.work, delay, victim, options.limit, directory)
            for rank, said in stuck.items():
                print(
                    f"rank {rank} did not end after rank {victim} was killed:\n{said}", flush=True
                )
            return bool(stuck)

        for number in range(options.runs):
            victim = (
                options.ranks - 1 if options.work == "waiting" else chance.randrange(options.ranks)
            )
            failed = in_a_child(run, chance.uniform(0, 0.2), victim)
            if failed not in (0, 1):
                raise SystemExit(f"run {number} ended with exit status {failed}")
            deadlocks += failed
            print(f"{number + 1} runs, {deadlocks} with survivors that did not end", flush=True)
    return int(deadlocks > 0)


if __name__ == "__main__":
    sys.exit(main())
