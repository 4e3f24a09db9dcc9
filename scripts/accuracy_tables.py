"""The tables of docs/accuracy.md, from the figures of the accuracy laboratory."""

import math
import statistics

#: index and value codecs of DeepReduce, and the same elements without them
DEEP_REDUCE = (
    "raw values",
    *(f"Bloom {policy}, {rate} %" for rate in ("0.1", "1", "10") for policy in ("P0", "P1", "P2")),
    "FitPoly",
    "FitDExp",
)
#: densities of layers, and a choice from each bucket or chunk instead of each tensor
CHOICES = (
    "large tensors", "LAGS", "raw values", "buckets", "raw values, no warm-up", "buckets, no warm-up",
    "chunks",
)  # fmt: skip
#: how candidates send tensors with fewer than 1,024 elements
SMALL_TENSORS = {
    "large tensors": "uncompressed",
    "dense below 128": "the largest, from 128 elements on",
}
#: how candidates send the embedding tables of the recommender
EMBEDDING_TABLES = {
    "default": "the default",
    "tables: 1 %, LloydMax 1": "tables: 1 %, 1 bit per value",
    "5 %": "5 %, small tensors uncompressed",
    "tables: 5 %, LloydMax 2": "tables: 5 %, 2 bits per value",
    "tables: 10 %, LloydMax 2": "tables: 10 %, 2 bits per value",
    "tables: rows, QSGD 4": "tables: all non-zero elements, `QSGD(4)`",
    "tables: rows, QSGD 7": "tables: all non-zero elements, `QSGD(7)`",
    "tables: rows, LloydMax 1": "tables: all non-zero elements, 1 bit per value",
    "tables: rows, LloydMax 2": "tables: all non-zero elements, 2 bits per value",
    "tables: rows, LloydMax 3": "tables: all non-zero elements, 3 bits per value",
    "tables: rows, LloydMax 4": "tables: all non-zero elements, 4 bits per value",
    "tables: rows, raw values": "tables: all non-zero elements, exact values",
    "all but tables": "tables uncompressed",
}
SCALECOM = (
    "raw values", "GTopK, raw values", "CLTK, TopK", "CLTK, TopK, LowPass",
    "CLTK, TopK, LowPass 0.3", "CLTK", "CLTK, LowPass", "CLTK, LowPass 0.3",
)  # fmt: skip


def of_laboratory():
    """Return {name of a table in docs/accuracy.md: function of the laboratory's entries}."""
    own = {
        "laboratory": laboratory_table,
        "small tensors": small_tensors_table,
        "many seeds": many_seeds_table,
        "embedding tables": embedding_tables_table,
        "candidates": lambda rows: candidates_table(rows, 4),
        "16 ranks": lambda rows: candidates_table(rows, 16),
        "gTop-k": gtopk_table,
        "ScaleCom": scalecom_table,
        "choices": lambda rows: choices_table(rows, CHOICES),
        "lstm rates": lstm_rates_table,
        "DeepReduce": lambda rows: choices_table(rows, DEEP_REDUCE),
    }
    return {"lengths": lengths_table} | {name: _of_length_1(table) for name, table in own.items()}


def _of_length_1(table):
    """Return a function that makes ``table`` of the runs with their task's own number of steps."""
    return lambda rows: table([row for row in rows if row["length"] == 1])


def lengths_table(rows):
    """Compare the default with uncompressed training, for each task and number of steps.

    Tasks that were run with one number of steps are left out.
    """
    rows = [row for row in rows if row["batch_factor"] == 1]
    tried = {}
    for row in rows:
        if row["candidate"] == "none":
            tried.setdefault((row["task"], row["ranks"]), set()).add(row["total_steps"])
    lines = [
        (
            "| task, ranks | steps | rate | uncompressed | rate | default | difference | "
            "standard error | not worse: p | seeds |"
        ),
        "|---|" + "---:|" * 9,
    ]
    default = {_place(row): row for row in rows if row["candidate"] == "default"}
    for row in rows:
        if row["candidate"] != "none" or len(tried[row["task"], row["ranks"]]) < 2:
            continue
        other = default.get(_place(row))
        seeds = list(row["by_seed"] if other is None else other["gains"])
        cells = f"{row['total_steps']:,} | {row['learning_rate']:g} | {_mean(row, seeds)}"
        if other is None:
            cells += " | " * 5
        else:
            gains = list(other["gains"].values())
            cells += (
                f" | {other['learning_rate']:g} | {_mean(other, seeds)} | {other['gain']:+.4f} | "
                f"{_error(gains)} | {_p(other['p_not_worse'])}"
            )
        lines.append(f"| {row['task']}, {row['ranks']} | {cells} | {len(seeds)} |")
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
    """Compare the default with other ways to send small tensors, over the seeds that both have."""
    lines = [
        (
            "| small tensors | task, ranks | default | metric | difference | standard error | "
            "to uncompressed | not worse: p | bytes, default | bytes | seeds |"
        ),
        "|---|---|" + "---:|" * 9,
    ]
    default = {_place(row): row for row in rows if row["candidate"] == "default"}
    # the recommender's default sends embedding tables in another way than what it is compared with
    default |= {_place(row): row for row in rows if row["candidate"] == "tables: 1 %, LloydMax 1"}
    for row in sorted(rows, key=lambda row: row["candidate"]):
        other = default.get(_place(row))
        if row["candidate"] not in SMALL_TENSORS or other is None:
            continue
        values = list(row["by_seed"].values())
        seeds = [seed for seed in row["by_seed"] if seed in other["by_seed"]]
        what = f"{row['task']}, {row['ranks']} | {_mean(other, seeds)}"
        sizes = f"{other['bytes_per_step']:,.0f} | {row['bytes_per_step']:,.0f}"
        if None in values:
            cells = f"diverged with {values.count(None)} of {len(values)} seeds | – | – | – | –"
        else:
            gained = [row["gains"][seed] - other["gains"][seed] for seed in seeds]
            cells = (
                f"{_mean(row, seeds)} | {statistics.mean(gained):+.4f} | {_error(gained)} | "
                f"{row['gain']:+.4f} | {_p(row['p_not_worse'])}"
            )
        name = SMALL_TENSORS[row["candidate"]]
        lines.append(f"| {name} | {what} | {cells} | {sizes} | {len(seeds)} |")
    return lines


def candidates_table(rows, ranks):
    """Compare candidates with uncompressed training, with seed 0, one column per task.

    Those with a table of their own are left out, and so is the task that has only such ones.
    """
    others = {"none", *DEEP_REDUCE, *CHOICES} - {"large tensors", "raw values"}
    rows = [
        row
        for row in rows
        if (row["ranks"], row["batch_factor"]) == (ranks, 1)
        and row["candidate"] not in others
        and row["task"] != "adagrad-ncf"
    ]
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


def gtopk_table(rows):
    """Compare GTopK and Allgather with uncompressed training, by number of ranks."""
    rows = [row for row in rows if row["batch_factor"] == 1]
    return _by_place(rows, ("raw values", "GTopK, raw values"))


def scalecom_table(rows):
    """Compare CLTK and others with uncompressed training on 8 and 64 ranks."""
    rows = [row for row in rows if row["ranks"] in (8, 64)]
    return _by_place(rows, SCALECOM)


def _by_place(rows, candidates):
    """Return the difference to uncompressed training by task, ranks and samples.

    A line has the candidates as columns, and needs figures of another one than Allgather. A column
    without figures is left out.
    """
    plain = {_place(row): row for row in rows if row["candidate"] == "none"}
    places = sorted(
        {_place(row) for row in rows if row["candidate"] in candidates[1:]} & set(plain)
    )
    found = {(*_place(row), row["candidate"]): row for row in rows if _place(row) in places}
    candidates = [name for name in candidates if any(name == key[-1] for key in found)]
    lines = [
        f"| task | ranks | samples per rank | uncompressed | {' | '.join(candidates)} |",
        "|---|" + "---:|" * (3 + len(candidates)),
    ]
    for place in places:
        other = plain[place]
        cells = [other["task"], str(other["ranks"]), str(other["samples"])]
        cells.append(_mean(other, list(other["by_seed"])))
        cells += [_difference(found.get((*place, name))) for name in candidates]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _difference(row):
    """Return the mean difference to uncompressed training and the number of seeds."""
    if row is None:
        return ""
    if "gain" not in row:
        return "diverged"
    return f"{row['gain']:+.4f} ({len(row['gains'])})"


def many_seeds_table(rows):
    """Show the mean differences that have at least 10 seeds, with their standard errors."""
    lines = [
        "| task, ranks | compression | difference | standard error | seeds |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        gains = list(row.get("gains", {}).values())
        if len(gains) >= 10:
            place = f"{row['task']}, {row['ranks']}"
            cells = f"{row['gain']:+.4f} | {_error(gains)} | {len(gains)}"
            lines.append(f"| {place} | {row['candidate']} | {cells} |")
    return lines


def embedding_tables_table(rows):
    """Compare ways to send the embedding tables of the recommenders with uncompressed training."""
    lines = [
        (
            "| task, ranks | compression | difference | standard error | not worse: p | equivalent: p |"
            " bytes per step | seeds |"
        ),
        "|---|---|" + "---:|" * 6,
    ]
    tasks, order = ("ncf", "adagrad-ncf"), list(EMBEDDING_TABLES)
    rows = [row for row in rows if row["task"] in tasks and row["candidate"] in order]
    for row in sorted(
        rows,
        key=lambda row: (tasks.index(row["task"]), row["ranks"], order.index(row["candidate"])),
    ):
        gains = list(row.get("gains", {}).values())
        if len(gains) >= 5:
            place = f"{row['task']}, {row['ranks']}"
            what = f"{place} | {EMBEDDING_TABLES[row['candidate']]} | {row['gain']:+.4f}"
            tests = f"{_p(row['p_not_worse'])} | {_p(row['p'])}"
            size = f"{row['bytes_per_step']:,.0f}"
            lines.append(f"| {what} | {_error(gains)} | {tests} | {size} | {len(gains)} |")
    return lines


def lstm_rates_table(rows):
    """Show the metric of lstm with 4 ranks at each learning rate that has at least 5 seeds."""
    lines = [
        "| compression | learning rate | metric | difference | seeds | bytes per step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = [row for row in rows if (row["task"], row["ranks"]) == ("lstm", 4)]
    (plain,) = (row for row in rows if row["candidate"] == "none")
    base = statistics.mean(plain["by_seed"].values())
    for row in rows:
        by_rate = {row["learning_rate"]: row["by_seed"]}
        by_rate |= {float(rate): found for rate, found in row["other_rates"].items()}
        for rate, by_seed in sorted(by_rate.items()):
            if len(by_seed) < 5:
                continue
            # fewer bits per character are better
            gain = f"{base - statistics.mean(by_seed.values()):+.4f}" if row != plain else ""
            cells = f"{_mean({'by_seed': by_seed}, list(by_seed))} | {gain} | {len(by_seed)}"
            size = f"{row['bytes_per_step']:,.0f}"
            lines.append(f"| {row['candidate']} | {rate:g} | {cells} | {size} |")
    return lines


def choices_table(rows, candidates):
    """Compare candidates with uncompressed training on 4 ranks, one column per task."""
    names = set(candidates) - {"large tensors", "raw values"}
    rows = [row for row in rows if row["ranks"] == 4 and row["batch_factor"] == 1]
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["candidate"] in names))
    found = {(row["candidate"], row["task"]): row for row in rows}
    lines = [
        "| compression | " + " | ".join(f"{task} | bytes" for task in tasks) + " |",
        "|---|" + "---:|---:|" * len(tasks),
    ]
    for name in candidates:
        cells = []
        for row in (found.get((name, task)) for task in tasks):
            size = "" if row is None else f"{row['bytes_per_step']:,.0f}"
            cells += [_difference(row), size]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def agreement_table(rows):
    """Show what ranks have in common, and how much of their sum a communicator sends."""
    lines = [
        (
            "| task, compression | ranks | samples per rank | elements in the sum | energy of the sum that is "
            "sent | residual / gradient | steps in the residual | cosine | with residual | "
            "ranks that select |"
        ),
        "|---|" + "---:|" * 9,
    ]
    for row in rows:
        sent = f"{100 * row['share_sent']:.1f} % | {100 * row['energy_sent']:.1f} %"
        residual = f"{row['residual_to_gradient']:.1f} | {row['steps_in_residual']:.0f}"
        common = (
            f"{row['cosine']:.3f} | {row['cosine_with_residual']:.3f} | "
            f"{row['ranks_that_select']:.2f}"
        )
        what = f"*{row['task']}*, {row['candidate']} | {row['ranks']} | {row['samples']}"
        lines.append(f"| {what} | {sent} | {residual} | {common} |")
    return lines


def _place(row):
    return row["task"], row["ranks"], row["total_steps"], row["batch_factor"]


def _mean(row, seeds):
    values = [row["by_seed"][seed] for seed in seeds]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _error(values):
    """Return the standard error of the mean."""
    if len(values) < 2:
        return "–"
    return f"{statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def _p(value):
    return "–" if value is None else f"{value:.3f}"
