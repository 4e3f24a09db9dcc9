"""Test that the public API, the names of docs/api.md, has type annotations and docstrings."""

import functools
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: a directive of docs/api.md, the name that it documents, and its options
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+).*((?:\n   :[\w-]+:.*)*)", re.MULTILINE)
OPTION = re.compile(r":([\w-]+):(.*)")
#: in the docstring of a method that is described by that of a base class
AS_BASE = "see :meth:`"


@functools.cache
def documented():
    """Return {name of a function or class that docs/api.md documents: members left out there}."""
    names = {}
    text = (ROOT / "docs/api.md").read_text()
    for kind, name, options in DIRECTIVE.findall(text):
        listed = {key: value.replace(",", " ").split() for key, value in OPTION.findall(options)}
        if kind == "module":
            members = listed["members"] or importlib.import_module(name).__all__
            names.update({f"{name}.{member}": [] for member in members})
        elif kind in ("class", "function", "exception"):
            names[name] = listed.get("exclude-members", [])
    return names


def resolved(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def functions(name):
    """Yield what a name of docs/api.md documents: the function, or the methods of the class.

    Yields:
        Tuples (name, function, its docstring or that of the method that it overrides).
    """
    value = resolved(name)
    if inspect.isfunction(value):
        yield name, value, inspect.getdoc(value)
        return
    for attribute, found in vars(value).items():
        if isinstance(found, property):
            found = found.fget
        found = inspect.unwrap(getattr(found, "__func__", found))
        public = attribute == "__init__" or not attribute.startswith("_")
        if not public or attribute in documented()[name] or not inspect.isfunction(found):
            continue
        if found.__module__.startswith("deepreduce_hvd"):  # not one of a dataclass or a named tuple
            yield f"{name}.{attribute}", found, inspect.getdoc(getattr(value, attribute))


def needs(name):
    """Skip the test of a name whose framework is not installed."""
    if name.startswith("deepreduce_hvd.tensorflow"):
        for module in ("tensorflow", "horovod"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed")


def arguments_of(function):
    parameters = list(inspect.signature(function).parameters.values())
    return [one for one in parameters if one.name not in ("self", "cls")]


def test_the_page_names_what_is_tested():
    names = [name for name in documented() if "tensorflow" not in name]
    found = {full for name in names for full, _, _ in functions(name)}
    assert len(names) > 90 and len(found) > 200
    assert {
        "deepreduce_hvd.Compressor.compress", "deepreduce_hvd.schedule.Network.ranks",
        "deepreduce_hvd.schedule.Plan.load"
    } <= found  # fmt: skip


@pytest.mark.parametrize("name", documented())
def test_every_public_function_has_types(name):
    needs(name)
    for full, function, _ in functions(name):
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty, (
            f"{full}: expected a type of what it returns"
        )
        for argument in arguments_of(function):
            assert argument.annotation is not argument.empty, (
                f"{full}: expected a type of {argument.name}"
            )


@pytest.mark.parametrize("name", documented())
def test_every_public_function_has_a_docstring(name):
    """Test that docstrings describe arguments, the result of functions with arguments, and errors.

    The docstring of a class describes the arguments of its constructor.
    """
    needs(name)
    assert inspect.getdoc(resolved(name)), f"{name}: expected a docstring"
    for full, function, text in functions(name):
        if full.endswith(".__init__"):
            continue
        assert text, f"{full}: expected a docstring"
        if AS_BASE in text:
            continue
        described, takes = text.partition("Args:\n")[2], arguments_of(function)
        for argument in takes:
            assert re.search(rf"\b{argument.name}\b[^:\n]*: ", described), (
                f"{full}: expected {argument.name} under Args"
            )
        if takes and inspect.signature(function).return_annotation not in (None, "None"):
            assert "Returns:\n" in text, f"{full}: expected Returns"
        if function.__doc__ is not None:
            raised = re.findall(r"raise (?:errors\.)?(\w+Error)\(", inspect.getsource(function))
            for error in set(raised) - {"NotImplementedError"}:
                assert error in text.partition("Raises:\n")[2], f"{full}: expected {error}"


def test_a_type_checker_finds_the_types(tmp_path):
    assert (ROOT / "deepreduce_hvd/py.typed").exists()
    (tmp_path / "user.py").write_text(
        "import deepreduce_hvd as dr\n"
        "codec = dr.Codec(dr.TopK(0.01), index=dr.Rice())\n"
        "dr.Codec(dr.TopK(0.01), index=dr.QSGD())\n"
        "dr.TopK('1 %')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"),
               "--follow-imports", "silent", str(tmp_path / "user.py")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [
        line.split("user.py:")[1][:1]
        for line in done.stdout.splitlines()
        if "user.py:" in line and "error" in line
    ]
    assert found == ["3", "4"], done.stdout + done.stderr
