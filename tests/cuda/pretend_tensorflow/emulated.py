"""Run TensorFlow's GPU kernels on the host, under the emulator.

They are built from the sources that setup.py compiles for CUDA, and used beside the package's own
operators. They are registered for the host under a label; :func:`labelled` selects it. Importing
this module loads TensorFlow.
"""

import ctypes
import functools
import pathlib

import emulation_build
import numpy as np
import tensorflow as tf
from incremental_build import with_system_headers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OPERATORS = ("DeepreduceEncode", "DeepreduceDecodeSum")


def build():
    """Compile what has changed, and return the path of the library."""
    of_tensorflow = with_system_headers(tf.sysconfig.get_compile_flags())
    includes = [f"-I{path}" for path in (HERE, *emulation_build.INCLUDES)]
    options = ["-O1", "-Wall", "-Wextra", "-Werror", *includes, *of_tensorflow]
    kernels = sorted((ROOT / "tf_ops/cuda").glob("*.cc"))
    made = emulation_build.compile_sources(
        kernels, "pretend_cuda/tensorflow", options, together=True
    )
    made += emulation_build.kernels_and_core()
    links = ["-Wl,-Bsymbolic,--exclude-libs,ALL", *tf.sysconfig.get_link_flags(), "-lz"]
    library = ROOT / f"build/pretend_cuda/tensorflow-{tf.__version__}.so"
    return emulation_build.link(library, made, links)


@functools.lru_cache(maxsize=1)
def load():
    """Register the kernels; return the ctypes library."""
    path = str(build())
    tf.load_op_library(path)
    return ctypes.CDLL(path)


def supports(fields):
    """Return what :func:`deepreduce_hvd.tensorflow.ops.cuda_supports` returns in a CUDA build."""
    fields = np.array(fields, dtype=np.float64)
    return bool(
        load().deepreduce_tf_cuda_supports(fields.ctypes.data_as(ctypes.POINTER(ctypes.c_double)))
    )


def labelled(operator):
    """Return the operator of this name with the GPU kernel, also in eager execution."""
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
    """The operators of the package, with GPU kernels where they exist.

    Records which were requested.
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
