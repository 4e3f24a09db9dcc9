"""Embedding tables: what the first gradients show, and the warning about delayed ones."""

import random

import horovod.torch as hvd
import numpy as np
import torch
from table_programs import COLUMNS, ROWS
from torch_tables import Model, warnings_of

import deepreduce_hvd as dr


def scenario_tables_are_named_in_one_warning(directory):
    """With a codec that the user gave, they stay as they are."""
    draw = random.Random(4)
    for _ in range(6):
        used = [draw.choice((1, 7, 99, 100, 400)) for _ in range(3)]
        steps = [[np.arange(count) for count in used]] * 3
        network = Model(len(used))
        compressor = dr.Compressor(dr.recommended_codec(), parameters=network.named_parameters())
        said = warnings_of(network, compressor, steps)
        tables = [number for number, count in enumerate(used) if count < 100]
        assert len(said) == bool(tables), (used, said)
        for number in range(3) if tables else ():
            assert (f'"table.{number}.weight": "rows"' in said[0]) == (number in tables), said
        assert not any("layer" in text for text in said)
        assert compressor.policies["table.0.weight"].codec == dr.recommended_codec()


def scenario_half_of_the_rows_in_a_step_are_a_table_if_they_change(directory):
    """A layer with dropout uses other outputs in each step, too, but has a bias."""
    for shift, has_bias in ((180, False), (59, False), (60, False), (180, True)):
        steps = [[(np.arange(180) + shift * step) % ROWS] for step in range(3)]
        is_table = shift >= 60 and not has_bias
        for codec in (None, dr.recommended_codec()):
            network = Model(1)
            if has_bias:
                bias = torch.nn.Parameter(torch.ones(COLUMNS))
                network.table[0].register_parameter("bias", bias)
            compressor = dr.Compressor(codec, parameters=network.named_parameters())
            said = warnings_of(network, compressor, steps)
            assert len(said) == (is_table and codec is not None), (shift, has_bias, said)
            entry = compressor.state_dict()["parameters"]["table.0.weight"]
            assert entry["is_table"] is (is_table if codec is None else None), (shift, has_bias)


def scenario_a_gradient_with_nan_tells_nothing(directory):
    """With loss scaling, its step may be made again with the same batch."""
    network = Model(1)
    compressor = dr.Compressor(parameters=network.named_parameters())
    weight = network.table[0].weight
    for factor in (np.nan, 1.0, 1.0):
        network.zero_grad()
        (network.table[0](torch.arange(180)).sum() * factor).backward()
        hvd.allreduce(weight.grad, compression=compressor)
        entry = compressor.state_dict()["parameters"]["table.0.weight"]
    assert entry["is_table"] is False  # the second of two finite gradients has the same rows
    compressor = dr.Compressor(parameters=network.named_parameters())
    for factor, first in ((np.nan, 0), (1.0, 0), (1.0, 150)):
        network.zero_grad()
        (network.table[0](torch.arange(first, first + 180)).sum() * factor).backward()
        hvd.allreduce(weight.grad, compression=compressor)
    entry = compressor.state_dict()["parameters"]["table.0.weight"]
    assert entry["is_table"] is True


def scenario_an_error_in_the_look_at_a_gradient_is_told_to_all_ranks(directory):
    network = Model(1)
    compressor = dr.Compressor(parameters=network.named_parameters())

    def fails(slot, gradient):
        raise MemoryError("no memory today")

    if hvd.rank() == hvd.size() - 1:
        compressor.adapter.look_for_table = fails
    network([torch.arange(9)]).backward()
    try:
        hvd.allreduce(network.table[0].weight.grad, compression=compressor)
    except dr.PeerFailedError as error:
        assert f"rank {hvd.size() - 1}: MemoryError: no memory today" in str(error), error
    else:
        raise AssertionError("expected an error, got a sum")


def scenario_a_table_without_rows_is_looked_at_later(directory):
    network = Model(1)
    nothing, some = np.arange(0), np.arange(9)
    compressor = dr.Compressor(dr.recommended_codec(), parameters=network.named_parameters())
    said = warnings_of(network, compressor, [[nothing], [nothing], [some]])
    assert len(said) == 1, said


def scenario_what_a_table_can_have_is_suggested(directory):
    """GTopK selects as many elements in each step."""
    chosen = dr.recommended_codec()
    for way, codec, settings in (
        ("dense", None, {"communicator": dr.GTopK()}),
        ("rows", None, {"communicator": "auto"}),
        ("rows", chosen, {"schedule": "auto"}),
    ):
        network = Model(1)
        named = list(network.named_parameters())
        compressor = dr.Compressor(codec, parameters=named, **settings)
        (said,) = warnings_of(network, compressor, [[np.arange(9)]] * 2)
        assert f'write dr.Compressor({{"table.0.weight": "{way}"}}, ' in said, (settings, said)
        dr.Compressor({"table.0.weight": way, "*": codec}, parameters=named, **settings)


def scenario_tables_that_are_not_delayed_need_no_warning(directory):
    for codec, memory in (
        ("rows", None),
        ("dense", None),
        (None, None),
        (None, dr.NoMemory()),
        (dr.Codec(dr.NoneSparsifier()), None),
        (dr.Codec(dr.Threshold(0), index=dr.RLE()), None),
        (dr.Codec(dr.TopK(1.0)), None),
    ):
        network = Model(1)
        compressor = dr.Compressor(
            {"table*": codec}, memory and {"table*": memory}, parameters=network.named_parameters()
        )
        assert not warnings_of(network, compressor, [[np.arange(9)]] * 2), codec
