"""Compile PyTorch's and TensorFlow's operators with CUDA, as a check without CUDA builds.

The sources of each folder are compiled as one, as setup.py does. No object is kept. PyTorch and
TensorFlow without CUDA still have almost all of the headers. The one header missing in PyTorch,
which its own build generates from its settings, is supplied here. The exit status is 2 if there is
no nvcc.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import nvcc
from incremental_build import join, with_system_headers

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETTINGS = "c10/cuda/impl/cuda_cmake_macros.h"


def toolkit_includes(path):
    """Return the directories where nvcc has the headers of the CUDA runtime."""
    plan = subprocess.run(
        [path, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    )
    return re.findall(r'"-I([^"]+)"', plan.stdout + plan.stderr)


def pytorch(scratch):
    """Return the compiler options for PyTorch's operators."""
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "include"
    supplied = pathlib.Path(scratch) / SETTINGS
    supplied.parent.mkdir(parents=True)
    supplied.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    includes = [
        torch,
        torch / "torch/csrc/api/include",
        *([] if (torch / SETTINGS).exists() else [scratch]),
    ]
    return ["-std=c++20", *(word for path in includes for word in ("-isystem", str(path)))]


def tensorflow(_):
    """Return the compiler options for TensorFlow's operators."""
    question = "import tensorflow; print(*tensorflow.sysconfig.get_compile_flags(), sep='\\n')"
    answer = subprocess.run(
        [sys.executable, "-c", question],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    flags = with_system_headers(answer.stdout.split())
    return [*flags, "-DGOOGLE_CUDA=1", "-Itf_ops/cuda/gpu"]


def main():
    path = nvcc.find()
    if path is None:
        print(
            (
                "expected nvcc, with the headers of the CUDA runtime, got none: the CUDA "
                "operators were not compiled"
            ),
            file=sys.stderr,
        )
        return 2
    compiler = [
        os.environ.get("CXX") or "g++",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Ideepreduce_hvd/csrc",
    ]
    compiler += [word for folder in toolkit_includes(path) for word in ("-isystem", folder)]
    for name, top, settings in (
        ("torch", "torch_ops", pytorch),
        ("tensorflow", "tf_ops", tensorflow),
    ):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: its CUDA operators were not compiled", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            options = settings(scratch)
            for folder in (top, f"{top}/cuda"):
                sources = sorted((ROOT / folder).glob("*.cc"))
                joined = pathlib.Path(scratch) / folder / "joined.cc"
                join(sources, joined)
                done = subprocess.run([*compiler, *options, str(joined)], cwd=ROOT, check=False)
                if done.returncode != 0:
                    print(f"{folder}: does not compile", flush=True)
                    return 1
                print(f"{folder}: {len(sources)} sources compile", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
