"""Test the setting "layers" of from_params: parameters with their own settings."""

import pytest
import torch
from test_params import TOPK, initialized_horovod  # noqa: F401

import deepreduce_hvd as dr


def with_layers(layers, **more):
    network = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    return dr.from_params({**TOPK, **more, "layers": layers}, network.named_parameters())


def test_layers_with_their_own_settings():
    layers = {
        "0.weight": "dense",
        "0.*": {"compress_ratio": 0.5},
        "2.w*": {"compressor": "none", "deepreduce": None},
    }
    compressor = with_layers(layers, deepreduce="index", index="rice")
    rice = dr.Rice()
    expected = {
        "0.weight": None,
        "0.bias": dr.Codec(dr.TopK(0.5), index=rice),
        "2.weight": dr.Codec(dr.NoneSparsifier()),
        "2.bias": dr.Codec(dr.TopK(0.01), index=rice),
    }
    assert {name: policy.codec for name, policy in compressor.policies.items()} == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("dense", "layers: expected a dictionary of name patterns, .* got 'dense'"),
        ({"0.*": {"memory": "none"}}, "layers '0.\\*': expected settings of a codec, got memory"),
        ({"0.*": {"threshold": 1.0}}, "expected settings that apply to this choice .* threshold"),
        ({"0.*": "half"}, "expected a Codec, 'dense', 'fp16' or 'rows', got 'half'"),
        ({"9.*": "dense"}, "expected a pattern that a parameter needs"),
    ],
)
def test_layers_that_are_refused(layers, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        with_layers(layers)


def test_a_pattern_for_all_other_layers():
    """The settings of "*" replace those of the dictionary, and None stands for the latter."""
    half = with_layers({"*.bias": None, "*": {"compress_ratio": 0.5}}).policies
    assert half["0.bias"].codec.sparsifier == dr.TopK(0.01)
    assert half["0.weight"].codec.sparsifier == dr.TopK(0.5)
    dense = with_layers({"0.weight": {"compress_ratio": 0.5}, "*": "dense"}).policies
    assert [policy.dense for policy in dense.values()] == [False, True, True, True]
