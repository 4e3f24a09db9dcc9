"""Copy the tables that the demo and the benchmarks wrote to results/ into README and pages of docs/.

Markers in these pages show their places.
"""

import json
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent
_PAGES = ("accuracy.md", "schedule.md")


def demo_table(rows):
    lines = [
        (
            "| compression | test accuracy | bytes per step | share of dense | share of Top-r "
            "pairs | ms per step |"
        ),
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        of_pairs = row["share_of_top_r_pairs"]
        lines.append(
            f"| {row['name']} | {row['accuracy']:.4f} | {row['bytes_per_step']:,.0f} | "
            f"{row['share_of_dense']:.4f} | "
            f"{'–' if of_pairs is None else f'{of_pairs:.3f}'} | "
            f"{1e3 * row['seconds_per_step']:.1f} |"
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
    """Compare the default with uncompressed training, for each task and number of ranks."""
    lines = [
        (
            "| task, ranks | uncompressed | default | difference | margin | not worse: p | "
            "equivalent: p | seeds |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    plain = {_place(row): row for row in rows if row["candidate"] == "none"}
    for row in rows:
        if row["candidate"] == "default" and "gain" in row:
            seeds, other = list(row["gains"]), plain[_place(row)]
            what = f"{row['task']}, {row['ranks']} | {_mean(other, seeds)} | {_mean(row, seeds)}"
            tests = f"{_p(row['p_not_worse'])} | {_p(row['p'])}"
            lines.append(
                f"| {what} | {row['gain']:+.4f} | {row['margin']:.3f} | {tests} | {len(seeds)} |"
            )
    return lines


def candidates_table(rows, ranks):
    """Compare all candidates with uncompressed training, with seed 0, one column per task."""
    rows = [row for row in rows if row["ranks"] == ranks and row["candidate"] != "none"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["candidate"], row["task"]): row for row in rows}
    lines = [
        "| compression | " + " | ".join(f"{task} | bytes" for task in tasks) + " |",
        "|---|" + "---:|---:|" * len(tasks),
    ]
    for candidate in sorted({row["candidate"] for row in rows}):
        cells = []
        for task in tasks:
            row = found.get((candidate, task))
            if row is None:
                cells += ["", ""]
                continue
            gain = row.get("gains", {}).get("0")
            cells += ["diverged" if gain is None else f"{gain:+.4f}"]
            cells += [f"{row['bytes_per_step']:,.0f}"]
        lines.append(f"| {candidate} | " + " | ".join(cells) + " |")
    return lines


def auto_schedule_table(rows):
    """Compare fixed settings with ``schedule="auto"``, in milliseconds per step by link."""
    names, links = (list(dict.fromkeys(row[key] for row in rows)) for key in ("row", "link"))
    found = {(row["row"], row["link"]): row for row in rows}
    lines = [
        "| milliseconds per step | " + " | ".join(links) + " |",
        "|---|" + "---:|" * len(links),
    ]
    for name in names:
        cells = [f"{1e3 * found[name, link]['seconds']:.1f}" for link in links]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = [f"{found['auto', link]['against_best_fixed']:.2f}" for link in links]
    lines.append("| auto ÷ the fastest other row | " + " | ".join(cells) + " |")
    return lines


def _place(row):
    return row["task"], row["ranks"], row["total_steps"]


def _mean(row, seeds):
    values = [row["by_seed"][seed] for seed in seeds]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _p(value):
    return "–" if value is None else f"{value:.3f}"


def updated(text):
    """Return a page's text with the tables of results/."""
    for name, source, table in (
        ("demo", "demo.json", demo_table),
        ("bench", "bench.json", bench_table),
        ("laboratory", "accuracy-lab.json", laboratory_table),
        ("candidates", "accuracy-lab.json", lambda rows: candidates_table(rows, 4)),
        ("16 ranks", "accuracy-lab.json", lambda rows: candidates_table(rows, 16)),
        ("auto schedule", "auto-schedule.json", auto_schedule_table),
    ):
        content = json.loads((ROOT / "results" / source).read_text())
        lines = "\n".join(table(content["rows"] if isinstance(content, dict) else content))
        begin, end = f"<!-- {name} table: begin -->", f"<!-- {name} table: end -->"
        text = re.sub(
            f"{begin}.*?{end}", lambda _: f"{begin}\n{lines}\n{end}", text, flags=re.DOTALL
        )
    return text


def main():
    for page in (ROOT / "README.md", *(ROOT / "docs" / name for name in _PAGES)):
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    main()
