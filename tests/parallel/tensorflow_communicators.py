"""Test communicators on stock Horovod with TensorFlow.

Started by test_tensorflow_communicators.py under horovodrun.
"""

import itertools
import os
import sys
import zlib

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import sparse_vectors
import tensorflow as tf
from codecs_table import VALUE
from tensorflow_tools import (
    ALL_COMPRESSED,
    RATE,
    SIZES,
    assert_equal_everywhere,
    assert_same,
    batch,
    compressor_of,
    local_gradients,
    make_step,
    model,
    run_all,
    sum_over_ranks,
    train,
    variables,
)  # fmt: skip

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator

hvd.init()  # the schemes below depend on the number of ranks
COMMUNICATORS = [
    dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.GTopK(form="tree"), dr.CLTK(),
    dr.SharedRandomK(), dr.Auto(),
    dr.Hierarchical(dr.GTopK(), hvd.size()),
]  # fmt: skip


def codec_for(communicator, *stages):
    return dr.Codec(
        dr.RandomK(0.1) if communicator == dr.SharedRandomK() else dr.TopK(0.1), *stages
    )


def scenario_sparse_vectors(directory):
    """Test dr.sparse_allreduce.

    This is the first scenario, so that no compressor exists yet.
    """
    sparse_vectors.check(hvd, tf.constant, lambda tensor: tensor.numpy())
    vector = sparse_vectors.given(hvd.rank())

    @tf.function
    def in_a_graph():
        return dr.sparse_allreduce(*map(tf.constant, vector), sparse_vectors.D)

    try:
        in_a_graph()
    except Exception as error:  # of a type from AutoGraph
        assert "expected eager execution, got a graph" in str(error), error
    else:
        raise AssertionError("expected an error in a graph")


def scenario_equal_parameters_and_nothing_lost(directory):
    # each communicator runs with one of the options, and on three ranks with another one
    cases = list(itertools.product(({}, {"groups": 1}, {"groups": 2}), COMMUNICATORS))
    for number, (options, communicator) in enumerate(cases[hvd.size() % 3 :: 3]):
        named = model()
        compressor = compressor_of(
            named, codec_for(communicator, dr.Rice(), VALUE["qsgd_4"]), communicator=communicator
        )
        step = make_step(named, compressor, **options)
        step = step if number % 2 else tf.function(step, autograph=False)
        came_in = arrived = 0.0
        for count in range(2):
            before = local_gradients(named, batch(count))
            after = step(batch(count))
            came_in = came_in + np.concatenate(
                [part.numpy().astype(np.float64).reshape(-1) for part in before]
            )
            arrived = arrived + np.concatenate(
                [part.numpy().astype(np.float64).reshape(-1) for part in after]
            )
            assert_equal_everywhere(variables(named), f"{communicator} {options}")
        state = compressor.state_dict()["parameters"]
        kept = np.concatenate([
            state[name]["memory"].get("residual", np.zeros(np.prod(variable.shape))).astype(np.float64) for name, variable in named
        ])  # fmt: skip
        total_in, total = sum_over_ranks(came_in), arrived * hvd.size() + sum_over_ranks(kept)
        np.testing.assert_allclose(
            total,
            total_in,
            rtol=0,
            atol=1e-5 * np.abs(total_in).max(),
            err_msg=f"{communicator} {options}",
        )


def scenario_horovod_does_what_the_simulator_does(directory):
    """One message with all gradients gives the result of the simulator.

    The simulator equals the oracles (tests/test_communicators.py).
    """
    for communicator in COMMUNICATORS:
        if isinstance(communicator, dr.Auto):  # it measures, and then uses one of the others
            continue
        named = model()
        codec = codec_for(communicator, dr.Rice(), VALUE["qsgd_4"])
        compressor = compressor_of(named, codec, communicator=communicator, **ALL_COMPRESSED)
        buckets = []
        for rank in range(hvd.size()):
            members = []
            for (name, _), gradient in zip(named, local_gradients(named, batch(0, rank))):
                flat = gradient.numpy().reshape(-1)
                members.append(
                    BucketMember(
                        name, flat, (np.zeros(flat.size, np.float32),), zlib.crc32(name.encode())
                    )
                )
            buckets.append(Bucket(codec, dr.Residual(), members, rank=rank))
        expected = Simulator(hvd.size()).run(communicator, buckets)[hvd.rank()]
        got = make_step(named, compressor, groups=1)(batch(0))
        states = compressor.state_dict()["parameters"]
        for number, (member, gradient) in enumerate(zip(buckets[hvd.rank()].members, got)):
            out = np.zeros(member.gradient.size, np.float32)
            expected.add_to(number, out, 1 / hvd.size())
            # Horovod's allreduce may sum in another order
            tolerance = (
                1e-6
                if isinstance(communicator, (dr.CLTK, dr.SharedRandomK, dr.Hierarchical))
                else 0
            )
            np.testing.assert_allclose(
                gradient.numpy().reshape(-1),
                out,
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"{communicator} {member.name}",
            )
            np.testing.assert_allclose(
                states[member.name]["memory"]["residual"],
                member.state[0],
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"{communicator} {member.name}",
            )
        row = compressor.stats()["kernel0"]
        assert (
            row["rounds"] > 0
            and row["sent_bytes"] > 0
            and row["communicator"] == repr(communicator)
        ), row


def scenario_gradient_dtypes(directory):
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        named = model(dtype=dtype)
        compressor = compressor_of(named, codec_for(None), communicator=dr.GTopK())
        for gradient, (name, variable) in zip(
            tf.function(make_step(named, compressor), autograph=False)(batch(0, dtype=dtype)), named
        ):
            assert gradient.dtype == dtype and gradient.shape == variable.shape, name
            assert np.abs(gradient.numpy().astype(np.float64)).max() > 0, name
        assert_equal_everywhere(variables(named), dtype.name)


def scenario_keras_fit(directory):
    network = tf.keras.Sequential([tf.keras.layers.Dense(columns) for _, columns in SIZES])
    network.build([None, 48])
    network.set_weights([variable.numpy() for variable in variables(model())])
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.05)),
        communicator="auto",
        parameters=network.trainable_variables,
        dense_below=50,
    )
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(RATE), compression=compressor
    )
    network.compile(optimizer, loss=lambda truth, output: tf.reduce_mean(output**2))
    images = np.concatenate([batch(step).numpy() for step in range(4)])
    network.fit(images, np.zeros(len(images)), batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert_equal_everywhere(network.trainable_variables, "fit")
    row = compressor.stats()[network.trainable_variables[0].name]
    assert row["steps"] == 4 and "predicted for k" in row["communicator"], row


def scenario_resumed_equals_uninterrupted(directory):
    whole = model()
    codec = codec_for(None, dr.Rice(), VALUE["qsgd_4"])
    compressor = compressor_of(whole, codec, communicator=dr.GTopK(), **ALL_COMPRESSED)
    train(2, named=whole, compressor=compressor)
    kept = [variable.numpy() for variable in variables(whole)]
    state = compressor.state_dict()
    train(2, named=whole, compressor=compressor, start=2)
    resumed = model(seed=9)
    for variable, value in zip(variables(resumed), kept):
        variable.assign(value)
    other = compressor_of(resumed, codec, communicator=dr.GTopK(), **ALL_COMPRESSED)
    other.load_state_dict(state)
    train(2, named=resumed, compressor=other, start=2)
    assert_same(whole, resumed)


def scenario_not_finite_on_one_rank_is_nan_on_all(directory):
    for communicator in COMMUNICATORS:
        named = model()
        compressor = compressor_of(named, codec_for(communicator), communicator=communicator)
        images = batch(0) * (float("nan") if hvd.rank() == hvd.size() - 1 else 1.0)
        for (name, _), gradient in zip(named, make_step(named, compressor, groups=1)(images)):
            assert np.isnan(gradient.numpy()).all(), f"{communicator} {name}"


def scenario_a_rank_that_fails_makes_all_raise(directory):
    # without Hierarchical, in which only the first rank of a host selects
    for number, communicator in enumerate(COMMUNICATORS[:-1]):
        named = [(f"failing{number}.{name}", variable) for name, variable in model()]
        compressor = compressor_of(named, codec_for(communicator), communicator=communicator)
        if hvd.rank() == hvd.size() - 1:
            # a wrong size: one element is expected
            compressor.adapter.slots[named[0][0]].selected = np.zeros(0, np.float32)
        step = make_step(named, compressor, groups=1)
        try:
            (step if number % 2 else tf.function(step, autograph=False))(batch(0))
        except (dr.PeerFailedError, tf.errors.OpError) as error:
            assert (
                f"rank {hvd.size() - 1}: " in str(error)
                and "PeerFailedError" in f"{type(error).__name__} {error}"
            ), error
        else:
            raise AssertionError(f"{communicator}: went on silently")


def scenario_graphs_of_version_1_are_refused(directory):
    with tf.Graph().as_default():
        named = [("weight", tf.compat.v1.get_variable("weight", [40, 48], use_resource=True))]
        compressor = dr.Compressor(parameters=named, communicator=dr.GTopK())
        try:
            compressor.compress(tf.ones([40, 48]))
        except dr.InvalidArgumentError as error:
            assert (
                "got a graph of tf.compat.v1; use Allgather instead of GTopK(form='butterfly')"
                in str(error)
            ), error
        else:
            raise AssertionError("a graph of tf.compat.v1: went on silently")


def scenario_graphs_of_several_dtypes(directory):
    """A graph keeps the dtype of its gradients when another one is traced."""
    for communicator in (dr.GTopK(), dr.RecursiveDoubling(), dr.SplitAllgather()):
        weight = tf.Variable(tf.ones([24, 20]))
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(1.0)),
            communicator=communicator,
            parameters=[("weight", weight)],
            dense_below=0,
        )

        def reduced(gradient, dtype, compressor=compressor, weight=weight):
            return dr.tensorflow.allreduce_gradients(
                [tf.cast(gradient, dtype)], [weight], compression=compressor
            )[0]

        graphs = {
            dtype: tf.function(
                lambda gradient, dtype=dtype: reduced(gradient, dtype), autograph=False
            )
            for dtype in (tf.bfloat16, tf.float32, tf.float64)
        }
        for _ in range(2):
            for dtype, graph in graphs.items():
                found = graph(tf.fill([24, 20], 1.0 + hvd.rank()))
                mean = (1 + hvd.size()) / 2
                assert found.dtype == dtype, (found.dtype, dtype)
                assert np.allclose(tf.cast(found, tf.float32), mean), (communicator, dtype)


if __name__ == "__main__":
    run_all(dict(globals()), sys.argv[1])
