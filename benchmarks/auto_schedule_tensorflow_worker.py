"""One rank of benchmarks/auto_schedule.py, with Horovod and TensorFlow.

Arguments: the framework, which is TensorFlow, the number of turns of each row, and the features of
the network's first linear layer.
"""

import itertools
import os
import sys
import time

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import tensorflow as tf
from auto_schedule_rows import FRAMEWORKS, TENSORFLOW, print_rows
from decisions import decide, scheduler_of
from folders import EXAMPLES, module_at
from turns import seconds_in_turns

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow

_CODEC = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1))
_AUTO = f"{TENSORFLOW}auto"


def vgg(features):
    """Return the network of time_to_accuracy_worker.py."""
    layers = tf.keras.layers
    return tf.keras.Sequential([
        layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(features, activation="relu"), layers.Dense(features // 2, activation="relu"),
        layers.Dense(10),
    ])  # fmt: skip


def load():
    """Return [(32 images, their labels)] of the train images, as tensors."""
    images, labels, _, _ = module_at(EXAMPLES / "datasets.py").fashion_mnist()
    scaled = (images[..., None].astype("float32") / 255 - 0.286) / 0.353
    parts = (
        tf.split(scaled, len(labels) // 32),
        tf.split(tf.cast(labels, tf.int64), len(labels) // 32),
    )
    return list(zip(*parts))


def make_step(row, network):
    """Return the training step of a row, a function of images and labels, and its compressor."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(0.01)
    compression = {
        f"{TENSORFLOW}none": hvd.Compression.none,
        f"{TENSORFLOW}fp16": hvd.Compression.fp16,
    }.get(row)
    compressor = None
    if compression is None:
        compression = compressor = dr.Compressor(
            _CODEC,
            parameters=[(one.name, one) for one in network.trainable_variables],
            schedule="auto" if row == _AUTO else None,
        )

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            value = loss(labels, network(images, training=True))
        tape = hvd.DistributedGradientTape(
            tape, compression=compression, groups=1 if row == f"{TENSORFLOW}one message" else None
        )
        variables = network.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables))

    if row == _AUTO:
        step = dr.tensorflow.scheduled(compressor)(step)
    return step, compressor


def main(framework, turns, features):
    hvd.init()
    # as many threads as PyTorch has
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    batches = itertools.cycle(load())
    trained = {}
    for row in FRAMEWORKS[framework].rows:
        tf.random.set_seed(0)
        network = vgg(features)
        network.build((None, 28, 28, 1))
        trained[row] = make_step(row, network)

    def step(row):
        images, labels = next(batches)
        started = time.perf_counter()
        trained[row][0](images, labels)
        return time.perf_counter() - started

    def slowest_step(row):
        return float(hvd.allreduce(tf.constant(step(row)), op=hvd.Max, name="seconds"))

    compressor = trained[_AUTO][1]
    before = decide(compressor, lambda _: step(_AUTO))
    seconds = seconds_in_turns(trained, slowest_step, turns)
    if hvd.rank() == 0:
        print_rows(seconds, before, compressor.adapter, scheduler_of(compressor))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
