"""Test what must hold on every rank, on stock Horovod with TensorFlow.

Started by test_tensorflow_parallel.py under horovodrun.
"""

import itertools
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
import tensorflow_keras
import tensorflow_misuse
import tensorflow_refusals
import tensorflow_saved_models
import tensorflow_several
import tensorflow_states
import tensorflow_table_gradients
import tensorflow_tables
import tensorflow_variables
import tensorflow_version_1
from codecs_table import INDEX_WITH_MEMORY as INDEX, MEMORIES, VALUE_WITH_MEMORY as VALUE
from scenario_runner import sample
from tensorflow_tools import (
    ALL_COMPRESSED,
    RATE,
    SIZES,
    Version1,
    assert_close,
    assert_equal_everywhere,
    batch,
    compressor_of,
    count,
    local_gradients,
    loss_of,
    make_step,
    model,
    run_all,
    sum_over_ranks,
    train,
    variables,
)  # fmt: skip

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow


def scenario_every_codec_and_memory(directory):
    """All ranks get equal gradients.

    With Residual, what is sent plus what is kept equals the input.
    """
    cases = [(dr.Codec(dr.TopK(0.05), index=INDEX[index]), dr.Residual()) for index in INDEX]
    cases += [(dr.Codec(dr.TopK(0.05), value=VALUE[value]), dr.Residual()) for value in VALUE]
    cases += [
        (dr.Codec(dr.TopK(0.05), index=INDEX["rice"], value=VALUE["qsgd_4"]), memory)
        for memory in MEMORIES.values()
    ]
    for codec, memory in sample(hvd.size(), cases):
        weight = tf.Variable(tf.zeros([48, 40]))
        compressor = dr.Compressor(codec, memory, parameters=[("weight", weight)])
        reduce = tf.function(
            lambda gradient, compressor=compressor: hvd.allreduce(gradient, compression=compressor)
        )
        came_in = arrived = 0.0
        for step in range(2):
            gradient = tf.constant(
                np.random.default_rng([step, hvd.rank()]).standard_normal((48, 40)) ** 3, tf.float32
            )
            result = reduce(gradient)
            assert_equal_everywhere([result], f"{codec} {memory} {step}")
            came_in, arrived = (
                came_in + gradient.numpy().astype(np.float64),
                arrived + result.numpy().astype(np.float64),
            )
        if memory == dr.Residual():
            kept = compressor.state_dict()["parameters"]["weight"]["memory"]["residual"].reshape(
                48, 40
            )
            total = sum_over_ranks(came_in)
            np.testing.assert_allclose(
                arrived * hvd.size() + sum_over_ranks(kept),
                total,
                rtol=0,
                atol=2e-6 * np.abs(total).max(),
                err_msg=repr(codec),
            )


def scenario_average_is_the_mean_of_what_payloads_decode_to(directory):
    named = model()
    codec = dr.Codec(dr.TopK(0.1))
    gradients = make_step(named, compressor_of(named, codec, dr.NoMemory()))(batch(0))
    expected = [0.0] * len(gradients)
    for rank in range(hvd.size()):
        for number, gradient in enumerate(local_gradients(model(), batch(0, rank))):
            flat = tf.reshape(gradient, [-1])
            sent = dr.decode(codec.encode(flat)) if flat.shape[0] >= 50 else flat
            expected[number] = (
                expected[number] + tf.reshape(sent, gradient.shape).numpy() / hvd.size()
            )
    for gradient, mean in zip(gradients, expected):
        np.testing.assert_allclose(gradient.numpy(), mean, rtol=1e-6, atol=1e-9)


def scenario_eager_and_graph_agree(directory):
    for memory in sample(hvd.size(), MEMORIES.values()):
        assert_close(train(3, memory=memory)[0], train(3, memory=memory, eager=True)[0])


def scenario_groups_change_nothing_but_the_messages(directory):
    plain, _ = train(3)
    assert_close(plain, train(3, groups=1)[0])
    assert_close(plain, train(3, groups=2)[0])
    named = model()
    listed = variables(named)
    assert_close(plain, train(3, named=named, groups=[listed[2:], listed[:2]])[0])
    # one gather per group
    compressor = compressor_of(named)
    graph = (
        tf.function(make_step(named, compressor, groups=2)).get_concrete_function(batch(0)).graph
    )
    assert count(graph, "HorovodAllgather") == 2


def scenario_sum_and_predivide(directory):
    named = model()
    averaged = make_step(named, compressor_of(named))(batch(0))
    for options, factor in (({"op": hvd.Sum}, hvd.size()), ({"gradient_predivide_factor": 3.0}, 1)):
        again = model()
        for one, other in zip(
            averaged, make_step(again, compressor_of(again), **options)(batch(0))
        ):
            np.testing.assert_allclose(other.numpy(), factor * one.numpy(), rtol=1e-5, atol=1e-7)


def scenario_keras_optimizer_and_fit(directory):
    """model.fit with hvd.keras gives the same result as the tape."""

    def keras_model():
        named = model()
        network = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(
                    columns, activation="tanh" if number < len(SIZES) - 1 else None
                )
                for number, (_, columns) in enumerate(SIZES)
            ]
        )
        network.build([None, 48])
        network.set_weights([variable.numpy() for variable in variables(named)])
        return network

    images = np.concatenate([batch(step).numpy() for step in range(4)])
    for eagerly in sample(hvd.size(), (False, True)):
        network = keras_model()
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.05)), parameters=network.trainable_variables, dense_below=50
        )
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(RATE), compression=compressor
        )
        network.compile(
            optimizer, loss=lambda truth, output: tf.reduce_mean(output**2), run_eagerly=eagerly
        )
        network.fit(
            images, np.zeros(len(images)), batch_size=16, epochs=1, shuffle=False, verbose=0
        )
        expected, _ = train(4)
        for variable, (name, other) in zip(network.trainable_variables, expected):
            np.testing.assert_allclose(
                variable.numpy(), other.numpy(), rtol=1e-5, atol=1e-6, err_msg=name
            )
        assert compressor.stats()[network.trainable_variables[0].name]["steps"] == 4


def scenario_backward_passes_per_step(directory):
    named = model()
    compressor = compressor_of(named, memory=dr.NoMemory())
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(RATE), compression=compressor, backward_passes_per_step=2
    )

    @tf.function
    def step(images):
        with tf.GradientTape() as tape:
            loss = loss_of(named, images)
        optimizer.minimize(loss, variables(named), tape=tape)

    for number in range(4):
        step(batch(number))
        if number % 2 == 1:
            assert_equal_everywhere(variables(named), f"step {number}")
    assert compressor.stats()["kernel0"]["steps"] == 2
    by_hand = model()
    other = compressor_of(by_hand, memory=dr.NoMemory())
    for number in (0, 2):
        first, second = (
            local_gradients(by_hand, batch(number)),
            local_gradients(by_hand, batch(number + 1)),
        )
        for (_, variable), one, two in zip(by_hand, first, second):
            variable.assign_sub(RATE * hvd.allreduce(one + two, compression=other))
    assert_close(named, by_hand, rtol=1e-5, atol=1e-6)


def scenario_version_1_optimizer(directory):
    codec = dr.Codec(dr.TopK(0.05, warmup_steps=2))
    expected, _ = train(3, codec)
    version_1 = Version1()
    with version_1.graph.as_default():
        named = model()
        compressor = compressor_of(named, codec)
        training = version_1.training(named, compressor)
        broadcast = hvd.broadcast_global_variables(0)
    batches = [batch(step).numpy() for step in range(3)]
    with version_1.session() as session:
        for one in batches:
            session.run(training, {version_1.images: one})
            session.run(broadcast)  # must not overwrite the residuals of the ranks
        values = session.run(variables(named))
        steps = compressor.stats()["kernel0"]["steps"]
        state = compressor.state_dict()
        compressor.load_state_dict(state)
    assert steps == 3 and np.abs(state["parameters"]["kernel0"]["memory"]["residual"]).sum() > 0
    for value, (name, other) in zip(values, expected):
        np.testing.assert_allclose(value, other.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def scenario_process_set(directory):
    """The last rank of three does not take part; the others train together."""
    inside = [0, 1]
    chosen = hvd.add_process_set(inside) if hvd.size() > 2 else hvd.global_process_set
    named = model()
    if hvd.rank() in inside:
        compressor = compressor_of(named, process_set=chosen)
        step = tf.function(make_step(named, compressor, process_set=chosen))
        for number in range(2):
            step(batch(number))
            own = tf.concat([tf.reshape(variable, [-1]) for variable in variables(named)], 0)
            gathered = hvd.allgather(own[None], name="inside", process_set=chosen).numpy()
            assert (gathered == gathered[0]).all() and gathered.shape[0] == len(inside)
    if hvd.size() > 2:
        hvd.remove_process_set(chosen)


def scenario_gradient_dtypes(directory):
    cases = itertools.product((tf.float16, tf.bfloat16, tf.float64), ({}, {"groups": 1}))
    for dtype, options in sample(hvd.size(), cases):
        named = model(dtype=dtype)
        compressor = compressor_of(named)
        step = tf.function(make_step(named, compressor, **options))
        for number in range(2):
            gradients = step(batch(number, dtype=dtype))
            assert all(gradient.dtype == dtype for gradient in gradients)
            assert_equal_everywhere(variables(named), f"{dtype.name} step {number}")
        assert compressor.stats()["kernel0"]["dense_bytes"] == 48 * 64 * dtype.size


def scenario_embeddings(directory):
    """sparse_as_dense=True and allreduce_gradients give the same sums.

    allreduce_gradients returns slices. Neither sends anything of the dense size.
    """
    table, twin = (tf.Variable(tf.ones([1000, 16])) for _ in range(2))
    named = [("table", table), ("twin", twin)]
    rows = tf.constant([3, 3, 7 + hvd.rank()])
    expected = np.zeros((1000, 16), np.float32)
    for rank in range(hvd.size()):
        for row in (3, 3, 7 + rank):
            expected[row] += 1 / hvd.size()

    def loss():
        return tf.reduce_sum(tf.gather(table, rows)) + 2 * tf.reduce_sum(tf.gather(twin, rows))

    dense = dr.Compressor(dr.Codec(dr.TopK(1.0)), dr.NoMemory(), parameters=named)
    sliced = dr.Compressor(dr.Codec(dr.TopK(1.0)), parameters=named)

    @tf.function
    def as_dense():
        with tf.GradientTape() as tape:
            value = loss()
        return hvd.DistributedGradientTape(tape, compression=dense, sparse_as_dense=True).gradient(
            value, [table, twin]
        )

    @tf.function
    def as_slices():
        with tf.GradientTape() as tape:
            value = loss()
        return dr.tensorflow.allreduce_gradients(
            tape.gradient(value, [table, twin]), [table, twin], compression=sliced
        )

    for factor, one, other in zip((1, 2), as_dense(), as_slices()):
        np.testing.assert_allclose(one.numpy(), factor * expected, rtol=1e-6)
        assert isinstance(other, tf.IndexedSlices)
        assert other.indices.numpy().tolist() == [3, *(7 + rank for rank in range(hvd.size()))]
        np.testing.assert_allclose(
            tf.convert_to_tensor(other).numpy(), factor * expected, rtol=1e-6
        )
    for compressor in (dense, sliced):
        for row in compressor.stats().values():
            assert row["sent_bytes"] <= 40 + 16 + 8 * 32, row
    bypassed = dr.Compressor(parameters=named)
    with tf.GradientTape() as tape:
        value = loss()
    hvd.DistributedGradientTape(tape, compression=bypassed).gradient(value, [table, twin])
    for row in bypassed.stats().values():
        assert (row["path"], row["sent_bytes"]) == ("none", 0), row
    tf.keras.optimizers.SGD(0.1).apply_gradients(zip(as_slices(), [table, twin]))
    assert_equal_everywhere([table, twin], "embeddings")


def scenario_a_schedule_stays_out_of_graphs(directory):
    """A warm-up adds almost nothing to a graph, and every step sends the scheduled amount."""

    def graph_bytes(compressor, named):
        return (
            tf.function(make_step(named, compressor))
            .get_concrete_function(batch(0))
            .graph.as_graph_def()
            .ByteSize()
        )

    plain, long = model(), model()
    without = graph_bytes(compressor_of(plain, **ALL_COMPRESSED), plain)
    with_schedule = graph_bytes(
        compressor_of(long, dr.Codec(dr.TopK(0.05, warmup_steps=100_000)), **ALL_COMPRESSED), long
    )
    assert with_schedule < without + 20_000, (without, with_schedule)

    for eager in (False, True):
        sparsifier = dr.TopK(0.02, warmup_steps=3, warmup_ratio=0.5)
        named = model()
        compressor = compressor_of(named, dr.Codec(sparsifier), **ALL_COMPRESSED)
        step = make_step(named, compressor) if eager else tf.function(make_step(named, compressor))
        for number in range(5):
            step(batch(number))
            sent = {name: row["sent_values"] for name, row in compressor.stats().items()}
            assert sent == {
                name: sparsifier.most_selected(int(np.prod(variable.shape)), number)
                for name, variable in named
            }, (number, sent)


if __name__ == "__main__":
    hvd.init()
    run_all(
        {
            **globals(),
            **vars(tensorflow_several),
            **vars(tensorflow_states),
            **vars(tensorflow_variables),
            **vars(tensorflow_refusals),
            **vars(tensorflow_keras),
            **vars(tensorflow_saved_models),
            **vars(tensorflow_misuse),
            **vars(tensorflow_tables),
            **vars(tensorflow_version_1),
            **vars(tensorflow_table_gradients),
        },
        sys.argv[1],
    )
