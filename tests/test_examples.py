"""Test the examples as a user starts them, but only for a part of an epoch."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(example, *arguments):
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    finished = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_a_run_does_not_replace_the_figures_of_the_pages():
    """The tests compare results/ with README and docs/, also after a demo."""
    default = ranks.command_line("an example", "the data", 1, "demo.json").parse_args([]).output
    assert default.parent == ROOT / "build" / "results"


@pytest.mark.slow
@pytest.mark.parametrize("demo", ["demo.py", "demo_ddp.py", "demo_tensorflow.py"])
def test_demo_trains_and_draws(demo, tmp_path):
    output = tmp_path / "demo.json"
    printed = run(
        demo, "--epochs", 0.3, "--only", "none,Top-r pairs,QSGD + Rice", "--output", output
    )
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert all(row["accuracy"] > 0.8 for row in rows.values()), rows
    assert rows["QSGD + Rice"]["share_of_top_r_pairs"] < 0.25
    assert rows["none"]["share_of_dense"] == 1
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "of Top-r pairs" in printed and "[3/3] QSGD + Rice" in printed


@pytest.mark.slow
def test_hooks_of_pytorch_send_what_their_formulas_say(tmp_path):
    output = tmp_path / "demo.json"
    run(
        "demo_ddp.py",
        "--epochs",
        0.4,  # PowerSGD starts after 140 steps
        "--only",
        "fp16,PowerSGD rank 1,PowerSGD rank 4",
        "--output",
        output,
    )
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert all(row["accuracy"] > 0.8 for row in rows.values()), rows
    assert rows["fp16"]["bytes_per_step"] == 818_068
    for rank in (1, 4):
        elements = 16 + 32 + 256 + 10  # the biases
        for height, width in [(16, 9), (32, 144), (256, 1568), (10, 256)]:
            factors = rank * (height + width)
            # PowerSGD does not compress a matrix that would not become half as large
            elements += factors if 2 * factors < height * width else height * width
        assert rows[f"PowerSGD rank {rank}"]["bytes_per_step"] == 4 * elements


@pytest.mark.slow
def test_recommender_sends_only_what_is_not_zero(tmp_path):
    output = tmp_path / "recommender.json"
    run("recommender.py", "--epochs", 0.2, "--output", output)
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    lossless = rows["lossless: Bitmap"]
    assert lossless["share_of_dense"] < 0.9
    assert abs(lossless["hit_rate_at_10"] - rows["none"]["hit_rate_at_10"]) < 0.03
    assert rows["QSGD 7 + Bitmap"]["share_of_dense"] < 0.4 * lossless["share_of_dense"]
    assert rows["LloydMax 4 + RLE"]["share_of_dense"] < 0.2 * lossless["share_of_dense"]


@pytest.mark.parametrize("demo", ["demo.py", "demo_ddp.py", "demo_tensorflow.py"])
def test_unknown_rows_are_named(demo):
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / demo), "--only", "nonesuch"], cwd=ROOT,
        capture_output=True, text=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT)), timeout=120,
    )  # fmt: skip
    assert finished.returncode != 0
    assert "expected some of none, fp16, " in finished.stdout + finished.stderr
