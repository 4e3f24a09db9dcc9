"""Compare the traffic of the communicators in the simulator with their cost formulas.

    python benchmarks/traffic.py [--elements 20000] [--most 1024]

Covers 2 to 1024 ranks at densities of 0.1 %, 1 % and 10 %. Prints a table and writes
results/traffic.png, all rows to results/raw/traffic.json, and the smallest, median and largest
ratio to the formulas to results/traffic.json. Every rank's gradient is random and independent,
which is the worst case of fill-in: the union of P random sets of k is d (1 - (1 - k / d)^P). Bytes
are those that the busiest rank receives, with headers, RawIndex and RawValue. So an element takes 8
bytes and the formulas are exact: I = V = 32 bits.
"""

import argparse
import math
import pathlib

import matplotlib
import numpy as np
from measure import summarized, write_summary

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.doubling import folded
from deepreduce_hvd.communicators.simulator import Simulator

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = pathlib.Path(__file__).parent.parent / "results"
DENSITIES = (0.001, 0.01, 0.1)
HEADER = 40
SCHEMES = {
    "Allgather": dr.Allgather(),
    "SplitAllgather": dr.SplitAllgather(),
    "RecursiveDoubling": dr.RecursiveDoubling(),
    "GTopK": dr.GTopK(),
    "GTopK tree": dr.GTopK(form="tree"),
    "CLTK": dr.CLTK(),
    "SharedRandomK": dr.SharedRandomK(),
}


def union(k, d, size):
    """Return the number of elements in at least one of ``size`` random sets of k."""
    return d * -math.expm1(size * math.log1p(-k / d))


def message(count, d):
    """Return the bytes of ``count`` elements of d: pairs, or all elements if that is less."""
    return HEADER + min(8 * count, 4 * d)


def received_doubling(rank, k, d, size):
    """Return the bytes that a rank receives in recursive doubling of random sets."""
    power, beyond = folded(size)
    if rank >= power:
        return message(union(k, d, size), d)
    received = message(k, d) if rank < beyond else 0
    distance = 1
    while distance < power:
        # of the partner's block, including the ranks folded into it
        first = (rank ^ distance) & -distance
        ranks = distance + min(max(beyond - first, 0), distance)
        received += message(union(k, d, ranks), d)
        distance *= 2
    return received


def formula(scheme, k, d, size):
    """Return the bytes that the busiest rank receives."""
    power, beyond = folded(size)
    levels = power.bit_length() - 1
    if scheme == "Allgather":
        return (size - 1) * message(k, d)
    if scheme == "SplitAllgather":
        part = d / size
        # nothing is sent to a rank that owns none of the k
        arrives = 1 - math.exp(-k / size) if k / size < 20 else 1
        return (size - 1) * (
            HEADER * arrives + 8 * k / size + message(union(k, d, size) / size, part)
        )
    if scheme == "RecursiveDoubling":
        return max(received_doubling(rank, k, d, size) for rank in range(size))
    # a fold, and one round per level; rank 0 is the busiest in the tree
    if scheme in ("GTopK", "GTopK tree"):
        return (levels + bool(beyond)) * message(k, d)
    reduced = 2 * (size - 1) / size * 4 * (k + 2)
    if scheme == "CLTK":
        return HEADER + 4 * k + reduced
    return reduced


def measure(scheme, k, d, size):
    sparsifier = dr.RandomK(k=k) if scheme == "SharedRandomK" else dr.TopK(k=k)
    codec = dr.Codec(sparsifier, dr.RawIndex(), dr.RawValue())
    buckets = []
    for rank in range(size):
        values = np.random.default_rng([rank, k]).standard_normal(d).astype(np.float32)
        buckets.append(
            Bucket(
                codec,
                dr.Residual(),
                [BucketMember("tensor", values, (np.zeros(d, dtype=np.float32),))],
                rank=rank,
            )
        )
    simulator = Simulator(size)
    outcomes = simulator.run(SCHEMES[scheme], buckets)
    _, values = outcomes[0].sparse(0, 1.0)
    return {
        "scheme": scheme, "density": k / d, "elements": d, "k": k, "ranks": size,
        "received_bytes": int(simulator.received_bytes.max()),
        "formula_bytes": formula(scheme, k, d, size),
        "mean_received_bytes": float(simulator.received_bytes.mean()),
        "rounds": simulator.rounds, "messages": int(simulator.messages.max()),
        "sum_elements": int(np.count_nonzero(values)), "union_formula": union(k, d, size),
        "dense_allreduce_bytes": 2 * (size - 1) / size * 4 * d,
    }  # fmt: skip


def summary(rows):
    """Return a record for each scheme and density, over all numbers of ranks."""
    return summarized(
        rows,
        ("scheme", "density", "elements"),
        "numbers_of_ranks",
        {
            "ranks": lambda row: row["ranks"],
            "received_over_formula": lambda row: row["received_bytes"] / row["formula_bytes"],
            "sum_over_union": lambda row: row["sum_elements"] / row["union_formula"],
        },
    )


def plot(rows, path):
    figure, axes = pyplot.subplots(2, 2, figsize=(9.5, 8))
    axes = axes.ravel()
    for axis, density in zip(axes, DENSITIES):
        for number, scheme in enumerate(SCHEMES):
            own = [row for row in rows if row["scheme"] == scheme and row["density"] == density]
            ranks = [row["ranks"] for row in own]
            axis.plot(ranks, [row["formula_bytes"] for row in own], color=f"C{number}", linewidth=1)
            axis.plot(
                ranks,
                [row["received_bytes"] for row in own],
                "o",
                color=f"C{number}",
                markersize=4,
                label=scheme,
            )
        dense = [
            (row["ranks"], row["dense_allreduce_bytes"])
            for row in rows
            if row["scheme"] == "Allgather" and row["density"] == density
        ]
        axis.plot(*zip(*dense), color="black", linestyle=":", label="dense allreduce")
        axis.set(
            title=f"density {100 * density:g} %",
            xlabel="ranks",
            ylabel="bytes that the busiest rank receives",
            xscale="log",
            yscale="log",
        )
        axis.set_xscale("log", base=2)
    axes[2].legend(fontsize=7)  # where it covers no line
    for number, density in enumerate(DENSITIES):
        own = [
            row
            for row in rows
            if row["scheme"] == "RecursiveDoubling" and row["density"] == density
        ]
        ranks = [row["ranks"] for row in own]
        axes[-1].plot(
            ranks,
            [row["union_formula"] / row["elements"] for row in own],
            color=f"C{number}",
            linewidth=1,
        )
        axes[-1].plot(
            ranks,
            [row["sum_elements"] / row["elements"] for row in own],
            "o",
            color=f"C{number}",
            label=f"{100 * density:g} %",
        )
    axes[-1].set(
        title="fill-in of the sum, line: d (1 - (1 - k/d)^P)",
        xlabel="ranks",
        ylabel="share of elements",
        yscale="log",
    )
    axes[-1].set_xscale("log", base=2)
    axes[-1].legend(fontsize=7)
    figure.suptitle("points: simulator; lines: formulas")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=20_000)
    parser.add_argument("--most", type=int, default=1024)
    arguments = parser.parse_args()
    d = arguments.elements
    sizes = [2**level for level in range(1, arguments.most.bit_length())]
    sizes = sorted(
        {
            *sizes,
            *(
                3 * size // 2
                for size in sizes
                if size in (2, 8, 64) and 3 * size // 2 <= arguments.most
            ),
        }
    )
    rows = []
    print(
        f"{'scheme':20}{'density':>9}{'ranks':>7}{'bytes':>13}{'of formula':>12}{'rounds':>8}{'sum':>9}{'of union':>10}"
    )
    for density in DENSITIES:
        k = round(density * d)
        for size in sizes:
            for scheme in SCHEMES:
                row = measure(scheme, k, d, size)
                rows.append(row)
                print(
                    f"{scheme:20}{density:9.3f}{size:7}{row['received_bytes']:13,}{row['received_bytes'] / row['formula_bytes']:12.3f}"
                    f"{row['rounds']:8}{row['sum_elements']:9,}{row['sum_elements'] / row['union_formula']:10.3f}", flush=True
                )  # fmt: skip
    write_summary(RESULTS / "traffic.json", rows, summary)
    plot(rows, RESULTS / "traffic.png")


if __name__ == "__main__":
    main()
