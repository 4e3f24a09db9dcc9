"""Find nvcc, list its architectures, and give the options that keep payloads bit-identical.

setup.py and the scripts that compile CUDA sources share this file. It needs only Python.
"""

import os
import re
import shutil
import subprocess

#: options for the same float32 and float64 results as on the host: no fused multiply-add, no
#: flushing of denormals, exact division and square root
EXACT = ("--fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
#: architectures that are compiled for by default; of the last one PTX is kept too, for later
#: devices
ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0")


def look():
    """Return nvcc's path and None, or None and a text that says where it was searched."""
    for variable, path in (
        ("CUDACXX", "{}"),
        ("CUDA_HOME", "{}/bin/nvcc"),
        ("CUDA_PATH", "{}/bin/nvcc"),
    ):
        if os.environ.get(variable):
            found = shutil.which(path.format(os.environ[variable]))
            return found, None if found else f"none from {variable}={os.environ[variable]}"
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return found, None if found else "none on PATH or in /usr/local/cuda/bin"


def find():
    """Return nvcc's path, or None."""
    return look()[0]


def known_architectures(nvcc):
    """Return the architectures that this nvcc compiles for, such as {"7.5", "9.0"}."""
    listed = subprocess.run(
        [nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout
    return {f"{number[:-1]}.{number[-1]}" for number in re.findall(r"compute_(\d+)", listed)}


def code_options(architecture, ptx=False):
    """Return nvcc's options for one architecture, such as 9.0 or 9.0a.

    With ``ptx``, PTX for later devices is included.
    """
    number = architecture.replace(".", "")
    options = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    return [*options, f"-gencode=arch=compute_{number},code=compute_{number}"] if ptx else options
