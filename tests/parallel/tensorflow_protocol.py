"""Test what ranks must agree on, with stock Horovod and TensorFlow.

These are configurations and process sets. Started by test_tensorflow_protocol.py under horovodrun.
"""

import contextlib
import io
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from protocol_tools import SAME, before_last, on_last
from scenario_runner import refused
from tensorflow_tools import (
    Version1,
    assert_equal_everywhere,
    batch,
    compressor_of,
    make_step,
    model,
    run_all,
    variables,
)

import deepreduce_hvd as dr


def refusal_of(expected, run):
    """Return a list of what is wrong with a step that must raise ``expected`` on every rank.

    No rank may wait, and no collective may be left over.
    """
    try:
        run()
    # AutoGraph raises its own type, with the text of InvalidArgumentError
    except Exception as error:
        return [] if expected in str(error) else [f"expected {expected}, got {error}"]
    return [f"went on silently, expected {expected}"]


def scenario_ranks_that_differ_are_told_in_what(directory):
    """If a setting differs between ranks, the error names it and both values.

    This holds for eager steps and functions, for gradients that only some ranks compress, and for
    communicators that measure first.
    """
    found = []
    last = f" on rank {hvd.size() - 1}"
    for name, other, usual in (
        ("dense_below", 50, 300), ("dense_below", 1 << 20, 0), ("seed", 1, 0),
        ("codec", dr.Codec(dr.TopK(0.02)), dr.Codec(dr.TopK(0.05))),
        ("communicator", dr.Auto(), dr.Allgather()),
        ("communicator", dr.Allgather(), dr.Hierarchical(dr.Allgather(), 1)),
        ("communicator", dr.Auto(), dr.Hierarchical(dr.Allgather(), 1)),
    ):  # fmt: skip
        for wrap in (tf.function, lambda function: function):
            named = model()
            step = wrap(
                make_step(named, compressor_of(named, **{name: on_last(hvd, other, usual)}))
            )
            found += refusal_of(
                f"{SAME}{name}={usual} on {before_last(hvd)} and {other}{last}",
                lambda step=step: step(batch(0)),
            )
    slices = tf.IndexedSlices(
        tf.ones([1, 16]), tf.constant([3], tf.int64), tf.constant([1000, 16], tf.int64)
    )
    table = tf.Variable(tf.ones([1000, 16]))
    compressor = dr.Compressor(parameters=[("table", table)], dense_below=on_last(hvd, 0, 1 << 20))
    reduce = lambda: dr.tensorflow.allreduce_gradients([slices], [table], compression=compressor)  # noqa: E731
    found += refusal_of(f"{SAME}dense_below={1 << 20} on {before_last(hvd)} and 0{last}", reduce)
    assert not found, "\n".join(found)


def _two_compressors_in_a_graph_of_version_1(**options):
    """Return a graph, two models, and a training step of each.

    ``options`` are for the compressor of the second model.
    """
    version_1 = Version1()
    with version_1.graph.as_default():
        models = model(), model()
        steps = [
            version_1.training(named, compressor_of(named, **some))
            for named, some in zip(models, ({}, options))
        ]
    return version_1, models, steps


def scenario_ranks_that_differ_in_a_graph_of_version_1(directory):
    """If the second of two compressors differs between ranks, no step begins.

    This holds for a step of each compressor, and for a step of both.
    """
    found = []
    last = f" on rank {hvd.size() - 1}"
    for name, other, usual in (
        ("dense_below", 50, 300), ("dense_below", 1 << 20, 0), ("seed", 1, 0),
        ("codec", dr.Codec(dr.TopK(0.02)), dr.Codec(dr.TopK(0.05))),
    ):  # fmt: skip
        version_1, models, steps = _two_compressors_in_a_graph_of_version_1(
            **{name: on_last(hvd, other, usual)}
        )
        expected = f"{SAME}{name}={usual} on {before_last(hvd)} and {other}{last}"
        feeds = {version_1.images: batch(0).numpy()}
        with version_1.session() as session:
            weights = [variables(named) for named in models]
            before = tf.nest.flatten(session.run(weights))
            for fetched in (steps, *steps):
                found += refusal_of(expected, lambda: session.run(fetched, feeds))
            for was, now in zip(before, tf.nest.flatten(session.run(weights))):
                np.testing.assert_array_equal(was, now)
    assert not found, "\n".join(found)


def scenario_two_compressors_in_a_graph_of_version_1(directory):
    version_1, models, steps = _two_compressors_in_a_graph_of_version_1(seed=1)
    batches = [batch(number).numpy() for number in range(2)]
    with version_1.session() as session:
        before = session.run([variables(named) for named in models])
        for one in batches:
            session.run(steps, {version_1.images: one})
        after = session.run([variables(named) for named in models])
    for was, now in zip(before, after):
        assert all((one != other).any() for one, other in zip(was, now))
        assert_equal_everywhere(now, "weights")


def scenario_slices_that_only_some_ranks_compress_in_a_graph_of_version_1(directory):
    with tf.Graph().as_default():
        table = tf.compat.v1.get_variable("table", [1000, 16], use_resource=True)
        compressor = dr.Compressor(
            parameters=[("table", table)], dense_below=on_last(hvd, 0, 1 << 20)
        )
        # a placeholder, because TensorFlow would run the allreduce of a constant before the graph
        rows = tf.compat.v1.placeholder(tf.float32, [1, 16])
        slices = tf.IndexedSlices(
            rows, tf.constant([3], tf.int64), tf.constant([1000, 16], tf.int64)
        )
        reduced = dr.tensorflow.allreduce_gradients([slices], [table], compression=compressor)
        fetched = tf.convert_to_tensor(reduced[0])
        start = tf.compat.v1.local_variables_initializer()
        with tf.compat.v1.Session() as session:
            session.run(start)
            last = f" and 0 on rank {hvd.size() - 1}"
            expected = f"{SAME}dense_below={1 << 20} on {before_last(hvd)}{last}"
            run = lambda: session.run(fetched, {rows: np.ones((1, 16))})  # noqa: E731
            found = refusal_of(expected, run)
    assert not found, found


def scenario_a_state_that_one_rank_has_loaded(directory):
    named = model()
    compressor = compressor_of(named)
    make_step(named, compressor)(batch(0))
    state = compressor.state_dict()
    named = model()
    compressor = compressor_of(named)
    if hvd.rank() < hvd.size() - 1:
        compressor.load_state_dict(state)
    expected = (
        f"{SAME}steps, number 0=kernel0 at step 1 on {before_last(hvd)} and kernel0 at step 0 on "
        f"rank {hvd.size() - 1}"
    )
    found = refusal_of(expected, lambda: make_step(named, compressor)(batch(0)))
    assert not found, found


def scenario_horovod_and_the_compressor_have_other_process_sets(directory):
    """The compressor does not wait for ranks outside of Horovod's process set."""
    some = hvd.add_process_set([0]) if hvd.size() == 2 else hvd.add_process_set([0, 1])
    expected = (
        f"expected Horovod to sum or average over the {hvd.size()} ranks of the compressor's "
        "process set, got another set"
    )
    named = model()
    compressor = compressor_of(named)
    found = []
    if some.included():
        gradient = tf.ones_like(named[0][1])
        calls = [
            lambda: hvd.allreduce(gradient, compression=compressor, process_set=some),
            lambda: hvd.grouped_allreduce([gradient], compression=compressor, process_set=some),
        ]
        if hvd.size() > 2:  # with one rank, a tape does not reduce
            calls.append(lambda: make_step(named, compressor, process_set=some)(batch(0)))
        for call in calls:
            found += refusal_of(expected, call)
    hvd.allreduce(tf.zeros([1]), name="process sets")
    hvd.remove_process_set(some)
    assert not found, found


def scenario_ranks_outside_of_a_process_set_have_the_same_compressors(directory):
    """Every rank makes the compressors of all process sets, in the same order.

    A rank outside of one takes no part in its handshake, and has no state.
    """
    some = hvd.add_process_set(list(range(hvd.size() - 1)))
    parts = []
    for members in (some, hvd.global_process_set):
        named = model()
        compressor = compressor_of(named, process_set=members)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            dr.prepare(tf_keras.optimizers.SGD(0.1, momentum=0.9), compressor)
        assert ("prepared SGD" in said.getvalue()) == (hvd.rank() == 0), said.getvalue()
        parts.append((named, compressor, make_step(named, compressor, process_set=members)))
    # the compressor of some ranks still waits for its handshake at the first step of the other
    for number in (1, 0, 1):
        if number or some.included():
            parts[number][2](batch(0))
    assert_equal_everywhere(variables(parts[1][0]), "all ranks")
    compressor = parts[0][1]
    compressor.summary()
    if some.included():
        compressor.load_state_dict(compressor.state_dict())
    else:
        message = (
            rf"expected a rank of the compressor's process set, .*got rank {hvd.rank()}; leave"
        )
        checkpoint = tf.train.Checkpoint(compressor=compressor.trackable)
        for call in (
            compressor.state_dict,
            lambda: compressor.load_state_dict({}),
            lambda: checkpoint.write(str(directory / "outside")),
            lambda: parts[0][2](batch(0)),
        ):
            with refused(message):
                call()
    hvd.allreduce(tf.zeros([1]), name="outside")
    for _, one, _ in parts:
        one.close()
    hvd.remove_process_set(some)


def scenario_process_sets_that_are_there_already(directory):
    """Hierarchical uses process sets that are already registered.

    The user or another compressor may have registered them.
    """
    hvd.add_process_set([1])
    for turn in range(2):
        named = model()
        make_step(named, compressor_of(named, communicator=dr.Hierarchical(dr.Allgather(), 1)))(
            batch(0)
        )
        assert_equal_everywhere(variables(named), f"sets {turn}")


# --- ranks without data ---


def scenario_data_that_ends_earlier_on_some_ranks(directory):
    """Ranks without data are named after some steps, and before the first step.

    The sizes of messages stay the same, so that Horovod caches them, or they change. On TensorFlow,
    Horovod joins only once per process: later calls of ``hvd.join()`` return at once.
    """
    constant = dr.Codec(dr.TopK(0.05), dr.RawIndex(), dr.RawValue())
    steps = []
    for eager in (False, True):
        for count, codec, communicator in (
            (3, constant, dr.Allgather()), (3, dr.Codec(dr.TopK(0.05)), dr.Allgather()),
            (3, constant, dr.GTopK()), (0, constant, dr.Allgather()),
        ):  # fmt: skip
            named = model()
            step = make_step(named, compressor_of(named, codec, communicator=communicator))
            step = step if eager else tf.function(step, autograph=False)
            for number in range(count):
                step(batch(number))
            steps.append(lambda step=step: step(batch(9)))
    table = tf.Variable(tf.ones([1000, 16]))
    compressor = dr.Compressor(parameters=[("table", table)])

    def reduce_slices():
        slices = tf.IndexedSlices(
            tf.ones([1, 16]), tf.constant([3], tf.int64), tf.constant([1000, 16], tf.int64)
        )
        return dr.tensorflow.allreduce_gradients([slices], [table], compression=compressor)

    for _ in range(3):
        reduce_slices()
    found = []
    if hvd.rank() == 0:
        for step in (*steps, reduce_slices):
            found += refusal_of("hvd.join()", step)
        # everything that this rank has started must end before it joins
        hvd.allreduce(tf.zeros([1]), name="told")
    hvd.join()
    assert not found, "\n".join(found)


if __name__ == "__main__":
    hvd.init()
    run_all(globals(), sys.argv[1])
