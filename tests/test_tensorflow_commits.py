"""Test what an elastic state of TensorFlow goes back to after a failure, on one rank."""

import os
import types

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.coordination import memory_transfer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
hvd = pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")
from horovod.common.exceptions import HorovodInternalError  # noqa: E402

from deepreduce_hvd.tensorflow.elastic import TensorFlowKerasState  # noqa: E402


class Job:
    """A variable and its compressor in an elastic state, with a commit at step 3 of 5."""

    def __init__(self):
        self.variable = tf.Variable(tf.zeros([40, 50]))
        self.compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=[("weight", self.variable)]
        )
        model = types.SimpleNamespace(variables=[self.variable])
        optimizer = types.SimpleNamespace(variables=list)
        self.state = TensorFlowKerasState(model, optimizer, compressor=self.compressor, step=0)
        self.state.sync()
        self.train(3)
        self.state.save()
        self.committed = self.snapshot()
        self.train(2)

    def train(self, steps):
        for _ in range(steps):
            gradient = np.random.default_rng(self.state.step).standard_normal([40, 50])
            reduced = hvd.allreduce(tf.constant(gradient, tf.float32), compression=self.compressor)
            self.variable.assign_sub(reduced)
            self.state.step += 1

    def snapshot(self):
        saved = self.compressor.state_dict()["parameters"]["weight"]
        return {
            "step": self.state.step,
            "model": self.variable.numpy(),
            "steps of the compressor": saved["steps"],
            **{kind: np.array(part) for kind, part in saved["memory"].items()},
        }


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # Horovod compresses on one rank only then
    hvd.init()
    return Job()


def lost(*arguments, **named):
    raise HorovodInternalError("Connection closed by peer")


def other_than(expected, snapshot):
    return [name for name in expected if not np.array_equal(expected[name], snapshot[name])]


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("save", "copies of memories"),
        ("sync", "copies of memories"),
        ("sync", "the model"),
        ("sync", "objects"),
    ],
)
def test_a_failure_goes_back_to_the_commit(job, monkeypatch, call, part):
    assert len(other_than(job.committed, job.snapshot())) == 4, "expected steps that change all"
    with monkeypatch.context() as patch:
        if part == "copies of memories":
            patch.setattr(memory_transfer, "copy_of_other_rank", lost)
        else:
            patch.setattr(
                job.state, {"the model": "_bcast_model", "objects": "_bcast_object"}[part], lost
            )
        with pytest.raises(HorovodInternalError):
            getattr(job.state, call)()
    job.state.restore()
    assert not other_than(job.committed, job.snapshot())
    job.state.sync()
    assert not other_than(job.committed, job.snapshot())


def test_sync_makes_a_commit(job):
    job.state.sync()
    synced = job.snapshot()
    assert synced["step"] == 3, "expected Horovod's rule: objects as in the last commit"
    assert synced["steps of the compressor"] == 5
    job.train(2)
    job.state.restore()
    assert not other_than(synced, job.snapshot())


def test_the_module_needs_no_import_of_its_own(monkeypatch):
    monkeypatch.delattr(dr.tensorflow, "elastic")
    assert dr.tensorflow.elastic.TensorFlowKerasState is TensorFlowKerasState
    with pytest.raises(AttributeError, match="no attribute 'states'"):
        dr.tensorflow.states()
