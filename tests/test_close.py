"""Test ``Compressor.close``: memories are freed, and every further use is refused."""

import gc
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch

import deepreduce_hvd as dr

CLOSED = r"Compressor: expected one that is not closed, got one after close\(\)"
COMMUNICATORS = [dr.Allgather(), dr.GTopK()]


@pytest.fixture(autouse=True)
def horovod():
    import horovod.torch as hvd

    hvd.init()
    return hvd


def used(hvd, **options):
    """Return a parameter, and a compressor with a residual of its gradient."""
    parameter = torch.nn.Parameter(torch.zeros(40, 50))
    compressor = dr.Compressor(parameters=[("weight", parameter)], **options)
    parameter.grad = torch.randn(40, 50)
    hvd.allreduce(parameter.grad, compression=compressor)
    return parameter, compressor


def test_a_refused_compressor_does_not_stop_other_optimizers():
    """A notebook keeps the last exception, and so the half-made compressor."""
    parameter = torch.nn.Parameter(torch.ones(3))
    complex_one = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(dr.InvalidArgumentError, match="view_as_real") as kept:
        dr.Compressor(parameters=[("weight", complex_one)])
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.5).step()
    assert parameter.tolist() == [0.5] * 3
    del kept


def uses(parameter, path):
    """Return {what: function that uses a compressor}."""
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    return {
        "compress": lambda compressor: compressor.compress(parameter.grad),
        "decompress": lambda compressor: compressor.decompress(torch.ones(4), None),
        "register": lambda compressor: compressor.register(_ddp_model()),
        "state_dict": lambda compressor: compressor.state_dict(),
        "load_state_dict": lambda compressor: compressor.load_state_dict({}),
        "trackable": lambda compressor: compressor.trackable,
        "bound_to": lambda compressor: compressor.bound_to([parameter]),
        "stats": lambda compressor: compressor.stats(),
        "summary": lambda compressor: compressor.summary(),
        "profile": lambda compressor: compressor.profile(),
        "plan": lambda compressor: compressor.plan,
        "timeline": lambda compressor: compressor.timeline(path),
        "plot": lambda compressor: compressor.plot(path),
        "prepare": lambda compressor: dr.prepare(optimizer, compressor),
    }


def _ddp_model():
    """Return a stand-in for a DDP model; its process group is not used before the refusal."""
    return object.__new__(torch.nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("what", uses(torch.nn.Parameter(torch.zeros(1)), "x"))
def test_every_use_is_refused(horovod, what, tmp_path):
    parameter, compressor = used(horovod)
    compressor.close()
    compressor.close()
    with pytest.raises(dr.InvalidArgumentError, match=CLOSED):
        uses(parameter, tmp_path / "file.png")[what](compressor)
    assert "parameters=1 named" in repr(compressor)


@pytest.mark.subprocesses
def test_other_optimizers_step_after_shutdown():
    program = """
import horovod.torch as hvd
import torch
import deepreduce_hvd as dr

def gradient_of(layer):
    layer(torch.ones(2, 50)).sum().backward()
    return layer.weight.grad

hvd.init()
first, second = torch.nn.Linear(50, 50), torch.nn.Linear(50, 50)
compressor = dr.Compressor(parameters=first.named_parameters())
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(first.parameters(), lr=0.1), first.named_parameters(), compressor
)
hvd.allreduce(gradient_of(first), compression=compressor)
optimizer.step()
hvd.shutdown()
gradient_of(second)
torch.optim.SGD(second.parameters(), lr=0.1).step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("communicator", COMMUNICATORS, ids=repr)
def test_memories_are_freed_whatever_else_lives(horovod, communicator):
    parameter, compressor = used(horovod, communicator=communicator, loss_scale=lambda: 1.0)
    slot = compressor.adapter.slots["weight"]
    assert slot.state[0].any()
    compressor.close()
    assert slot.state == slot.backup == ()
    assert slot.payload is None
    _, other = used(horovod)  # the closed compressor does not interfere
    assert parameter.grad is not None
    assert other.stats()["weight"]["steps"] == 1


def test_a_commit_is_refused(horovod):
    from horovod.torch.elastic import TorchState

    _, compressor = used(horovod)
    state = TorchState(model=torch.nn.Linear(2, 2), compressor=compressor)
    compressor.close()
    with pytest.raises(dr.InvalidArgumentError, match=CLOSED):
        state.save()


class TestTensorFlow:
    """The same with TensorFlow, for variables that live on and functions traced before."""

    CODECS: ClassVar = {
        "native": {},
        "no memory": {"memory": dr.NoMemory()},
        "exchange in Python": {"communicator": dr.GTopK()},
    }

    @pytest.fixture(autouse=True)
    def tf(self):
        return pytest.importorskip("tensorflow")

    @staticmethod
    def used(tf, **options):
        """Return a variable, a compressor that was used with it, and its traced function."""
        import horovod.tensorflow as hvd

        hvd.init()
        variable = tf.Variable(tf.zeros([40, 50]))
        compressor = dr.Compressor(parameters=[("weight", variable)], **options)

        @tf.function
        def reduce(gradient):
            return hvd.allreduce(gradient, compression=compressor)

        reduce(gradient(tf))
        return variable, compressor, reduce

    @pytest.mark.parametrize("options", CODECS.values(), ids=CODECS)
    def test_memories_are_freed_and_traced_functions_are_refused(self, tf, options):
        variable, compressor, reduce = self.used(tf, **options)
        (slot,) = compressor.adapter.slots.values()
        held = [*slot.state, slot.payload.variable]
        compressor.close()
        compressor.close()
        gc.collect()
        assert variable.shape == [40, 50]
        for part in held:
            kept = tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=part.dtype)
            assert kept.shape == [0], f"{part.name} is still of shape {kept.shape}"
        with pytest.raises(tf.errors.InvalidArgumentError, match="expected .*got"):
            reduce(gradient(tf))

    def test_every_use_is_refused(self, tf, tmp_path):
        from deepreduce_hvd.tensorflow import allreduce_gradients

        variable, compressor, _ = self.used(tf)
        view, trackable = compressor.bound_to([variable]), compressor.trackable
        compressor.close()
        for use in (
            lambda: compressor.compress(gradient(tf)),
            lambda: view.compress(gradient(tf)),
            lambda: compressor.bound_to([variable]),
            lambda: compressor.trackable,
            lambda: compressor.state_dict(),
            lambda: compressor.stats(),
            lambda: tf.train.Checkpoint(compressor=trackable).write(str(tmp_path / "saved")),
            lambda: allreduce_gradients([gradient(tf)], [variable], compressor),
        ):
            with pytest.raises(dr.InvalidArgumentError, match=CLOSED):
                use()


def gradient(tf):
    return tf.constant(np.random.default_rng(0).normal(size=(40, 50)), tf.float32)
