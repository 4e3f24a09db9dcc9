"""Test on which device TensorFlow gradients are compressed, and why. No GPU is needed."""

import os
import types
import warnings

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import RecursiveDoubling
from deepreduce_hvd.planning.policies import Policy

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")
adapter = pytest.importorskip("deepreduce_hvd.tensorflow.ops")
from deepreduce_hvd.tensorflow import device as tensorflow_device  # noqa: E402
from deepreduce_hvd.tensorflow.device import DevicePath, gpu_of  # noqa: E402

GPU = "/job:localhost/replica:0/task:0/device:GPU:1"
CODEC = dr.Codec(dr.TopK(0.1), index=dr.Rice())


def on(device):
    return types.SimpleNamespace(device=device)


def path(codec=CODEC, communicator=None):
    return DevicePath(
        types.SimpleNamespace(
            policies={"layer": Policy("codec", codec, dr.Residual())},
            table_candidates=frozenset(),
            communicator=communicator or dr.Allgather(),
        )
    )


@pytest.fixture
def kernels(monkeypatch):
    """Simulate a CUDA build that supports codecs with Rice."""
    monkeypatch.setattr(adapter, "cuda_supports", lambda fields: fields[5] == dr.Rice().stage_id)


def test_the_gpu_of_a_variable():
    assert gpu_of(on(GPU)) == GPU and gpu_of(types.SimpleNamespace(value=on(GPU))) == GPU
    for elsewhere in (
        tf.Variable(1.0),
        on(""),
        on(None),
        on("/job:localhost/device:CPU:0"),
        types.SimpleNamespace(),
        types.SimpleNamespace(value=lambda: 1),
    ):
        assert gpu_of(elsewhere) is None


def test_a_home_beside_the_variable(kernels):
    one = path()
    assert one.why_not is None and not one.nccl
    assert one.home(on(GPU)) == GPU and one.home(tf.Variable(1.0)) is None


def test_nccl_is_asked_for_by_what_horovod_was_built_with(kernels, monkeypatch):
    monkeypatch.setattr(tensorflow_device.hvd, "nccl_built", lambda: 21805)
    assert path().nccl and not path(dr.Codec(dr.TopK(0.1), index=dr.RLE())).nccl


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"codec": dr.Codec(dr.TopK(0.1), index=dr.RLE())}, "has a stage without CUDA kernels"),
        ({"communicator": RecursiveDoubling()}, r"RecursiveDoubling\(.*\) works on the host"),
    ],
)
def test_what_keeps_gradients_on_the_host_is_told_once(kernels, options, reason):
    one = path(**options)
    with pytest.warns(
        UserWarning, match=f"gradients on {GPU} are compressed on the host: .*{reason}"
    ):
        assert one.home(on(GPU)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.home(on(GPU)) is None
        assert path(**options).home(tf.Variable(1.0)) is None


def test_a_build_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(adapter, "cuda_supports", None)
    with pytest.warns(UserWarning, match="operators are built without CUDA"):
        assert path().home(on(GPU)) is None
