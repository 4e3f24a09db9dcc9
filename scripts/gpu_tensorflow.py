"""Compare TensorFlow's kernels on a GPU with those of the host.

    export PYTHONPATH=.:tests/support
    python scripts/gpu_tensorflow.py [--small] [--seed N] [--device GPU:0]

The inputs are new in each run. Payloads, memories, sums and a training step are compared. Only the
training step needs Horovod. ``--device CPU:0`` tries the comparison on a machine without a GPU.
The exit status is 2 if there is no GPU, or no kernels for it.
"""

import argparse
import importlib.util
import os
import secrets
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np
import tensorflow as tf
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE
from gpu_differences import Differences, heavy_tailed, inputs

import deepreduce_hvd as dr
from deepreduce_hvd.tensorflow import ops as adapter

HOST = "CPU:0"
DTYPES = ("float32", "float16", "bfloat16", "float64")
SIZES = (1, 3, 8, 33, 257, 4097, 20011)
STEPS = 4
SHAPES = {"first": (300, 200), "second": (200, 70), "bias": (70,)}


def outcome(work):
    """Return the result as an array, or the class and text of its error."""
    try:
        made = work().numpy()
        return (
            np.where(np.isnan(made), np.float32(np.nan), made).tobytes()
            if made.dtype == np.float32
            else made.tobytes()
        )
    except tf.errors.OpError as error:
        return type(error).__name__, adapter._DECORATION.sub("", error.message)


class Comparison(Differences):
    """Compare TensorFlow's operators on the device with those of the host."""

    def same(self, mine, expected, what):
        self.made += 1
        if mine != expected:
            shown = [
                one if isinstance(one, tuple) else f"{len(one)} bytes" for one in (expected, mine)
            ]
            self.failures.append(
                f"{what}: expected {shown[0]}, got "
                f"{shown[1]}{'' if shown[0] != shown[1] else ' that differ'}"
            )

    def codec(self, codec, memory, values, dtype, what):
        """Encode two steps on both sides, add up the payloads, and decode invalid bytes."""
        table = np.array([codec.fields(memory)])
        start = [heavy_tailed(self.random, values.size) * np.float32(0.1) for _ in memory.state]
        sides = []  # of the host, of the device
        for device in (HOST, self.device):
            with tf.device(device):
                sides.append((device, [tf.Variable(part) for part in start]))
        payloads = []
        for step in range(2):
            made = []
            for device, state in sides:
                with tf.device(device):
                    gradient = tf.cast(tf.constant(np.roll(values, step)), dtype)
                    handles = [part.handle for part in state]
                    made.append(
                        adapter.operators.deepreduce_encode(
                            gradient, table, [7, step, 3, 5], handles, []
                        ).numpy()
                    )
            self.same(made[1].tobytes(), made[0].tobytes(), f"{what}: payload of step {step}")
            for name, expected, mine in zip(memory.state, sides[0][1], sides[1][1]):
                self.same(
                    mine.numpy().tobytes(),
                    expected.numpy().tobytes(),
                    f"{what}: {name} after step {step}",
                )
            payloads.append(made[0])
        messages, lengths = np.concatenate(payloads), [payload.size for payload in payloads]
        self.sums(messages, lengths, table, heavy_tailed(self.random, values.size), what)
        if values.size < 5000:
            flipped = messages.copy()
            bit = int(self.random.integers(8 * flipped.size))
            flipped[bit // 8] ^= 1 << bit % 8
            self.sums(
                flipped,
                lengths,
                table,
                heavy_tailed(self.random, values.size),
                f"{what}: bit {bit} flipped",
            )

    def sums(self, messages, lengths, table, start, what):
        def total(device, hints):
            with tf.device(device):
                arguments = (
                    tf.identity(messages),
                    np.float64(0.5),
                    [start.size],
                    len(lengths),
                    [tf.identity(start)],
                    [],
                    [],
                    hints,
                )
                return outcome(
                    lambda: adapter.operators.deepreduce_decode_sum(*arguments, T=tf.float32)
                )

        expected = total(HOST, [])
        for hints in ([], [np.array(lengths, np.int64), table]):
            self.same(total(self.device, hints), expected, f"{what}: sum with {len(hints)} hints")


def compare(device, seed, small):
    random = np.random.default_rng(seed)
    comparison = Comparison(device, random)
    cases = inputs(random, (1, 300) if small else SIZES)
    for index in INDEX:
        for value in VALUE:
            if (
                index == "raw_index"
                or value == "raw_value"
                or (index, value) in (("rice", "qsgd_4"), ("bloom_p2", "fit_poly"))
            ):
                codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
                for case in cases:
                    comparison.codec(
                        codec, dr.Residual(), cases[case], "float32", f"{index} {value} {case}"
                    )
    for memory in MEMORIES:
        for dtype in DTYPES:
            for case in ("empty", "ties", "nan") if small else cases:
                comparison.codec(
                    dr.Codec(dr.TopK(0.05), index=dr.Rice()),
                    MEMORIES[memory],
                    cases[case],
                    dtype,
                    f"{memory} {dtype} {case}",
                )
    for sparsifier in SPARSIFIERS:
        comparison.codec(
            dr.Codec(SPARSIFIERS[sparsifier]), dr.Residual(), cases["ties"], "float32", sparsifier
        )
    if not small:
        codec = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.QSGD(bits=4))
        comparison.codec(codec, dr.Residual(), heavy_tailed(random, 3_000_017), "float32", "large")
    return comparison


def train(device, codec):
    """Train with a tf.function that reduces gradients as Horovod does.

    Returns:
        {name: (value after the last step, residual)}.
    """
    import horovod.tensorflow as hvd

    with tf.device(device):
        variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
    compressor = dr.Compressor(codec, parameters=list(zip(SHAPES, variables)), dense_below=0)

    @tf.function
    def step(*gradients):
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(
                0.1 * hvd.allreduce(tf.identity(gradient), op=hvd.Average, compression=compressor)
            )

    for number in range(STEPS):
        random = np.random.default_rng(number)
        with tf.device(device):
            gradients = [
                tf.constant(heavy_tailed(random, int(np.prod(shape))).reshape(shape))
                for shape in SHAPES.values()
            ]
        # if Horovod's operators have no kernels for the device, they run on the host
        step(*gradients)
    kept = compressor.state_dict()["parameters"]
    return {
        name: (variable.numpy(), np.asarray(kept[name]["memory"]["residual"]))
        for name, variable in zip(SHAPES, variables)
    }


def compare_training(comparison):
    import horovod.tensorflow as hvd

    hvd.init()
    codecs = {
        "recommended": dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.QSGD(bits=4)),
        "Bloom P2, FitPoly": dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.02), value=dr.FitPoly()),
        "Deflate": dr.Codec(dr.TopK(0.05), value=dr.Deflate()),
    }
    for label, codec in codecs.items():
        mine, expected = train(comparison.device, codec), train(HOST, codec)
        for name in SHAPES:
            for what, one, other in zip(("value", "residual"), mine[name], expected[name]):
                comparison.same(
                    one.tobytes(),
                    other.tobytes(),
                    f"{label}: {name}'s {what} after {STEPS} steps of a tf.function",
                )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few and small inputs")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="repeats a run")
    parser.add_argument("--device", default="GPU:0")
    arguments = parser.parse_args()
    # an operator without a kernel for the device must fail, not run on the host
    tf.config.set_soft_device_placement(False)
    if arguments.device != HOST and (
        adapter.cuda_supports is None or not tf.config.list_physical_devices("GPU")
    ):
        kernels = "kernels for CUDA" if adapter.cuda_supports else "no kernels for CUDA"
        print(
            f"expected operators with kernels for CUDA and a GPU, got {kernels} and "
            f"{len(tf.config.list_physical_devices('GPU'))} GPUs"
        )
        sys.exit(2)
    started = time.perf_counter()
    comparison = compare(arguments.device, arguments.seed, arguments.small)
    training = "no training step: Horovod is not installed"
    if importlib.util.find_spec("horovod") is not None:
        compare_training(comparison)
        training = "a training step among them"
    comparison.show()
    print(
        f"{comparison.made} comparisons of TensorFlow on {arguments.device}, "
        f"{len(comparison.failures)} differ; {training}; "
        f"seed {arguments.seed}; {time.perf_counter() - started:.0f} s"
    )
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
