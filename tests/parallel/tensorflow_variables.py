"""Test which variable a gradient belongs to, whatever the shapes.

Run by tensorflow_scenarios.py.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from own_stages import OwnResidual
from scenario_runner import sample
from tensorflow_tools import assert_equal_everywhere, sum_over_ranks

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow

SHAPE = (40, 48)


def alike(count):
    """Return [(name, variable)] of equal shape."""
    return [
        (f"layer{number}", tf.Variable(tf.ones(SHAPE), name=f"layer{number}"))
        for number in range(count)
    ]


def gradient_of(*key):
    return tf.constant(
        np.random.default_rng([*key, hvd.rank()]).standard_normal(SHAPE) ** 3, tf.float32
    )


class Balance:
    """Checks that nothing is lost for any variable.

    The results plus the residuals of all ranks must equal the inputs of all ranks.
    """

    def __init__(self, compressor):
        self.compressor = compressor
        self.came_in = {}
        self.handed_out = {}

    def count(self, name, gradient, result):
        self.came_in[name] = self.came_in.get(name, 0.0) + np.asarray(gradient, np.float64)
        self.handed_out[name] = self.handed_out.get(name, 0.0) + np.asarray(result, np.float64)

    def check(self, what):
        state = self.compressor.state_dict()["parameters"]
        for name in sorted(self.came_in):
            kept = sum_over_ranks(state[name]["memory"]["residual"].reshape(SHAPE))
            total = sum_over_ranks(self.came_in[name])
            np.testing.assert_allclose(
                self.handed_out[name] * hvd.size() + kept,
                total,
                rtol=0,
                atol=1e-5 * max(np.abs(total).max(), 1),
                err_msg=f"{what}: {name}",
            )


def tape_step(compressor, sources, gradients, **options):
    """Return the reduced gradients of ``sources``, whose gradients are ``gradients``.

    A source whose gradient is None is not in the loss.
    """
    with tf.GradientTape() as tape:
        loss = tf.add_n(
            [
                tf.reduce_sum(source * gradient)
                for source, gradient in zip(sources, gradients)
                if gradient is not None
            ]
        )
    tape = hvd.DistributedGradientTape(tape, compression=compressor, **options)
    return tape.gradient(loss, sources)


def expect_refusal(call, *words):
    try:
        call()
    except Exception as error:  # AutoGraph and the runtime raise their own errors, which quote ours
        text = f"{type(error).__name__} {error}"
        for word in ("InvalidArgumentError", *words):
            assert word in text, (word, text)
    else:
        raise AssertionError(f"went on silently instead of saying {words}")


def scenario_two_functions_of_equal_shapes(directory):
    """An exactly zero gradient is reduced to zero.

    It must not get the residual of a variable of another function.
    """
    named = alike(2)
    (_, a), (_, b) = named
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named)
    step_a = tf.function(lambda gradient: tape_step(compressor, [a], [gradient]))
    step_b = tf.function(lambda gradient: tape_step(compressor, [b], [gradient]))
    balance = Balance(compressor)
    for step in range(3):
        gradient = gradient_of(step)
        (result,) = step_a(gradient)
        balance.count("layer0", gradient, result)
        (result,) = step_b(tf.zeros(SHAPE))
        assert not result.numpy().any(), (
            f"step {step}: the gradient of layer1 is zero and has layer0's residual in it"
        )
        balance.count("layer1", tf.zeros(SHAPE), result)
    balance.check("two functions")
    assert [row["steps"] for row in compressor.stats().values()] == [3, 3]


def scenario_sources_in_any_order_and_number(directory):
    """Every gradient is added to the residual of its own variable.

    This holds for sources in any order, for missing sources, for gradients of None, and for
    Horovod's groups.
    """
    named = alike(4)
    variables = dict(named)
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named)
    balance = Balance(compressor)
    cases = [
        ((0, 1, 2, 3), (), {}), ((3, 2, 1, 0), (), {}), ((1, 3), (), {}), ((0, 1, 2), (1,), {}),
        ((2, 0, 3), (2,), {"groups": 1}), ((1, 0, 3, 2), (), {"groups": 2}),
        ((0, 1, 2), (), {"groups": [[named[2][1], named[1][1]], [named[3][1], named[0][1]]]}),
    ]  # fmt: skip
    for number, (order, nothing, options) in enumerate(sample(hvd.size(), cases)):
        names = [f"layer{index}" for index in order]

        def reduce(*gradients, names=names, options=options, nothing=nothing, order=order):
            given = [
                None if index in nothing else gradient for index, gradient in zip(order, gradients)
            ]
            sources = [variables[name] for name in names]
            bound = compressor.bound_to(sources) if tf.executing_eagerly() else compressor
            return [
                result
                for result in tape_step(bound, sources, given, **options)
                if result is not None
            ]

        gradients = [gradient_of(number, index) for index in order]
        for step in (reduce, tf.function(reduce)):
            present = [position for position, index in enumerate(order) if index not in nothing]
            results = step(*gradients)
            assert len(results) == len(present)
            assert_equal_everywhere(results, f"case {number}")
            for position, result in zip(present, results):
                balance.count(names[position], gradients[position], result)
        balance.check(f"case {number}")


def scenario_one_tensor_that_is_the_gradient_of_two_variables(directory):
    named = alike(3)
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named)
    balance = Balance(compressor)
    upstream = gradient_of(0)
    orders = ((0, 1, 2), (2, 0, 1))
    groups = [[named[1][1], named[2][1]], [named[0][1]]]
    for order, options in (
        (orders[0], {}),
        (orders[1], {}),
        (orders[0], {"groups": groups}),
        (orders[1], {"groups": groups}),
    ):
        sources = [named[index][1] for index in order]

        @tf.function
        def reduce(sources=sources, options=options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((sources[0] + sources[1] + 2 * sources[2]) * upstream)
            return hvd.DistributedGradientTape(tape, compression=compressor, **options).gradient(
                loss, sources
            )

        for index, factor, result in zip(order, (1, 1, 2), reduce()):
            balance.count(f"layer{index}", factor * upstream, result)
        balance.check(f"{order} {options}")


def scenario_gradients_beside_their_variables(directory):
    """allreduce_gradients accepts None, and slices beside dense gradients of equal shape."""
    named = alike(3)
    listed = [variable for _, variable in named]
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named)
    balance = Balance(compressor)

    def as_slices(gradient, rows):
        return tf.IndexedSlices(
            tf.gather(gradient, rows), tf.constant(rows), dense_shape=tf.constant(SHAPE)
        )

    def reduce(*gradients):
        return dr.tensorflow.allreduce_gradients(list(gradients), listed, compression=compressor)

    rows = list(range(0, SHAPE[0], 3))
    masked = np.zeros(SHAPE, np.float32)
    masked[rows] = 1
    for step, call in enumerate((reduce, tf.function(reduce)) * 2):
        one, two = gradient_of(step, 0), gradient_of(step, 1)
        results = call(one, None, two)
        assert results[1] is None
        balance.count("layer0", one, results[0])
        balance.count("layer2", two, results[2])
        results = call(None, as_slices(one, rows), two)
        balance.count("layer1", one * masked, tf.convert_to_tensor(results[1]))
        balance.count("layer2", two, results[2])
        balance.check(f"step {step}")
    assert [row["steps"] for row in compressor.stats().values()] == [4, 4, 8]


def scenario_eager_tapes_of_equal_shapes(directory):
    """Eager tapes of equal shapes are refused, because Horovod traces them only once.

    The error names the variables. Views from ``bound_to`` tell the tapes apart.
    """
    named = alike(2)
    (_, a), (_, b) = named
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named)
    first = gradient_of(0)
    (result,) = tape_step(compressor, [a], [first])
    expect_refusal(
        lambda: tape_step(compressor, [b], [gradient_of(1)]), "layer0", "layer1", "bound_to"
    )
    balance = Balance(compressor)
    balance.count("layer0", first, result)
    for step in range(2, 5):
        for name, variable in named:
            gradient = gradient_of(step, int(name[-1]))
            (result,) = tape_step(compressor.bound_to([variable]), [variable], [gradient])
            balance.count(name, gradient, result)
    balance.check("views")
    expect_refusal(
        lambda: tape_step(compressor.bound_to([a]), [a, b], [first, first]),
        "expected the gradient of layer0, of shape",
        "got the gradient of layer1",
    )


def scenario_eager_tapes_of_equal_shapes_that_travel_differently(directory):
    """Each gradient goes the way of its own variable, or is refused.

    Views tell the variables apart. Variables that are all sent uncompressed need none.
    """
    named = alike(3)
    gradient = tf.fill(SHAPE, 1e5)  # float16 has no such number
    policies = {"layer0": "fp16", "layer1": "dense", "*": dr.Codec(dr.TopK(0.05))}
    for first in range(3):
        compressor = dr.Compressor(policies, parameters=named)
        tape_step(compressor, [named[first][1]], [gradient])
        for number in range(3):
            if number != first:
                expect_refusal(
                    lambda: tape_step(compressor, [named[number][1]], [gradient]),
                    f"layer{first}",
                    f"layer{number}",
                    "bound_to",
                )
        paths = [row["path"] for row in compressor.stats().values()]
        assert [path != "none" for path in paths] == [number == first for number in range(3)]
    results = [
        tape_step(compressor.bound_to([variable]), [variable], [gradient])[0].numpy()
        for _, variable in named
    ]
    assert np.isinf(results[0]).all()
    assert (results[1] == 1e5).all()
    assert np.count_nonzero(results[2]) == np.prod(SHAPE) // 20
    paths = [row["path"] for row in compressor.stats().values()]
    assert paths == ["fp16", "dense", "compressed"], paths
    for way in ("fp16", "dense"):
        compressor = dr.Compressor(way, parameters=named)
        for _, variable in named:
            (result,) = tape_step(compressor, [variable], [tf.ones(SHAPE)])
            assert (result.numpy() == 1).all()


def scenario_a_refused_step_is_none(directory):
    """A refused step changes no counter and no memory.

    This also holds if the codec or the exchange runs in Python.
    """
    for memory, communicator in ((OwnResidual(), dr.Allgather()), (dr.Residual(), dr.GTopK())):
        named = alike(2)
        (_, a), (_, b) = named
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), memory, communicator, parameters=named)
        tape_step(compressor, [a], [gradient_of(0)])
        before = compressor.state_dict()["parameters"]
        for number in range(3):
            expect_refusal(lambda: tape_step(compressor, [b], [gradient_of(number)]), "bound_to")
        after = compressor.state_dict()["parameters"]
        assert [after[name]["steps"] for name, _ in named] == [1, 0], f"{communicator}: {after}"
        for name, _ in named:
            for kind, array in after[name]["memory"].items():
                np.testing.assert_array_equal(array, before[name]["memory"][kind], err_msg=name)


def scenario_allreduce_alone(directory):
    """hvd.allreduce does not know variables, so a shape that several of them have is refused.

    A view from ``bound_to`` says which variable is meant.
    """
    named = [*alike(2), ("other", tf.Variable(tf.ones([48, 40])))]
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named)
    for wrap in (lambda call: call, tf.function):
        reduce = wrap(lambda gradient: hvd.allreduce(gradient, compression=compressor))
        expect_refusal(lambda: reduce(gradient_of(0)), "layer0, layer1", "bound_to")
        assert reduce(tf.ones([48, 40])).numpy().any()
    balance = Balance(compressor)
    for step in range(3):
        for name, variable in named[:2]:
            gradient = gradient_of(step, int(name[-1]))
            balance.count(
                name, gradient, hvd.allreduce(gradient, compression=compressor.bound_to([variable]))
            )
    balance.check("views")
    expect_refusal(
        lambda: hvd.allreduce(tf.ones([3]), compression=compressor.bound_to([named[0][1]])),
        "layer0",
        "(3,)",
    )
    expect_refusal(lambda: compressor.bound_to([tf.Variable(1.0, name="stranger")]), "stranger")
    expect_refusal(lambda: compressor.bound_to([]), "at least one variable")


def scenario_keras_layers_of_equal_shape(directory):
    """Layers of equal shape train with fit, while another layer is frozen in each call.

    The residual of a frozen layer is kept. The last batch is smaller, so the step is traced again.
    """
    width = 40
    layers = [
        tf.keras.layers.Dense(width, use_bias=False, activation="tanh", name=f"alike{number}")
        for number in range(3)
    ]
    network = tf.keras.Sequential(layers)
    network.build([None, width])
    network.set_weights(
        [np.random.default_rng(number).standard_normal([width, width]) / 6 for number in range(3)]
    )
    random = np.random.default_rng(hvd.rank())
    images = random.standard_normal((40, width)).astype(np.float32)
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=network.trainable_variables)
    steps = {layer.name: 0 for layer in layers}
    for eagerly, frozen in ((False, None), (False, 1), (False, 0), (True, None), (True, 2)):
        for number, layer in enumerate(layers):
            layer.trainable = number != frozen
            steps[layer.name] += 3 * layer.trainable
        # in three of the fits, two layers train, always with the same shapes
        bound = compressor.bound_to(network.trainable_variables)
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=bound)
        network.compile(
            optimizer, loss=lambda truth, output: tf.reduce_mean(output**2), run_eagerly=eagerly
        )
        before = compressor.state_dict()["parameters"]
        network.fit(
            images, np.zeros(len(images)), batch_size=16, epochs=1, shuffle=False, verbose=0
        )
        assert_equal_everywhere(network.variables, "fit")
        after = compressor.state_dict()["parameters"]
        for number, layer in enumerate(layers):
            name = layer.kernel.name
            assert after[name]["steps"] == steps[layer.name], (name, after[name]["steps"], steps)
            unchanged = np.array_equal(
                before[name]["memory"]["residual"], after[name]["memory"]["residual"]
            )
            assert unchanged == (number == frozen), name
