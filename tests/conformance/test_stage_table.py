"""Test that the core and Python have the same stages, with the same ids, and the same codes.

Each stage also has its place in the documentation and in the tests.
"""

import inspect
import pathlib
import re

import numpy as np
import pytest
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE

import deepreduce_hvd as dr
from deepreduce_hvd import _native, container, errors
from deepreduce_hvd.stages import (
    index_codecs as index,
    memories as memory,
    sparsifiers,
    value_codecs as value,
)
from deepreduce_hvd.stages.suggestions import written

ROOT = pathlib.Path(dr.__file__).parent
KINDS = {"sparsifier": sparsifiers, "index": index, "value": value, "memory": memory}
ROWS = _native.stages()
DOCS = ROOT.parent / "docs"
TESTS = ROOT.parent / "tests" / "stages"


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_has_its_row(kind):
    rows = {row["name"]: row["id"] for row in ROWS if row["kind"] == kind}
    classes = {name: getattr(KINDS[kind], name).stage_id for name in KINDS[kind].__all__}
    assert rows == classes


@pytest.mark.parametrize(
    ("kind", "table"),
    [("sparsifier", SPARSIFIERS), ("index", INDEX), ("value", VALUE), ("memory", MEMORIES)],
)
def test_the_conformance_suite_has_every_stage(kind, table):
    tested = {type(stage).__name__ for stage in table.values()}
    missing = {row["name"] for row in ROWS if row["kind"] == kind} - tested
    assert not missing, f"expected a row in tests/support/codecs_table.py for {sorted(missing)}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_sources_are_where_the_table_says(row):
    module = inspect.getmodule(getattr(KINDS[row["kind"]], row["name"]))
    assert pathlib.Path(module.__file__).stem == row["file"]
    if row["kind"] in ("index", "value"):
        sources = "\n".join(path.read_text() for path in (ROOT / "csrc" / row["kind"]).glob("*.cc"))
        assert re.search(rf"\b{row['file']}_codec = .*\bk{row['name']}\b", sources)
        kernels = "\n".join(
            path.read_text() for path in (ROOT / "csrc" / "cuda" / row["kind"]).glob("*.cu")
        )
        found = re.search(rf"\b{row['file']}_device_codec = [^;]*\bk{row['name']}\b", kernels)
        assert row["on_device"] == bool(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_every_stage_has_its_file_of_tests(row):
    module = inspect.getmodule(getattr(KINDS[row["kind"]], row["name"]))
    *_, folder, name = module.__name__.split(".")
    path = TESTS / folder / f"test_{name}.py"
    assert path.is_file(), f"expected the tests of {row['name']} in {path}"
    source = path.read_text()
    assert "\ndef test_" in source and row["name"] in source


def test_every_file_of_tests_has_its_module():
    """The exceptions have tests of all stages of a kind."""
    for path in TESTS.glob("*/test_*.py"):
        folder, name = path.parent.name, path.name.removeprefix("test_")
        assert name == f"all_{folder}.py" or (ROOT / "stages" / folder / name).is_file(), path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_default_parameters_are_those_of_the_class(row):
    stage = eval(written(getattr(dr, row["name"])), vars(dr))
    assert stage.fields()[1:] == row["parameters"]


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("sparsifier", "Sparsifiers"),
        ("index", "Index codecs"),
        ("value", "Value codecs"),
        ("memory", "Memories"),
    ],
)
def test_the_reference_lists_every_stage(kind, title):
    section = (DOCS / "api.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    assert set(re.findall(r"autoclass:: deepreduce_hvd\.(\w+)", section)) == {
        row["name"] for row in ROWS if row["kind"] == kind
    }


@pytest.mark.parametrize("kind", ["index", "value"])
def test_the_page_about_gpus_says_where_every_codec_runs(kind):
    table = (DOCS / "gpu.md").read_text().split("\n## What runs where\n")[1]
    device, host = re.search(
        rf"^\| {kind} codecs \| (.*) \| (.*) \|$", table, re.MULTILINE
    ).groups()
    for on_device, listed in (
        (True, device.split(", ")),
        (False, re.findall(r"(?:^|\. )(\w+):", host)),
    ):
        assert set(listed) == {
            row["name"] for row in ROWS if row["kind"] == kind and row["on_device"] == on_device
        }


def test_other_stages_run_on_both():
    """The page about GPUs says that all sparsifiers and memories run on the device."""
    assert all(row["on_device"] for row in ROWS if row["kind"] in ("sparsifier", "memory"))


@pytest.mark.parametrize("kind", ["index", "value"])
def test_the_format_lists_every_id(kind):
    ids = (DOCS / "format.md").read_text().split("\n## Ids\n")[1].replace("\n", " ")
    listed = re.search(rf"{kind.title()}: ([^.]*)\.", ids)[1].removeprefix("0 all, ")
    assert listed.split(", ") == [
        f"{row['id']} {row['name']}" for row in ROWS if row["kind"] == kind
    ]


def test_a_codec_is_the_numbers_of_four_stages():
    with pytest.raises(dr.InvalidArgumentError, match="codec: expected 20 numbers, got 19"):
        _native.encode([0.0] * 19, np.zeros(1, np.float32), 0)


def codes_in_header(enum):
    """Return {name without DR_: code} of an enum of the C ABI."""
    text = (ROOT / "csrc" / "api" / "deepreduce.h").read_text()
    body = re.search(rf"enum {enum} {{(.*?)}};", text, re.DOTALL)[1]
    return {name: int(code) for name, code in re.findall(r"\bDR_(\w+) = (\d+)", body)}


def test_codes_are_those_of_the_header():
    statuses = codes_in_header("dr_status")
    assert statuses.pop("OK") == 0
    assert statuses == {status.name: status for status in errors.Status} and all(
        status in errors.OF_STATUS for status in errors.Status
    )
    dtypes = {name.lower(): code for name, code in codes_in_header("dr_dtype").items()}
    assert dtypes == container.DTYPES
