"""The tables of docs/schedule.md, from the figures of the benchmarks of schedules."""

import statistics


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
        none = f"{auto.removesuffix('auto')}none"
        ratios = [found[auto, link]["seconds"] / found[none, link]["seconds"] for link in links]
        lines.append(f"| {auto} ÷ none | " + " | ".join(f"{one:.2f}" for one in ratios) + " |")
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
    close = [[abs(found[key] - 1) <= 0.15 for key in found if key[1] == link] for link in links]
    cells = [f"{sum(one)} of {len(one)}" for one in close]
    lines.append("| within 15 % | " + " | ".join(cells) + " |")
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


_NETWORKS = {"resnet18": "ResNet-18", "transformer": "transformer"}


def _whole_step_places(rows):
    """Return the (network, cycle time) pairs of the rows and the first two lines of a table."""
    places = list(dict.fromkeys((row["network"], row["cycle"]) for row in rows))
    heads = " | ".join(f"{_NETWORKS[network]}, {cycle:g} ms" for network, cycle in places)
    return places, heads, "|---|" + "---:|" * len(places)


def whole_step_table(rows):
    """Compare whole steps of each network, and what they take longer than without an exchange."""
    places, heads, line = _whole_step_places(rows)
    found = {(row["network"], row["cycle"], row["row"]): row for row in rows}
    lines = [f"| milliseconds per step (exposed) | {heads} |", line]
    for name in dict.fromkeys(row["row"] for row in rows):
        own = [found[(*place, name)] for place in places]
        cells = [f"{1e3 * row['seconds']:.0f} ({1e3 * row['exposed']:.0f})" for row in own]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = [f"{1e3 * found[(*place, 'none')]['coding']:.0f}" for place in places]
    lines.append("| encoding and decoding alone, one thread | " + " | ".join(cells) + " |")
    return lines


def whole_step_threads_table(rows):
    """Show which threads of a rank take the processor time of a step."""
    places, heads, line = _whole_step_places(rows)
    found = {(row["network"], row["cycle"], row["row"]): row for row in rows}
    lines = [f"| main + compressor + Horovod | {heads} |", line]
    for name in dict.fromkeys(row["row"] for row in rows):
        cells = [
            " + ".join(
                f"{1e3 * found[(*place, name)]['processor_seconds'][kind]:.0f}"
                for kind in ("main", "compressor", "Horovod")
            )
            for place in places
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
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


def ranks_table(rows):
    """Compare predicted and measured steps by number of ranks, and show predictions for more."""
    counts = list(dict.fromkeys(row["ranks"] for row in rows))
    found = {(row["row"], row["ranks"]): row for row in rows}
    lines = [
        "| milliseconds per step | " + " | ".join(f"{count:,} ranks" for count in counts) + " |",
        "|---|" + "---:|" * len(counts),
    ]
    for name in dict.fromkeys(row["row"] for row in rows):
        cells = []
        for count in counts:
            row = found[name, count]
            expected = f"{1e3 * row['predicted']:,.0f}"
            known = row.get("seconds")
            cells.append(f"({expected})" if known is None else f"{1e3 * known:,.0f} ({expected})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
