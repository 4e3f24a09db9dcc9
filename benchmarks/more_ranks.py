"""Compare predicted and measured steps for more and more ranks.

    python benchmarks/more_ranks.py [--hosts 2,4,8] [--link 100mbit] [--steps 15]

Hosts are network namespaces of this machine, with one rank each. They repeat the steps of a network
of 1.4 million parameters. Its backward pass sleeps, so that many ranks can share few cores. A job
on two hosts measures a profile. All predictions are made from this profile, for the hosts that are
measured and for up to 1,024. Writes results/more-ranks.json and .png. Needs root, iproute2 and
openssh-server.
"""

import argparse
import pathlib
import statistics
import sys
import time

from jobs import run_job
from links import bits_per_second
from measure import at_least_one, write
from more_ranks_rows import COMMUNICATORS, DENSE, NONE
from network import Network as Hosts, NetworkError, problems

from deepreduce_hvd.schedule import Message, Network, Profile
from deepreduce_hvd.schedule.dag import CODEC, timeline
from deepreduce_hvd.schedule.rules import predict

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
_LONGEST = 600  # maximum seconds of one job
_PROFILED = 2  # hosts of the profile
_MOST = 1024  # ranks


def measured(hosts, link, steps):
    """Return {row: its figures} of one job, and the profile if it measured one."""
    rows, profiles = {}, []

    def report(row):
        if row.pop("event") == "profile":
            profiles.append(Profile.from_json(row["profile"]))
        else:
            rows[row["row"]] = row

    with Hosts(hosts, link) as network:
        words = [HERE / "more_ranks_worker.py", int(hosts == _PROFILED), steps]
        run_job(network, words, _LONGEST, report)
    return rows, profiles[0] if profiles else None


def predicted(row, profile, hosts):
    """Return the predicted seconds of a step of a row."""
    network = Network(hosts, profile.link())
    if row in (NONE, DENSE):
        rule = "dense" if row == NONE else "one message"
        return predict(rule, profile, network)[0].step_seconds
    everything = tuple(part.name for part in profile.parameters)
    message = Message(everything, CODEC, profile.density, row)
    return timeline(profile, network, [message]).step_seconds


def draw(rows, link, path):
    """Plot measured steps, and predicted ones as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(row["row"] for row in rows))
    for number, name in enumerate(names):
        own = [row for row in rows if row["row"] == name]
        axes.plot(
            [row["ranks"] for row in own],
            [1e3 * row["predicted"] for row in own],
            color=f"C{number}",
            lw=1,
        )
        found = [row for row in own if row.get("seconds")]
        axes.plot(
            [row["ranks"] for row in found],
            [1e3 * row["seconds"] for row in found],
            "o",
            color=f"C{number}",
            ms=5,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("ranks, one per host")
    axes.set_ylabel("milliseconds per step")
    axes.set_title(f"Points: measured over {link}. Lines: predicted from 2 ranks")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4,8", help="comma-separated; the first is 2")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=at_least_one, default=15, help="measured steps of each row")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "more-ranks.json")
    arguments = parser.parse_args()
    try:
        hosts = [int(count) for count in arguments.hosts.split(",")]
    except ValueError:
        hosts = []
    if hosts[:1] != [_PROFILED] or min(hosts) < 2:
        parser.error(f"--hosts: expected numbers such as 2,4,8, got {arguments.hosts!r}")
    bits_per_second(arguments.link)
    if found := problems():
        sys.exit("\n".join(found))
    started, profile, rows = time.perf_counter(), None, []
    for count in hosts:
        steps, own = measured(count, arguments.link, arguments.steps)
        profile = profile or own
        for name, figures in steps.items():
            expected = predicted(name, profile, count)
            ratio = expected / figures["seconds"]
            rows.append({"ranks": count, **figures, "predicted": expected, "ratio": ratio})
            print(
                f"{count:>5} ranks  {name:<18}{1e3 * figures['seconds']:>9.1f} ms measured"
                f"{1e3 * expected:>9.1f} ms predicted{ratio:>7.2f}",
                flush=True,
            )
    count = 2 * max(hosts)
    while count <= _MOST:
        rows += [
            {"ranks": count, "row": name, "predicted": predicted(name, profile, count)}
            for name in (NONE, DENSE, *COMMUNICATORS)
        ]
        count *= 2
    write(arguments.output, {"link": arguments.link, "rows": rows})
    draw(rows, arguments.link, arguments.output.with_suffix(".png"))
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    print(
        f"predicted / measured: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to "
        f"{max(ratios):.2f}; {arguments.output} written; {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"more_ranks.py: {error}")
