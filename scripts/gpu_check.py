"""Check this package on a GPU: build, compare byte by byte, run the sanitizer, measure.

Needs a GPU, nvcc and a PyTorch with CUDA, and no network. If a TensorFlow for CUDA is installed
too, its kernels are built and compared.

    make gpu-check                      about 5 minutes with 16 cores, a third of it compiling
    python scripts/gpu_check.py --dry-run    without a GPU: compiles everything, tries the scripts on the host, says what was not run

The check uses the Python that it is started with (make gpu-check PYTHON=...) and the PyTorch in it.
It writes results/gpu.json and gpu.png.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import nvcc
from gpu_parts import FOLDERS, ROOT, Parts, Stop, expect_success, part, run, say, script

#: modules that a build needs, by import name
MODULES = ("torch", "numpy", "setuptools")
OLDEST_SETUPTOOLS = 77  # the first that supports pyproject.toml
#: messages of a sanitizer that does not work on this machine; these are not failures of the checked
#: program
UNSUPPORTED = (
    "Device not supported",
    "LibraryNotLoaded",
    "Unable to find injection library",
    "Operation not permitted",
    "not supported on",
)
#: beginnings of what sanitizers find
FOUND = ("========= Invalid", "========= Error", "========= Program hit")
SANITIZER_SECONDS = 90
DDP_SECONDS = 120
#: programs for two ranks
RANK_SCRIPTS = (
    "scripts/gpu_ranks.py",
    *(f"tests/cuda/pretend/{name}.py" for name in ("tables", "steps")),
)
CANNOT = 2  # exit status of gpu_tensorflow.py if there is nothing to compare


def expect_modules():
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise Stop(
            f"expected the modules {', '.join(MODULES)} in {sys.executable}, got no "
            f"{', '.join(missing)}; name another with make gpu-check PYTHON=..."
        )
    version = importlib.metadata.version("setuptools")
    if int(version.partition(".")[0]) < OLDEST_SETUPTOOLS:
        raise Stop(
            f"expected setuptools of at least {OLDEST_SETUPTOOLS} in {sys.executable}, "
            f"got {version}"
        )


def gpu():
    """Return name, architecture such as "9.0" and PyTorch's CUDA version of the first GPU.

    Raises:
        Stop: there is no GPU.
    """
    import torch

    if torch.version.cuda is None:
        raise Stop(
            f"expected a PyTorch with CUDA, got {torch.__version__}; --dry-run runs what "
            "works without one"
        )
    if not torch.cuda.is_available():
        raise Stop(
            f"expected a GPU that PyTorch {torch.__version__} can use, got none; "
            "--dry-run runs what works without one"
        )
    major, minor = torch.cuda.get_device_capability(0)
    return torch.cuda.get_device_name(0), f"{major}.{minor}", torch.version.cuda


def why_no_tensorflow():
    """Return why TensorFlow's kernels cannot be built and compared, or None."""
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow is not installed"
    question = (
        "import tensorflow as tf; print(tf.__version__, "
        "tf.sysconfig.get_build_info().get('cuda_version'), "
        "len(tf.config.list_physical_devices('GPU')))"
    )
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    answer = subprocess.run(
        [sys.executable, "-c", question],
        env=variables,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        return (
            "TensorFlow does not load: "
            f"{(answer.stderr.strip() or 'it says nothing').splitlines()[-1]}"
        )
    version, cuda, gpus = answer.stdout.splitlines()[-1].split()
    if cuda == "None":
        return f"TensorFlow {version} is built without CUDA"
    return None if gpus != "0" else f"TensorFlow {version} finds no GPU"


def build(architecture, with_tensorflow=False):
    if nvcc.find() is None:
        raise Stop(
            "expected nvcc as $CUDACXX or in $CUDA_HOME/bin, $CUDA_PATH/bin, PATH or"
            " /usr/local/cuda/bin, got none"
        )
    expect_success(
        "build",
        run(
            sys.executable, "setup.py", "-q", "build_ext", "--inplace", DEEPREDUCE_WITH_CUDA="1",
            DEEPREDUCE_WITH_PYTORCH="1",
            DEEPREDUCE_CUDA_ARCHITECTURES=architecture,
            **{f"DEEPREDUCE_WITH{'' if with_tensorflow else 'OUT'}_TENSORFLOW": "1"},
        ),
    )  # fmt: skip


def sanitize(tool):
    """Run the small comparisons under compute-sanitizer; return why they did not run, or None."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if sanitizer is None:
        return "compute-sanitizer is not installed"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99", "--launch-timeout", "60"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # PyTorch asks for functions that may not exist
    command += [sys.executable, "scripts/gpu_equality.py", "--small", "--seed", "1"]
    # PyTorch's caching allocator would hide accesses outside of an allocation
    variables = {**os.environ, "PYTHONPATH": FOLDERS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryFile("w+") as written:
        # a session of its own, to stop the checked program too
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            started.wait(SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        written.seek(0)
        output = written.read()
    return verdict_of(tool, started.returncode, output)


def verdict_of(tool, status, output):
    """Return why a sanitizer did not check the program to its end, or None if it found nothing.

    Raises:
        Stop: it found an error.
    """
    summary = "SUMMARY" in output
    if not summary:
        unsupported = next(
            (
                line.strip()
                for line in output.splitlines()
                if any(words in line for words in UNSUPPORTED)
            ),
            None,
        )
        if unsupported is not None:
            return f"it does not work on this machine: {unsupported}"
    print(output[-3000:], flush=True)
    if status == -signal.SIGKILL and not any(words in output for words in FOUND):
        return f"it found nothing in {SANITIZER_SECONDS} s, and did not end"
    if status != 0:
        raise Stop(f"compute-sanitizer {tool}: expected exit status 0, got {status}")
    return None


def ranks():
    """Compare two ranks on this GPU with two on the host; return why they did not run, or None."""
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed"
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    if not launcher.exists():
        return f"there is no {launcher}"
    for path in RANK_SCRIPTS:
        expect_success(path, run(launcher, "-np", 2, sys.executable, path, timeout=90))
    return None


def ddp(backend, ranks, device="cuda:0"):
    """Compare DDP on this GPU with DDP on the host; return why it did not run, or None."""
    import torch.distributed

    if not getattr(torch.distributed, f"is_{backend}_available")():
        return f"this PyTorch has no {backend}"
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    script = ("scripts/gpu_ddp.py", backend, "--device", device)
    expect_success(
        f"DDP with {backend}", run(sys.executable, *launcher, *script, timeout=DDP_SECONDS)
    )
    return None


def tensorflow(architecture):
    """Compare TensorFlow's kernels on the GPU with the host's; return why not, or None."""
    reason = why_no_tensorflow()
    if reason is not None:
        return reason
    build(architecture, with_tensorflow=True)
    variables = {**os.environ, "PYTHONPATH": FOLDERS}
    done = subprocess.run(
        [sys.executable, "scripts/gpu_tensorflow.py"],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode == CANNOT:
        return done.stdout.strip().splitlines()[-1]
    expect_success("scripts/gpu_tensorflow.py", done)
    return None


def check():
    expect_modules()
    name, architecture, cuda = gpu()
    say(f"{name}, architecture {architecture}, CUDA {cuda}, {os.cpu_count()} cores")
    with part(
        f"building for architecture {architecture}", "1 to 2 minutes with 16 cores, the first time"
    ):
        build(architecture)
    parts = Parts()
    parts.run(
        "comparing the GPU with the host byte by byte, on random inputs",
        "about 1 minute",
        lambda: script("scripts/gpu_equality.py"),
    )
    parts.run("measuring", "1 minute", lambda: script("benchmarks/gpu.py"))
    parts.run("two ranks on this GPU against two on the host", "half a minute", ranks)
    # NCCL needs a GPU for each rank
    for backend, ranks_here in (("gloo", 2), ("nccl", 1)):
        parts.run(
            f"DDP with {backend}, {ranks_here} ranks on this GPU, against the host",
            "half a minute",
            functools.partial(ddp, backend, ranks_here),
        )
    parts.run(
        "TensorFlow's operators: building, comparing the GPU with the host",
        "2 minutes",
        functools.partial(tensorflow, architecture),
    )
    for tool in ("memcheck", "racecheck"):
        parts.run(
            f"compute-sanitizer {tool} on small inputs",
            f"at most {SANITIZER_SECONDS} s",
            functools.partial(sanitize, tool),
        )
    if parts.failed:
        raise Stop(f"{len(parts.failed)} parts: {'; '.join(parts.failed)}")
    return parts.not_run


def dry_run(architectures):
    """Do what is possible on a machine without a GPU."""
    expect_modules()
    not_run = []
    if nvcc.find() is None:
        not_run.append("compiling the CUDA sources: nvcc is missing")
    else:
        with part(
            f"compiling every kernel with nvcc for {' '.join(architectures)}",
            "minutes on few cores",
        ):
            options = ("--architectures", *architectures, "--folder", "build/cuda_check")
            expect_success("kernels", run(sys.executable, "scripts/build_cuda.py", *options))
        with part("compiling the operators against PyTorch's and TensorFlow's headers", "a minute"):
            expect_success("operators", run(sys.executable, "scripts/check_cuda_operators.py"))
    if not list((ROOT / "deepreduce_hvd").glob("_torch_ops-*.so")):
        not_run.append(
            "trying the scripts on the host: the PyTorch operators are not built here "
            "(python setup.py build_ext --inplace)"
        )
    else:
        with part("trying the comparison on the host, which does not test the GPU", "a minute"):
            expect_success(
                "comparison",
                run(sys.executable, "scripts/gpu_equality.py", "--small", "--device", "cpu"),
            )
        with part("trying DDP on the host, which does not test the GPU", "10 s"):
            ddp("gloo", 2, device="cpu")
        with (
            tempfile.TemporaryDirectory() as scratch,
            part("trying the measurements on the host, with meaningless figures", "some seconds"),
        ):
            options = (
                "--device",
                "cpu",
                "--elements",
                100_000,
                "--repeats",
                1,
                "--output",
                pathlib.Path(scratch) / "gpu.json",
            )
            expect_success("benchmark", run(sys.executable, "benchmarks/gpu.py", *options))
    if not list((ROOT / "deepreduce_hvd").glob("_tf_ops-*.so")):
        not_run.append(
            "trying TensorFlow's comparison on the host: the TensorFlow operators are not "
            "built here"
        )
    else:
        with part(
            "trying TensorFlow's comparison on the host, which does not test the GPU",
            "half a minute",
        ):
            expect_success(
                "comparison",
                run(sys.executable, "scripts/gpu_tensorflow.py", "--small", "--device", "CPU:0"),
            )
    not_run += [
        "linking and loading the CUDA operators", "byte-equality of the GPU with the host",
        "compute-sanitizer memcheck and racecheck",
        "two ranks on one GPU", "DDP on a GPU", "TensorFlow's kernels on a GPU",
        "every measurement on a GPU; results/gpu.json and gpu.png are unchanged",
    ]  # fmt: skip
    return not_run


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="run only what works without a GPU")
    parser.add_argument(
        "--architectures",
        nargs="+",
        default=["9.0"],
        help="architectures for which a dry run compiles",
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    try:
        not_run = dry_run(arguments.architectures) if arguments.dry_run else check()
    except (Stop, subprocess.TimeoutExpired) as stop:
        say(f"FAILED: {stop}")
        return 1
    for what in not_run:
        say(f"NOT RUN: {what}")
    say(
        f"{'dry run' if arguments.dry_run else 'everything that was run passed'}: "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
