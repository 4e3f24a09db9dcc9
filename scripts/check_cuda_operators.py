"""Compiles the sources of PyTorch's CUDA operators, no object kept: the check where PyTorch has no CUDA, whose headers are there all the same.

Of the headers only one is missing then, which PyTorch's own build makes of its settings; it is supplied here. Exits with 2 when there is no nvcc.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import build_cuda

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETTINGS = "c10/cuda/impl/cuda_cmake_macros.h"


def toolkit_includes(nvcc):
    """Where nvcc has the headers of the CUDA runtime."""
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"], capture_output=True, text=True, check=True)
    return re.findall(r'"-I([^"]+)"', plan.stdout + plan.stderr)


def main():
    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        print("expected nvcc, with the headers of the CUDA runtime, got none: the CUDA operators were not compiled", file=sys.stderr)
        return 2
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "include"
    with tempfile.TemporaryDirectory() as scratch:
        supplied = pathlib.Path(scratch) / SETTINGS
        supplied.parent.mkdir(parents=True)
        supplied.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
        includes = [torch, torch / "torch/csrc/api/include", *toolkit_includes(nvcc), *([] if (torch / SETTINGS).exists() else [scratch])]
        command = [os.environ.get("CXX", "g++"), "-fsyntax-only", "-std=c++20", "-Wall", "-Wextra", "-Werror"]
        command += ["-Ideepreduce_hvd/csrc", "-Ideepreduce_hvd/csrc/cuda", *(word for path in includes for word in ("-isystem", str(path)))]
        for source in sorted((ROOT / "torch_ops" / "cuda").glob("*.cc")):
            done = subprocess.run([*command, str(source)], cwd=ROOT, check=False)
            print(f"{source.relative_to(ROOT)}: {'compiles' if done.returncode == 0 else 'does not compile'}", flush=True)
            if done.returncode != 0:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
