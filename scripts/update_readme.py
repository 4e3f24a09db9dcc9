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

import accuracy_tables
import schedule_tables

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
        spread = ""
        if len(row["accuracies"]) > 1:
            spread = f" ± {statistics.stdev(row['accuracies']):.4f}"
        lines.append(
            f"| {row['name']} | {row['accuracy']:.4f}{spread} | {row['bytes_per_step']:,.0f} | "
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


def network_bytes_table(rows):
    """Compare the bytes of Top-r pairs and of the default, per network."""
    found = {(row["network"], row["name"]): row for row in rows}
    lines = [
        (
            "| network | uncompressed | Top-r pairs | default | share of Top-r pairs |"
            " payloads of small tensors | small tensors uncompressed | share of Top-r pairs |"
            " uncompressed bytes |"
        ),
        "|---|" + "---:|" * 8,
    ]
    for network in dict.fromkeys(row["network"] for row in rows):
        pairs, default, large = (
            found[network, name] for name in ("Top-r pairs", "default", "large tensors")
        )
        shares = [f"{row['bytes'] / pairs['bytes']:.3f}" for row in (default, large)]
        lines.append(
            f"| {network} | {default['dense']:,} | {pairs['bytes']:,} | {default['bytes']:,} | "
            f"{shares[0]} | {default['small']:,} | {large['bytes']:,} | {shares[1]} | "
            f"{large['uncompressed']:,} |"
        )
    return lines


def gpu_step_table(rows):
    """Compare training steps on a GPU: alone, uncompressed and compressed."""
    jobs = list(dict.fromkeys((row["framework"], row["network"]) for row in rows))
    found = {(row["framework"], row["network"], row["row"]): row for row in rows}
    names = {"horovod": "Horovod", "ddp": "DDP", "resnet50": "ResNet-50"}
    lines = [
        "| milliseconds per step | "
        + " | ".join(", ".join(names.get(one, one) for one in job) for job in jobs)
        + " |",
        "|---|" + "---:|" * len(jobs),
    ]
    for row in dict.fromkeys(row["row"] for row in rows):
        cells = [f"{1e3 * found[(*job, row)]['seconds']:.1f}" for job in jobs]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
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


def generated():
    """Yield (name, lines) of every generated part."""
    for name, source, table in (
        ("demo", "demo.json", demo_table),
        ("ddp demo", "demo-ddp.json", demo_table),
        ("bench", "bench.json", bench_table),
        ("gpu", "gpu.json", bench_table),
        ("gpu step", "gpu-step.json", gpu_step_table),
        *(
            (name, "accuracy-lab.json", table)
            for name, table in accuracy_tables.of_laboratory().items()
        ),
        ("network bytes", "network-bytes.json", network_bytes_table),
        ("ddp hosts", "bench-hosts-ddp.json", hosts_table),
        ("agreement", "accuracy-agreement.json", accuracy_tables.agreement_table),
        ("auto schedule", "auto-schedule.json", schedule_tables.auto_schedule_table),
        ("auto predictions", "auto-schedule.json", schedule_tables.auto_predictions_table),
        ("whole step", "whole-step.json", schedule_tables.whole_step_table),
        ("whole step threads", "whole-step.json", schedule_tables.whole_step_threads_table),
        ("changing link", "changing-link.json", schedule_tables.changing_link_table),
        ("replay", "replay.json", schedule_tables.replay_table),
        ("more ranks", "more-ranks.json", schedule_tables.ranks_table),
        ("replay predictions", "replay.json", schedule_tables.replay_predictions_table),
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
