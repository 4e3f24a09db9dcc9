"""Test make gpu-check on a machine without a GPU: its errors, and its dry run."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import build_cuda  # noqa: E402
import gpu_check  # noqa: E402
import nvcc  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent


def check(*options):
    return subprocess.run(
        [sys.executable, "scripts/gpu_check.py", *options], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_fails_and_says_why():
    done = check()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    expected = (
        f"got {torch.__version__}" if torch.version.cuda is None else "expected a GPU that PyTorch"
    )
    assert (
        "[gpu-check] FAILED: expected" in done.stdout
        and expected in done.stdout
        and "--dry-run runs what works without one" in done.stdout
    )


@pytest.mark.slow
def test_a_dry_run_compiles_everything_and_says_what_was_not_run():
    """A dry run compiles every kernel for the oldest architecture.

    It also compiles the operators against the headers of the frameworks.
    """
    path = nvcc.find()
    known = nvcc.known_architectures(path) if path else ()
    # no source asks for its architecture, so what the oldest one compiles, all others do
    oldest = next((name for name in nvcc.ARCHITECTURES if name in known), None)
    done = check("--dry-run", *(["--architectures", oldest] if path else []))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if path is None:
        assert "NOT RUN: compiling the CUDA sources: nvcc is missing" in done.stdout
    else:
        kernels = f"{len(build_cuda.sources())} objects for {oldest} in build/"
        assert f"{kernels}cuda_check" in done.stdout
        for name, top in (("torch", "torch_ops"), ("tensorflow", "tf_ops")):
            if importlib.util.find_spec(name) is None:
                assert f"{name} is not installed" in done.stdout
                continue
            for folder in (top, f"{top}/cuda"):
                sources = list((ROOT / folder).glob("*.cc"))
                assert f"{folder}: {len(sources)} sources compile\n" in done.stdout
    assert " 0 differ" in done.stdout and "decode-and-sum of 8 payloads" in done.stdout
    if list((ROOT / "deepreduce_hvd").glob("_tf_ops-*.so")):
        assert "comparisons of TensorFlow on CPU:0, 0 differ" in done.stdout
    for words in (
        "byte-equality of the GPU with the host",
        "compute-sanitizer memcheck and racecheck",
        "every measurement on a GPU",
    ):
        assert f"NOT RUN: {words}" in done.stdout


def test_a_dry_run_is_for_one_architecture_unless_others_are_named(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_check, "dry_run", lambda named: asked.append(named) or [])
    for options in ([], ["--architectures", "7.5", "8.0"]):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", *options])
        assert gpu_check.main() == 0
    assert asked == [["9.0"], ["7.5", "8.0"]]


def test_a_sanitizer_that_cannot_work_here_is_no_failure(tmp_path, monkeypatch):
    sanitizer = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answers(text, status):
        sanitizer.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
        sanitizer.chmod(0o755)

    answers("========= Error: Device not supported. Please refer to the documentation", 1)
    assert (
        "it does not work on this machine: ========= Error: Device not supported"
        in gpu_check.sanitize("memcheck")
    )
    answers("========= ERROR SUMMARY: 0 errors", 0)
    assert gpu_check.sanitize("memcheck") is None
    answers("========= ERROR SUMMARY: 3 errors", 99)
    with pytest.raises(
        gpu_check.Stop, match="compute-sanitizer memcheck: expected exit status 0, got 99"
    ):
        gpu_check.sanitize("memcheck")


def test_a_sanitizer_that_is_stopped_keeps_what_it_found():
    output = "========= COMPUTE-SANITIZER\n"
    assert "found nothing" in gpu_check.verdict_of("memcheck", -9, output)
    with pytest.raises(gpu_check.Stop, match="memcheck: expected exit status 0, got -9"):
        gpu_check.verdict_of("memcheck", -9, output + "========= Invalid __global__ write")


@pytest.mark.slow
def test_steps_are_measured_on_the_host_too(tmp_path):
    output = tmp_path / "steps.json"
    options = ["--device", "cpu", "--small", "--networks", "transformer", "--output", output]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    # of an earlier run: this one replaces the first, and keeps the second
    earlier = [
        {"framework": name, "ranks": 1, "network": "transformer", "row": "of another run"}
        for name in ("ddp", "horovod")
    ]
    output.write_text(json.dumps(earlier))
    command = [sys.executable, "benchmarks/gpu_step.py", "ddp", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kept, *found = json.loads(output.read_text())
    assert kept == earlier[1]
    rows = {row["row"]: row for row in found}
    assert list(rows) == ["no exchange", "none", "fp16", "default", "Rice, QSGD", "Rice, Deflate"]
    assert rows["none"]["sent_bytes"] is None
    assert 0 < rows["Rice, QSGD"]["sent_bytes"] < rows["Rice, Deflate"]["sent_bytes"]


def expect_a_difference(script, device, code):
    """Check that the script finds a difference, when this code rehearses it on the host."""
    arguments = [f"{script}.py", "--small", "--device", device, "--seed", "1"]
    begin = f"import sys; sys.argv = {arguments}\n"
    command = [sys.executable, "-c", begin + code]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(["scripts", gpu_check.FOLDERS])}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 1 and "DIFFERS  raw_index raw_value" in done.stdout, (
        done.stdout[-2000:] + done.stderr[-2000:]
    )


def test_a_difference_is_found():
    """The comparison with a GPU detects one wrong bit in a payload, a residual or a sum."""
    expect_a_difference(
        "gpu_equality",
        "cpu",
        "import gpu_equality\n"
        "encode = gpu_equality.operators.encode_flat\n"
        "def wrong(*arguments):\n"
        "    payload = encode(*arguments)\n"
        "    payload[-1] ^= 1\n"
        "    return payload\n"
        "gpu_equality.operators.encode_flat = wrong\n"
        "gpu_equality.main()\n",
    )


def test_a_part_that_fails_does_not_keep_the_next_from_running():
    parts = gpu_check.Parts()
    for title, work in (
        ("first", lambda: gpu_check.script("no_such_script.py")),
        ("second", lambda: "there is no such thing"),
        ("third", lambda: None),
    ):
        parts.run(title, "a moment", work)
    assert parts.failed == ["first"] and parts.not_run == ["second: there is no such thing"]


def test_what_keeps_tensorflow_out_is_told(tmp_path, monkeypatch):
    def installed(info, gpus):
        (tmp_path / "tensorflow").mkdir(exist_ok=True)
        config = (
            f"class config: list_physical_devices = staticmethod(lambda kind: [kind] * {gpus})\n"
        )
        build = f"class sysconfig: get_build_info = staticmethod(lambda: {info})\n"
        (tmp_path / "tensorflow/__init__.py").write_text(f"__version__ = '2.18.1'\n{config}{build}")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: True)
    for info, gpus, reason in (
        ({}, 1, "TensorFlow 2.18.1 is built without CUDA"),
        ({"cuda_version": "12.5.1"}, 0, "TensorFlow 2.18.1 finds no GPU"),
        ({"cuda_version": "12.5.1"}, 1, None),
    ):
        installed(info, gpus)
        assert gpu_check.why_no_tensorflow() == reason
    (tmp_path / "tensorflow/__init__.py").write_text("import no_such_module\n")
    assert (
        gpu_check.why_no_tensorflow()
        == "TensorFlow does not load: ModuleNotFoundError: No module named 'no_such_module'"
    )
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert (
        gpu_check.why_no_tensorflow()
        == gpu_check.tensorflow("9.0")
        == "TensorFlow is not installed"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
def test_a_difference_of_tensorflow_is_found():
    """The comparison detects one wrong bit in a payload of TensorFlow."""
    expect_a_difference(
        "gpu_tensorflow",
        "CPU:0",
        "import gpu_tensorflow, types\n"
        "tf, real, calls = gpu_tensorflow.tf, gpu_tensorflow.adapter.operators, []\n"
        "def wrong(*arguments):\n"
        "    calls.append(1)\n"
        "    payload = real.deepreduce_encode(*arguments)\n"
        "    return payload if len(calls) % 2 else tf.concat([payload[:-1], payload[-1:] ^ 1], 0)\n"
        "gpu_tensorflow.adapter.operators = "
        "types.SimpleNamespace(deepreduce_encode=wrong, "
        "deepreduce_decode_sum=real.deepreduce_decode_sum)\n"
        "gpu_tensorflow.compare_training = lambda comparison: None\n"
        "gpu_tensorflow.main()\n",
    )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
def test_without_a_gpu_tensorflows_comparison_says_that_there_is_nothing_to_compare():
    done = subprocess.run(
        [sys.executable, "scripts/gpu_tensorflow.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": gpu_check.FOLDERS, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == gpu_check.CANNOT
        and "expected operators with kernels for CUDA and a GPU, got" in done.stdout
    ), done.stdout + done.stderr
