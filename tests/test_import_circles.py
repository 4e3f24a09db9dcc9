"""Test that no files of the package import each other, directly or through others."""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "deepreduce_hvd"
NAMES = {
    ".".join(("deepreduce_hvd", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}  # fmt: skip


def imported(path):
    """Return the modules of the package that a file imports, including imports in functions.

    Imports for type checkers do not count.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in NAMES else node.module


def test_no_circle():
    # the package's __init__ imports the public names, and no module may need it
    graph = {
        name: {
            other
            for other in imported(path)
            if other in NAMES and other not in (name, "deepreduce_hvd")
        }
        for name, path in NAMES.items()
        if name not in ("deepreduce_hvd", "deepreduce_hvd.__main__")
    }
    assert len(graph) > 80 and sum(map(len, graph.values())) > 200
    # raises CycleError, which names the cycle
    list(graphlib.TopologicalSorter(graph).static_order())
