"""Time the merge program, and predict the steps of a network with the shapes of ResNet-50.

    python benchmarks/schedule.py [--layers-csv FILE]

Prints the seconds of ``schedule.optimal_merge`` for 500 gradients, for three kinds of cost; how
often the greedy rules miss the optimum for random layers; and the median ratio of each rule's
predicted step to the plan's. Writes results/schedule.json. The seconds
of layers are computed, not measured: backward takes 0.1 s, divided among the layers in proportion
to their multiplications. ``--layers-csv`` writes them as a file for ``deepreduce-plan``.
"""

import argparse
import math
import pathlib

import architectures
import numpy as np
from measure import seconds, write

from deepreduce_hvd import schedule
from deepreduce_hvd.schedule.rules import RULES, predict

RESULTS = pathlib.Path(__file__).parent.parent / "results"
GRADIENTS = 500
INSTANCES = 3_000
BACKWARD_SECONDS = 0.1
#: nanoseconds per element of encoding and of decoding one payload, for the predictions
ENCODE, DECODE = 1.0, 0.1


def layers():
    """Return [(name, elements, backward seconds)] of ResNet-50 in the order of the model."""
    rows = architectures.resnet50()
    total = sum(work for _, _, work in rows)
    return [(name, math.prod(shape), BACKWARD_SECONDS * work / total) for name, shape, work in rows]


def csv_of(rows):
    lines = [f"{name},{size},{taken:.9f}" for name, size, taken in rows]
    return "\n".join(["name,elements,backward_seconds", *lines, ""])


def profile():
    """Return the profile of these layers, as ``deepreduce-plan --encode 1 --decode 0.1`` has it."""
    clock, parameters = 0.0, []
    for name, size, taken in reversed(layers()):
        clock += taken
        encode, decode = 1e-9 * ENCODE * size, 1e-9 * DECODE * size
        parameters.append(schedule.Parameter(name, size, clock, encode, decode))
    return schedule.Profile(tuple(parameters), clock / 2)


def merge_times():
    random = np.random.default_rng(0)
    ready = np.cumsum(random.random(GRADIENTS)) * 1e-3
    sizes = random.integers(100, 100_000, GRADIENTS)
    table_sizes = np.geomspace(1, 1e8, 20)
    table_seconds = 1e-4 + 1e-8 * table_sizes

    def on_numbers(size):
        return 1e-4 + 1e-8 * size if size > 4096 else 1.4e-4

    costs = {
        "line": lambda size: 1e-4 + 1e-8 * size,
        "table": lambda size: np.interp(size, table_sizes, table_seconds),
        "plain Python": on_numbers,
    }
    return [
        {
            "what": "optimal_merge",
            "gradients": GRADIENTS,
            "cost": name,
            "seconds": seconds(lambda: schedule.optimal_merge(ready, sizes, cost)),
        }
        for name, cost in costs.items()
    ]


def greedy_rules():
    """Compare the greedy rules with the optimum for random instances of 3 to 7 gradients."""
    random = np.random.default_rng(0)
    ratios = {"MG-WFBP": [], "OMGS": []}
    for _ in range(INSTANCES):
        count = int(random.integers(3, 8))
        ready, sizes = np.cumsum(random.random(count)), random.random(count)
        alpha, select = random.random(), 0.2 * random.random()
        found = schedule.mg_wfbp(ready, sizes, alpha, 1.0)[1]
        best = schedule.optimal_merge(ready, sizes, lambda size: alpha + size)[1]
        ratios["MG-WFBP"].append(found / best)
        elements = np.ceil(1_000 * sizes)
        arguments = (
            ready,
            elements,
            schedule.selection_cost(select / 1e4),
            lambda size: alpha + size / 1_000,
        )
        best = schedule.optimal_merge_with_selection(*arguments)[1]
        ratios["OMGS"].append(schedule.omgs(*arguments)[1] / best)
    return [
        {
            "what": rule,
            "instances": INSTANCES,
            "missed": sum(ratio > 1 + 1e-9 for ratio in found),
            "worst_ratio": max(found),
        }
        for rule, found in ratios.items()
    ]


def predictions():
    rows, whole = [], profile()
    for link in ("100mbit", "1gbit", "10gbit"):
        for hosts in (2, 4, 16, 64):
            network = schedule.Network(hosts, schedule.Link.parse(link))
            steps = {rule: predict(rule, whole, network)[0].step_seconds for rule in RULES}
            rows.append({"link": link, "hosts": hosts, **steps})
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers-csv", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.layers_csv:
        arguments.layers_csv.write_text(csv_of(layers()))
        return
    merged, greedy, steps = merge_times(), greedy_rules(), predictions()
    for row in merged:
        print(
            f"optimal_merge of {GRADIENTS} gradients, {row['cost']}: {1e3 * row['seconds']:.1f} ms"
        )
    for row in greedy:
        print(
            f"{row['what']} misses the optimum in {row['missed']:,} of {row['instances']:,} random "
            f"instances, by at most {row['worst_ratio']:.2f} times"
        )
    for rule in RULES:
        ratios = [row[rule] / row["plan"] for row in steps]
        print(
            f"{rule:12} / plan: median {np.median(ratios):7.2f}, {min(ratios):.2f} to "
            f"{max(ratios):.2f}"
        )
    write(RESULTS / "schedule.json", {"merge": merged, "greedy": greedy, "predicted_steps": steps})


if __name__ == "__main__":
    main()
