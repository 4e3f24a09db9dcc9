"""Test steps that loss scaling skips, on stock Horovod with TensorFlow.

No residual loses what these steps had sent. Started by test_tensorflow_overflow.py under
horovodrun.
"""

import itertools
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tensorflow_loss_scale
import tensorflow_scaled_reductions
from scenario_runner import refused, sample
from tensorflow_overflow_tools import (
    ONE,
    SHAPES,
    coefficients,
    compressor_of,
    made,
    make_step,
    residuals,
)
from tensorflow_tools import count, run_all, sum_over_ranks

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow.elastic

HIGH = {tf.float16: 6e4, tf.float32: 3e38, tf.bfloat16: 3e38}


def communicators():
    per_host = 2 if hvd.size() % 2 == 0 else hvd.size()
    return [
        dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.CLTK(),
        dr.SharedRandomK(),
        dr.Hierarchical(dr.Allgather(), per_host),
    ]  # fmt: skip


def codec_for(communicator):
    return dr.Codec(
        dr.RandomK(0.1) if communicator == dr.SharedRandomK() else dr.TopK(0.1), dr.Rice()
    )


def is_finite(gradients):
    return all(np.isfinite(np.array(gradient, np.float64)).all() for gradient in gradients.values())


def expect_skipped(compressor, step, network, peaks, what):
    """Check that a step with ``peaks``, between two normal steps, is skipped.

    It leaves all residuals unchanged, and no mass is lost.
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
        # float16 rounds the results, which have magnitudes of a few units
        tolerance = 1e-5 if network[name].dtype == tf.float32 else 2e-2
        np.testing.assert_allclose(
            got[name] + left, total, rtol=0, atol=tolerance, err_msg=f"{what} {name}: mass"
        )


def alternating():
    """Return each communicator with one of two dtypes."""
    return [*zip(communicators(), itertools.cycle([tf.float16, tf.float32]))]


def usual():
    """Return the default communicator with both dtypes, and one with several rounds."""
    return [(dr.Allgather(), tf.float16), (dr.Allgather(), tf.float32), (dr.GTopK(), tf.float32)]


def scenario_a_sum_that_overflows_is_a_skipped_step(directory):
    overflow_once(usual())


def scenario_a_sum_that_overflows_with_every_communicator(directory):
    other = {tf.float16: tf.float32, tf.float32: tf.float16}
    others = [(communicator, other[dtype]) for communicator, dtype in alternating()]
    cases = [*alternating(), *sample(hvd.size(), others)]
    overflow_once([case for case in cases if case not in usual()])


def overflow_once(cases):
    """Check gradients that are finite on every rank, but whose sum overflows their dtype."""
    for communicator, dtype in cases:
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
    """All ranks get NaN, and nothing is lost that other variables had sent."""
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
    for other in others:  # each has a void step of its own before it loads
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
    """allreduce_gradients reduces all its gradients in one step.

    With a loss scale, Horovod's own reduction of slices is refused.
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
            # slices are sent as whole rows
            assert np.array_equal(after["table"], before["table"]), (poisoned, number)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.gather(network["table"], [1, 2])) + tf.reduce_sum(network["quiet"])
    try:
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(
            loss, list(network.values())
        )
    except Exception as error:  # AutoGraph wraps our error in its own
        assert "expected dense gradients with loss_scale=, got tf.IndexedSlices" in str(error)
    else:
        raise AssertionError("slices that are never looked at were taken")
    dense = hvd.DistributedGradientTape(
        tape, compression=compressor, sparse_as_dense=True
    ).gradient(loss, list(network.values()))
    assert all(np.isfinite(one.numpy()).all() for one in dense)


def operations_of(graph):
    """Return the types of the operations in a graph and its functions."""
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
        compressor = compressor_of(network, **options)
        first = make_step(network, compressor)
        graph = first.get_concrete_function(coefficients(0, network)).graph
        # there is no optimizer here, so the search for one ends in step 101
        assert count(graph, "PyFunc") == 1 or name == "with"
        for number in range(101):
            first(coefficients(number % 2, network))
        step = make_step(network, compressor)
        found[name] = operations_of(step.get_concrete_function(coefficients(0, network)).graph)
    assert not {"IsFinite", "PyFunc", "EagerPyFunc"} & found["without"], found["without"]
    assert {"IsFinite", "PyFunc"} <= found["with"], found["with"]


def scenario_an_elastic_state_has_the_loss_scale(directory):
    """It synchronizes, saves and restores what Keras' optimizer leaves out of its variables."""
    network = tf.keras.Sequential([tf.keras.layers.Input((48,)), tf.keras.layers.Dense(40)])
    scaled = tf.keras.mixed_precision.LossScaleOptimizer
    optimizer = scaled(tf.keras.optimizers.SGD(0.01), initial_scale=2.0 ** (5 + hvd.rank()))
    compressor = dr.Compressor(
        parameters=network.trainable_variables, loss_scale=lambda: optimizer.loss_scale
    )
    optimizer.dynamic_counter.assign(hvd.rank() + 3)
    elastic = deepreduce_hvd.tensorflow.elastic
    state = elastic.TensorFlowKerasState(network, optimizer, compressor=compressor)

    def found():
        return float(optimizer.loss_scale), int(optimizer.dynamic_counter)

    assert found() == (2.0 ** (5 + hvd.rank()), hvd.rank() + 3)
    state.sync()
    assert found() == (32.0, 3)
    optimizer.dynamic_counter.assign(7)
    state.save()
    for changed in (state._saved_scale, [64.0, 9]):
        optimizer._loss_scale.current_loss_scale.assign(changed[0])
        optimizer.dynamic_counter.assign(changed[1])
    state.restore()
    assert found() == (32.0, 7)
    fixed = scaled(tf.keras.optimizers.SGD(0.01), dynamic=False, initial_scale=8.0)
    elastic.TensorFlowKerasState(network, fixed, compressor=compressor).sync()


def scenario_an_elastic_state_expects_equal_numbers_of_variables(directory):
    """The optimizer of a rank that joins may have no variables yet. Horovod would wait forever."""
    network = tf.keras.Sequential([tf.keras.layers.Input((48,)), tf.keras.layers.Dense(40)])
    optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
    if hvd.rank() == 0:
        optimizer.build(network.trainable_variables)
    compressor = dr.Compressor(parameters=network.trainable_variables)
    elastic = deepreduce_hvd.tensorflow.elastic
    state = elastic.TensorFlowKerasState(network, optimizer, compressor=compressor)
    found = r"got 3 on rank 0 and 1 on ranks? 1"
    with refused(rf"same number of variables of the optimizer on all ranks, {found}.*build"):
        state.sync()
    optimizer.build(network.trainable_variables)
    state.sync()


if __name__ == "__main__":
    hvd.init()
    parts = tensorflow_loss_scale, tensorflow_scaled_reductions
    others = {name: one for part in parts for name, one in vars(part).items()}
    run_all({**globals(), **others}, sys.argv[1])
