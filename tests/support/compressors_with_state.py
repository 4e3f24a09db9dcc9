"""Compressors of three parameters in either framework, stepped without other ranks."""

import numpy as np
import pytest

import deepreduce_hvd as dr

CODEC = dr.Codec(dr.TopK(0.1), index=dr.Rice())


SHAPES = {"first": (20, 10), "second": (30, 10), "third": (4,)}


class OnTorch:
    """A compressor of three PyTorch parameters, the last one dense."""

    has_loss_scale = True

    def __init__(self, memory=None, shapes=SHAPES, codec=CODEC, **options):
        import horovod.torch as hvd
        import torch

        hvd.init()
        self.torch = torch
        self.named = [
            (name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()
        ]
        self.compressor = dr.Compressor(
            codec, memory, parameters=self.named, dense_below=50, **options
        )

    def step(self, seed):
        generator = self.torch.Generator().manual_seed(seed)
        for _, parameter in self.named:
            parameter.grad = self.torch.randn(parameter.shape, generator=generator)
        pending = [self.compressor.compress(parameter.grad) for _, parameter in self.named]
        return [
            self.compressor.decompress(reduced, context).numpy().copy()
            for reduced, context in pending
        ]

    def array(self, values):
        return self.torch.from_numpy(np.array(values))


class OnTensorFlow:
    """The same as :class:`OnTorch` with TensorFlow variables."""

    has_loss_scale = False

    def __init__(self, memory=None, shapes=SHAPES, codec=CODEC, **options):
        tf = pytest.importorskip("tensorflow")
        import horovod.tensorflow as hvd

        hvd.init()
        self.tf, self.hvd = tf, hvd
        self.named = [(name, tf.Variable(tf.zeros(shape))) for name, shape in shapes.items()]
        self.compressor = dr.Compressor(
            codec, memory, parameters=self.named, dense_below=50, **options
        )

    def step(self, seed):
        random = np.random.default_rng(seed)
        gradients = [
            self.tf.constant(random.standard_normal(variable.shape), self.tf.float32)
            for _, variable in self.named
        ]
        pending = [self.compressor.compress(gradient) for gradient in gradients]
        return [
            self.compressor.decompress(reduced, context).numpy() for reduced, context in pending
        ]

    def array(self, values):
        return np.array(values)


FRAMEWORKS = pytest.mark.parametrize("framework", [OnTorch, OnTensorFlow])


def snapshot(compressor):
    """Return everything that must not change if a state is refused."""
    return {
        name: (
            row["steps"],
            row["loss_scale"],
            {kind: np.array(part) for kind, part in row["memory"].items()},
        )
        for name, row in compressor.state_dict()["parameters"].items()
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name][:2] == other[name][:2], name
        for kind in one[name][2]:
            np.testing.assert_array_equal(one[name][2][kind], other[name][2][kind])
