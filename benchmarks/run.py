"""Run all benchmarks and write their results.

    python benchmarks/run.py [--quick] [--only targets,combinations,figure8,tensorflow,accuracy]

Prints a table and writes results/bench.json, bench-tensorflow.json, combinations.json, figure8.png
and accuracy.json. ``--quick`` leaves out the accuracy over three seeds, which trains for some
minutes.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

# one thread: the benchmarks compare work, not how many cores share it
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

from measure import write, write_summary  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PARTS = ("targets", "combinations", "figure8", "tensorflow", "accuracy")


def show(row):
    verdict = "" if row["met"] is None else "met" if row["met"] else "MISSED"
    bound = "" if row["target"] is None else f"{'≤' if row['at_most'] else '≥'} {row['target']:g}"
    print(
        f"{row['what']:<62}{row['value']:>10.4f}  {bound:<10}{row['unit']:<26}{verdict}", flush=True
    )


def targets():
    import targets as module

    rows = []

    def report(row):
        rows.append(row)
        show(row)

    for measurement in module.MEASUREMENTS:
        measurement(report)
    return rows


def combinations():
    import combinations as module

    rows = module.all_combinations()
    write_summary(RESULTS / "combinations.json", rows, module.summary)
    print(
        "\nevery index × value combination on the gradient of the demo's largest layer "
        f"({RESULTS.name}/raw/combinations.json has the others, {RESULTS.name}/combinations.json "
        "the smallest, median and largest figures)"
    )
    print(module.combination_table(rows, "hidden.weight@100"))


def figure8():
    import combinations as module

    rows = module.figure_8()
    write(RESULTS / "figure8.json", rows)
    module.draw_figure_8(rows, RESULTS / "figure8.png")
    print("\nDeepReduce's Figure 8 with ours: % of dense, d = 36,864, Top-r 1 %")
    for row in rows:
        published = (
            "      -" if row["published_percent"] is None else f"{row['published_percent']:>7.2f}"
        )
        micro = 1e6 * (row["encode_seconds"] + row["decode_seconds"])
        print(
            f"{row['name']:<22}published{published}  ours "
            f"{100 * row['share_of_dense']:>6.2f}  error to Top-r "
            f"{row['error_to_top_r']:.4f}  {micro:>7.0f} µs"
        )


def tensorflow():
    """Measure what TensorFlow adds to the core, alone and beside Horovod's own reductions.

    Writes results/bench-tensorflow.json.
    """
    if importlib.util.find_spec("tensorflow") is None:
        print("\nskipped: TensorFlow is not installed")
        return
    print()
    for ranks in ("1", "2"):
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "tensorflow_overhead.py"), "--ranks", ranks],
            check=True,
        )


def accuracy():
    """Train the default, no compression, and Top-r pairs over three seeds.

    The demo's network is trained for two epochs.
    """
    output = RESULTS / "accuracy.json"
    command = [
        sys.executable,
        str(ROOT / "examples" / "demo.py"),
        "--seeds",
        "3",
        "--epochs",
        "2",
        "--only",
        "none,Top-r pairs,default",
        "--output",
        str(output),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(command, check=True, env=environment)
    from measure import row

    by_name = {entry["name"]: entry for entry in json.loads(output.read_text())["rows"]}
    own, pairs = by_name["default"], by_name["Top-r pairs"]
    spread = max(max(entry["accuracies"]) - min(entry["accuracies"]) for entry in (own, pairs))
    difference = statistics.mean(pairs["accuracies"]) - statistics.mean(own["accuracies"])
    rows = [
        row("default, share of Top-r pairs' bytes", own["share_of_top_r_pairs"], 0.25, "of bytes"),
        row(
            "accuracy loss of the default relative to Top-r pairs (target: the spread over 3 seeds)",
            difference,
            spread,
            "accuracy",
        ),
    ]
    for entry in rows:
        show(entry)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="without the accuracy over three seeds"
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"comma-separated parts, of {', '.join(PARTS)}"
    )
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(
            f"--only: expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}"
        )
    RESULTS.mkdir(exist_ok=True)
    started = time.perf_counter()
    rows = []
    for part in parts:
        if part == "accuracy" and arguments.quick:
            continue
        rows += globals()[part]() or []
    if rows:
        path = RESULTS / "bench.json"
        measured = {row["what"] for row in rows}
        kept = (
            [row for row in json.loads(path.read_text()) if row["what"] not in measured]
            if path.exists() and len(parts) < len(PARTS)
            else []
        )
        write(path, kept + rows)
    print(
        f"\n{sum(row['met'] is False for row in rows)} of "
        f"{sum(row['met'] is not None for row in rows)} targets missed; "
        f"{time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
