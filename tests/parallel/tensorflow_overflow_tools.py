"""Steps with given gradients, and the residuals of their compressors."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import deepreduce_hvd as dr

ONE = {"loss_scale": lambda: 1.0}


SHAPES = {"quiet": (40, 30), "loud": (40, 30), "small": (8,)}


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
    """Return {name: this rank's gradient}.

    ``peaks`` are {name: number}; the number replaces the fourth element.
    """
    random = np.random.default_rng(1000 * step + hvd.rank())
    found = {}
    for name, variable in network.items():
        values = random.standard_normal(variable.shape)
        if name in (peaks or {}):
            values.flat[3] = peaks[name]
        found[name] = tf.cast(values, variable.dtype)
    return found


def make_step(network, compressor, names=None, **options):
    """Return a step that reduces the gradients that it is given."""

    @tf.function(autograph=False)
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
