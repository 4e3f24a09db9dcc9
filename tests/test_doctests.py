"""Test the examples in the docstrings of the package."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import deepreduce_hvd

ROOT = Path(deepreduce_hvd.__file__).parent
WITH_EXAMPLES = [
    path for path in sorted(ROOT.rglob("*.py")) if re.search(r"^ *>>> [^#]", path.read_text(), re.M)
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(path):
    parts = [
        part for part in path.relative_to(ROOT.parent).with_suffix("").parts if part != "__init__"
    ]
    failed, attempted = doctest.testmod(importlib.import_module(".".join(parts)))
    assert attempted > 0 and failed == 0


def test_there_are_examples():
    assert WITH_EXAMPLES
