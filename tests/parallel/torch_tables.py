"""Embedding tables: the codec "rows", and the warning about tables with another codec."""

import random
import warnings

import horovod.torch as hvd
import numpy as np
import torch
from torch_tools import assert_equal_everywhere

import deepreduce_hvd as dr

_ROWS, _COLUMNS = 400, 8


class _Model(torch.nn.Module):
    """Some tables, and a layer of the same shape, which uses all of its rows."""

    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.ModuleList(torch.nn.Embedding(_ROWS, _COLUMNS) for _ in range(tables))
        self.layer = torch.nn.Linear(_COLUMNS, _ROWS)

    def forward(self, rows):
        """Return a loss that uses ``rows``, one array for each table."""
        found = [table(one) for table, one in zip(self.table, rows)]
        return sum((self.layer(one).pow(2) + 1).sum() for one in found)


def _warnings_of(network, compressor, steps, **options):
    """Train, and return the warnings about tables. ``steps`` has the rows of each step."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=1e-4),
        named_parameters=network.named_parameters(), compression=compressor, **options,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in steps:
            optimizer.zero_grad()
            network([torch.from_numpy(one) for one in rows]).backward()
            optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "tables")
    return [str(one.message) for one in caught if "embedding table" in str(one.message)]


def scenario_tables_are_named_in_one_warning(directory):
    """These are tables of which the first batch uses less than a quarter of the rows."""
    draw = random.Random(3)
    for _ in range(6):
        used = [draw.choice((1, 7, 99, 100, 400)) for _ in range(3)]
        steps = [[np.arange(count) for count in used]] * 3
        network = _Model(len(used))
        said = _warnings_of(network, dr.Compressor(parameters=network.named_parameters()), steps)
        tables = [number for number, count in enumerate(used) if count < 100]
        assert len(said) == bool(tables), (used, said)
        for number in range(3) if tables else ():
            assert (f'"table.{number}.weight": "rows"' in said[0]) == (number in tables), said
        assert not any("layer" in text for text in said)


def scenario_a_table_without_rows_is_looked_at_later(directory):
    network = _Model(1)
    nothing, some = np.arange(0), np.arange(9)
    compressor = dr.Compressor(parameters=network.named_parameters())
    said = _warnings_of(network, compressor, [[nothing], [nothing], [some]])
    assert len(said) == 1, said


def scenario_what_a_table_can_have_is_suggested(directory):
    """A plan needs one codec, and GTopK selects as many elements in each step."""
    for settings in ({"communicator": dr.GTopK()}, {"schedule": "auto"}, {"communicator": "auto"}):
        way = "rows" if settings.get("communicator") == "auto" else "dense"
        network = _Model(1)
        named = list(network.named_parameters())
        compressor = dr.Compressor(parameters=named, **settings)
        (said,) = _warnings_of(network, compressor, [[np.arange(9)]] * 2)
        assert f'write dr.Compressor({{"table.0.weight": "{way}"}}, ' in said, (settings, said)
        dr.Compressor({"table.0.weight": way}, parameters=named, **settings)


def scenario_tables_that_are_not_delayed_need_no_warning(directory):
    for codec, memory in (
        ("rows", None),
        ("dense", None),
        (None, dr.NoMemory()),
        (dr.Codec(dr.NoneSparsifier()), None),
        (dr.Codec(dr.Threshold(0), index=dr.RLE()), None),
        (dr.Codec(dr.TopK(1.0)), None),
    ):
        network = _Model(1)
        compressor = dr.Compressor(
            {"table*": codec}, memory and {"table*": memory}, parameters=network.named_parameters()
        )
        assert not _warnings_of(network, compressor, [[np.arange(9)]] * 2), codec


def scenario_rows_get_what_the_codec_decodes_to(directory):
    """All non-zero elements are sent in each step, and nothing is kept."""
    network = _Model(2)
    compressor = dr.Compressor({"table*": "rows"}, parameters=network.named_parameters())
    codec = compressor.policies["table.0.weight"].codec
    used = [np.arange(9) + hvd.rank(), np.array([5, 5, 300 - hvd.rank()])]
    network([torch.from_numpy(one) for one in used]).backward()
    expected = []
    for number, table in enumerate(network.table):
        sent = dr.decode(codec.encode(table.weight.grad.numpy().ravel()))
        mean = hvd.allreduce(torch.from_numpy(sent), op=hvd.Average, name=f"expected.{number}")
        expected.append(mean.reshape(_ROWS, _COLUMNS))
    assert not _warnings_of(network, compressor, [used])
    rows, state = compressor.stats(), compressor.state_dict()["parameters"]
    for number, table in enumerate(network.table):
        torch.testing.assert_close(table.weight.grad, expected[number], rtol=1e-6, atol=0)
        name = f"table.{number}.weight"
        assert rows[name]["sent_values"] == _COLUMNS * len(set(used[number].tolist()))
        assert "residual" not in state[name], state[name]
