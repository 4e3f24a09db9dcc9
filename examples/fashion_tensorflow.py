"""The demo's network and training in Keras (tf-keras), with model.fit."""

import math
import time

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from datasets import fashion_mnist

import deepreduce_hvd as dr

BATCH = 64  # images per rank and step


def make_network():
    """Return the network of the PyTorch demo: 409,034 parameters in four layers."""
    layers = tf.keras.layers
    return tf.keras.Sequential([
        layers.Input((28, 28, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPool2D(2),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPool2D(2),
        layers.Flatten(),
        layers.Dense(256, activation="relu"),
        layers.Dense(10),
    ])  # fmt: skip


def load():
    """Return the data set, with images scaled to mean 0 and standard deviation 1.

    Returns:
        Train images, train labels, test images, test labels.
    """
    train_images, train_labels, test_images, test_labels = fashion_mnist()

    def scaled(images):
        return tf.constant(((images.astype(np.float32) / 255 - 0.286) / 0.353)[..., np.newaxis])

    return (
        scaled(train_images),
        tf.constant(train_labels),
        scaled(test_images),
        tf.constant(test_labels),
    )


# registered because Horovod recreates the optimizer from its configuration
@tf.keras.utils.register_keras_serializable()
class OneCycle(tf.keras.optimizers.schedules.LearningRateSchedule):
    """PyTorch's OneCycleLR as a Keras schedule.

    The learning rate rises along half a cosine in the first tenth of all steps and falls along half
    a cosine in the rest.
    """

    def __init__(self, highest, steps):
        super().__init__()
        self.highest = highest
        self.steps = steps

    def __call__(self, step):
        done = tf.cast(step, tf.float32)
        top = 0.1 * self.steps - 1

        def between(first, last, share):
            return last + (first - last) / 2 * (1 + tf.cos(math.pi * tf.clip_by_value(share, 0, 1)))

        low = self.highest / 25
        return tf.where(
            done <= top,
            between(low, self.highest, done / top),
            between(self.highest, low / 1e4, (done - top) / (self.steps - 1 - top)),
        )

    def get_config(self):
        return {"highest": self.highest, "steps": self.steps}


class Progress(tf.keras.callbacks.Callback):
    """Report the mean loss so far every 50 steps; record the seconds of every step."""

    def __init__(self, total, report):
        super().__init__()
        self.total = total
        self.report = report
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.started = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.started)
        done = batch + 1
        if done % 50 == 0 or done == self.total:
            self.report(done, self.total, logs["loss"])


def batches(images, labels, order):
    """Return this rank's batches of all epochs.

    A rank takes every hvd.size()-th batch, so the images of a step are the same for any number of
    ranks with the same total batch size.
    """
    order = order.reshape(-1, hvd.size(), BATCH)[:, hvd.rank()]
    data = tf.data.Dataset.from_tensor_slices(order)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return (
        data.map(lambda batch: (tf.gather(images, batch), tf.gather(labels, batch)))
        .prefetch(2)
        .with_options(options)
    )


def train(data, compression, epochs, seed, on_progress, learning_rate=0.05):
    """Train a new network; calls with the same seed use the same weights and order of images.

    Args:
        data: what :func:`load` returns.
        compression: function of the network that returns the ``compression`` argument of
            DistributedOptimizer.
        epochs: number of epochs, also a fraction.
        seed: seed of the network's weights and of the order of images.
        on_progress: function of (steps done, total steps, loss), called every 50 steps.
        learning_rate: maximum of the one-cycle schedule.

    Returns:
        The network, the median seconds per step, the test accuracy.
    """
    train_images, train_labels, test_images, test_labels = data
    tf.keras.backend.clear_session()  # gives variables the same names in every row
    tf.keras.utils.set_random_seed(seed)
    network = make_network()
    step_images = BATCH * hvd.size()
    steps = len(train_images) // step_images
    random = np.random.default_rng(seed)
    total = max(round(epochs * steps), 1)
    order = np.concatenate(
        [
            random.permutation(len(train_images))[: steps * step_images]
            for _ in range(math.ceil(total / steps))
        ]
    )[: total * step_images]
    # Keras does not apply momentum to weight decay, and with momentum PyTorch's 1e-4 is ten times
    # as strong
    optimizer = tf.keras.optimizers.SGD(
        OneCycle(learning_rate, total), momentum=0.9, weight_decay=1e-3
    )
    chosen = compression(network)
    if isinstance(chosen, dr.Compressor):
        optimizer = dr.prepare(optimizer, chosen)
    network.compile(
        hvd.DistributedOptimizer(optimizer, compression=chosen),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    progress = Progress(total, on_progress)
    network.fit(
        batches(train_images, train_labels, order), verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), progress],
    )  # fmt: skip
    return network, float(np.median(progress.seconds)), accuracy(network, test_images, test_labels)


def accuracy(network, images, labels):
    """Return the accuracy on the test images; each rank evaluates a part of them."""
    own = slice(hvd.rank(), None, hvd.size())
    answers = tf.argmax(network.predict(images[own], batch_size=500, verbose=0), 1)
    right = tf.reduce_sum(tf.cast(answers == tf.cast(labels[own], tf.int64), tf.float32))
    return float(hvd.allreduce(right, name="right", op=hvd.Sum)) / len(images)


def dense_bytes(network):
    """Return the bytes that a rank hands to allreduce per step without compression."""
    return 4 * network.count_params()


class KerasTraining:
    """Training with Horovod's DistributedOptimizer of Keras, as fashion.Training."""

    load = staticmethod(load)
    train = staticmethod(train)
    dense_bytes = staticmethod(dense_bytes)

    def __init__(self):
        hvd.init()
        self.rank = hvd.rank()
        self.size = hvd.size()

    def baseline(self, name):
        """Return the compression of a row without DeepReduce."""
        return getattr(hvd.Compression, name)

    def mean(self, number):
        """Return the mean of a number over all ranks."""
        return float(hvd.allreduce(tf.constant(number, tf.float64), name="mean", op=hvd.Average))

    @staticmethod
    def parameters(network):
        """Return the ``parameters`` of a compressor."""
        return network.trainable_variables
