"""Steps that loss scaling skips, on stock Horovod with TensorFlow: no residual loses what they had
sent.

Started by test_tensorflow_overflow.py under horovodrun.
"""

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # what Horovod's Keras optimizers are made for

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from codecs_table import MEMORIES
from tensorflow_tools import assert_equal_everywhere, run_all, sum_over_ranks

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow

ONE = {"loss_scale": lambda: 1.0}
SHAPES = {"quiet": (40, 30), "loud": (40, 30), "small": (8,)}
LOW, HIGH = 1.0, {tf.float16: 6e4, tf.float32: 3e38, tf.bfloat16: 3e38}


def communicators():
    per_host = 2 if hvd.size() % 2 == 0 else hvd.size()
    return [
        dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.CLTK(), dr.SharedRandomK(),
        dr.Hierarchical(dr.Allgather(), per_host),
    ]  # fmt: skip


def codec_for(communicator):
    return dr.Codec(
        dr.RandomK(0.1) if communicator == dr.SharedRandomK() else dr.TopK(0.1), dr.Rice()
    )


def made(dtype=tf.float32, shapes=SHAPES):
    return {name: tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in shapes.items()}


def compressor_of(network, codec=None, memory=None, dense_below=50, **options):
    return dr.Compressor(
        codec or dr.Codec(dr.TopK(0.1)),
        memory,
        parameters=list(network.items()),
        dense_below=dense_below,
        **options,
    )


def coefficients(step, network, peaks=None):
    """{name: this rank's gradient}; ``peaks``: {name: a number in its fourth place}."""
    random = np.random.default_rng(1000 * step + hvd.rank())
    found = {}
    for name, variable in network.items():
        values = random.standard_normal(variable.shape)
        if name in (peaks or {}):
            values.flat[3] = peaks[name]
        found[name] = tf.cast(values, variable.dtype)
    return found


def make_step(network, compressor, names=None, **options):
    """The reduced gradients of a loss whose gradients are what is given."""

    @tf.function
    def step(wanted):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(tf.cast(network[name] * wanted[name], tf.float64))
                    for name in names or network
                ]
            )
        tape = hvd.DistributedGradientTape(
            tape, compression=compressor, **{"op": hvd.Sum, **options}
        )
        sources = [network[name] for name in names or network]
        return dict(zip(names or network, tape.gradient(loss, sources)))

    return step


def residuals(compressor):
    parameters = compressor.state_dict()["parameters"]
    return {name: part["memory"]["residual"] for name, part in parameters.items() if part["memory"]}


def is_finite(gradients):
    return all(np.isfinite(np.array(gradient, np.float64)).all() for gradient in gradients.values())


def expect_skipped(compressor, step, network, peaks, what):
    """Runs a sound step, one with ``peaks`` and a sound one; the second leaves all residuals as
    they were; none loses mass.
    """
    given = dict.fromkeys(residuals(compressor), 0.0)
    got = dict(given)
    for number in range(3):
        before = residuals(compressor)
        wanted = coefficients(number, network, peaks if number == 1 else None)
        gradients = step(wanted)
        assert is_finite(gradients) == (number != 1), f"{what} step {number}"
        if number == 1:
            for name, kept in residuals(compressor).items():
                np.testing.assert_array_equal(kept, before[name], err_msg=f"{what} {name}")
            continue
        for name in given:
            given[name] += wanted[name].numpy().astype(np.float64)
            got[name] += gradients[name].numpy().astype(np.float64)
    for name, kept in residuals(compressor).items():
        total, left = sum_over_ranks(given[name]), sum_over_ranks(kept).reshape(SHAPES[name])
        # float16 rounds the result, of at most a few units
        tolerance = 1e-5 if network[name].dtype == tf.float32 else 2e-2
        np.testing.assert_allclose(
            got[name] + left, total, rtol=0, atol=tolerance, err_msg=f"{what} {name}: mass"
        )


def scenario_a_sum_that_overflows_is_a_skipped_step(directory):
    """Finite on every rank, too large for the gradient's type once summed."""
    for communicator in communicators():
        for dtype in (tf.float16, tf.float32):
            network = made(dtype)
            compressor = compressor_of(
                network, codec_for(communicator), communicator=communicator, **ONE
            )
            options = {} if dtype == tf.float16 else {"groups": 1}
            step = make_step(network, compressor, **options)
            peak = (
                {"loud": HIGH[dtype]}
                if communicator != dr.SharedRandomK()
                else dict.fromkeys(["small"], HIGH[dtype])
            )
            expect_skipped(compressor, step, network, peak, f"{communicator} {dtype.name}")


def scenario_what_is_not_compressed_overflows(directory):
    network = made()
    compressor = compressor_of(network, **ONE)
    expect_skipped(compressor, make_step(network, compressor), network, {"small": 3e38}, "dense")


def scenario_nan_on_one_rank(directory):
    """It is NaN everywhere, and what the other variables had sent is not lost."""
    for bad in (np.nan, np.inf):
        for groups in (None, 1):
            network = made()
            compressor = compressor_of(network, **ONE)
            peak = {"loud": bad if hvd.rank() == hvd.size() - 1 else 1.0}
            expect_skipped(
                compressor,
                make_step(network, compressor, groups=groups),
                network,
                peak,
                f"{bad} {groups}",
            )


def scenario_several_void_steps_in_a_row(directory):
    network = made()
    compressor = compressor_of(network, **ONE)
    step = make_step(network, compressor)
    step(coefficients(0, network))
    before = residuals(compressor)
    for number in range(1, 4):  # nothing reads the state in between
        step(coefficients(number, network, {"loud": np.nan}))
    for name, kept in residuals(compressor).items():
        np.testing.assert_array_equal(kept, before[name], err_msg=name)
    once = residuals(compressor)
    for name in once:
        np.testing.assert_array_equal(once[name], before[name], err_msg=f"{name} read again")


def scenario_one_optimizer_skips_and_the_other_does_not(directory):
    network = made()
    compressor = compressor_of(network, **ONE)
    steps = {name: make_step(network, compressor, [name]) for name in ("quiet", "loud")}
    for number in range(3):
        before = residuals(compressor)
        wanted = coefficients(number, network, {"loud": np.nan} if number == 1 else None)
        for step in steps.values():
            step(wanted)
        for name, kept in residuals(compressor).items():
            assert np.array_equal(kept, before[name]) == (number == 1 and name == "loud"), (
                number,
                name,
            )


def scenario_memories_follow_the_loss_scale(directory):
    """A scale that changes by powers of two changes nothing else, with a variable, with eager steps
    and void steps in between.
    """
    for memory in MEMORIES.values():
        trained = []
        for scaled in (False, True):
            network = made()
            scale = tf.Variable(1.0)
            options = {"loss_scale": lambda: scale} if scaled else {}
            compressor = compressor_of(network, memory=memory, **options)
            step = make_step(network, compressor, op=hvd.Average)
            for number in range(6):
                scale.assign(2.0 ** (3 * number % 7) if scaled else 1.0)
                gradients = step(
                    {name: value * scale for name, value in coefficients(number, network).items()}
                )
                for name, gradient in gradients.items():
                    network[name].assign_sub(gradient / scale)
                if scaled:
                    step(
                        {
                            name: value * np.nan
                            for name, value in coefficients(number, network).items()
                        }
                    )
                    assert (
                        compressor.state_dict()["parameters"]["quiet"]["loss_scale"]
                        == scale.numpy()
                    )
            assert_equal_everywhere(network.values(), f"{memory} {scaled}")
            trained.append(network)
        for name in SHAPES:
            one, other = (network[name].numpy() for network in trained)
            # Horovod's ring adds three ranks up in an order that its buffer decides
            if compressor.stats()[name]["path"] == "dense":
                np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=f"{memory} {name}")
            else:
                np.testing.assert_array_equal(one, other, err_msg=f"{memory} {name}")


def scenario_a_checkpoint_after_a_void_step(directory):
    network = made()
    compressor = compressor_of(network, **ONE)
    step = make_step(network, compressor)
    step(coefficients(0, network))
    expected = residuals(compressor)
    step(coefficients(1, network, {"loud": np.nan}))
    prefix = str(directory / f"void.{hvd.size()}.{hvd.rank()}")
    tf.train.Checkpoint(compressor=compressor.trackable).write(prefix)
    state = compressor.state_dict()
    others = [compressor_of(network, **ONE) for _ in range(2)]
    for other in others:  # with a void step of their own behind them
        make_step(network, other)(coefficients(2, network, {"loud": np.nan}))
    tf.train.Checkpoint(compressor=others[0].trackable).read(prefix).assert_consumed()
    others[1].load_state_dict(state)
    for other in others:
        for name, kept in residuals(other).items():
            np.testing.assert_array_equal(kept, expected[name], err_msg=name)
        make_step(network, other)(coefficients(3, network))
    make_step(network, compressor)(coefficients(3, network))
    for other in others:
        for name, kept in residuals(other).items():
            np.testing.assert_array_equal(kept, residuals(compressor)[name], err_msg=name)
    try:
        tf.train.Checkpoint(compressor=compressor_of(network).trackable).read(prefix)
    except dr.InvalidArgumentError as error:
        assert (
            "expected one saved without loss_scale=, like this Compressor, got one saved with"
            in str(error)
        )
    else:
        raise AssertionError("a checkpoint in units of a loss scale was taken")


def scenario_slices(directory):
    """allreduce_gradients is one step of all that it is given; Horovod's own reduction of slices is
    refused.
    """
    network = made(shapes={"table": (200, 16), "quiet": (40, 30)})
    compressor = compressor_of(network, **ONE)

    @tf.function
    def step(rows, values, quiet):
        slices = tf.IndexedSlices(values, rows, tf.constant([200, 16], tf.int64))
        return dr.tensorflow.allreduce_gradients(
            [slices, quiet], list(network.values()), compression=compressor, op=hvd.Sum
        )

    for poisoned in ("table", "quiet"):
        for number in range(3):
            before = residuals(compressor)
            wanted = coefficients(
                number, network, {"quiet": np.nan} if number == 1 and poisoned == "quiet" else None
            )
            values = np.ones([2, 16], np.float32) + hvd.rank()
            if number == 1 and poisoned == "table":
                values[0, 0] = 3e38
            step(tf.constant([3, 9 + hvd.rank()], tf.int64), values, wanted["quiet"])
            after = residuals(compressor)
            assert np.array_equal(after["quiet"], before["quiet"]) == (number == 1), (
                poisoned,
                number,
            )
            # whole rows are sent
            assert np.array_equal(after["table"], before["table"]), (poisoned, number)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.gather(network["table"], [1, 2])) + tf.reduce_sum(network["quiet"])
    try:
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(
            loss, list(network.values())
        )
    except Exception as error:  # AutoGraph puts its own around ours
        assert "expected dense gradients with loss_scale=, got tf.IndexedSlices" in str(error)
    else:
        raise AssertionError("slices that are never looked at were taken")
    dense = hvd.DistributedGradientTape(
        tape, compression=compressor, sparse_as_dense=True
    ).gradient(loss, list(network.values()))
    assert all(np.isfinite(one.numpy()).all() for one in dense)


#: batches of the Keras scenarios, and how many of the first have Inf on one rank
STEPS, VOID = 10, 3


class _Batches:
    """A linear model's data."""

    def __init__(self):
        truth = np.random.default_rng(7).standard_normal((48, 40))
        self.inputs = (
            np.random.default_rng(hvd.rank()).standard_normal((STEPS * 16, 48)).astype(np.float32)
        )
        self.answers = (self.inputs @ truth).astype(np.float32)
        if hvd.rank() == hvd.size() - 1:
            self.inputs[: VOID * 16, 3] = np.inf


def scenario_keras_fit_with_a_loss_scale_optimizer(directory):
    """Void steps are as if they had not been, and the scale that they lower changes nothing."""
    batches = _Batches()

    def fit(first, scale):
        network = tf.keras.Sequential(
            [tf.keras.layers.Dense(40, use_bias=False, kernel_initializer="zeros")]
        )
        network.build([None, 48])
        options = {"loss_scale": lambda: network.optimizer.loss_scale} if scale else {}
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables, **options
        )
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.01), compression=compressor
        )
        if scale:
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=scale)
        network.compile(optimizer, loss="mse")
        network.fit(
            batches.inputs[first * 16 :],
            batches.answers[first * 16 :],
            batch_size=16,
            shuffle=False,
            verbose=0,
        )
        assert_equal_everywhere(network.trainable_variables, f"fit {scale}")
        return network, compressor

    scaled, compressor = fit(0, 2.0**15)
    plain, other = fit(VOID, None)
    np.testing.assert_allclose(
        scaled.get_weights()[0], plain.get_weights()[0], rtol=1e-5, atol=1e-7
    )
    scale = float(scaled.optimizer.loss_scale.numpy())
    assert scale == 2.0 ** (15 - VOID)
    (kept,), (expected,) = residuals(compressor).values(), residuals(other).values()
    np.testing.assert_allclose(
        kept / scale, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


def scenario_keras_without_loss_scale_is_refused(directory):
    """Unless the scale never changes, or nothing is kept."""
    batches = _Batches()
    for dynamic, memory in ((True, dr.Residual()), (False, dr.Residual()), (True, dr.NoMemory())):
        network = tf.keras.Sequential([tf.keras.layers.Dense(40, use_bias=False)])
        network.build([None, 48])
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), memory, parameters=network.trainable_variables
        )
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.01), compression=compressor
        )
        network.compile(
            tf.keras.mixed_precision.LossScaleOptimizer(
                optimizer, dynamic=dynamic, initial_scale=8.0
            ),
            loss="mse",
        )
        try:
            network.fit(batches.inputs[-32:], batches.answers[-32:], batch_size=16, verbose=0)
        except Exception as error:  # AutoGraph puts its own around ours
            assert (
                dynamic
                and memory == dr.Residual()
                and "give Compressor loss_scale=lambda: model.optimizer.loss_scale" in str(error)
            ), error
        else:
            assert not dynamic or memory == dr.NoMemory()


def scenario_keras_3_with_a_loss_scale_optimizer(directory):
    import keras

    batches = _Batches()

    def train(first, scale):
        network = keras.Sequential(
            [
                keras.layers.Input((48,)),
                keras.layers.Dense(40, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        optimizer = keras.optimizers.SGD(0.01)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
        optimizer.build(network.trainable_variables)
        options = {"loss_scale": lambda: optimizer.dynamic_scale} if scale else {}
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables, **options
        )

        @tf.function
        def step(inputs, answers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((network(inputs, training=True) - answers) ** 2)
                loss = optimizer.scale_loss(loss) if scale else loss
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            gradients = tape.gradient(
                loss, [variable.value for variable in network.trainable_variables]
            )
            optimizer.apply(gradients, network.trainable_variables)

        for number in range(first, STEPS):
            rows = slice(16 * number, 16 * (number + 1))
            step(tf.constant(batches.inputs[rows]), tf.constant(batches.answers[rows]))
        weights = network.get_weights()
        assert_equal_everywhere([tf.constant(one) for one in weights], f"keras {scale}")
        return weights[0], optimizer

    scaled, optimizer = train(0, 2.0**15)
    assert float(optimizer.dynamic_scale.numpy()) == 2.0 ** (15 - VOID)
    plain, _ = train(VOID, None)
    np.testing.assert_allclose(scaled, plain, rtol=1e-5, atol=1e-7)


def operations_of(graph):
    """The kinds of operations in a graph and in its functions."""
    definition = graph.as_graph_def()
    nodes = [
        *definition.node,
        *(node for function in definition.library.function for node in function.node_def),
    ]
    return {node.op for node in nodes}


def scenario_without_loss_scaling_nothing_is_added(directory):
    found = {}
    for name, options in (("without", {}), ("with", ONE)):
        network = made()
        step = make_step(network, compressor_of(network, **options))
        found[name] = operations_of(step.get_concrete_function(coefficients(0, network)).graph)
    assert not {"IsFinite", "PyFunc", "EagerPyFunc"} & found["without"], found["without"]
    assert {"IsFinite", "PyFunc"} <= found["with"], found["with"]


def scenario_a_loss_scale_that_is_none(directory):
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        network = made()
        step = make_step(network, compressor_of(network, loss_scale=lambda: scale))
        try:
            step(coefficients(0, network))
        except tf.errors.OpError as error:
            assert f"expected a function that returns a finite number above 0, got {scale}" in str(
                error
            )
        else:
            raise AssertionError(f"a loss scale of {scale} was taken")


if __name__ == "__main__":
    hvd.init()
    run_all(globals(), sys.argv[1])
