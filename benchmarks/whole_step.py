"""Measure whole training steps of a residual network and of a transformer on 2 hosts.

    python benchmarks/whole_step.py [--networks resnet18,transformer] [--link 1gbit] [--turns 5]
        [--cycles 1,5] [--examples N]

Every network is one job of Horovod on two hosts (network namespaces of this machine), with a real
forward and backward pass. The rows of a job run in turns of a few steps. "No exchange" trains each
rank alone; the seconds by which the other rows are longer are exposed. They are compared with the
seconds in which the core encodes and decodes the same gradients, and with the processor time of the
rank's threads. Each network has a job per cycle time of Horovod: the milliseconds between two looks
for new messages. Horovod's default is 1. Writes results/whole-step.json. Needs root, iproute2 and
openssh-server.
"""

import argparse
import itertools
import pathlib
import sys
import time

from jobs import run_job
from links import bits_per_second
from measure import at_least_one, split_choices, write
from network import Network, NetworkError, problems
from whole_step_rows import EXAMPLES, LOCAL, NETWORKS

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
_LONGEST = 900  # maximum seconds of one job


def measured(network, link, name, cycle, turns, examples):
    """Return the rows of one job, and print them."""
    rows = []
    command = [HERE / "whole_step_worker.py", name, turns, examples]
    variables = {"HOROVOD_CYCLE_TIME": str(cycle)}
    run_job(network, command, _LONGEST, rows.append, variables=variables)
    local = next(row["seconds"] for row in rows if row["row"] == LOCAL)
    for row in rows:
        row.update(
            network=name, link=link, cycle=cycle, examples=examples, exposed=row["seconds"] - local
        )
        threads = ", ".join(
            f"{kind} {1e3 * spent:.0f}" for kind, spent in row["processor_seconds"].items()
        )
        print(
            f"{name:<12}{cycle:>3g} ms  {row['row']:<18}{1e3 * row['seconds']:>9.1f} ms"
            f"{1e3 * row['exposed']:>9.1f} exposed  threads: {threads}  {row['chosen']}",
            flush=True,
        )
    print(f"{name:<12}encode and decode {1e3 * rows[0]['coding']:>9.1f} ms", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS), help="comma-separated")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--cycles", default="1,5", help="milliseconds, comma-separated")
    parser.add_argument("--turns", type=int, default=5, help="turns of each row, of 4 steps")
    parser.add_argument(
        "--examples", type=at_least_one, help="examples in a batch of a rank (default: by network)"
    )
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "whole-step.json")
    arguments = parser.parse_args()
    split_choices(parser, arguments, "networks", NETWORKS, ",")
    bits_per_second(arguments.link)
    cycles = [float(word) for word in arguments.cycles.split(",")]
    if found := problems():
        sys.exit("\n".join(found))
    rows, started = [], time.perf_counter()
    with Network(2, arguments.link) as network:
        for name, cycle in itertools.product(arguments.networks, cycles):
            examples = arguments.examples or EXAMPLES[name]
            rows += measured(network, arguments.link, name, cycle, arguments.turns, examples)
    write(arguments.output, {"rows": rows})
    print(f"{arguments.output} written; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"whole_step.py: {error}")
