"""Test that the core's table and the Python classes have the same stages, with the same ids."""

import inspect
import pathlib
import re

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.stages import (
    index_codecs as index,
    memories as memory,
    sparsifiers,
    value_codecs as value,
)

ROOT = pathlib.Path(dr.__file__).parent
KINDS = {"sparsifier": sparsifiers, "index": index, "value": value, "memory": memory}
ROWS = _native.stages()


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_has_its_row(kind):
    rows = {row["name"]: row["id"] for row in ROWS if row["kind"] == kind}
    classes = {name: getattr(KINDS[kind], name).stage_id for name in KINDS[kind].__all__}
    assert rows == classes


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
def test_default_parameters_are_those_of_the_class(row):
    needed = {"TopK": [0.01], "RandomK": [0.01], "ChunkTopK": [0.01], "Threshold": [0]}
    stage = getattr(dr, row["name"])(*needed.get(row["name"], []))
    parameters = stage.fields()[1:]
    assert parameters == row["parameters"]


def test_a_codec_is_the_numbers_of_four_stages():
    with pytest.raises(dr.InvalidArgumentError, match="codec: expected 20 numbers, got 19"):
        _native.encode([0.0] * 19, np.zeros(1, np.float32), 0)
