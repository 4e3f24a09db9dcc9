"""Write the generated parts of README and of the pages of docs/.

These are the tables that the demo and the benchmarks wrote to results/, and the lists of stages
from csrc/stages.def and of communicators. Markers in the pages show their places.
"""

import ast
import json
import pathlib
import re
import statistics
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: the pages with generated parts
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("accuracy", "api", "format", "gpu", "schedule", "tutorial-ddp")
    ),
)
_PACKAGE = ROOT / "deepreduce_hvd"
#: a row of csrc/stages.def: kind, id, name, where it runs, and why on the host only
_ROW = re.compile(r"^DR_(\w+)\((\d+), (\w+), \w+, (\w+).*?\) *(?:// (.*))?$", re.MULTILINE)


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


def small_tensors_table(rows):
    """Compare the default with ``dense_below=128``, over the seeds that both have."""
    lines = [
        (
            "| task, ranks | default | `dense_below=128` | difference | to uncompressed | "
            "not worse: p | bytes, default | bytes | seeds |"
        ),
        "|---|" + "---:|" * 8,
    ]
    default = {_place(row): row for row in rows if row["candidate"] == "default"}
    for row in (row for row in rows if row["candidate"] == "dense below 128"):
        other, values = default[_place(row)], list(row["by_seed"].values())
        seeds = [seed for seed in row["by_seed"] if seed in other["by_seed"]]
        what = f"{row['task']}, {row['ranks']} | {_mean(other, seeds)}"
        sizes = f"{other['bytes_per_step']:,.0f} | {row['bytes_per_step']:,.0f}"
        if None in values:
            cells = f"diverged with {values.count(None)} of {len(values)} seeds | – | – | –"
        else:
            gained = statistics.mean(row["gains"][seed] - other["gains"][seed] for seed in seeds)
            cells = (
                f"{_mean(row, seeds)} | {gained:+.4f} | {row['gain']:+.4f} | "
                f"{_p(row['p_not_worse'])}"
            )
        lines.append(f"| {what} | {cells} | {sizes} | {len(seeds)} |")
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


def agreement_table(rows):
    """Show what 16 ranks have in common, and how much of their sum a communicator sends."""
    lines = [
        (
            "| 16 ranks, after the warm-up | elements in the sum | energy of the sum that is "
            "sent | residual / gradient | steps in the residual | cosine | ranks that select |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sent = f"{100 * row['share_sent']:.1f} % | {100 * row['energy_sent']:.1f} %"
        residual = f"{row['residual_to_gradient']:.1f} | {row['steps_in_residual']:.0f}"
        common = f"{row['cosine']:.3f} | {row['ranks_that_select']:.2f}"
        lines.append(f"| *{row['task']}*, {row['candidate']} | {sent} | {residual} | {common} |")
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
    for auto in (name for name in names if name.endswith("auto")):
        cells = [f"{found[auto, link]['against_best_fixed']:.2f}" for link in links]
        lines.append(f"| {auto} ÷ the fastest other row | " + " | ".join(cells) + " |")
    return lines


def changing_link_table(jobs):
    """Show how ``schedule="auto"`` follows a link that becomes slow."""
    lines = ["| a link that changes | |", "|---|---:|"]
    for job in jobs:
        before, after = job["links"]
        median = 1e3 * statistics.median(job["before"])
        lines.append(f"| auto at {before}, before the change | {median:.0f} ms |")
        for name, seconds in job["rows"].items():
            lines.append(f"| {name} at {after} | {1e3 * seconds:.0f} ms |")
        lines.append(
            f"| until auto is within 1.1 times the fastest other row | {job['steps_until_fast']} steps |"
        )
    return lines


def auto_predictions_table(rows):
    """Compare the predicted and the measured steps of all plans that ``schedule="auto"`` tried."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    found = {
        (row["row"].replace("auto", trial["rule"]), row["link"]): trial["predicted"]
        / trial["measured"]
        for row in rows
        for trial in row["trials"]
    }
    lines = ["| predicted ÷ measured | " + " | ".join(links) + " |", "|---|" + "---:|" * len(links)]
    for rule in dict.fromkeys(rule for rule, _ in found):
        cells = [f"{found[rule, link]:.2f}" if (rule, link) in found else "–" for link in links]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return lines


def replay_table(rows):
    """Compare the steps of all rows, in milliseconds, by network and link."""
    places = list(dict.fromkeys((row["network"], row["link"]) for row in rows))
    found = {(row["row"], row["network"], row["link"]): row for row in rows}
    lines = [
        "| milliseconds per step | "
        + " | ".join(f"{network}, {link}" for network, link in places)
        + " |",
        "|---|" + "---:|" * len(places),
    ]

    def line(what, name, shown):
        cells = [shown(found[(name, *place)]) for place in places]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")

    for name in dict.fromkeys(row["row"] for row in rows):
        line(name, name, lambda row: f"{1e3 * row['seconds']:.0f}")
    for what, key in (
        ("auto ÷ the fastest other row", "against_best_fixed"),
        ("auto ÷ none", "against_none"),
        ("exposed ÷ the model's optimum", "exposed_against_optimum"),
    ):
        line(what, "auto", lambda row: f"{row[key]:.2f}")
    return lines


def replay_predictions_table(rows):
    """Compare predicted and measured steps of all rules, over all networks and links."""
    lines = [
        (
            "| predicted ÷ measured | median | smallest | largest | median without measured float16"
            " times |"
        ),
        "|---|---:|---:|---:|---:|",
    ]
    known = [row for row in rows if row["predicted"]]
    ratios = {}
    for row in known:
        ratio = row["predicted_against_measured"]
        pair = ratio, row["predicted_without_fp16"] / row["seconds"]
        for name in (row["row"], "all"):
            ratios.setdefault(name, []).append(pair)
    ratios["all"] = ratios.pop("all")  # last
    for name, pairs in ratios.items():
        own, without = zip(*pairs)
        lines.append(
            f"| {name} | {statistics.median(own):.2f} | {min(own):.2f} | {max(own):.2f} | "
            f"{statistics.median(without):.2f} |"
        )
    return lines


def hosts_table(rows):
    """Show seconds and bytes per step by link."""
    names, links = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "link"))
    found = {(row["name"], row["link"]): row for row in rows}
    lines = [
        "| seconds per step | " + " | ".join(links) + " | bytes per step |",
        "|---|" + "---:|" * (len(links) + 1),
    ]
    for name in names:
        cells = [f"{found[name, link]['seconds']:.3f}" for link in links if (name, link) in found]
        claimed = statistics.mean(found[name, links[0]]["claimed_bytes"])
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {claimed:,.0f} |")
    return lines


class Stage(NamedTuple):
    """A row of csrc/stages.def."""

    kind: str
    number: int
    name: str
    on_device: bool
    reason: str


def stages():
    """Return the rows of csrc/stages.def."""
    rows = _ROW.findall((_PACKAGE / "csrc" / "stages.def").read_text())
    return [
        Stage(kind, int(number), name, where == "DR_HOST_AND_DEVICE", reason)
        for kind, number, name, where, reason in rows
    ]


def named(kind):
    """Return the names of the stages of a kind by id, with what does nothing (id 0) last."""
    rows = [row for row in stages() if row.kind == kind]
    return [row.name for row in sorted(rows, key=lambda row: row.number or len(rows))]


def communicators():
    """Return the names of the communicators, without the base classes."""
    tree = ast.parse((_PACKAGE / "communicators" / "__init__.py").read_text())
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    return sorted(set(names) - {"Communicator", "Transport"}, key=str.lower)


def stages_table():
    """List the stages and the communicators."""
    exchanges = [name for name in communicators() if name != "Auto"]
    rows = {
        "sparsifier": named("SPARSIFIER"),
        "index codec": named("INDEX_CODEC"),
        "value codec": named("VALUE_CODEC"),
        "memory": named("MEMORY"),
        "communicator": exchanges,
    }
    more = {"communicator": ', or `"auto"` ([docs](docs/communicators.md))'}
    lines = ["| stage | choices |", "|---|---|"]
    for kind, names in rows.items():
        lines.append(f"| {kind} | `{' '.join(names)}`{more.get(kind, '')} |")
    return lines


def devices_table():
    """Say which stages run on a GPU, and why the others do not."""
    lines = ["| stage | on the GPU | on the host |", "|---|---|---|"]
    rows = stages()
    for row in rows:
        if not row.on_device and (row.kind in ("SPARSIFIER", "MEMORY") or not row.reason):
            raise SystemExit(
                "csrc/stages.def: expected sparsifiers and memories on devices, and a comment with"
                f" the reason for each codec that is not, got {row}"
            )
    lines.append("| accumulation, memories, sparsifiers | all | |")
    for kind, title in (("INDEX_CODEC", "index codecs"), ("VALUE_CODEC", "value codecs")):
        device = ", ".join(row.name for row in rows if row.kind == kind and row.on_device)
        host = ". ".join(
            f"{row.name}: {row.reason}" for row in rows if row.kind == kind and not row.on_device
        )
        lines.append(f"| {title} | {device} | {host} |")
    lines += [
        "| container, checksum, decode-and-sum | all | |",
        "| sums without zeros (`decode_sparse`), custom codecs | | all |",
        "| communicators | Allgather | the others: the native core computes their partial sums |",
    ]
    return lines


def ids_list():
    """List the ids of codecs in payloads."""
    rows = stages()
    index, value = (
        ", ".join(f"{row.number} {row.name}" for row in rows if row.kind == kind)
        for kind in ("INDEX_CODEC", "VALUE_CODEC")
    )
    return [f"Index: 0 all, {index}.", "", f"Value: {value}."]


def reference(names):
    """Return the directives of the API reference for some classes."""
    return ["```{eval-rst}", *(f".. autoclass:: deepreduce_hvd.{name}" for name in names), "```"]


def _place(row):
    return row["task"], row["ranks"], row["total_steps"]


def _mean(row, seeds):
    values = [row["by_seed"][seed] for seed in seeds]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _p(value):
    return "–" if value is None else f"{value:.3f}"


def generated():
    """Yield (name, lines) of every generated part."""
    for name, source, table in (
        ("demo", "demo.json", demo_table),
        ("ddp demo", "demo-ddp.json", demo_table),
        ("bench", "bench.json", bench_table),
        ("laboratory", "accuracy-lab.json", laboratory_table),
        ("small tensors", "accuracy-lab.json", small_tensors_table),
        ("candidates", "accuracy-lab.json", lambda rows: candidates_table(rows, 4)),
        ("16 ranks", "accuracy-lab.json", lambda rows: candidates_table(rows, 16)),
        ("ddp hosts", "bench-hosts-ddp.json", hosts_table),
        ("agreement", "accuracy-agreement.json", agreement_table),
        ("auto schedule", "auto-schedule.json", auto_schedule_table),
        ("auto predictions", "auto-schedule.json", auto_predictions_table),
        ("changing link", "changing-link.json", changing_link_table),
        ("replay", "replay.json", replay_table),
        ("replay predictions", "replay.json", replay_predictions_table),
    ):
        content = json.loads((ROOT / "results" / source).read_text())
        yield name, table(content["rows"] if isinstance(content, dict) else content)
    yield "stages", stages_table()
    yield "devices", devices_table()
    yield "ids", ids_list()
    yield "sparsifiers", reference(named("SPARSIFIER"))
    yield "index codecs", reference(named("INDEX_CODEC"))
    yield "value codecs", reference(named("VALUE_CODEC"))
    yield "memories", reference(named("MEMORY"))
    yield "communicators", reference(communicators())


def updated(text):
    """Return a page's text with its generated parts."""
    for name, lines in generated():
        begin, end = f"<!-- {name} table: begin -->", f"<!-- {name} table: end -->"
        if begin in text:
            whole = "\n".join((begin, *lines, end))
            text = re.sub(f"{begin}.*?{end}", lambda _, whole=whole: whole, text, flags=re.DOTALL)
    return text


def main():
    for page in PAGES:
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    main()
