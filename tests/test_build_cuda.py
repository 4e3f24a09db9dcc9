"""Test the CUDA decisions of setup.py, with stand-ins for nvcc, PyTorch and TensorFlow."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from test_build import ROOT, package  # noqa: F401

KERNEL = 'extern "C" int kernel() { return 1; }\n'
#: a stand-in for nvcc that answers, records its calls, and compiles with g++
NVCC = """#!{python}
import pathlib, subprocess, sys
words = sys.argv[1:]
if "--version" in words:
    print("Cuda compilation tools, release {version}, V{version}.88")
elif "--list-gpu-arch" in words:
    print("{listed}")
elif "--dryrun" in words:
    print('#$ INCLUDES="-I{toolkit}/include"\\n#$ LIBRARIES= "-L{toolkit}/lib"', file=sys.stderr)
else:
    with open("{toolkit}/calls", "a") as calls:
        calls.write(" ".join(words) + "\\n")
    out, source = words[words.index("-o") + 1], words[words.index("-c") + 1]
    pathlib.Path(words[words.index("-MF") + 1]).write_text(f"{{out}} : {{source}}\\n")
    sys.exit(subprocess.run(["g++", "-fPIC", "-x", "c++", "-c", source, "-o", out]).returncode)
"""
TORCH = """
__version__ = "{version}"
class version: cuda = {cuda!r}
def compiled_with_cxx11_abi(): return True
"""
TENSORFLOW = """
__version__ = "{version}"
class sysconfig:
    get_compile_flags = staticmethod(lambda: ["-DTHEIRS=1"])
    get_link_flags = staticmethod(lambda: [])
    get_build_info = staticmethod(lambda: {info!r})
class test: is_built_with_cuda = staticmethod(lambda: {info!r} != {{}})
"""
#: a GPU kernel of TensorFlow that checks the options it is compiled with
KERNELS = """
#include <runtime.h>
#include <where_they_run.h>
#if !GOOGLE_CUDA || !THEIRS
#error "expected TensorFlow's flags"
#endif
int cuda_kernels() { return RUNTIME; }
"""


@pytest.fixture
def machine(package, tmp_path_factory):  # noqa: F811
    """The small package with kernels and operators.

    Also returns functions that install stand-ins for given versions of PyTorch and nvcc.
    """
    for name, text in {
        # nothing here loads the module, and pybind11's headers take two seconds to compile
        "deepreduce_hvd/csrc/api/python.cc": "int python() { return 1; }\n",
        "deepreduce_hvd/csrc/cuda/kernel.cu": KERNEL,
        "torch_ops/ops.cc": "int ops() { return 1; }\n",
        "torch_ops/cuda/ops.cc": "#include <runtime.h>\nint cuda_ops() { return RUNTIME; }\n",
        "tf_ops/ops.cc": "#if GOOGLE_CUDA\nint placed() { return 1; }\n#endif\n",
        "tf_ops/cuda/kernels.cc": KERNELS,
        "tf_ops/cuda/gpu/where_they_run.h": "",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", package / "bare"], check=True)
    site = next((package / "bare/lib").glob("python*/site-packages"))
    for name in ("setuptools", "pybind11", "_distutils_hack"):
        (site / name).symlink_to(Path(__import__(name).__file__).parent)
    toolkit = tmp_path_factory.mktemp("toolkit")

    class Machine:
        root, calls, home = package, toolkit / "calls", toolkit

        @staticmethod
        def library(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", path], check=True)

        def install_torch(self, cuda, version="2.9.0"):
            (site / "torch/include").mkdir(parents=True)
            (site / "torch/__init__.py").write_text(TORCH.format(version=version, cuda=cuda))
            for name in ("torch", "torch_cpu", "c10", "c10_cuda"):
                self.library(site / f"torch/lib/lib{name}.so")

        def install_tensorflow(self, cuda, version="2.18.1"):
            (site / "tensorflow").mkdir()
            info = {} if cuda is None else {"cuda_version": cuda}
            (site / "tensorflow/__init__.py").write_text(
                TENSORFLOW.format(version=version, info=info)
            )

        def install_nvcc(self, version="13.0", listed=("75", "80", "86", "89", "90", "100")):
            (toolkit / "include").mkdir()
            (toolkit / "include/runtime.h").write_text("#define RUNTIME 1\n")
            self.library(toolkit / "lib/libcudart.so")
            subprocess.run(["ar", "rcs", toolkit / "lib/libcudart_static.a"], check=True)
            (toolkit / "bin").mkdir()
            nvcc = toolkit / "bin/nvcc"
            nvcc.write_text(
                NVCC.format(
                    python=sys.executable,
                    version=version,
                    toolkit=toolkit,
                    listed="\\n".join(f"compute_{n}" for n in listed),
                )
            )
            nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)

        def build(self, **environment):
            hidden = ("PYTHONPATH", "CUDACXX", "CUDA_PATH")
            variables = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("DEEPREDUCE_") and name not in hidden
            }
            variables |= {"CXXFLAGS": "-O0", "CUDA_HOME": str(toolkit), **environment}
            command = [package / "bare/bin/python", "setup.py", "-q", "build_ext", "--inplace"]
            return subprocess.run(
                command, cwd=package, env=variables, capture_output=True, text=True
            )

        def symbols(self, library):
            command = ["nm", "-C", package / "deepreduce_hvd" / library]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        def codes(self):
            """Return the architectures that each kernel was compiled for."""
            return [
                [
                    word.removeprefix("-gencode=")
                    for word in call.split()
                    if word.startswith("-gencode")
                ]
                for call in self.calls.read_text().splitlines()
            ]

    return Machine()


def test_kernels_are_compiled_and_linked_into_the_operators(machine):
    machine.install_torch("13.0")
    machine.install_nvcc()
    done = machine.build(DEEPREDUCE_WITH_CUDA="1")
    assert done.returncode == 0, done.stderr
    assert "nvcc 13.0 does not compile for 7.0: left out" in done.stdout
    expected = [f"arch=compute_{number},code=sm_{number}" for number in (75, 80, 86, 89, 90)] + [
        "arch=compute_90,code=compute_90"
    ]
    assert machine.codes() == [expected]
    for flag in ("--fmad=false", "-std=c++17", "-O3"):
        assert flag in machine.calls.read_text().split()
    names = machine.symbols("_torch_ops-2.9.0.so")
    assert " kernel" in names and "cuda_ops()" in names
    needed = subprocess.run(
        ["objdump", "-p", machine.root / "deepreduce_hvd/_torch_ops-2.9.0.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "RUNPATH" not in needed and "RPATH" not in needed
    again = machine.build(DEEPREDUCE_WITH_CUDA="1")
    assert "compiling 1" not in again.stdout and "linked" not in again.stdout
    without = machine.build(DEEPREDUCE_WITHOUT_CUDA="1")
    assert (
        "skipping the CUDA operators: DEEPREDUCE_WITHOUT_CUDA=1" in without.stdout
        and "linked deepreduce_hvd._torch_ops" in without.stdout
    )


TORCH_WITHOUT = "expected PyTorch with CUDA, got PyTorch 2.9.0, which is built without"
TENSORFLOW_WITHOUT = "expected TensorFlow with CUDA, got TensorFlow 2.18.1, which is built without"


@pytest.mark.parametrize(
    ("torch", "tensorflow", "lines"),
    [
        (
            "13.0",
            "13.1",
            [
                "building the CUDA operators for PyTorch with",
                "building the CUDA operators for TensorFlow with",
            ],
        ),
        (
            "13.0",
            None,
            [
                "building the CUDA operators for PyTorch with",
                f"skipping the CUDA operators for TensorFlow: {TENSORFLOW_WITHOUT}\n",
            ],
        ),
        (
            None,
            "13.0",
            [
                f"skipping the CUDA operators for PyTorch: {TORCH_WITHOUT}\n",
                "building the CUDA operators for TensorFlow with",
            ],
        ),
        (
            "13.0",
            "12.5.1",
            [
                "building the CUDA operators for PyTorch with",
                "for TensorFlow: expected nvcc of CUDA 12 as TensorFlow 2.18.1 has, got",
            ],
        ),
    ],
)
def test_each_framework_has_kernels_where_it_can(machine, torch, tensorflow, lines):
    machine.install_torch(torch)
    machine.install_tensorflow(tensorflow)
    machine.install_nvcc()
    done = machine.build(DEEPREDUCE_WITH_CUDA="1", DEEPREDUCE_CUDA_ARCHITECTURES="9.0")
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in lines), done.stdout
    assert len(machine.codes()) == 1, "the kernels were compiled twice"
    for library, line in (("_torch_ops-2.9.0.so", lines[0]), ("_tf_ops-2.18.1.so", lines[1])):
        assert (" kernel" in machine.symbols(library)) == line.startswith("building")
    names = machine.symbols("_tf_ops-2.18.1.so")
    assert ("cuda_kernels()" in names) == ("placed()" in names) == lines[1].startswith("building")


def test_tensorflow_alone(machine):
    machine.install_tensorflow("13.0")
    machine.install_nvcc()
    done = machine.build(DEEPREDUCE_WITH_CUDA="1")
    assert done.returncode == 0 and "cuda_kernels()" in machine.symbols("_tf_ops-2.18.1.so"), (
        done.stderr
    )


def test_neither_framework_with_cuda_is_an_error_when_asked_for(machine):
    machine.install_torch(None)
    machine.install_tensorflow(None)
    machine.install_nvcc()
    skipped = machine.build()
    assert (
        f"skipping the CUDA operators: {TORCH_WITHOUT}; {TENSORFLOW_WITHOUT}\n" in skipped.stdout
        and skipped.returncode == 0
    )
    asked = machine.build(DEEPREDUCE_WITH_CUDA="1")
    assert (
        asked.returncode != 0
        and f"DEEPREDUCE_WITH_CUDA=1: {TORCH_WITHOUT}; {TENSORFLOW_WITHOUT}\n" in asked.stderr
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("8.0", ["arch=compute_80,code=sm_80"]),
        (
            "8.0;9.0a+PTX",
            [
                "arch=compute_80,code=sm_80",
                "arch=compute_90a,code=sm_90a",
                "arch=compute_90a,code=compute_90a",
            ],
        ),
        (
            "10.0, 7.5+PTX",
            [
                "arch=compute_100,code=sm_100",
                "arch=compute_75,code=sm_75",
                "arch=compute_75,code=compute_75",
            ],
        ),
    ],
)
def test_architectures_that_are_asked_for(machine, asked, expected):
    machine.install_torch("13.1")
    machine.install_nvcc()
    done = machine.build(DEEPREDUCE_CUDA_ARCHITECTURES=asked)
    assert done.returncode == 0 and machine.codes() == [expected], done.stderr


@pytest.mark.parametrize("asked", ["7.0", "sm_80", "8.0+ptx"])
def test_unknown_architectures_are_refused(machine, asked):
    machine.install_torch("13.0")
    machine.install_nvcc()
    done = machine.build(DEEPREDUCE_CUDA_ARCHITECTURES=asked)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert (
        f"expected some of 7.5 8.0 8.6 8.9 9.0 10.0, each with +PTX or without, got '{asked}'"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("torch", "nvcc", "reason"),
    [
        (None, "13.0", "expected PyTorch or TensorFlow with CUDA, got the operators of neither"),
        (
            {"cuda": None, "version": "2.9.0+cpu"},
            "13.0",
            "expected PyTorch with CUDA, got PyTorch 2.9.0+cpu, which is built without",
        ),
        ({"cuda": "13.0"}, None, "expected nvcc, got none from CUDA_HOME={home}"),
        (
            {"cuda": "12.8"},
            "13.0",
            "expected nvcc of CUDA 12 as PyTorch 2.9.0 has, got {home}/bin/nvcc of CUDA 13.0",
        ),
        (
            None,
            None,
            (
                "expected PyTorch or TensorFlow with CUDA, got the operators of neither; "
                "expected nvcc, got none from CUDA_HOME={home}"
            ),
        ),
    ],
)
def test_what_is_missing_is_a_skip_in_one_line_and_an_error_when_asked_for(
    machine, torch, nvcc, reason
):
    if torch is not None:
        machine.install_torch(**torch)
    if nvcc is not None:
        machine.install_nvcc(nvcc)
    reason = reason.format(home=machine.home)
    skipped = machine.build()
    assert skipped.returncode == 0, skipped.stderr
    assert f"deepreduce_hvd: skipping the CUDA operators: {reason}\n" in skipped.stdout
    asked = machine.build(DEEPREDUCE_WITH_CUDA="1")
    assert (
        asked.returncode != 0
        and f"DEEPREDUCE_WITH_CUDA=1: {reason}\n" in asked.stderr
        and "Traceback" not in asked.stderr
    )


def test_both_switches_are_refused(machine):
    done = machine.build(DEEPREDUCE_WITH_CUDA="1", DEEPREDUCE_WITHOUT_CUDA="1")
    assert (
        done.returncode != 0
        and "DEEPREDUCE_WITH_CUDA and DEEPREDUCE_WITHOUT_CUDA: expected one of them, got both"
        in done.stderr
    )
