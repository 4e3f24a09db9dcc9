"""Test that TensorFlow's operators with GPU kernels load into a TensorFlow without CUDA.

They are compiled by nvcc and linked as in setup.py.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
import build_cuda  # noqa: E402
import emulation_build  # noqa: E402
import nvcc  # noqa: E402
from check_cuda_operators import tensorflow, toolkit_includes  # noqa: E402
from incremental_build import compile_together  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc: nothing was linked"),
]

#: prints what the runtime knows about the kernels of the library, and the results of the host
#: kernels
USE = """
import ctypes, json, sys
import numpy as np, tensorflow as tf
from tensorflow.python.framework import kernels
library = tf.load_op_library(sys.argv[1])
import deepreduce_hvd as dr
table = lambda codec: np.array([codec.fields(dr.NoMemory())])
supports = ctypes.CDLL(sys.argv[1]).deepreduce_tf_cuda_supports
codecs = [dr.Codec(dr.TopK(0.5), index=dr.Rice(), value=dr.QSGD(bits=4)), dr.Codec(dr.TopK(0.5), index=dr.RLE())]
payload = library.deepreduce_encode(tf.constant([1.0, -5.0, 2.0]), table(codecs[0]), [0] * 4, [], [])
found = {name: {kernel.device_type: [sorted(kernel.host_memory_arg), [str(one.name) for one in kernel.constraint]]
                for kernel in kernels.get_registered_kernels_for_op(name).kernel}
         for name in ("DeepreduceEncode", "DeepreduceDecodeSum", "DeepreduceProbe", "DeepreduceScale", "DeepreduceEncodeSlices")}
print(json.dumps({
    "kernels": found, "supports": [supports(table(codec).ctypes.data_as(ctypes.POINTER(ctypes.c_double))) for codec in codecs],
    "sum": library.deepreduce_decode_sum(payload, np.float64(1), [3], 1, [], [], [], [], T=tf.float32).numpy().tolist(),
    "expected": dr.decode(payload.numpy()).tolist(),
}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    import tensorflow as tf

    path = nvcc.find()
    known = nvcc.known_architectures(path)
    # the architecture of tests/test_gpu_check.py, whose objects are used again
    oldest = next(name for name in nvcc.ARCHITECTURES if name in known)
    objects = build_cuda.build(path, ROOT / "build/cuda_check", [oldest])
    compiler, core = os.environ.get("CXX", "g++"), pathlib.Path("deepreduce_hvd/csrc")
    common = [compiler, "-O0", "-fPIC", "-fvisibility=hidden", f"-I{core}"]
    of_tensorflow = [
        *tensorflow(None),
        *(word for include in toolkit_includes(path) for word in ("-isystem", include)),
    ]

    sources = sorted((ROOT / "tf_ops").rglob("*.cc"))
    objects += compile_together(
        [path.relative_to(ROOT) for path in sources],
        ROOT / "build/cuda_check/host",
        [*common, *of_tensorflow],
        root=ROOT,
    )
    objects += emulation_build.core()
    plan = subprocess.run(
        [path, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    )
    directories = [f"-L{path}" for path in re.findall(r'"-L([^"]+)"', plan.stdout + plan.stderr)]
    made = tmp_path_factory.mktemp("linked") / "operators.so"
    links = [
        *tf.sysconfig.get_link_flags(),
        *directories,
        "-lcudart_static",
        "-ldl",
        "-lrt",
        "-lpthread",
        "-lz",
    ]
    # fails if a symbol is missing
    subprocess.run(
        [
            compiler,
            "-shared",
            *map(str, objects),
            "-Wl,--exclude-libs,ALL,-z,defs",
            *links,
            "-o",
            str(made),
        ],
        check=True,
    )
    return made


def test_it_loads_and_says_where_each_operator_runs(library):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", USE, library],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["supports"] == [1, 0] and found["sum"] == found["expected"]
    kernels = found["kernels"]
    assert kernels["DeepreduceEncode"] == {
        "CPU": [[], []],
        "GPU": [["codec", "memory", "position", "record"], []],
    }
    assert kernels["DeepreduceDecodeSum"] == {
        "CPU": [[], []],
        "GPU": [["hints", "ranks", "scale", "seconds", "shape"], ["T"]],
    }
    assert kernels["DeepreduceScale"] == {
        "CPU": [[], []],
        "GPU": [["loss_scale", "reduced_probe", "scale", "size", "step"], []],
    }
    assert kernels["DeepreduceProbe"] == {
        "CPU": [[], []],
        "GPU": [["loss_scale", "probe", "rank", "step"], []],
    }
    assert list(kernels["DeepreduceEncodeSlices"]) == ["CPU"]


def test_it_needs_no_library_that_a_machine_without_a_gpu_lacks(library):
    needed = re.findall(
        r"NEEDED\s+(\S+)",
        subprocess.run(
            ["objdump", "-p", library], capture_output=True, text=True, check=True
        ).stdout,
    )
    assert not [name for name in needed if "cuda" in name], needed
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert " deepreduce_tf_cuda_supports\n" in exported
    assert not re.findall(r" [TWBD] (cuda\w+|dr_\w+)\n", exported), (
        "what another library has too is exported"
    )
