"""Test a parameter that a compressor gets under two names, as with tied weights."""

import pytest
import torch

import deepreduce_hvd as dr

WEIGHT, BIAS = torch.zeros(40, 50), torch.zeros(40, 50)
TIED = [("enc", WEIGHT), ("bias", BIAS), ("dec", WEIGHT)]
POLICIES = [
    (
        {"codec": {"enc": "dense"}},
        r"same codec and memory for enc and dec, two names of one parameter, got dense for the"
        r" first and Codec\(.* for the second; write patterns that match both, or pass the",
    ),
    (
        {"memory": {"dec": dr.NoMemory()}},
        r"Codec\(.* with Residual\(\) \(or rows, if a table\) for the first and .* with NoMem",
    ),
    (
        {"codec": {"enc": dr.recommended_codec()}},
        r"with Residual\(\) for the first and .* with Residual\(\) \(or rows, if a table\) for the",
    ),
]


@pytest.mark.parametrize(("settings", "message"), POLICIES)
def test_names_with_other_codecs_or_memories_are_refused(settings, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.Compressor(parameters=TIED, **settings)


@pytest.mark.parametrize(("settings", "message"), POLICIES[:1])
def test_names_of_a_variable_are_refused_too(settings, message):
    tf = pytest.importorskip("tensorflow")
    variable = tf.Variable(tf.zeros((40, 50)))
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.Compressor(parameters=[("enc", variable), ("dec", variable)], **settings)


@pytest.mark.parametrize("codec", [None, "dense", {"[ed][en]c": "fp16"}, {"bias": "dense"}])
def test_statistics_have_one_row_for_all_names(codec):
    compressor = dr.Compressor(codec, parameters=TIED)
    assert list(compressor.stats()) == ["bias", "dec"]
    assert list(compressor.adapter.slots) == ["enc", "bias", "dec"]


def test_statistics_have_one_row_for_all_names_of_a_variable():
    tf = pytest.importorskip("tensorflow")
    tied, bias = tf.Variable(tf.zeros((40, 50))), tf.Variable(tf.zeros((40, 50)))
    compressor = dr.Compressor(parameters=[("enc", tied), ("bias", bias), ("dec", tied)])
    assert list(compressor.stats()) == ["bias", "dec"]


def test_a_plan_may_send_the_name_that_counts_uncompressed():
    """Its other name is then in no plan, and may still be an embedding table."""
    message = dr.schedule.Message(("dec",), "dense")
    plan = dr.schedule.Plan((message,), (), 1.0, "0" * 64, repr(dr.recommended_codec()), 1, 3, "x")
    compressor = dr.Compressor(parameters=TIED, schedule=plan)
    assert compressor.table_candidates == {"enc", "bias"}
