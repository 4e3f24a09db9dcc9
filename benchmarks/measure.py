"""What the benchmarks share: compiled programs, options, timing and output.

Times are medians of one thread, and ratios are of one run.
"""

import argparse
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import time

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd.stages.registry import FIRST_USER_ID, registered

HERE = pathlib.Path(__file__).resolve().parent
CORE = HERE.parent / "deepreduce_hvd" / "csrc"
#: number of parameters of ResNet-50: size of the gradient for speed measurements
RESNET50 = 25_557_032


def default_codec():
    """Return the default codec as it is after its first steps, in which the density falls."""
    default = dr.recommended_codec()
    return dr.Codec(dr.TopK(default.sparsifier.ratio), index=default.index, value=default.value)


def every_codec(kind, settings):
    """Return {name: codec}: the default of each built-in codec, or its settings if there are some.

    Args:
        kind: ``dr.IndexCodec`` or ``dr.ValueCodec``.
        settings: {name: codec} of the codecs that are measured with other parameters too.
    """
    table = {}
    for number, codec in sorted(registered(kind).items()):
        if number < FIRST_USER_ID:
            own = {name: one for name, one in settings.items() if type(one) is codec}
            table.update(own or {codec.__name__: codec()})
    return table


def compile_program(folder, name, kind):
    """Compile ``name``.cc of this folder with all codecs of the core; return the program's path.

    Args:
        folder: where the program goes.
        name: of the source.
        kind: of the codecs, "index" or "value".
    """
    program = pathlib.Path(folder) / name
    sources = [HERE / f"{name}.cc", CORE / "base.cc"]
    sources += [*sorted(CORE.glob("support/*.cc")), *sorted(CORE.glob(f"{kind}/*.cc"))]
    libraries = ["-lz"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", f"-I{CORE}"]
    subprocess.run([*compiler, *flags, *sources, *libraries, "-o", program], check=True)
    return program


def split_choices(parser, options, what, known, separator):
    """Split the option ``what`` in place; an unknown word ends the program with a message."""
    chosen = getattr(options, what).split(separator)
    if not set(chosen) <= set(known):
        parser.error(
            f"--{what}: expected some of {separator.join(known)}, got {separator.join(chosen)}"
        )
    setattr(options, what, chosen)


def at_least_one(text):
    """Return the number that an option was given; argparse refuses it if it is less than 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def seconds(work, repeats=7):
    """Return the median time of ``work()`` in seconds, after one call that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def paired_ratio(work, unit, repeats=9):
    """Return the median of work / unit, and the median seconds of work and of unit.

    The ratio is taken per pair, so a drift of the machine's speed cancels.
    """
    work()
    unit()
    pairs = []
    for _ in range(repeats):
        started = time.perf_counter()
        unit()
        between = time.perf_counter()
        work()
        pairs.append((time.perf_counter() - between, between - started))
    pairs = np.array(pairs)
    return (
        float(np.median(pairs[:, 0] / pairs[:, 1])),
        float(np.median(pairs[:, 0])),
        float(np.median(pairs[:, 1])),
    )


def row(what, value, target=None, unit="ratio", at_most=True, **details):
    """Return one line of results/bench.json; ``met`` is None if there is no target."""
    met = None if target is None else bool(value <= target if at_most else value >= target)
    return {
        "what": what,
        "value": value,
        "target": target,
        "unit": unit,
        "at_most": at_most,
        "met": met,
        **details,
    }


def verdict(entry):
    """Return the text about the target in a printed row."""
    if entry["target"] is None:
        return ""
    return f"  (target {entry['target']:g}: {'met' if entry['met'] else 'MISSED'})"


def write(path, rows):
    """Write rows as JSON; create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(rows))


def write_summary(path, rows, summary):
    """Write the summary of some rows, and the rows themselves, which git ignores.

    Args:
        path: file of the summary; the rows go to raw/ beside it, under the same name.
        rows: list of records.
        summary: function that makes fewer records of them.
    """
    write(path, summary(rows))
    write(path.parent / "raw" / path.name, rows)


def summarized(rows, keys, count, figures):
    """Return a record for all rows that agree in some fields.

    Args:
        rows: list of records.
        keys: the fields in which rows agree.
        count: the name of the number of these rows.
        figures: {field: function of a row that returns a number}; the record has the smallest, the
            median and the largest number.
    """
    groups = {}
    for one in rows:
        groups.setdefault(tuple(one[key] for key in keys), []).append(one)
    return [
        {
            **dict(zip(keys, group)),
            count: len(own),
            **{
                field: [min(numbers), statistics.median(numbers), max(numbers)]
                for field, number in figures.items()
                for numbers in [[number(one) for one in own]]
            },
        }
        for group, own in groups.items()
    ]


def bound(d, count):
    """Return the bits per index that any lossless code needs for uniform supports."""
    return (
        (math.lgamma(d + 1) - math.lgamma(count + 1) - math.lgamma(d - count + 1))
        / math.log(2)
        / count
    )


def heavy_tailed(d, seed):
    """Return (d,) float32 like a network's gradient: normal times log-normal."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(d, dtype=np.float32)
    values *= np.exp(random.standard_normal(d, dtype=np.float32))
    values *= np.float32(1e-3)
    return values


def as_lines(value):
    """Return results as JSON text: one record per line, numbers with six digits.

    Args:
        value: a list of records, or a dictionary of such lists and other values.
    """
    if isinstance(value, dict):
        parts = ",\n".join(
            f"{json.dumps(key)}: {as_lines(part).rstrip()}" for key, part in value.items()
        )
        return f"{{\n{parts}\n}}\n"
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(_rounded(record)) for record in value) + "\n]\n"
    return json.dumps(_rounded(value)) + "\n"


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return value
