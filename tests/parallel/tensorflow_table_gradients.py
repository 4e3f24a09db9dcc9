"""Embedding tables: gradients of other dtypes, on other ways, and with NaN; momentum; exports."""

import random
import warnings

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from table_programs import COLUMNS, ROWS
from tensorflow_tables import loss_of_rows, model
from tensorflow_tools import assert_equal_everywhere, sum_over_ranks

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.planning.policies import rows_codec


def _tape_step(variable, compressor, reduces=None):
    """Return a function of (rows, factor) that reduces the gradient of one table."""

    signature = tf.TensorSpec([None], tf.int64), tf.TensorSpec([])

    @tf.function(input_signature=signature, autograph=False)
    def step(rows, factor):
        with tf.GradientTape() as tape:
            used = tf.gather(variable, rows)
            value = tf.reduce_sum(used**2 + used) * tf.cast(factor, variable.dtype)
        if reduces is not None:
            return reduces(tape.gradient(value, [variable]))
        tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
        return tape.gradient(value, [variable])[0]

    return step


def _residual(compressor):
    (entry,) = compressor.state_dict()["parameters"].values()
    return np.abs(entry["memory"]["residual"]).sum()


def scenario_nothing_of_a_table_is_lost_on_other_ways(directory):
    """A gradient that is not made from slices, slices, and NaN."""
    table = model(1)[0][1]
    rows = tf.range(40, dtype=tf.int64)
    for way in ("dense", "slices", "NaN"):
        compressor = dr.Compressor(parameters=[("table", table)])
        step = _tape_step(table, compressor)

        def reduces(gradients, way=way, compressor=compressor):
            if way == "dense":
                gradients = [tf.convert_to_tensor(gradients[0]) + tf.ones_like(table)]
            reduce = dr.tensorflow.allreduce_gradients
            return reduce(gradients, [table], compression=compressor)

        other = step if way == "NaN" else _tape_step(table, compressor, reduces)
        step(rows, 1.0)
        before = _residual(compressor)
        assert before > 0 and names_of(compressor.adapter.slots) == ["table"]
        other(rows, np.nan if way == "NaN" else 1.0)
        assert (_residual(compressor) == before) == (way == "NaN"), way
        step(rows, 1.0)
        assert _residual(compressor) == 0, way
        compressor.close()


def scenario_residuals_of_float16_tables_are_added_in_float32(directory):
    """The sum of a rank is above 65,504, the mean of all ranks is not."""
    table = tf.Variable(tf.zeros([ROWS, COLUMNS], tf.float16))
    compressor = dr.Compressor(parameters=[("table", table)])
    step, rows = _tape_step(table, compressor), tf.range(80, dtype=tf.int64)
    factor = 40_000.0 if hvd.rank() == 0 else 0.0
    total = sum(tf.cast(step(rows, factor), tf.float32).numpy() for _ in range(2))
    assert np.isfinite(total).all() and total[80:].sum() == 0
    np.testing.assert_allclose(total[:80].sum(), 2 * 40_000 / hvd.size() * 80 * COLUMNS, rtol=1e-2)
    compressor.close()


def scenario_tables_that_ranks_see_in_other_ways_are_named(directory):
    table = model(1)[0][1]
    compressor = dr.Compressor(parameters=[("table", table)])
    step = _tape_step(table, compressor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(tf.range(350 if hvd.rank() else 20, dtype=tf.int64), 1.0)
    (said,) = [str(one.message) for one in caught if "embedding table" in str(one.message)]
    assert '"table": "rows"' in said and names_of(compressor.adapter.slots) == []
    compressor.close()


def scenario_a_factor_may_stand_before_or_after_a_gradient(directory):
    for product in (lambda one: 0.5 * one, lambda one: one * tf.constant(0.5)):
        table = model(1)[0][1]
        compressor = dr.Compressor(parameters=[("table", table)])

        def reduces(gradients, product=product, compressor=compressor, table=table):
            found = [product(tf.convert_to_tensor(gradients[0]))]
            return dr.tensorflow.allreduce_gradients(found, [table], compression=compressor)

        _tape_step(table, compressor, reduces)(tf.range(9, dtype=tf.int64), 1.0)
        assert names_of(compressor.adapter.slots) == ["table"]
        compressor.close()


def scenario_momentum_outside_of_graphs_and_on_a_gpu(directory):
    """A table that is compressed on a GPU keeps the default codec, so it has no momentum."""
    for on_gpu in (False, True):
        table, references = model(1)[0][1], model(1)
        compressor = dr.Compressor(parameters=[("table", table)])
        if on_gpu:
            compressor.adapter.slots["table"].table._on_host = False
        optimizer = tf.keras.optimizers.Adam(0.01)
        dr.prepare(optimizer, compressor)
        expected = tf.keras.optimizers.Adam(0.01, beta_1=0.0 if on_gpu else 0.9)
        reference = references[0][1]
        view = compressor.bound_to([table])
        for number in range(4):
            gradient = tf.tensor_scatter_nd_add(
                tf.zeros([ROWS, COLUMNS]), [[number], [number + 1]], tf.ones([2, COLUMNS])
            )
            result = hvd.allreduce(gradient, compression=view)
            optimizer.apply_gradients([(result, table)])
            expected.apply_gradients([(result, reference)])
            tf.debugging.assert_near(table, reference, rtol=1e-4, atol=1e-6)
        assert names_of(compressor.adapter.slots) == ([] if on_gpu else ["table"])
        compressor.close()


def scenario_a_step_that_is_traced_again_keeps_the_momentum_of_a_table(directory):
    """A dense gradient of the table is sent in between, and Horovod keeps the graph of slices."""
    table = model(1)[0][1]
    compressor = dr.Compressor(parameters=[("table", table)])
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.1, momentum=0.5), compressor)
    optimizer = hvd_keras.DistributedOptimizer(
        optimizer, compression=compressor, sparse_as_dense=True
    )
    optimizer.build([table])

    @tf.function
    def train(again):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2, 3]))
        optimizer.minimize(loss, [table], tape=tape)

    @tf.function
    def regularize():
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(table**2)
        optimizer.minimize(loss, [table], tape=tape)

    def change(step, *arguments):
        before = table.numpy()
        step(*arguments)
        return before[1, 0] - table.numpy()[1, 0]

    train(False)
    assert names_of(compressor.adapter.slots) == ["table"]
    # without momentum, an update leaves none
    assert abs(change(regularize)) < 1e-6
    for again, expected in ((False, 0.1), (True, 0.15), (True, 0.175)):
        np.testing.assert_allclose(change(train, again), expected, rtol=1e-4)
    compressor.close()


def scenario_a_prepared_step_of_a_table_is_exported(directory):
    """One rank alone saves it, and nobody trains with the saved function."""
    named = model(1)[:1]

    class Training(tf.Module):
        def __init__(self):
            self.table = named[0][1]
            self.compressor = dr.Compressor(parameters=named)
            self.optimizer = tf.keras.optimizers.Adam(0.01)
            dr.prepare(self.optimizer, self.compressor)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def step(self, rows):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.gather(self.table, rows))
            tape = hvd.DistributedGradientTape(
                tape, compression=self.compressor, sparse_as_dense=True
            )
            self.optimizer.apply_gradients(zip(tape.gradient(value, [self.table]), [self.table]))

    training = Training()
    for number in range(2):
        training.step(tf.range(number, 9, dtype=tf.int64))
    assert names_of(training.compressor.adapter.slots) == ["table0"]
    if hvd.rank() == 0:
        tf.saved_model.save(training, f"{directory}/table")
    training.compressor.close()


def scenario_momentum_of_tables_needs_no_warning(directory):
    network = tf.keras.Sequential([tf.keras.layers.Embedding(ROWS, COLUMNS)])
    network.build([None, 4])
    compressor = dr.Compressor(parameters=network.trainable_variables)
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.Adam(0.01), compression=compressor, sparse_as_dense=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network.compile(optimizer, loss="mse")
        network.fit(np.arange(32).reshape(8, 4), np.zeros([8, 4, COLUMNS]), verbose=0)
    assert not [str(one.message) for one in caught if "beta_1" in str(one.message)]
    assert compressor.stats()[network.trainable_variables[0].name]["relative_error"] is None
    compressor.close()


def scenario_tables_of_single_gradients(directory):
    """Outside of graphs, it is not known that slices were made dense."""
    for used, is_table in ((9, True), (99, True), (100, False), (150, False), (400, False)):
        named = model(1)
        compressor = dr.Compressor(parameters=named)
        for step in range(3):
            rows = tf.range(used * step, used * (step + 1)) % ROWS
            gradient = tf.tensor_scatter_nd_add(
                tf.zeros([ROWS, COLUMNS]), rows[:, None], tf.ones([used, COLUMNS])
            )
            view = compressor.bound_to([named[0][1]])
            result = hvd.allreduce(gradient, compression=view)
            known = compressor.state_dict()["parameters"]["table0"]["is_table"]
            assert known is is_table, (used, step, known)
        if is_table:
            tf.debugging.assert_near(result, gradient)
        compressor.close()


def scenario_sums_of_several_backward_passes(directory):
    """Horovod adds up dense gradients; a table uses few rows in all passes together."""
    for traced in (True, False):
        named = model(2)
        variables = [variable for _, variable in named]
        compressor = dr.Compressor(parameters=named)
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(1e-3), compression=compressor, backward_passes_per_step=3,
            sparse_as_dense=True,
        )  # fmt: skip

        def step(*rows, named=named, variables=variables, optimizer=optimizer):
            with tf.GradientTape() as tape:
                value = loss_of_rows(named, rows)
            optimizer.minimize(value, variables, tape=tape)

        if traced:
            step = tf.function(step, [tf.TensorSpec([None], tf.int64)] * 2, autograph=False)
        for number in range(4):
            kept = _residuals(compressor)
            before, own = [one.numpy() for one in variables], np.zeros((ROWS, COLUMNS))
            for part in range(3):
                first = 40 * number + 9 * part + hvd.rank()
                few, many = tf.range(first, first + 9), tf.range(350)
                rows = [tf.cast(one % ROWS, tf.int64) for one in (few, many)]
                with tf.GradientTape() as tape:
                    value = loss_of_rows(named, rows)
                own += tf.convert_to_tensor(tape.gradient(value, variables[0])).numpy()
                step(*rows)
            if number > 0:  # known since the first sum
                total = (own.ravel() + kept["table0"].ravel()).astype(np.float32)
                sent = dr.decode(rows_codec().encode(total)).reshape(ROWS, COLUMNS)
                mean = hvd.allreduce(tf.constant(sent), name=f"mean.{traced}.{number}")
                change = (before[0] - variables[0].numpy()) / 1e-3
                np.testing.assert_allclose(change, mean, rtol=1e-3, atol=1e-3)
                assert not _residuals(compressor)["table0"].any(), number
        assert names_of(compressor.adapter.slots) == ["table0"]
        assert_equal_everywhere(variables, f"passes {traced}")
        compressor.close()


def _residuals(compressor):
    parameters = compressor.state_dict()["parameters"]
    return {name: entry["memory"]["residual"] for name, entry in parameters.items()}


def _train_with_slices(seeds):
    """With the default, all used rows are sent with 4 bits per value, and what is left is kept."""
    for seed in seeds:
        draw = random.Random(seed)
        own = np.random.default_rng(10 * seed + hvd.rank())
        rows, columns = draw.choice(((50, 24), (2000, 3), (300, 16)))
        table = tf.Variable(tf.zeros([rows, columns]), name="table")
        compressor = dr.Compressor(parameters=[("table", table)])
        optimizer = dr.prepare(tf.keras.optimizers.Adam(0.01), compressor)

        def step(values, indices, table=table, compressor=compressor, optimizer=optimizer):
            slices = tf.IndexedSlices(values, indices, tf.constant(table.shape.as_list()))
            (reduced,) = dr.tensorflow.allreduce_gradients([slices], [table], compressor)
            optimizer.apply_gradients([(reduced, table)])
            return tf.convert_to_tensor(reduced)

        if draw.random() >= 0.3:
            step = tf.function(step, autograph=False, reduce_retracing=True)
        given, arrived = np.zeros((rows, columns)), np.zeros((rows, columns))
        for _ in range(6):
            used = own.integers(rows, size=draw.choice((1, 5, 40)) if own.random() < 0.9 else 0)
            values = own.standard_normal((used.size, columns)).astype(np.float32)
            np.add.at(given, used, values)
            arrived += step(tf.constant(values), tf.constant(used)).numpy()
        assert names_of(compressor.adapter.slots) == ["table"]
        slot = compressor.adapter.slots["table"]
        assert bool(slot.table.keeps_momentum())
        kept = compressor.state_dict()["parameters"]["table"]["memory"]["residual"]
        total = sum_over_ranks(given) / hvd.size()
        left = sum_over_ranks(kept.reshape(rows, columns)) / hvd.size()
        assert np.abs(arrived + left - total).max() < 1e-5
        assert np.square(left).sum() < 0.1 * np.square(total).sum()


def scenario_slices_are_those_of_a_table(directory):
    _train_with_slices(range(2))


def scenario_slices_of_many_random_programs(directory):
    _train_with_slices(range(2, 6))
