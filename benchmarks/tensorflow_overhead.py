"""Measure what TensorFlow adds to the core: ResNet-50's 161 gradients in one tf.function step.

    python benchmarks/tensorflow_overhead.py            one process: the step against the core's own encode and decode, one thread
    python benchmarks/tensorflow_overhead.py --ranks 2  under horovodrun: the step against Horovod's none and fp16

Writes results/bench-tensorflow.json. The gradients of the step's loss are prepared arrays with
log-normal magnitudes. The same step without a reduction is timed and subtracted.
"""

import argparse
import json
import os
import sys
import time

from folders import EXAMPLES, ROOT, module_at

RESULT = ROOT / "results" / "bench-tensorflow.json"


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="1 (default) compares with the core, more with Horovod's none and fp16",
    )
    parser.add_argument(
        "--steps", type=int, default=15, help="timed steps of each kind (default 15)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def reduce_on_one_rank(hvd):
    """Let Horovod reduce and compress gradients on one rank too, where it returns them as they are.

    Args:
        hvd: the module ``horovod.tensorflow``.
    """
    hvd._allreduce_cond = hvd.allreduce
    hvd._grouped_allreduce_cond = hvd.grouped_allreduce


def measure(options):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import horovod.tensorflow as hvd
    import numpy as np
    import resnet50
    import tensorflow as tf
    from measure import default_codec, heavy_tailed, row, write

    import deepreduce_hvd as dr
    from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

    hvd.init()
    if options.ranks == 1:
        reduce_on_one_rank(hvd)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    shapes = resnet50.shapes()
    arrays = [
        heavy_tailed(int(np.prod(shape)), number + 1000 * hvd.rank()).reshape(shape)
        for number, (_, shape) in enumerate(shapes)
    ]
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes]
    gradients = [tf.constant(array) for array in arrays]
    codecs = {
        "Rice, 32-bit values": dr.Codec(dr.TopK(0.01), index=dr.Rice()),
        "default": default_codec(),
    }
    if options.ranks > 1:
        codecs["default by size"] = None  # with small tensors, which a codec that is given leaves

    def step_of(compression, groups):
        @tf.function
        def step(one):
            with tf.GradientTape() as tape:
                loss = tf.add_n(
                    [
                        tf.reduce_sum(variable * (gradient * one))
                        for variable, gradient in zip(variables, gradients)
                    ]
                )
            if compression is not None:
                tape = hvd.DistributedGradientTape(
                    tape, compression=compression, groups=1 if groups else None
                )
            return tape.gradient(loss, variables)  # TensorFlow does not compute unused results

        return step

    def core_of(codec):
        states = [np.zeros(array.size, np.float32) for array in arrays]
        out = np.zeros(max(array.size for array in arrays), np.float32)
        thresholds = [0.0] * len(arrays)
        count = 0

        def step(one):
            nonlocal count
            for number, array in enumerate(arrays):
                if array.size >= 1024:
                    payload, thresholds[number] = encode_numpy(
                        codec,
                        dr.Residual(),
                        array.reshape(-1),
                        (states[number],),
                        thresholds[number],
                        0,
                        count,
                        number,
                        0,
                    )
                    decode_sum_numpy([payload], out[: array.size], 1.0)
            count += 1

        return step

    steps = {"nothing": step_of(None, False)}
    if options.ranks > 1:
        steps["Horovod none"] = step_of(hvd.Compression.none, False)
        steps["Horovod fp16"] = step_of(hvd.Compression.fp16, False)
    for name, codec in codecs.items():
        if options.ranks == 1:
            steps[f"core: {name}"] = core_of(codec)
        for groups in (False, True):
            compressor = dr.Compressor(
                codec,
                parameters=[
                    (f"{groups}{name}", variable) for (name, _), variable in zip(shapes, variables)
                ],
            )
            steps[f"{name}{', one group' if groups else ''}"] = step_of(compressor, groups)
    one = tf.constant(1.0)
    for name, step in steps.items():
        if name.startswith("default by size"):
            for _ in range(dr.recommended_codec().sparsifier.warmup_steps):
                step(one)
    taken = {name: [] for name in steps}
    for turn in range(options.steps + 3):
        for name, step in steps.items():
            if options.ranks > 1:
                hvd.allreduce(one, name="together")
            started = time.perf_counter()
            step(one)
            if turn >= 3:
                taken[name].append(time.perf_counter() - started)
        if hvd.rank() == 0:
            print(f"turn {turn + 1} of {options.steps + 3}", flush=True)
    seconds = {name: float(np.median(times)) for name, times in taken.items()}
    exchange = {
        name: value - seconds["nothing"]
        for name, value in seconds.items()
        if name != "nothing" and not name.startswith("core")
    }
    rows = []
    for name in codecs:
        for suffix in ("", ", one group"):
            spent = exchange[name + suffix]
            if options.ranks == 1:
                rows.append(row(f"TensorFlow step / bare core, {name}{suffix}", spent / seconds[f"core: {name}"], 1.3,
                                milliseconds=1e3 * spent,
                                core_milliseconds=1e3 * seconds[f"core: {name}"]))  # fmt: skip
            else:
                for plain in ("Horovod none", "Horovod fp16"):
                    rows.append(row(f"TensorFlow step / {plain}, {options.ranks} ranks of one machine, {name}{suffix}", spent / exchange[plain],
                                    milliseconds=1e3 * spent,
                                    plain_milliseconds=1e3 * exchange[plain]))  # fmt: skip
    if hvd.rank() == 0:
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else []
        measured = {entry["what"] for entry in rows}
        write(RESULT, [entry for entry in kept if entry["what"] not in measured] + rows)
        from run import show

        for entry in rows:
            show(entry)


def main():
    options = parse()
    if options.ranks == 1 or options.worker:
        measure(options)
        return 0
    return module_at(EXAMPLES / "ranks.py").launch(__file__, options.ranks, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
