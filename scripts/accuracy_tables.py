"""The tables of docs/accuracy.md, from the figures of the accuracy laboratory."""

import statistics


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


def _place(row):
    return row["task"], row["ranks"], row["total_steps"]


def _mean(row, seeds):
    values = [row["by_seed"][seed] for seed in seeds]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _p(value):
    return "–" if value is None else f"{value:.3f}"
