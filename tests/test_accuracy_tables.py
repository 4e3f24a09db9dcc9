"""Test the tables of docs/accuracy.md."""

import accuracy_tables
import candidates
import pytest
import report
import tasks


def _row(candidate, seed, metric, ranks=8, factor=1, task="resnet", length=1):
    return {
        "task": task, "candidate": candidate, "ranks": ranks, "seed": seed, "learning_rate": 0.1,
        "total_steps": length * tasks.TASKS[task].total_steps,
        "batch_factor": factor, "metric": metric,
        "bytes": 1000.0 if candidate == "none" else 20.0,
    }  # fmt: skip


def _cells(lines):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_line_has_the_differences_at_one_number_of_ranks_and_samples():
    rows = report.summarize([
        _row("none", 0, 0.8, factor=8), _row("none", 1, 0.9, factor=8), _row("none", 0, 0.5),
        _row("GTopK, raw values", 0, 0.75, factor=8), _row("GTopK, raw values", 1, 0.86, factor=8),
        _row("raw values", 0, 0.83, factor=8), _row("GTopK, raw values", 0, None),
        _row("none", 0, 0.7, ranks=64), _row("raw values", 0, 0.7, ranks=64),
        _row("CLTK", 0, 0.7, ranks=64, factor=8),
    ])  # fmt: skip
    head, _, small, large = _cells(accuracy_tables.scalecom_table(rows))
    assert head == [
        "task", "ranks", "samples per rank", "uncompressed", "raw values", "GTopK, raw values"
    ]  # fmt: skip
    assert small == ["resnet", "8", "16", "0.5000", "", "diverged"]
    assert large[:3] == ["resnet", "8", "128"] and large[3].startswith("0.8500 ± 0.0707")
    assert large[4:] == ["+0.0300 (1)", "-0.0450 (2)"]  # no column without figures
    # no line for 64 ranks: one would have only Allgather, the other nothing to compare with
    # the table of gTop-k has batches of one size and all numbers of ranks
    lines = _cells(accuracy_tables.gtopk_table(rows))[2:]
    assert [line[:3] for line in lines] == [["resnet", "8", "16"]]


def test_choices_have_differences_bytes_and_seeds_per_task():
    rows = report.summarize(
        [_row("none", seed, 0.8, ranks=4) for seed in (0, 1)]
        + [_row("FitPoly", seed, 0.79, ranks=4) for seed in (0, 1)]
        + [_row("raw values", 0, 0.81, ranks=4), _row("FitDExp", 0, 0.7, ranks=8)]
        + [_row("none", 0, 0.8, ranks=4, task="vgg"), _row("default", 0, 0.8, ranks=4, task="vgg")]
    )
    head, _, *lines = _cells(accuracy_tables.choices_table(rows, accuracy_tables.DEEP_REDUCE))
    assert head == ["compression", "resnet", "bytes"]
    assert lines == [["raw values", "+0.0100 (1)", "20"], ["FitPoly", "-0.0100 (2)", "20"]]


def test_small_tensors_compare_with_the_default_over_the_seeds_that_both_have():
    rows = report.summarize(
        [_row("none", seed, 0.8, ranks=4) for seed in (0, 1)]
        + [_row("default", seed, 0.82 + seed, ranks=4) for seed in (0, 5)]
        + [_row("large tensors", seed, 0.85, ranks=4) for seed in (0, 1)]
        + [_row("dense below 128", 0, None, ranks=4)]
        # without the default, there is nothing to compare with
        + [_row(name, 0, 0.7, ranks=8) for name in ("none", "large tensors")]
    )
    _, _, *lines = _cells(accuracy_tables.small_tensors_table(rows))
    assert lines == [
        ["the largest, from 128 elements on", "resnet, 4", "0.8200",
         "diverged with 1 of 1 seeds", "–", "–", "–", "–", "20", "20", "1"],
        ["uncompressed", "resnet, 4", "0.8200", "0.8500", "+0.0300", "–", "+0.0500", "0.000", "20",
         "20", "1"],
    ]  # fmt: skip


def test_embedding_tables_have_at_least_five_seeds_and_the_standard_error():
    every = "tables: rows, LloydMax 4"
    rows = report.summarize(
        [_row("none", seed, 0.6, ranks=4, task="ncf") for seed in range(5)]
        + [_row(every, seed, 0.6 + 0.001 * seed, ranks=4, task="ncf") for seed in range(5)]
        + [_row("default", seed, 0.5, ranks=4, task="ncf") for seed in range(4)]
        + [_row("default", seed, 0.5, ranks=4, task="vgg") for seed in range(5)]
        + [_row("none", seed, 0.6, ranks=2, task="adagrad-ncf") for seed in range(5)]
        + [_row("default", seed, 0.5, ranks=2, task="adagrad-ncf") for seed in range(5)]
    )
    _, _, line, other = _cells(accuracy_tables.embedding_tables_table(rows))
    what = "tables: all non-zero elements, 4 bits per value"
    assert line[:4] == ["ncf, 4", what, "+0.0020", "0.0007"] and line[6:] == ["20", "5"]
    assert other[:3] == ["adagrad-ncf, 2", "the default", "-0.1000"]


@pytest.mark.parametrize(
    "names",
    [
        accuracy_tables.DEEP_REDUCE,
        accuracy_tables.CHOICES,
        accuracy_tables.SCALECOM,
        accuracy_tables.EMBEDDING_TABLES,
    ],
)
def test_the_columns_are_candidates(names):
    assert set(names) <= set(candidates.CANDIDATES)


def test_the_table_of_all_candidates_has_batches_of_one_size_and_no_columns_of_other_tables():
    rows = report.summarize(
        [_row(name, 0, 0.8, ranks=4) for name in ("none", "default", "2 %", "FitPoly", "LAGS")]
        + [_row(name, 0, 0.8, ranks=4, factor=8) for name in ("none", "5 %")]
    )
    lines = _cells(accuracy_tables.candidates_table(rows, 4))
    assert [line[0] for line in lines[2:]] == ["2 %", "default"]


def test_numbers_of_steps_have_a_table_of_their_own():
    rows = report.summarize(
        [_row("none", 0, 0.8), _row("default", 0, 0.81)]
        + [_row("none", seed, 0.9, length=4) for seed in (0, 1)]
        + [_row("default", seed, 0.89 - 0.02 * seed, length=4) for seed in (0, 1, 2)]
        + [_row("none", 0, 0.91, length=8)]
        # a batch of another size; a task with one number of steps; nothing to compare with
        + [_row("none", 0, 0.7, factor=8, length=2), _row("none", 0, 0.7, task="vgg")]
        + [_row("default", 0, 0.7, length=2)]
    )
    _, _, *lines = _cells(accuracy_tables.lengths_table(rows))
    assert [line[:2] for line in lines] == [
        ["resnet, 8", steps] for steps in ("600", "2,400", "4,800")
    ]
    assert lines[0][3:] == ["0.8000", "0.1", "0.8100", "+0.0100", "–", "–", "1"]
    assert lines[1][6:8] == ["-0.0200", "0.0100"] and lines[1][-1] == "2"
    assert lines[2][2:] == ["0.1", "0.9100", "", "", "", "", "", "1"]
    tables = accuracy_tables.of_laboratory()
    lines = _cells(tables["laboratory"](rows))
    assert [line[0] for line in lines[2:]] == ["resnet, 8"]  # of 600 steps
    assert lines[2][3] == "+0.0100"
