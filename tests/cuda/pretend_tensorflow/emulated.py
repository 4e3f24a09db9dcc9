"""TensorFlow's kernels for GPUs on the host: the sources that setup.py compiles for CUDA, under the
emulator, beside the package's own operators.

They are registered for the host under a label; :func:`labelled` asks for it. Importing this loads
TensorFlow.
"""

import ctypes
import functools
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CORE = pathlib.Path("deepreduce_hvd/csrc")
sys.path.insert(0, str(HERE.parent))

import emulation  # noqa: E402

OPERATORS = ("DeepreduceEncode", "DeepreduceDecodeSum")


def build():
    """Compiles what changed and returns the library's path."""
    emulation.build()
    compiler, objects = os.environ.get("CXX", "g++"), ROOT / "build" / "pretend_cuda"
    flags = [
        "-O1",
        "-g1",
        "-fPIC",
        "-ffp-contract=off",
        "-std=c++17",
        f"-I{HERE}",
        f"-I{CORE}",
        f"-I{ROOT / 'tests/cuda/emulator'}",
    ]
    of_tensorflow = [
        word
        for flag in tf.sysconfig.get_compile_flags()
        for word in (("-isystem", flag[2:]) if flag.startswith("-I") else (flag,))
    ]
    newest_header = max(
        path.stat().st_mtime
        for top in (ROOT / CORE, ROOT / "tf_ops", HERE)
        for path in top.rglob("*.h")
    )

    def compile_one(source):
        made = objects / f"{source}.o"
        made.parent.mkdir(parents=True, exist_ok=True)
        if not made.exists() or made.stat().st_mtime < max(
            newest_header, (ROOT / source).stat().st_mtime
        ):
            extra = [] if source in core else ["-Wall", "-Wextra", "-Werror", *of_tensorflow]
            subprocess.run(
                [compiler, *flags, *extra, "-c", str(source), "-o", str(made)], cwd=ROOT, check=True
            )
        return made

    core = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / CORE).rglob("*.cc"))
        if path.name != "python.cc" and "cuda" not in path.parts
    ]
    kernels = [path.relative_to(ROOT) for path in sorted((ROOT / "tf_ops/cuda").glob("*.cc"))]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(compile_one, [*kernels, *core]))
    # of the device's kernels and the emulator
    made += [
        ROOT / "build/cuda_emulation" / f"{'_'.join(path.relative_to(ROOT).parts)}.o"
        for path in emulation.sources()
        if path.suffix == ".cu" or path.name == "scheduler.cc"
    ]
    library = objects / f"tensorflow-{tf.__version__}.so"
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in made):
        links = [*tf.sysconfig.get_link_flags(), "-lz"]
        subprocess.run(
            [
                compiler,
                "-shared",
                *map(str, made),
                "-Wl,-Bsymbolic,--exclude-libs,ALL",
                *links,
                "-o",
                str(library),
            ],
            check=True,
        )
    return library


@functools.lru_cache(maxsize=1)
def load():
    """Registers the kernels; returns the library as ctypes has it."""
    path = str(build())
    tf.load_op_library(path)
    return ctypes.CDLL(path)


def supports(fields):
    """As :func:`deepreduce_hvd.tensorflow.ops.cuda_supports` in a build for CUDA."""
    fields = np.array(fields, dtype=np.float64)
    return bool(
        load().deepreduce_tf_cuda_supports(fields.ctypes.data_as(ctypes.POINTER(ctypes.c_double)))
    )


def labelled(operator):
    """The operator of this name, with the kernel for GPUs, in eager execution too."""
    load()

    def call(*arguments, **attributes):
        def build_it():
            with tf.compat.v1.get_default_graph()._kernel_label_map(
                dict.fromkeys(OPERATORS, "emulated")
            ):
                return operator(*arguments, **attributes)

        return tf.function(build_it, autograph=False)() if tf.executing_eagerly() else build_it()

    return call


class Operators:
    """The package's operators, with the kernels for GPUs where there are such; notes which were
    asked for.
    """

    def __init__(self, operators):
        self._operators = operators
        self.asked_for = []

    def __getattr__(self, name):
        operator = getattr(self._operators, name)
        if name not in ("deepreduce_encode", "deepreduce_decode_sum"):
            return operator
        self.asked_for.append(name)
        return labelled(operator)
