"""Measure seconds per step between hosts: ResNet-50's 161 gradients over shaped links.

    python benchmarks/hosts.py [--hosts 2,4] [--links 100mbit,1gbit,10gbit,unshaped] [--rows "none;fp16;Allgather"] [--seconds 8]

Writes results/bench-hosts.json and .png, and prints a table. Needs root (network namespaces),
iproute2 and openssh-server. Every combination of a number of hosts and a link is one job under
horovodrun over ssh, and one under torchrun for the rows of PyTorch's DDP. A partial run changes only its own lines of results/bench-hosts.json. Targets
compare results of one job, or of two that run one after the other.
"""

import argparse
import json
import pathlib
import sys
import time

from jobs import run_job
from measure import split_choices, write
from network import Network, NetworkError, problems

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
HERE = pathlib.Path(__file__).resolve().parent
#: launcher -> the script that it starts
WORKERS = {"horovodrun": HERE / "hosts_worker.py", "torchrun": HERE / "hosts_ddp_worker.py"}
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s", "unshaped": "unshaped"}
#: (hosts, link) -> target: how many times faster the best compressed row must be than Horovod
#: without compression
TARGETS = {(2, "100mbit"): 40, (2, "1gbit"): 8, (2, "10gbit"): 2, (4, "1gbit"): 8}
DENSE = ("no exchange", "none", "fp16")
DDP = "DDP: "  # prefix of the names of DDP rows
#: (row, other row, link or None for all) -> bound on the ratio of the other row's time to the row's
RATIOS = {
    ("Allgather", f"{DDP}Allgather", None): ("at most", 1.1),
    (f"{DDP}Allgather", f"{DDP}PowerSGD rank 4", "100mbit"): ("at least", 5),
}
_LONGEST = 900  # maximum seconds of one job


def show(row, dense_seconds):
    factor = f"{dense_seconds / row['seconds']:8.1f}" if dense_seconds else " " * 8
    mean = {
        figure: sum(row[figure]) / len(row[figure]) for figure in ("claimed_bytes", "sent_bytes")
    }
    print(
        f"{row['name']:<24}{row['seconds']:>10.4f}{row['fastest']:>10.4f}{row['slowest']:>10.4f}{row['steps']:>6}{factor}"
        f"{mean['claimed_bytes']:>15,.0f}{mean['sent_bytes']:>15,.0f}",
        flush=True,
    )


def head(hosts, link):
    print(f"\n{hosts} hosts, {LINKS[link]}")
    print(
        f"{'':<24}{'s a step':>10}{'fastest':>10}{'slowest':>10}{'steps':>6}{'faster':>8}{'claimed B':>15}{'interface B':>15}"
    )


def verdicts(measured):
    """Return the targets that were met and missed, by the results of one job."""
    found = []
    for (hosts, link), factor in TARGETS.items():
        rows = {
            row["name"]: row for row in measured if (row["hosts"], row["link"]) == (hosts, link)
        }
        compressed = [
            row for name, row in rows.items() if name not in DENSE and not name.startswith(DDP)
        ]
        if "none" not in rows or not compressed:
            continue
        best = min(compressed, key=lambda row: row["seconds"])
        value = rows["none"]["seconds"] / best["seconds"]
        against_fp16 = rows["fp16"]["seconds"] / best["seconds"] if "fp16" in rows else None
        found.append({
            "hosts": hosts, "link": link, "best": best["name"], "faster_than_none": value,
            "faster_than_fp16": against_fp16, "target": factor,
            "met": value >= factor,
        })  # fmt: skip
    return found


def ratios(measured):
    """Return how the rows of DDP compare with others, and whether their targets were met."""
    rows = {(row["hosts"], row["link"], row["name"]): row for row in measured}
    found = []
    for hosts, link in dict.fromkeys(key[:2] for key in rows):
        for (name, other, only), (sense, target) in RATIOS.items():
            pair = rows.get((hosts, link, name)), rows.get((hosts, link, other))
            if None in pair:
                continue
            value = pair[1]["seconds"] / pair[0]["seconds"]
            entry = {"hosts": hosts, "link": link, "row": name, "other": other, "ratio": value}
            if only in (None, link):
                met = value <= target if sense == "at most" else value >= target
                entry |= {"target": f"{sense} {target}", "met": met}
            found.append(entry)
    return found


def draw(measured, path):
    """Plot seconds per step by link, a panel for each number of hosts, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({row["hosts"] for row in measured})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6 * len(panels) + 2, 5), sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(row["name"] for row in measured))
    for axis, hosts in zip(axes[0], panels):
        for name in names:
            points = sorted(
                (list(LINKS).index(row["link"]), row)
                for row in measured
                if (row["hosts"], row["name"]) == (hosts, name)
            )
            middle = [row["seconds"] for _, row in points]
            spread = [
                [row["seconds"] - row["fastest"] for _, row in points],
                [row["slowest"] - row["seconds"] for _, row in points],
            ]
            style = (
                {
                    "color": "black",
                    "linestyle": {"none": "-", "fp16": "--", "no exchange": ":"}[name],
                }
                if name in DENSE
                else {"marker": "s", "linestyle": "--"}
                if name.startswith(DDP)
                else {"marker": "o"}
            )
            axis.errorbar(
                [position for position, _ in points],
                middle,
                yerr=spread,
                capsize=3,
                label=name,
                **style,
            )
        axis.set_yscale("log")
        axis.set_xticks(range(len(LINKS)), LINKS.values())
        axis.set_title(f"{hosts} hosts")
        axis.set_xlabel("link")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("seconds per step, median; bars: fastest to slowest")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(
        "Exchange of ResNet-50's 161 gradients, no forward pass, compressed rows at 1 %"
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def save(measured, path):
    """Save rows to a results file and draw all of its rows.

    They replace the rows of the same hosts, link and name.
    """
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["hosts"], row["link"], row["name"]) for row in measured}
    rows = [row for row in kept if (row["hosts"], row["link"], row["name"]) not in new] + measured
    rows.sort(key=lambda row: (row["hosts"], list(LINKS).index(row["link"])))
    path.parent.mkdir(exist_ok=True)
    write(path, {"targets": verdicts(rows), "ratios": ratios(rows), "rows": rows})
    draw(rows, path.with_suffix(".png"))


def arguments_of(names):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts, comma-separated")
    parser.add_argument(
        "--links", default=",".join(LINKS), help=f"comma-separated, of {', '.join(LINKS)}"
    )
    parser.add_argument(
        "--rows", default=";".join(names), help=f"semicolon-separated, of: {'; '.join(names)}"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5,
        help="of measured steps per row; at least 4 steps, at most 15",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=RESULTS / "bench-hosts.json",
        help="the plot goes beside it",
    )
    arguments = parser.parse_args()
    arguments.hosts = [int(hosts) for hosts in arguments.hosts.split(",")]
    split_choices(parser, arguments, "links", LINKS, ",")
    split_choices(parser, arguments, "rows", names, ";")
    return arguments


def main():
    found = problems()
    if found:
        sys.exit("\n".join(found))
    import hosts_ddp_worker  # late, because they import the frameworks
    import hosts_worker

    arguments = arguments_of([*hosts_worker.ROWS, *hosts_ddp_worker.ROWS])
    rows = {
        "horovodrun": [name for name in arguments.rows if not name.startswith(DDP)],
        "torchrun": [name for name in arguments.rows if name.startswith(DDP)],
    }
    started, measured = time.perf_counter(), []
    for hosts in arguments.hosts:
        with Network(hosts) as network:
            for link in arguments.links:
                head(hosts, link)
                network.shape(None if link == "unshaped" else link)
                dense = []

                def report(row):
                    dense.extend([row["seconds"]] if row["name"] == "none" else [])
                    show(row, dense[0] if dense else None)
                    measured.append({"hosts": hosts, "link": link, **row})

                for launcher, names in rows.items():
                    if not names:
                        continue
                    words = [WORKERS[launcher], ";".join(names), arguments.seconds]
                    before = len(measured)
                    run_job(network, words, _LONGEST, report, launcher)
                    if len(measured) - before != len(names):
                        raise NetworkError(
                            f"job: expected {len(names)} rows, got {len(measured) - before}"
                        )
                    # after every job, so that a failing job does not lose the results of others
                    save(measured, arguments.output)
    targets = verdicts(measured)
    print()
    for target in targets:
        fp16 = (
            f", {target['faster_than_fp16']:.1f} times fp16" if target["faster_than_fp16"] else ""
        )
        print(
            f"{target['hosts']} hosts, {LINKS[target['link']]}: {target['best']} is "
            f"{target['faster_than_none']:.1f} times as fast as none{fp16}; "
            f"target {target['target']} {'met' if target['met'] else 'MISSED'}"
        )
    for entry in ratios(measured):
        text = (
            f"{entry['hosts']} hosts, {LINKS[entry['link']]}: {entry['other']} takes "
            f"{entry['ratio']:.2f} times as long as {entry['row']}"
        )
        if "met" in entry:
            text += f"; target {entry['target']} {'met' if entry['met'] else 'MISSED'}"
        print(text)
    print(f"{arguments.output} written; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except NetworkError as error:
        sys.exit(f"hosts.py: {error}")
