"""Test several compressors in one process, together and one after another.

Run by tensorflow_scenarios.py.
"""

import gc
import os
import time
import warnings
import weakref

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from scenario_runner import sample
from tensorflow_tools import count

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.schedule import Message, Plan
from deepreduce_hvd.tensorflow.elastic import KerasState

SHAPES = ((24, 20), (20, 24), (30, 16))


def scenario_two_compressors_in_one_function(directory):
    """Two compressors in one function give the same results as in separate functions.

    Both use the same names. The names of one compressor differ only in characters that Horovod
    replaces with ``_``. TensorFlow may run independent operations concurrently.
    """
    names = ("layer/a", "layer_a", "layer.a")
    pairs = ((dr.GTopK(), dr.GTopK()), (dr.SplitAllgather(), dr.Allgather()))
    for communicators in sample(hvd.size(), pairs):

        def compressors(communicators=communicators):
            made = []
            for communicator in communicators:
                named = [(name, tf.Variable(tf.zeros(shape))) for name, shape in zip(names, SHAPES)]
                made.append(
                    (
                        dr.Compressor(
                            dr.Codec(dr.TopK(0.1)),
                            communicator=communicator,
                            parameters=named,
                            dense_below=0,
                        ),
                        named,
                    )
                )
            return made

        def gradients_of(step):
            random = np.random.default_rng([step, hvd.rank()])
            return [
                [tf.constant(random.standard_normal(shape), tf.float32) for shape in SHAPES]
                for _ in communicators
            ]

        at_once, in_turn = compressors(), compressors()

        def reduce(gradients, made):
            results = []
            for own, (compressor, named) in zip(gradients, made):
                variables = [variable for _, variable in named]
                with tf.GradientTape() as tape:
                    loss = tf.add_n(
                        [
                            tf.reduce_sum(variable * gradient)
                            for variable, gradient in zip(variables, own)
                        ]
                    )
                results.append(
                    hvd.DistributedGradientTape(tape, compression=compressor).gradient(
                        loss, variables
                    )
                )
            return results

        together = tf.function(lambda *flat: reduce([flat[:3], flat[3:]], at_once))
        alone = [tf.function(lambda *own, made=made: reduce([own], [made])[0]) for made in in_turn]
        for step in range(10):
            gradients = gradients_of(step)
            for number, (mine, expected) in enumerate(
                zip(
                    together(*gradients[0], *gradients[1]),
                    [reduce_alone(*own) for reduce_alone, own in zip(alone, gradients)],
                )
            ):
                for name, one, other in zip(names, mine, expected):
                    np.testing.assert_array_equal(
                        one.numpy(),
                        other.numpy(),
                        err_msg=f"{communicators[number]} {name}, step {step}",
                    )


def scenario_every_variable_travels_its_own_way(directory):
    """Sums equal those of Horovod alone, of float16, and of a separate compressor per codec."""
    other, codec = dr.Codec(dr.TopK(0.2), index=dr.Rice()), dr.Codec(dr.TopK(0.1))
    ways = {"dense*": "dense", "half*": "fp16", "other*": other, "*": codec}
    names = ("rest0", "other0", "half0", "rest1", "dense0", "other1")
    expected_of = {"dense": hvd.Compression.none, "half": hvd.Compression.fp16}
    for number, (communicator, options) in enumerate(
        ((dr.Allgather(), {}), (dr.Allgather(), {"groups": 1}), (dr.GTopK(), {"groups": 1}))
    ):
        if options:  # a group of Horovod has one dtype
            ways.pop("half*", None)
            expected_of["half"] = hvd.Compression.none
            ways = {"half*": "dense", **ways}
        parts = {name: tf.Variable(tf.zeros((24, 20)), name=name) for name in names}
        settings = {"communicator": communicator, "dense_below": 0}
        mixed = dr.Compressor(ways, parameters=list(parts.items()), **settings)
        for kind, own in (("other", other), ("rest", codec)):
            named = [(name, part) for name, part in parts.items() if name[:-1] == kind]
            expected_of[kind] = dr.Compressor(own, parameters=named, **settings)

        def reduce(coefficients, compression, chosen, parts=parts, options=options):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(parts[n] * coefficients[n]) for n in chosen])
            tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
            return dict(zip(chosen, tape.gradient(loss, [parts[name] for name in chosen])))

        traced = tf.function(lambda given, reduce=reduce, mixed=mixed: reduce(given, mixed, names))
        for step in range(3):
            random = np.random.default_rng([step, number, hvd.rank()])
            given = {n: tf.constant(random.standard_normal((24, 20)), tf.float32) for n in names}
            got, wanted = traced(given), {}
            for kind, compression in expected_of.items():
                chosen = [name for name in names if name[:-1] == kind]
                wanted.update(reduce(given, compression, chosen))
            for name in names:
                # with more than two ranks, Horovod's own sums depend on what it fuses
                exact = hvd.size() < 3 or name[:-1] in ("other", "rest")
                near = 2e-3 if name == "half0" else 1e-6
                tolerance = {} if exact else {"rtol": near, "atol": near}
                compare = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
                compare(got[name].numpy(), wanted[name].numpy(), **tolerance, err_msg=name)
        paths = [row["path"] for row in mixed.stats().values()]
        half = "dense" if options else "fp16"
        assert paths == ["compressed"] * 2 + [half, "compressed", "dense", "compressed"], paths
        assert mixed.stats()["half0"]["sent_bytes"] == (4 if options else 2) * 24 * 20


#: layers of the model whose plan is followed
LAYERS = (24, 20, 30, 16)


def _planned(ways):
    """Return a Keras model, and a plan whose messages have its variables in turn.

    Args:
        ways: (way, density) of each message.
    """
    network = tf.keras.Sequential([tf.keras.layers.Dense(units) for units in LAYERS])
    network.build([None, 40])
    random = np.random.default_rng(0)
    network.set_weights([random.standard_normal(w.shape) / 8 for w in network.get_weights()])
    names = [variable.name for variable in network.trainable_variables][::-1]
    messages = [
        Message(
            tuple(names[number :: len(ways)]), way, density, "Allgather" if density else "Allreduce"
        )
        for number, (way, density) in enumerate(ways)
    ]
    return network, Plan(tuple(messages), (), 0.0, "none", "none", 2, 1, "none")


def scenario_messages_of_a_plan(directory):
    """The groups of a plan change the messages, in a function and in fit, and no result."""
    ways = (("codec", 0.1), ("fp16", None), ("codec", 0.3), ("dense", None))
    random = np.random.default_rng(hvd.rank())
    images = random.standard_normal((64, 40)).astype(np.float32)
    gathers, results = {}, {}
    for grouped, through in ((False, "function"), (True, "function"), (True, "fit")):
        network, plan = _planned(ways)
        listed = network.trainable_variables
        codec = dr.Codec(dr.TopK(0.1), index=dr.Rice())
        compressor = dr.Compressor(codec, parameters=listed, dense_below=0, schedule=plan)
        groups = dr.tensorflow.message_groups(compressor) if grouped else None
        if through == "fit":
            network.compile(
                hvd_keras.DistributedOptimizer(
                    tf.keras.optimizers.SGD(0.1), compression=compressor, groups=groups
                ),
                loss=lambda truth, output: tf.reduce_mean(output**2),
            )
            network.fit(images, images, batch_size=16, shuffle=False, verbose=0)
        else:

            @tf.function
            def step(batch, network=network, compressor=compressor, groups=groups):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(network(batch) ** 2)
                tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
                found = tape.gradient(loss, network.trainable_variables)
                for variable, gradient in zip(network.trainable_variables, found):
                    variable.assign_sub(0.1 * gradient)

            for start in range(0, 64, 16):
                step(tf.constant(images[start : start + 16]))
            graph = step.get_concrete_function(tf.constant(images[:16])).graph
            gathers[grouped] = count(graph, "HorovodAllgather")
        results[grouped, through] = [variable.numpy() for variable in listed]
    encoded = sum(len(range(n, 2 * len(LAYERS), len(ways))) for n in (0, 2))
    assert gathers == {False: encoded, True: 2}, gathers
    for other in results.values():
        for one, two in zip(results[False, "function"], other):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def _end(references, seconds=30):
    """Return whether all objects behind weak references end in time.

    The watcher of long waits may hold the frame of a call for some seconds, until it looks again.
    """
    deadline = time.monotonic() + seconds
    while any(reference() is not None for reference in references):
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.1)
    return True


def scenario_memory_of_variables_that_are_gone(directory):
    """Memories are freed with their variables, or by ``close`` while the variables live.

    Horovod keeps its ``compression`` argument forever. It must not keep the memories.
    """

    def eager():
        variable = tf.Variable(tf.ones([200, 300]))
        compressor = dr.Compressor(parameters=[("weight", variable)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (1.0 + hvd.rank()))
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [variable])
        return compressor, [variable]

    def keras():
        network = tf.keras.Sequential([tf.keras.layers.Dense(200, use_bias=False)])
        network.build([None, 300])
        compressor = dr.Compressor(parameters=network.trainable_variables, communicator=dr.GTopK())
        network.compile(
            hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compressor),
            loss="mse",
        )
        network.fit(np.ones([4, 300]), np.ones([4, 200]), verbose=0)
        return compressor, network.trainable_variables

    for make, closes in ((eager, False), (keras, False), (eager, True), (keras, True)):
        compressor, variables = make()
        gone = [weakref.ref(variable) for variable in variables]
        (slot,) = compressor.adapter.slots.values()
        held = [*slot.state, slot.payload.variable]
        assert slot.state[0].numpy().any()
        if closes:
            compressor.close()
        else:
            tf.keras.backend.clear_session()
            with tf.Graph().as_default():  # the last reference may be dropped in any graph
                del variables
                assert _end(gone), f"{make.__name__}: the compressor keeps its variables"
        for part in held:
            kept = tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=part.dtype)
            assert kept.shape == [0], f"{make.__name__}: {part.name} is still of shape {kept.shape}"


def scenario_keras_state_with_the_callbacks_of_horovod(directory):
    """A restore returns memories and weights to the last commit of a callback."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(3)
    network = tf.keras.Sequential([tf.keras.layers.Dense(50)])
    network.build([None, 60])
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=network.trainable_variables)
    optimizer = tf.keras.optimizers.Adam(0.01)
    network.compile(hvd_keras.DistributedOptimizer(optimizer, compression=compressor), loss="mse")
    random = np.random.default_rng(hvd.rank())

    def fit(*callbacks):
        inputs, outputs = random.normal(size=[8, 60]), random.normal(size=[8, 50])
        network.fit(inputs, outputs, batch_size=4, verbose=0, callbacks=list(callbacks))

    def kept():
        saved = compressor.state_dict()["parameters"].values()
        return [*network.get_weights(), *(part for one in saved for part in one["memory"].values())]

    fit()  # creates the variables of the optimizer
    state = KerasState(network, compressor=compressor, batch=0, epoch=0)
    state.sync()
    fit(
        hvd_keras.elastic.CommitStateCallback(state),
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.UpdateEpochStateCallback(state),
    )
    assert state.epoch == 1, state.epoch
    committed = kept()
    fit()
    assert not any(map(np.array_equal, kept(), committed)), "expected steps that change everything"
    state.restore()
    state.sync()
    assert all(map(np.array_equal, kept(), committed)), "expected what the last commit has"


def scenario_prepared_optimizers(directory):
    """A prepared optimizer trains like one that was created without momentum.

    An optimizer with momentum that is not prepared causes one warning.
    """

    def trained(prepare, optimizer):
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(3)
        network = tf.keras.Sequential([tf.keras.layers.Dense(200), tf.keras.layers.Dense(4)])
        network.build([None, 300])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compressor = dr.Compressor(
                dr.Codec(dr.TopK(0.05)), parameters=network.trainable_variables, dense_below=0
            )
            if prepare:
                dr.prepare(optimizer, compressor)
            network.compile(
                hvd_keras.DistributedOptimizer(optimizer, compression=compressor), loss="mse"
            )
            random = np.random.default_rng(hvd.rank())
            inputs = random.standard_normal([64, 300]).astype(np.float32)
            network.fit(inputs, inputs[:, :4], batch_size=16, shuffle=False, verbose=0)
        texts = [str(one.message) for one in said]
        return network.get_weights(), [text for text in texts if "optimizer = dr.prepare" in text]

    optimizers = tf.keras.optimizers
    pairs = (
        (lambda: optimizers.SGD(0.001, momentum=0.9), lambda: optimizers.SGD(0.01)),
        (lambda: optimizers.Adam(0.001), lambda: optimizers.Adam(0.001, beta_1=0.0)),
    )
    for with_momentum, without in sample(hvd.size(), pairs):
        weights, said = trained(True, with_momentum())
        assert not said, said
        expected, said = trained(False, without())
        assert not said, said
        for one, other in zip(weights, expected):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        _, said = trained(False, with_momentum())
        assert len(said) == 1 and said[0].startswith("deepreduce_hvd: "), said
