"""Test from_params: layers with allreduce, settings of None, policies with which a memory grows."""

import pytest
from test_params import GATHERED, TOPK, initialized_horovod, made, quiet  # noqa: F401

import deepreduce_hvd as dr


def test_layers_count_with_allreduce():
    """Layers without a compressor go through Horovod's own allreduce, and others do not."""

    def ways(params):
        return [repr(policy.codec or policy.way) for policy in quiet(params).policies.values()]

    random, dense = repr(dr.RandomK(0.1)), "'dense'"
    one = {"compressor": "randomk", "compress_ratio": 0.1}
    first, second = ways({"layers": {"weight": one}})
    assert random in first and second == dense
    first, second = ways({**one, "layers": {"weight": {"compressor": "none"}}})
    assert first == dense and random in second


def test_none_is_not_given():
    """As from a parser of arguments."""
    nothing = dict.fromkeys(("compress_ratio", "warmup_steps", "quantum_bits", "layers"))
    assert quiet({**nothing, **GATHERED, "compressor": "topk"}).codec.sparsifier == dr.TopK(0.3)
    settings = {"quantum_bits": None, "bucket_size": None, "compressor": "qsgd", **GATHERED}
    assert made(settings)[0].codec.value == dr.QSGD(bits=8, bucket=128, norm="l2")


def test_policies_with_which_a_memory_grows():
    bloom = {**TOPK, "deepreduce": "index"}
    assert "residual" in TOPK.values()
    _, (text,) = made(bloom)
    assert "the end of a tensor is hardly ever sent" in text
    quiet({**bloom, "policy": "p0"})
    quiet({**bloom, "memory": "none"})
    with pytest.raises(dr.InvalidArgumentError, match="keeps values at their indices, got .*naive"):
        made({**bloom, "policy": "naive"})
    quiet({**bloom, "policy": "naive", "memory": "none"})


@pytest.mark.parametrize("memory", ["none", "residual"])
def test_half_precision_through_allreduce(memory):
    compressor, texts = made({"compressor": "fp16", "memory": memory})
    assert {policy.way for policy in compressor.policies.values()} == {"fp16"}
    assert ["not kept" in text for text in texts] == [True] * (memory == "residual")
    ways = made({"layers": {"weight": {"compressor": "fp16"}}})[0].policies.values()
    assert [policy.way for policy in ways] == ["fp16", "dense"]


@pytest.mark.parametrize("name", ["codec", "memory", "communicator"])
def test_stages_as_arguments_are_refused(name):
    stage = {"codec": dr.Codec(dr.TopK(0.1)), "memory": dr.NoMemory(), "communicator": dr.GTopK()}
    message = f"from_params: expected {name} among the settings, .* got the argument {name}="
    with pytest.raises(dr.InvalidArgumentError, match=message):
        made(TOPK, **{name: stage[name]})
