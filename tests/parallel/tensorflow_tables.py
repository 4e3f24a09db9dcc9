"""Embedding tables: the codec "rows", and the warning about tables with another codec."""

import random
import warnings

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from tensorflow_tools import assert_equal_everywhere

import deepreduce_hvd as dr

_ROWS, _COLUMNS = 400, 8


def _model(tables):
    """Return [(name, variable)] of tables, and of a kernel that uses most of its rows."""
    draw = np.random.default_rng(0)
    shape = (_ROWS, _COLUMNS)
    return [
        (name, tf.Variable(draw.standard_normal(shape), dtype=tf.float32, name=name))
        for name in [*(f"table{number}" for number in range(tables)), "kernel"]
    ]


def _loss(named, rows):
    tables = [variable for name, variable in named if name != "kernel"]
    found = [tf.gather(table, one) for table, one in zip(tables, rows)]
    total = sum(tf.reduce_sum(one**2) for one in found)
    kernel = dict(named)["kernel"]
    return total + tf.reduce_sum(kernel[3:] ** 2)


def _warnings_of(named, compressor, steps, how):
    """Train, and return the warnings about tables.

    Args:
        named: the variables with their names.
        compressor: their compressor.
        steps: the rows of each step, one array for each table.
        how: "dense", "slices", or "eager".
    """
    variables = [variable for _, variable in named]

    def gradients(*rows):
        with tf.GradientTape() as tape:
            value = _loss(named, rows)
        if how == "slices":
            return dr.tensorflow.allreduce_gradients(
                tape.gradient(value, variables), variables, compression=compressor
            )
        tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
        return tape.gradient(value, variables)

    if how != "eager":
        shapes = [tf.TensorSpec([None], tf.int64)] * (len(named) - 1)
        gradients = tf.function(gradients, input_signature=shapes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in steps:
            for variable, gradient in zip(variables, gradients(*map(tf.constant, rows))):
                variable.assign_sub(1e-3 * tf.convert_to_tensor(gradient))
    assert_equal_everywhere(variables, "tables")
    return [str(one.message) for one in caught if "embedding table" in str(one.message)]


def scenario_tables_are_named_in_one_warning(directory):
    """These are variables whose first gradient is zero in more than three quarters of the rows."""
    draw = random.Random(3)
    for how in ("dense", "eager") * 3:
        used = [draw.choice((1, 7, 99, 100, 400)) for _ in range(3)]
        named = _model(len(used))
        steps = [[np.arange(count) for count in used]] * 3
        said = _warnings_of(named, dr.Compressor(parameters=named), steps, how)
        tables = [number for number, count in enumerate(used) if count < 100]
        assert len(said) == bool(tables), (how, used, said)
        for number in range(3) if tables else ():
            assert (f'"table{number}": "rows"' in said[0]) == (number in tables), (used, said)
        assert not any("kernel" in text for text in said), said


def scenario_tables_of_keras_are_named(directory):
    """In fit, where Horovod's optimizer makes dense tensors of slices."""
    tf.keras.utils.set_random_seed(3)
    network = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(_ROWS, 32, input_length=4),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, use_bias=False),
        ]
    )
    network.build([None, 4])
    compressor = dr.Compressor(parameters=network.trainable_variables)
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.01), compression=compressor, sparse_as_dense=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network.compile(optimizer, loss="mse")
        inputs = np.arange(64).reshape(16, 4) % 60
        network.fit(inputs, np.zeros([16, 32]), batch_size=8, verbose=0)
    (said,) = [str(one.message) for one in caught if "embedding table" in str(one.message)]
    assert f'{{"{network.trainable_variables[0].name}": "rows"}}' in said, said


def scenario_tables_that_are_not_delayed_need_no_warning(directory):
    """Slices never are: all of their rows are sent in each step."""
    for codec, memory, how in (
        ("rows", None, "dense"),
        ("rows", None, "slices"),
        ("dense", None, "dense"),
        (dr.Codec(dr.Threshold(0), index=dr.RLE()), None, "dense"),
        (dr.Codec(dr.TopK(1.0)), None, "dense"),
        (None, dr.NoMemory(), "dense"),
        (None, None, "slices"),
    ):
        named = _model(1)
        compressor = dr.Compressor(
            {"table*": codec}, memory and {"table*": memory}, parameters=named
        )
        assert not _warnings_of(named, compressor, [[np.arange(9)]] * 2, how), (codec, how)


def scenario_a_later_step_of_a_restored_job_is_not_looked_at(directory):
    named = _model(1)
    compressor = dr.Compressor(parameters=named)
    assert _warnings_of(named, compressor, [[np.arange(9)]], "dense")
    other = dr.Compressor(parameters=named)
    other.load_state_dict(compressor.state_dict())
    compressor.close()
    assert not _warnings_of(named, other, [[np.arange(9)]], "dense")
