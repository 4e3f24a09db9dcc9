"""Test that no files and no folders of the package import each other, directly or through others.

A string that is the name of a module of the package counts as an import of it, because the package
imports modules by name too. Left out are the tables that name the modules of each framework: what
reads them does not know the frameworks, and what they name is above it.
"""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "deepreduce_hvd"
NAMES = {
    ".".join(("deepreduce_hvd", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}  # fmt: skip
#: {module: names of its tables of frameworks}
REGISTRIES = {
    "deepreduce_hvd.backends": {"_FRAMEWORKS", "_REGISTRATION"},
    "deepreduce_hvd.prepare_optimizer": {"_MODULES"},
    "deepreduce_hvd.sparse_vectors": {"_FRAMEWORKS"},
}
#: the public names and the command, which nothing imports
TOP = ("deepreduce_hvd", "deepreduce_hvd.__main__")


def registries(tree, names):
    """Yield the values that a file assigns to some names at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found = {target.id for target in node.targets if isinstance(target, ast.Name)} & names
            yield from [node.value] * len(found)


def imported(tree, left_out=()):
    """Return the modules that a file imports, also in functions and by name.

    Imports for type checkers do not count.

    Args:
        tree: syntax tree of the file.
        left_out: nodes of the tree whose strings do not count.
    """
    for_types = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(inner) for node in (*for_types, *left_out) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in NAMES else node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]  # "module:name" names a part of a module


def import_graph():
    """Return {module: the modules of the package that it imports}."""
    graph = {}
    for name, path in NAMES.items():
        if name in TOP:
            continue
        tree, names = ast.parse(path.read_text()), REGISTRIES.get(name, set())
        left_out = list(registries(tree, names))
        assert len(left_out) == len(names), f"{name} has other tables of frameworks than {names}"
        graph[name] = {
            other
            for other in imported(tree, left_out)
            if other in NAMES and other not in (name, *TOP)
        }
    return graph


def in_folder(graph, folder):
    """Return the graph of what a folder contains: its files, and each subfolder as one.

    Args:
        graph: {module: modules that it imports}.
        folder: the folder as a tuple of names, from the top of the package on.
    """
    depth = len(folder) + 1

    def entry(name):
        parts = NAMES[name].relative_to(PACKAGE).parts
        return "/".join(parts[:depth]) if parts[: len(folder)] == folder else None

    entries = {}
    for name, others in graph.items():
        own = entry(name)
        if own is not None:
            found = {entry(other) for other in others} - {None, own}
            entries.setdefault(own, set()).update(found)
    return entries


def expect_no_circle(graph):
    # raises CycleError, which names the cycle
    list(graphlib.TopologicalSorter(graph).static_order())


def test_no_circle_of_files():
    graph = import_graph()
    assert len(graph) > 80 and sum(map(len, graph.values())) > 200
    expect_no_circle(graph)


def test_no_circle_of_folders():
    """Test each folder: its files and its subfolders, each with all that is in it.

    So ``torch/adapter.py`` may import ``torch/cuda/``, and ``torch/cuda/`` may import
    ``torch/results.py``, but not what imports ``torch/cuda/``.
    """
    graph = import_graph()
    folders = {path.relative_to(PACKAGE).parts[:-1] for path in NAMES.values()}
    for folder in sorted(folders):
        entries = in_folder(graph, folder)
        assert entries
        expect_no_circle(entries)


def test_circles_are_found():
    """Test that a circle through a function, through a string and between folders is found."""
    tree = ast.parse("def f():\n    import_module('deepreduce_hvd.compressor')")
    assert "deepreduce_hvd.compressor" in imported(tree)
    graph = {
        "deepreduce_hvd.coordination.elastic": {"deepreduce_hvd.checkpoints.checkpoint"},
        "deepreduce_hvd.checkpoints.checkpoint": {"deepreduce_hvd.coordination.handshake"},
    }
    expect_no_circle(graph)
    assert in_folder(graph, ()) == {
        "coordination": {"checkpoints"},
        "checkpoints": {"coordination"},
    }
