"""The code in the documents runs, and their links and names exist."""

import ast
import fnmatch
import importlib.util
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest
from datasets import cache_directory
from launch import horovodrun, run_ranks
from launch_torchrun import torchrun
from update_readme import PAGES, updated

import deepreduce_hvd as dr
from deepreduce_hvd import communicators
from deepreduce_hvd.stages import (
    index_codecs as index,
    memories as memory,
    sparsifiers,
    value_codecs as value,
)
from deepreduce_hvd.stages.base import FIRST_USER_ID, registered

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def python_blocks(name):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("docs/add-a-codec.md", "'value': 'MeanSign'"),
        (
            "docs/communicators.md",
            "(array([0, 1, 2], dtype=uint32), array([4., 2., 5.], dtype=float32))",
        ),
    ],
)
def test_a_codec_and_a_communicator_of_your_own(document, expected):
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(python_blocks(document))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert expected in finished.stdout


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("docs/tutorial-torch.md", r"total .*"),
        ("docs/tutorial-ddp.md", r"total .*"),
        pytest.param("docs/tutorial-multi-node.md", r"total .*", marks=pytest.mark.slow),
        ("README.md", None),
    ],
)
def test_training_scripts_run_on_two_ranks(document, expected, tmp_path):
    script, *_ = python_blocks(document)
    if expected is None:
        script += (
            "\nloss = model(torch.randn(8, 784)).pow(2).mean()\nloss.backward()\nopt.step()\n"
            "assert comp.stats()['0.weight']['sent_bytes'] > 0\n"
        )
    path = tmp_path / "train.py"
    path.write_text(script)
    run = torchrun if document == "docs/tutorial-ddp.md" else horovodrun
    finished = run(2, path)
    assert finished.returncode == 0, finished.stdout[-3000:]
    if expected is not None:
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", finished.stdout)]
        assert losses[-1] < losses[0]
        assert re.search(expected, finished.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "block", "share"), [("torch", 0, "0.003"), ("tensorflow", 1, "0.01")]
)
def test_the_first_scripts_run_on_two_ranks(framework, block, share, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    path = tmp_path / "train.py"
    path.write_text(python_blocks("docs/start.md")[block])
    finished = horovodrun(2, path)
    assert finished.returncode == 0, finished.stdout[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", finished.stdout)]
    assert losses[-1] < losses[0]
    # the first row of the summary: the density after the first 50 steps
    assert re.search(rf"(0\.weight|Variable:0) .* {share}\d* .*compressed", finished.stdout)


#: what a program has before the blocks of a page
_BEFORE = {
    "docs/accuracy.md": "",
    "docs/migration.md": (
        "import horovod.torch as hvd\nimport torch\nhvd.init()\n"
        "model = torch.nn.Linear(100, 100)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    ),
}


@pytest.mark.parametrize("document", _BEFORE)
def test_the_blocks_of_a_page_run_in_order(document):
    script = _BEFORE[document] + "\n".join(python_blocks(document))
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_the_script_for_sharded_models_runs_on_two_hosts_of_two_ranks(tmp_path):
    (script,) = python_blocks("docs/tutorial-fsdp.md")
    path = tmp_path / "train.py"
    path.write_text(script)
    finished = run_ranks(
        "torchrun", "--standalone", "--nproc-per-node=4", path, timeout=120, RANKS_PER_HOST="2"
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", finished.stdout)]
    assert losses[-1] < losses[0]
    assert re.search(r"0\.weight +15,000 .*compressed", finished.stdout), finished.stdout[-3000:]


def _run_page(document, path, *arguments):
    """Run the script of a page on two ranks; return what it printed."""
    (script,) = python_blocks(document)
    path.write_text(script)
    finished = run_ranks(
        "torchrun", "--standalone", "--nproc-per-node=2", path, *arguments, timeout=200
    )
    assert finished.returncode == 0, finished.stdout[-5000:]
    assert re.search(r"\.weight +30,000 .*compressed", finished.stdout), finished.stdout[-3000:]
    return finished.stdout


def test_the_script_for_lightning_runs_and_resumes(tmp_path):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    path = tmp_path / "lightning_train.py"
    runs = tmp_path / "runs"
    output = _run_page("docs/lightning.md", path, 1, runs)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert losses[-1] < losses[0]
    (saved,) = runs.rglob("*.ckpt")
    output = _run_page("docs/lightning.md", path, 2, runs, saved)
    resumed = re.findall(r"step (\d+): loss ([0-9.]+)", output)
    assert resumed[0][0] == "100" and float(resumed[-1][1]) < losses[0], resumed


def test_the_script_for_accelerate_runs(tmp_path):
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    output = _run_page("docs/accelerate.md", tmp_path / "accelerate_train.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert losses[-1] < losses[0]


#: appended to a script of the TensorFlow tutorial
SAME_ON_ALL_RANKS = """
import horovod.tensorflow as horovod

for variable in model.trainable_variables if "model" in globals() else [table]:
    everywhere = horovod.allgather(tf.constant(np.array(variable).reshape(1, -1))).numpy()
    assert everywhere.shape[0] == 2 and (everywhere == everywhere[0]).all(), variable
print(f"rank {horovod.rank()}: equal parameters, {tf.keras.Model.__module__}")
"""


@pytest.mark.parametrize(
    ("name", "legacy", "arguments", "loss"),
    [
        pytest.param(
            "recommender.py",
            "1",
            [cache_directory() / "movielens-100k" / "ml-100k.inter", "lossless"],
            r"loss ([0-9.]+)",
            marks=pytest.mark.slow,
        ),
        ("slices.py", "1", [], r"loss ([0-9.]+)"),
        pytest.param("fit.py", "1", [], r"loss: ([0-9.]+)", marks=pytest.mark.slow),
        pytest.param("keras3.py", "0", [], r"loss ([0-9.]+)", marks=pytest.mark.slow),
    ],
)
def test_tensorflow_scripts_run_on_two_ranks(name, legacy, arguments, loss, tmp_path, monkeypatch):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    (script,) = (
        block
        for block in python_blocks("docs/tutorial-tensorflow.md")
        if block.startswith(f"# {name}\n")
    )
    path = tmp_path / name
    path.write_text(script + SAME_ON_ALL_RANKS)
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy)
    finished = horovodrun(2, path, *arguments)
    assert finished.returncode == 0, finished.stdout[-3000:]
    losses = [float(one) for one in re.findall(loss, finished.stdout)]
    assert losses[-1] < 0.95 * losses[0]
    module = "tf_keras" if legacy == "1" else "keras"
    assert len(re.findall(rf"rank [01]: equal parameters, {module}\.", finished.stdout)) == 2
    assert re.search("total .*", finished.stdout)
    if name == "recommender.py":
        assert float(re.search(r"hit rate@10 ([0-9.]+)", finished.stdout)[1]) > 0.5
        assert float(re.search(r"step, ([0-9.]+) of the dense", finished.stdout)[1]) < 0.5


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


def test_the_pages_code_runs():
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(python_blocks("docs/choosing.md"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    sizes = [
        int(size.replace(",", ""))
        for size in re.findall(r"^ *([\d,]+) bytes", finished.stdout, re.MULTILINE)
    ]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 3
