"""Copy the tables that the demo and the benchmarks wrote to results/ into README and docs/accuracy.md.

Markers in these pages show their places.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent


def demo_table(rows):
    lines = [
        "| compression | test accuracy | bytes per step | share of dense | share of Top-r pairs | ms per step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        of_pairs = row["share_of_top_r_pairs"]
        lines.append(
            f"| {row['name']} | {row['accuracy']:.4f} | {row['bytes_per_step']:,.0f} | {row['share_of_dense']:.4f} | "
            f"{'–' if of_pairs is None else f'{of_pairs:.3f}'} | {1e3 * row['seconds_per_step']:.1f} |"
        )
    return lines


def bench_table(rows):
    lines = ["| what | measured | target |", "|---|---:|---|"]
    for row in rows:
        target = (
            ""
            if row["target"] is None
            else f"{'≤' if row['at_most'] else '≥'} {row['target']:.4g}"
            + ("" if row["met"] else ", missed")
        )
        unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
        what = row["what"].replace("|", "\\|")
        lines.append(f"| {what} | {row['value']:.4g}{unit} | {target} |")
    return lines


def laboratory_table(rows):
    lines = [
        "| task, ranks | compression | mean | against uncompressed | bytes per step | seeds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        values = list(row["by_seed"].values())
        mean = "diverged" if None in values else f"{sum(values) / len(values):.4f}"
        gain = f"{row['gain']:+.4f}" if "gain" in row else ""
        lines.append(
            f"| {row['task']}, {row['ranks']} | {row['candidate']} | {mean} | {gain} | {row['bytes_per_step']:,.0f} | {len(values)} |"
        )
    return lines


def updated(text):
    """Return a page's text with the tables of results/."""
    for name, source, table in (
        ("demo", "demo.json", demo_table),
        ("bench", "bench.json", bench_table),
        ("laboratory", "accuracy-lab.json", laboratory_table),
    ):
        content = json.loads((ROOT / "results" / source).read_text())
        lines = "\n".join(table(content["rows"] if isinstance(content, dict) else content))
        begin, end = f"<!-- {name} table: begin -->", f"<!-- {name} table: end -->"
        text = re.sub(
            f"{begin}.*?{end}", lambda _: f"{begin}\n{lines}\n{end}", text, flags=re.DOTALL
        )
    return text


def main():
    for page in (ROOT / "README.md", ROOT / "docs" / "accuracy.md"):
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    main()
