"""The code in the documents runs."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
from datasets import cache_directory
from launch import horovodrun
from launch_torchrun import torchrun

ROOT = pathlib.Path(__file__).resolve().parent.parent


def python_blocks(name):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("docs/add-a-codec.md", ["'value': 'MeanSign'", "'index': 'FixedWidthGaps'"]),
        (
            "docs/communicators.md",
            ["(array([0, 1, 2], dtype=uint32), array([4., 2., 5.], dtype=float32))"],
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
    assert all(one in finished.stdout for one in expected), finished.stdout


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("docs/tutorial-torch.md", r"total .*"),
        pytest.param("docs/tutorial-ddp.md", r"total .*", marks=pytest.mark.slow),
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
    ("framework", "block", "share"), [("torch", 0, "0.003"), ("tensorflow", 1, "0.007")]
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
    script, _ = python_blocks("docs/tutorial-fsdp.md")
    path = tmp_path / "train.py"
    path.write_text(script)
    finished = torchrun(4, path, timeout=120, RANKS_PER_HOST="2")
    assert finished.returncode == 0, finished.stdout[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", finished.stdout)]
    assert losses[-1] < losses[0]
    assert re.search(r"0\.weight +15,000 .*compressed", finished.stdout), finished.stdout[-3000:]


@pytest.mark.slow
def test_the_script_for_sharded_models_resumes_with_other_numbers_of_ranks(tmp_path):
    _, script = python_blocks("docs/tutorial-fsdp.md")
    path, saved = tmp_path / "restarts.py", tmp_path / "saved"
    path.write_text(script)

    def losses(ranks_per_host, ranks):
        """Return {step: loss} of a job on two hosts, from the latest checkpoint on."""
        finished = torchrun(ranks, path, saved, timeout=200, RANKS_PER_HOST=str(ranks_per_host))
        assert finished.returncode == 0, finished.stdout[-3000:]
        found = re.findall(rf"step (\d+): loss ([0-9.]+), ranks {ranks}", finished.stdout)
        return {int(step): float(loss) for step, loss in found}

    first = losses(2, 4)
    assert list(first) == [19, 39, 59, 79, 99] and first[99] < first[19], first
    (saved / "latest").write_text("step-40")
    other = losses(1, 2)
    assert list(other) == [59, 79, 99] and max(other.values()) < first[19], other
    (saved / "latest").write_text("step-60")  # which the second job has saved
    again = losses(1, 2)
    assert again == {step: other[step] for step in (79, 99)}, again  # nothing was lost


def _run_page(document, path, *arguments):
    """Run the script of a page on two ranks; return what it printed."""
    (script,) = python_blocks(document)
    path.write_text(script)
    finished = torchrun(2, path, *arguments, timeout=200)
    assert finished.returncode == 0, finished.stdout[-5000:]
    assert re.search(r"\.weight +30,000 .*compressed", finished.stdout), finished.stdout[-3000:]
    return finished.stdout


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "legacy", "arguments", "loss"),
    [
        (
            "recommender.py",
            "1",
            [cache_directory() / "movielens-100k" / "ml-100k.inter", "lossless"],
            r"loss ([0-9.]+)",
        ),
        ("slices.py", "1", [], r"loss ([0-9.]+)"),
        ("fit.py", "1", [], r"loss: ([0-9.]+)"),
        ("keras3.py", "0", [], r"loss ([0-9.]+)"),
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
    path.write_text(
        script.replace("EPOCHS = 256, 4, 32, 6", "EPOCHS = 256, 4, 32, 2") + SAME_ON_ALL_RANKS
    )
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy)
    finished = horovodrun(2, path, *arguments)
    assert finished.returncode == 0, finished.stdout[-3000:]
    losses = [float(one) for one in re.findall(loss, finished.stdout)]
    assert losses[-1] < 0.95 * losses[0]
    module = "tf_keras" if legacy == "1" else "keras"
    assert len(re.findall(rf"rank [01]: equal parameters, {module}\.", finished.stdout)) == 2
    assert re.search("total .*", finished.stdout)
    if name == "recommender.py":
        assert float(re.search(r"hit rate@10 ([0-9.]+)", finished.stdout)[1]) > 0.3
        assert float(re.search(r"step, ([0-9.]+) of the dense", finished.stdout)[1]) < 0.5


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
