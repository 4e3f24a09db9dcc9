"""Links, names, tables and lists of the documents are right, and the site builds."""

import ast
import fnmatch
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest
from update_readme import PAGES, updated

import deepreduce_hvd as dr
from deepreduce_hvd import communicators
from deepreduce_hvd.stages import (
    index_codecs as index,
    memories as memory,
    sparsifiers,
    value_codecs as value,
)
from deepreduce_hvd.stages.registry import FIRST_USER_ID, registered

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_jobs_end_when_a_rank_hangs(document):
    if document.name == "CONTRIBUTING.md":
        return
    for block in re.split(r"\n(?! {4})", document.read_text()):
        if re.search(r"^ {4}horovodrun -np ", block, re.MULTILINE):
            assert re.search(
                r"--stall-check-shutdown-time-seconds|HOROVOD_STALL_SHUTDOWN_TIME", block
            ), block


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), (
                f"{document.name} points to {target}, which is not there"
            )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_documents_lead_to_headings(document):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        headings = re.findall(
            r"^#+ (.*)$",
            (document.parent / target if target else document).read_text(),
            re.MULTILINE,
        )
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, f"{document.name} points to #{anchor}, expected one of {slugs}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_of_the_package_are_there(document):
    """Every name such as `dr.TopK` or `deepreduce_hvd.tensorflow.cuda_supports` exists."""
    for name in re.findall(r"`(?:deepreduce_hvd|dr)\.([\w.]*\w)", document.read_text()):
        if name.startswith("tensorflow"):
            pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
            pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")
        pkgutil.resolve_name(f"deepreduce_hvd.{name}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_unresolved_merge(document):
    found = re.findall(r"^(?:<{7} |={7}$|>{7} ).*$", document.read_text(), re.MULTILINE)
    assert not found, f"{document.name}: {found}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_are_there(document):
    inside = [
        ROOT,
        *(ROOT / folder for folder in ("deepreduce_hvd", "deepreduce_hvd/csrc", "docs")),
    ]
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text()):
        for name in re.findall(
            r"(?<![\w./{*-])[\w./-]*/[\w-]+\.(?:py|cc|cu|h|md|json|png)(?![\w(])", quoted
        ):
            if "NAME" not in name and not name.startswith("/"):
                assert any((folder / name).exists() for folder in inside), (
                    f"{document.name} names {name}, which is not there"
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page):
    text = page.read_text()
    assert updated(text) == text, "run scripts/update_readme.py"


def test_readme_lists_every_stage_and_communicator():
    rows = dict(
        re.findall(
            r"^\| (sparsifier|index codec|value codec|memory|communicator) \| (.*) \|$",
            (ROOT / "README.md").read_text(),
            re.MULTILINE,
        )
    )
    modules = {
        "sparsifier": sparsifiers,
        "index codec": index,
        "value codec": value,
        "memory": memory,
        "communicator": communicators,
    }
    for kind, module in modules.items():
        # interfaces, and "auto", which the row says in its own words
        expected = set(module.__all__) - {"Communicator", "Transport", "Auto"}
        assert set(re.findall(r"\b[A-Z]\w+", rows[kind])) == expected, kind


@pytest.mark.parametrize(
    ("kind", "title"), [(dr.IndexCodec, "Index codecs"), (dr.ValueCodec, "Value codecs")]
)
def test_the_format_has_a_section_for_every_codec(kind, title):
    text = (ROOT / "docs" / "format.md").read_text()
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    built_in = {
        number: stage.__name__
        for number, stage in registered(kind).items()
        if number < FIRST_USER_ID
    }
    assert {
        int(number): name
        for number, name in re.findall(r"^### (\d+) (\w+)$", section, re.MULTILINE)
    } == built_in


def imported_by(path):
    """Return the modules of this package that a file imports, by file or folder name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "deepreduce_hvd"
        ):
            yield from node.module.split(".")[1:2] or (name.name for name in node.names)


def test_layers_import_what_the_architecture_says():
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Layers")[1].split("\n\n**")[0]
    rows = [
        re.findall(r"`([\w*]+)(?:\.py|/)`", row.split("|")[2])
        for row in table.splitlines()
        if row.startswith("| ")
    ]

    def layer(name):
        found = [
            number
            for number, patterns in enumerate(rows)
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]
        assert len(found) == 1, f"expected {name} in one row of the table, got {len(found)}"
        return found[0]

    package = ROOT / "deepreduce_hvd"
    for path in package.rglob("*.py"):
        own = path.relative_to(package).parts[0].removesuffix(".py")
        for other in imported_by(path) if own != "__init__" else ():
            if other != "_native":
                assert layer(other) >= layer(own), (
                    f"{path.relative_to(ROOT)} imports {other} of a layer above its own"
                )


def test_every_make_target_is_in_the_help():
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    shown = re.findall(r"make ([\w-]+)", text.split("help:")[1].split("\n\n")[0])
    assert set(phony.split()) - {"help", "python", "distclean"} <= set(shown)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        ROOT / "docs",
        tmp_path,
    ]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert (tmp_path / "api.html").exists()


def test_every_public_name_is_in_the_reference():
    listed = re.findall(
        r":: deepreduce_hvd\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE
    )
    assert set(dr.__all__) <= set(listed), sorted(set(dr.__all__) - set(listed))


def test_the_reference_has_the_options_of_the_command():
    from deepreduce_hvd.plan import _parser

    section = (ROOT / "docs" / "api.md").read_text().split("\n| option |")[1].split("\n\n")[0]
    options = {one for action in _parser()._actions for one in action.option_strings}
    assert set(re.findall(r"`(--[\w-]+)`", section)) == options - {"-h", "--help"}
