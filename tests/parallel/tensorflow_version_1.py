"""Test graphs of tf.compat.v1 with the variables and shapes of TensorFlow 1.

Run by tensorflow_scenarios.py.
"""

import warnings

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_tools import batch

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow


def scenario_momentum_of_optimizers_of_version_1_is_named(directory):
    """dr.prepare does not know these optimizers, so the warning says what to do instead."""
    train, images = tf.compat.v1.train, batch(0).numpy()
    for make, expected in (
        (lambda: train.MomentumOptimizer(0.1, 0.75), "and divide the learning rate by 0.25"),
        (lambda: train.RMSPropOptimizer(0.1, momentum=0.5), "and divide the learning rate by 0.5"),
        (lambda: train.AdamOptimizer(0.1), "set beta1 to 0"),
        (lambda: train.AdamOptimizer(0.1, beta1=0.0), None),
        (lambda: train.GradientDescentOptimizer(0.1), None),
    ):
        with tf.Graph().as_default():
            weights = tf.compat.v1.get_variable("weights", [48, 48])
            compressor = dr.Compressor(parameters=[weights])
            optimizer = hvd.DistributedOptimizer(make(), compression=compressor)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.minimize(tf.reduce_mean((tf.constant(images) @ weights) ** 2))
            texts = [str(one.message) for one in caught if "for compressed" in str(one.message)]
            assert len(texts) == (expected is not None), texts
            assert all(text.endswith(expected) for text in texts), texts


def scenario_reference_variables_of_version_1(directory):
    """Programs that call ``tf.compat.v1.disable_v2_behavior()`` have them, and other shapes."""
    batches = [batch(number).numpy() for number in range(4)]

    def trained(with_references):
        tf.compat.v1.enable_v2_tensorshape()
        if with_references:
            tf.compat.v1.disable_v2_tensorshape()
        random = np.random.default_rng(5)
        starts = {"one": (48, 48), "other": (48, 48), "bias": (48,), "table": (500, 48)}
        with tf.Graph().as_default() as graph:
            made = {
                name: tf.compat.v1.get_variable(
                    name,
                    initializer=random.standard_normal(shape).astype(np.float32) / 8,
                    use_resource=not with_references,
                )
                for name, shape in starts.items()
            }
            compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=list(made.items()))
            images = tf.compat.v1.placeholder(tf.float32, [16, 48])
            rows = tf.compat.v1.placeholder(tf.int64, [16])
            hidden = tf.tanh((images + tf.gather(made["table"], rows)) @ made["one"] + made["bias"])
            loss = tf.reduce_mean((hidden @ made["other"]) ** 2)
            gradients = dr.tensorflow.allreduce_gradients(
                tf.gradients(loss, list(made.values())), list(made.values()), compression=compressor
            )
            assert isinstance(gradients[-1], tf.IndexedSlices)
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
            step = optimizer.apply_gradients(zip(gradients, made.values()))
            start = [
                tf.compat.v1.global_variables_initializer(),
                tf.compat.v1.local_variables_initializer(),
            ]
            with tf.compat.v1.Session(graph=graph) as session:
                session.run(start)
                for number in range(4):
                    used = np.random.default_rng([number, hvd.rank()]).integers(500, size=16)
                    session.run(step, {images: batches[number], rows: used})
                weights = session.run(made)
                state = compressor.state_dict()
                compressor.load_state_dict(state)
                again = compressor.state_dict()
        for name, part in state["parameters"].items():
            for kind, array in part["memory"].items():
                np.testing.assert_array_equal(again["parameters"][name]["memory"][kind], array)
        return weights

    try:
        expected, found = (trained(with_references) for with_references in (False, True))
    finally:
        tf.compat.v1.enable_v2_tensorshape()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
