"""Test errors of one rank, and usage that is an error on every rank, with TensorFlow.

Every rank must get an error and continue with the next scenario. Run by tensorflow_scenarios.py.
"""

import itertools

import horovod.tensorflow as hvd
import tensorflow as tf
from scenario_runner import refused
from tensorflow_tools import (
    batch,
    compressor_of,
    local_gradients,
    loss_of,
    make_step,
    model,
    variables,
)

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.tensorflow.exchange import HorovodTransport


def scenario_xla(directory):
    with refused(r"expected a function without XLA, got one with jit_compile=True"):
        named = model()
        tf.function(make_step(named, compressor_of(named)), jit_compile=True)(batch(0))


def scenario_reducescatter(directory):
    named = model()
    compressor = compressor_of(named)
    gradients = local_gradients(named, batch(0))[:2]
    for reduce in (
        lambda: hvd.reducescatter(gradients[0], compression=compressor),
        tf.function(lambda: hvd.reducescatter(gradients[0], compression=compressor)),
        lambda: hvd.grouped_reducescatter(gradients, compression=compressor),
    ):
        with refused(r"expected a call by Horovod's allreduce, got one by reducescatter"):
            reduce()


def scenario_asynchronous_execution(directory):
    tf.config.experimental.set_synchronous_execution(False)
    try:
        named = model()
        compressor = compressor_of(named, communicator=dr.GTopK())
        with refused(r"expected synchronous execution"):
            tf.function(make_step(named, compressor))(batch(0))
    finally:
        tf.config.experimental.set_synchronous_execution(True)


def scenario_slices_out_of_range_on_one_rank(directory):
    with refused(r"parameter table: rank 1: slices: expected indices of 0 to 999, got 1000"):
        table = tf.Variable(tf.ones([1000, 16]))
        compressor = dr.Compressor(parameters=[("table", table)])
        rows = tf.constant([1000 if hvd.rank() == 1 else 3])
        slices = tf.IndexedSlices(tf.ones([1, 16]), rows, dense_shape=tf.constant([1000, 16]))
        reduce = tf.function(
            lambda: dr.tensorflow.allreduce_gradients([slices], [table], compression=compressor)
        )
        reduce()


def scenario_messages_too_large_on_one_rank(directory):
    """One rank believes that Horovod carries only 100 bytes, instead of 2 GiB."""
    right, message = HorovodTransport.most_bytes, r"messages of rank 1: expected at most 50 bytes, "
    table = tf.Variable(tf.ones([1000, 16]))
    slices = tf.IndexedSlices(tf.ones([20, 16]), tf.range(20), tf.constant([1000, 16]))
    try:
        if hvd.rank() == 1:
            HorovodTransport.most_bytes = 100
        for communicator, options in itertools.product(
            (dr.Allgather(), dr.SplitAllgather()), ({}, {"groups": 1})
        ):
            for wrap in (tf.function, lambda step: step):
                named = model()
                compressor = compressor_of(named, communicator=communicator)
                with refused(message):
                    wrap(make_step(named, compressor, **options))(batch(0))
        for wrap in (tf.function, lambda step: step):
            compressor = dr.Compressor(parameters=[("table", table)])
            with refused(message):
                wrap(
                    lambda compressor=compressor: dr.tensorflow.allreduce_gradients(
                        [slices], [table], compression=compressor
                    )
                )()
    finally:
        HorovodTransport.most_bytes = right


def scenario_other_process_set(directory):
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    with refused(r"expected Horovod to sum or average over the"):
        named = model()
        make_step(named, compressor_of(named, process_set=alone[hvd.rank()]))(batch(0))
    for one in alone:
        hvd.remove_process_set(one)


def scenario_min_as_the_operation(directory):
    with refused(r"expected Horovod to sum or average"):
        named = model()
        compressor = compressor_of(named)
        with tf.GradientTape() as tape:
            loss = loss_of(named, batch(0))
        for gradient in tape.gradient(loss, variables(named)):
            hvd.allreduce(gradient, op=hvd.Min, compression=compressor)


def scenario_adasum(directory):
    with refused(r"[Aa]dasum|expected Horovod to sum or average"):
        named = model()
        compressor = compressor_of(named)
        # the optimizer of tf.compat.v1 for Adasum never calls its compression
        for gradient in local_gradients(named, batch(0)):
            hvd.allreduce(gradient, compression=compressor, op=hvd.Adasum)


def scenario_the_message_after_a_failed_call(directory):
    """It has nothing of the gradient of an eager call that Horovod refused."""
    named = model()
    compressor = compressor_of(named)
    first, _, second, _ = local_gradients(named, batch(0))
    collectives, lengths = compressor.adapter.collectives, []
    gather = collectives.gather_messages

    def noting(message, name):
        lengths.append(len(message))
        return gather(message, name)

    collectives.gather_messages = noting
    for call in (
        lambda gradient, **options: hvd.allreduce(gradient, compression=compressor, **options),
        lambda *several, **options: hvd.grouped_allreduce(
            several, compression=compressor, **options
        ),
    ):
        with refused("prescale_factor"):
            call(first, prescale_factor="none")
        call(second)
        assert lengths.pop() == compressor.adapter.slots["kernel1"].payload_bytes
    call(first, second)
    (together,) = lengths
    slots = compressor.adapter.slots
    assert together == slots["kernel0"].payload_bytes + slots["kernel1"].payload_bytes


def scenario_unnamed_gradient(directory):
    with refused(
        r"one of the 2 named parameters, got the gradient of kernel1:0, of shape \(64, 3\)"
    ):
        named = model()
        make_step(named, compressor_of(named[:2]))(batch(0))


def scenario_a_single_variable_as_the_source(directory):
    """Horovod's tape would reduce the gradient of each of its rows."""
    with refused(
        r"got the gradient of .*, of shape \(50,\); give Horovod's tape variables in a list"
    ):
        weight = tf.Variable(tf.ones([40, 50]))
        compressor = dr.Compressor(parameters=[("weight", weight)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, weight)


def scenario_unknown_shape(directory):
    with refused(r"one of shape \(None, 16\), which could be that of a, b; name the variable"):
        a, b = tf.Variable(tf.ones([100, 16])), tf.Variable(tf.ones([50, 16]))
        compressor = dr.Compressor(parameters=[("a", a), ("b", b)])
        reduce = tf.function(
            lambda gradient: hvd.allreduce(gradient, compression=compressor),
            input_signature=[tf.TensorSpec([None, 16])],
        )
        reduce(tf.ones([100, 16]))


def scenario_a_variable_twice_among_the_sources(directory):
    """Horovod keeps one of the two results, so what the other one sent would be lost."""
    weight, other = tf.Variable(tf.ones([40, 50])), tf.Variable(tf.ones([40, 50]))
    for options, wrap in itertools.product(({}, {"groups": 1}), (tf.function, lambda step: step)):
        compressor = dr.Compressor(parameters=[("weight", weight), ("other", other)])

        def step(compressor=compressor, options=options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**2 + other**3)
            tape = hvd.DistributedGradientTape(tape, compression=compressor, **options)
            return tape.gradient(loss, [weight, other, weight])

        with refused(r"expected the gradient of each variable once, got that of .* 2 times"):
            wrap(step)()


def scenario_derivatives_of_reduced_gradients(directory):
    """They are errors; a result of Python code would count as a constant."""
    weight = tf.Variable(tf.reshape(tf.range(480.0) / 480, [24, 20]))
    exact = dr.Codec(dr.TopK(1.0))
    for communicator, as_slices in (
        (dr.GTopK(), False), (dr.Allgather(), True), (dr.Allgather(), False),
    ):  # fmt: skip
        compressor = dr.Compressor(
            exact, communicator=communicator, parameters=[("weight", weight)], dense_below=0
        )

        def derived(compressor=compressor, as_slices=as_slices):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_sum(weight**3)
                gradient = inner.gradient(loss, weight)
                if as_slices:
                    gradient = tf.IndexedSlices(gradient, tf.range(24), [24, 20])
                (reduced,) = dr.tensorflow.allreduce_gradients(
                    [gradient], [weight], compression=compressor
                )
                penalty = tf.reduce_sum(tf.convert_to_tensor(reduced) ** 2)
            return outer.gradient(penalty, weight)

        for wrap in (tf.function, lambda step: step):
            with refused("derive gradients before they are reduced"):
                wrap(derived)()


def scenario_rows_of_a_dense_variable_that_are_out_of_range(directory):
    """On all ranks; with a codec, see slices_out_of_range_on_one_rank."""
    weight = tf.Variable(tf.zeros([200, 8]))
    compressor = dr.Compressor("dense", parameters=[("weight", weight)])
    for bad in (-1, 200):
        slices = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([1, bad]))
        with refused("parameter weight: expected rows from 0 to 199, got"):
            dr.tensorflow.allreduce_gradients([slices], [weight], compression=compressor)
    slices = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([7, 7]))  # without dense_shape
    (mean,) = dr.tensorflow.allreduce_gradients([slices], [weight], compression=compressor)
    assert mean.shape == (200, 8) and float(tf.reduce_sum(mean[7])) == 16, mean
