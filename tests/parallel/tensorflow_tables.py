"""Embedding tables: those with the default codec get "rows"; a warning names the others."""

import copy
import random
import warnings

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from table_programs import COLUMNS, ROWS, decided_at, ranks_disagree, used_rows
from tensorflow_tools import assert_equal_everywhere

import deepreduce_hvd as dr
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.planning.policies import rows_codec


def model(tables):
    """Return [(name, variable)] of tables, and of a kernel that uses most of its rows."""
    draw = np.random.default_rng(0)
    shape = (ROWS, COLUMNS)
    return [
        (name, tf.Variable(draw.standard_normal(shape), dtype=tf.float32, name=name))
        for name in [*(f"table{number}" for number in range(tables)), "kernel"]
    ]


def loss_of_rows(named, rows, factors=()):
    """Return the sum of the squares of the rows, times the squares of their factors if given."""
    tables = [variable for name, variable in named if name != "kernel"]
    found = [tf.gather(table, one) for table, one in zip(tables, rows)]
    if factors:
        found = [one * factor[:, None] for one, factor in zip(found, factors)]
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
            value = loss_of_rows(named, rows)
        if how == "slices":
            return dr.tensorflow.allreduce_gradients(
                tape.gradient(value, variables), variables, compression=compressor
            )
        tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
        return tape.gradient(value, variables)

    if how != "eager":
        shapes = [tf.TensorSpec([None], tf.int64)] * (len(named) - 1)
        gradients = tf.function(gradients, shapes, autograph=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in steps:
            for variable, gradient in zip(variables, gradients(*map(tf.constant, rows))):
                variable.assign_sub(1e-3 * tf.convert_to_tensor(gradient))
    assert_equal_everywhere(variables, "tables")
    return [str(one.message) for one in caught if "embedding table" in str(one.message)]


def _run_random_programs(seeds):
    """Test when tables are found, what is sent then, and that nothing is lost.

    Returns:
        The number of results of tables, and whether tables were found after the first step: the set
        of the answers.
    """
    found, late = 0, set()
    for seed in seeds:
        draw = random.Random(100 + seed)
        programs = [used_rows(draw, 2, hvd.size()) for _ in range(5)]
        decided = [decided_at(programs, number) for number in range(2)]
        named = model(2)
        variables = [variable for _, variable in named]
        compressor = dr.Compressor(parameters=named, seed=seed)

        def local(rows, factors, named=named, variables=variables):
            with tf.GradientTape() as tape:
                value = loss_of_rows(named, rows, factors)
            return [tf.convert_to_tensor(one) for one in tape.gradient(value, variables)]

        def reduced(rows, factors, named=named, variables=variables, compressor=compressor):
            with tf.GradientTape() as tape:
                value = loss_of_rows(named, rows, factors)
            tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
            return tape.gradient(value, variables)

        in_graph = seed % 3 != 2  # without it, Horovod still makes a graph of the reduction
        if in_graph:
            shapes = [[tf.TensorSpec([None], dtype)] * 2 for dtype in (tf.int64, tf.float32)]
            reduced = tf.function(reduced, shapes, autograph=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, step in enumerate(programs, 1):
                kept = compressor.state_dict()["parameters"]
                used = step[hvd.rank()]
                # Horovod would trace its graph again for slices of another number of rows
                unused = [0 if in_graph else ROWS - len(one) for one in used]
                rows = [tf.constant(np.pad(one, (0, more))) for one, more in zip(used, unused)]
                factors = [
                    tf.constant(np.pad(np.ones(len(one), np.float32), (0, more)))
                    for one, more in zip(used, unused)
                ]
                own, results = local(rows, factors), reduced(rows, factors)
                after = compressor.state_dict()["parameters"]
                for place in range(2):
                    name = f"table{place}"
                    known = decided[place] is not None and number > decided[place][0]
                    is_table = known and decided[place][1]
                    assert (kept[name]["is_table"] is True) == is_table, (seed, number, name)
                    if not is_table:
                        continue
                    found += 1
                    late.add(decided[place][0] > 1)
                    total = own[place].numpy().ravel() + kept[name]["memory"]["residual"].ravel()
                    sent = dr.decode(rows_codec().encode(total)).astype(np.float64)
                    label = f"{seed}.{number}.{place}"
                    mean = hvd.allreduce(tf.constant(sent), name=f"mean.{label}")
                    sizes = hvd.allreduce(tf.constant(abs(sent)), name=f"sizes.{label}", op=hvd.Sum)
                    difference = abs(results[place].numpy().ravel() - mean.numpy())
                    assert (difference <= 2**-22 * sizes.numpy()).all(), label
                    assert not after[name]["memory"]["residual"].any(), label
                assert_equal_everywhere(results, f"tables {seed} {number}")
                for variable, result in zip(variables, results):
                    variable.assign_sub(1e-3 * result)
        told = " ".join(str(one.message) for one in caught if "table" in str(one.message))
        for place in range(2):
            assert (f"table{place}" in told) == ranks_disagree(programs, place), (seed, told)
        tables = [f"table{place}" for place in range(2) if (decided[place] or (0, 0))[1]]
        assert names_of(compressor.adapter.slots) == tables
        assert len(compressor.adapter.notes()) == bool(tables)
        state = compressor.state_dict()
        other = dr.Compressor(parameters=named, seed=seed)
        other.load_state_dict(copy.deepcopy(state))
        assert names_of(other.adapter.slots) == tables
        compressor.close()
        other.close()
    return found, late


def scenario_tables_get_the_codec_rows(directory):
    found, _ = _run_random_programs(range(3))
    assert found > 5, found


def scenario_tables_of_many_random_programs(directory):
    found, late = _run_random_programs(range(3, 12))
    assert found > 15 and late == {True, False}, (found, late)


def scenario_tables_keep_the_momentum_of_a_prepared_optimizer(directory):
    """Tables are found before the first update. All other variables have no momentum."""
    beta = {"learning_rate": 0.01, "beta_1": 0.0}
    for half, kind, settings, without, dtype in (
        (False, "Adam", {}, beta, tf.float32),
        (True, "Adam", {}, beta, tf.float64),
        (True, "AdamW", {"beta_1": 0.8}, beta, tf.float32),
        (False, "Adamax", {}, beta, tf.float32),
        (False, "SGD", {"momentum": 0.75}, {"learning_rate": 0.04}, tf.float32),
        (True, "SGD", {"momentum": 0.75, "nesterov": True}, {"learning_rate": 0.04}, tf.float32),
        (True, "SGD", {"momentum": 0.75}, {"learning_rate": 0.04}, tf.float64),
        (True, "RMSprop", {"momentum": 0.75}, {"learning_rate": 0.04}, tf.float32),
    ):
        named = [(name, tf.Variable(tf.cast(one, dtype), name=name)) for name, one in model(2)]
        variables = [variable for _, variable in named]
        references = [tf.Variable(one) for one in variables]
        compressor = dr.Compressor(parameters=named)
        make = getattr(tf.keras.optimizers, kind)
        settings = {"learning_rate": 0.01, **settings}
        optimizer, *expected = (
            make(**settings),
            make(**settings),
            make(**without),
            make(**without),
        )
        dr.prepare(optimizer, compressor)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2, autograph=False)
        def step(*rows, named=named, compressor=compressor, optimizer=optimizer):
            variables = [variable for _, variable in named]
            with tf.GradientTape() as tape:
                value = loss_of_rows(named, rows)
            tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
            results = tape.gradient(value, variables)
            optimizer.apply_gradients(zip(results, variables))
            return results

        used = 180 if half else 40
        for number in range(5):
            rows = (tf.range(used, dtype=tf.int64) + 90 * number + hvd.rank()) % ROWS
            # the second variable uses the same rows in each step, too many for a table
            results = step(rows, tf.range(350, dtype=tf.int64))
            for one, reference, result in zip(expected, references, results):
                one.apply_gradients([(result, reference)])
            for variable, reference in zip(variables, references):
                tf.debugging.assert_near(variable, reference, rtol=1e-4, atol=1e-6)
        assert names_of(compressor.adapter.slots) == ["table0"]
        compressor.close()


def scenario_void_steps_and_loss_scales_change_nothing_else(directory):
    """A void step follows each step, also the one that would send the residual of a new table."""
    trained = []
    for scaled in (False, True):
        named = model(2)
        variables = [variable for _, variable in named]
        scale = tf.Variable(1.0)
        options = {"loss_scale": lambda scale=scale: scale} if scaled else {}
        compressor = dr.Compressor(parameters=named, **options)

        @tf.function(input_signature=[*[tf.TensorSpec([None], tf.int64)] * 2, tf.TensorSpec([])])
        def step(first, second, factor, named=named, compressor=compressor):
            with tf.GradientTape() as tape:
                value = loss_of_rows(named, [first, second]) * factor
            tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
            return tape.gradient(value, [variable for _, variable in named])

        for number in range(5):
            scale.assign(2.0 ** (3 * number % 7) if scaled else 1.0)
            rows = [
                tf.range(count, dtype=tf.int64) + 20 * number + hvd.rank() for count in (20, 180)
            ]
            for variable, result in zip(variables, step(*rows, scale)):
                variable.assign_sub(1e-3 * result / scale)
            if scaled:
                step(*rows, np.float32(np.nan))
        assert names_of(compressor.adapter.slots) == ["table0"]
        assert not compressor.state_dict()["parameters"]["table0"]["memory"]["residual"].any()
        trained.append(variables[0].numpy())  # the density of others depends on the number of steps
        compressor.close()
    np.testing.assert_array_equal(*trained)


def scenario_a_checkpoint_knows_the_tables(directory):
    """A restored job goes on bit for bit, also where the next gradient looks otherwise."""

    def trained(named, compressor, steps):
        rows = [[np.arange(count) + hvd.rank(), np.arange(350)] for count in steps]
        assert not _warnings_of(named, compressor, rows, "dense")

    named, copies = model(2), model(2)
    compressor = dr.Compressor(parameters=named)
    trained(named, compressor, [9, 30])
    path = tf.train.Checkpoint(state=compressor.trackable).write(
        str(directory / f"tables-{hvd.size()}-{hvd.rank()}")
    )
    for (_, copied), (_, variable) in zip(copies, named):
        copied.assign(variable)
    other = dr.Compressor(parameters=copies)
    tf.train.Checkpoint(state=other.trackable).read(path).assert_consumed()
    assert names_of(other.adapter.slots) == ["table0"]
    trained(named, compressor, [380, 5])
    trained(copies, other, [380, 5])
    for (name, variable), (_, copied) in zip(named, copies):
        np.testing.assert_array_equal(variable.numpy(), copied.numpy(), err_msg=name)
    compressor.close()
    other.close()


def scenario_tables_are_named_in_one_warning(directory):
    """These are variables whose first gradient is zero in more than three quarters of the rows."""
    draw = random.Random(3)
    for how in ("dense", "eager") * 3:
        used = [draw.choice((1, 7, 99, 100, 400)) for _ in range(3)]
        named = model(len(used))
        steps = [[np.arange(count) for count in used]] * 3
        compressor = dr.Compressor(dr.recommended_codec(), parameters=named)
        said = _warnings_of(named, compressor, steps, how)
        tables = [number for number, count in enumerate(used) if count < 100]
        assert len(said) == bool(tables), (how, used, said)
        for number in range(3) if tables else ():
            assert (f'"table{number}": "rows"' in said[0]) == (number in tables), (used, said)
        assert not any("kernel" in text for text in said), said


def scenario_tables_of_keras_are_found_or_named(directory):
    """In fit, where Horovod's optimizer makes dense tensors of slices."""
    for codec in (None, dr.recommended_codec()):
        _fit_with_a_table(codec)


def _fit_with_a_table(codec):
    tf.keras.utils.set_random_seed(3)
    network = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(ROWS, 32, input_length=4),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, use_bias=False),
        ]
    )
    network.build([None, 4])
    compressor = dr.Compressor(codec, parameters=network.trainable_variables)
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.01), compression=compressor, sparse_as_dense=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network.compile(optimizer, loss="mse")
        inputs = np.arange(64).reshape(16, 4) % 60
        network.fit(inputs, np.zeros([16, 32]), batch_size=8, verbose=0)
    said = [str(one.message) for one in caught if "embedding table" in str(one.message)]
    name = network.trainable_variables[0].name
    assert names_of(compressor.adapter.slots) == ([name] if codec is None else [])
    assert len(said) == (codec is not None), said
    if said:
        assert f'{{"{name}": "rows"}}' in said[0], said


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
        named = model(1)
        compressor = dr.Compressor(
            {"table*": codec}, memory and {"table*": memory}, parameters=named
        )
        assert not _warnings_of(named, compressor, [[np.arange(9)]] * 2, how), (codec, how)


def scenario_a_later_step_of_a_restored_job_is_not_looked_at(directory):
    named, codec = model(1), dr.recommended_codec()
    compressor = dr.Compressor(codec, parameters=named)
    assert _warnings_of(named, compressor, [[np.arange(9)]], "dense")
    other = dr.Compressor(codec, parameters=named)
    other.load_state_dict(compressor.state_dict())
    compressor.close()
    assert not _warnings_of(named, other, [[np.arange(9)]], "dense")
