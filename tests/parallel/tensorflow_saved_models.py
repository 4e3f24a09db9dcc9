"""Test models and functions that one rank saves, with TensorFlow. Run by tensorflow_scenarios.py."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from scenario_runner import refused
from tensorflow_keras import fit, fit_as_it_is, made
from tensorflow_tools import assert_equal_everywhere

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow


def scenario_one_rank_saves_a_model(directory):
    """It saves the optimizer too, as without compression, and all ranks continue to train."""
    network, compressor = made()
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.01, momentum=0.9), compressor)
    fit(network, optimizer, compressor)
    callbacks = []
    if hvd.rank() == 0:
        network.save(f"{directory}/saved")
        loaded = tf.keras.models.load_model(f"{directory}/saved")
        np.testing.assert_array_equal(loaded.get_weights()[0], network.get_weights()[0])
        assert float(loaded.optimizer.momentum) == np.float32(0.9)
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(f"{directory}/checkpoint"))
    inputs = np.random.default_rng(hvd.rank()).standard_normal([32, 48]).astype(np.float32)
    network.fit(inputs, inputs[:, :40], batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    assert compressor.stats()["dense/kernel:0"]["steps"] == 8
    assert_equal_everywhere(network.variables, "after saving")


def scenario_a_loaded_model_continues_like_the_saved_one(directory):
    """The program copies the state of the optimizer, which Horovod's does not take over."""
    network, compressor = made()
    adam = tf.keras.optimizers.Adam
    fit(network, dr.prepare(adam(0.01), compressor), compressor)
    path = f"{directory}/rank{hvd.rank()}.keras"
    network.save(path)
    kept = compressor.state_dict()
    fit_as_it_is(network, network.optimizer)

    again = tf.keras.models.load_model(path, custom_objects={"Adam": adam})
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.1)), parameters=[("dense/kernel:0", *again.trainable_variables)]
    )
    compressor.load_state_dict(kept)
    loaded = dr.prepare(again.optimizer, compressor)
    optimizer = hvd_keras.DistributedOptimizer(loaded, compression=compressor)
    optimizer.build(again.trainable_variables)
    for new, old in zip(optimizer.variables, loaded.variables):
        new.assign(old)
    fit_as_it_is(again, optimizer)
    np.testing.assert_array_equal(again.get_weights()[0], network.get_weights()[0])
    assert int(optimizer.iterations) == 8, optimizer.iterations


def scenario_a_model_is_saved_after_close(directory):
    """Horovod's optimizer traces the reduction again for a SavedModel."""
    network = tf.keras.Sequential([tf.keras.layers.Dense(40, input_shape=(40,))])
    compressor = dr.Compressor(parameters=network.trainable_variables)
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.01, momentum=0.9), compressor)
    network.compile(hvd_keras.DistributedOptimizer(optimizer, compression=compressor), loss="mse")
    inputs = np.ones([16, 40], np.float32)
    network.fit(inputs, inputs, batch_size=16, verbose=0)
    compressor.close()
    if hvd.rank() == 0:
        network.save(f"{directory}/closed", save_format="tf")
    with refused("expected one that is not closed"):
        compressor.compress(tf.ones([40, 40]))


def scenario_one_rank_saves_a_function_that_reduces(directory):
    """It saves before the first step: nothing waits for the other ranks, and nothing counts."""

    class Training(tf.Module):
        def __init__(self):
            self.tables = [tf.Variable(tf.ones([64, 16]), name=f"table{n}") for n in range(2)]
            self.compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=self.tables)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="rows")])
        def gradients(self, rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.tables[0]) + tf.reduce_sum(
                    tf.gather(self.tables[1], rows)
                )
            found = tape.gradient(loss, self.tables)
            reduced = dr.tensorflow.allreduce_gradients(found, self.tables, self.compressor)
            return [tf.convert_to_tensor(one) for one in reduced]

    training = Training()
    if hvd.rank() == 0:
        tf.saved_model.save(training, f"{directory}/training")
        adapter = training.compressor.adapter
        assert not adapter.agreed
        assert not any(slot.reduced for slot in adapter.slots.values())
    reduced = training.gradients(tf.constant([1, 2], tf.int64))
    assert [int(tf.math.count_nonzero(one)) for one in reduced] == [102, 32], reduced
    assert [row["steps"] for row in training.compressor.stats().values()] == [1, 1]
