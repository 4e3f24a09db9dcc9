"""What a compressor reports: scalars for a writer, the table, its notes and the picture."""

import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd import layers_plot, statistics


@pytest.fixture(autouse=True)
def initialised_horovod():
    import horovod.torch as hvd

    hvd.init()


def test_writer_gets_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    network = torch.nn.Linear(40, 50)
    with SummaryWriter(str(tmp_path)) as writer:
        compressor = dr.Compressor(
            parameters=network.named_parameters(), dense_below=100, writer=writer, writer_interval=2
        )
        for _ in range(5):
            network(torch.ones(3, 40)).sum().backward()
            pending = [compressor.compress(parameter.grad) for parameter in network.parameters()]
            for reduced, context in pending:
                compressor.decompress(reduced, context)
            network.zero_grad()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    sent = events.Scalars("deepreduce/sent_bytes")
    assert [event.step for event in sent] == [2, 4]
    assert 0 < sent[0].value < 4 * (2000 + 50)
    assert [event.step for event in events.Scalars("deepreduce_sent_bytes/weight")] == [2, 4]
    assert {"deepreduce_relative_error/weight", "deepreduce/relative_error"} <= set(
        events.Tags()["scalars"]
    )
    assert {
        "deepreduce/dense_bytes",
        "deepreduce/relative_error",
        "deepreduce/encode_seconds",
    } <= set(events.Tags()["scalars"])


def test_summary_is_a_table(capsys):
    network = torch.nn.Linear(40, 50)
    compressor = dr.Compressor(parameters=network.named_parameters())
    compressor.summary()
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:2] == ["parameter", "elements"]
    assert "weight" in printed and "total" in printed
    assert "one rank" in printed.splitlines()[-1] and "horovodrun -np 2" in printed.splitlines()[-1]


def _row(path, dense_bytes, sent_bytes, error):
    return statistics.row(
        dense_bytes // 4, dense_bytes, sent_bytes, int(path != "none"), 0, 0, path=path,
        payload=None, kept=None
    ) | {"relative_error": error}  # fmt: skip


def test_a_summary_names_what_was_not_compressed():
    stats = {"a": _row("compressed", 4000, 40, 0.9), "b": _row("sparse", 800, 99, 0.0)}
    stats |= {f"c{number}": _row("none", 0, 0, None) for number in range(7)}
    unused, sparse = statistics.notes(stats, 2)
    assert "c0, c1, c2, c3, c4 and 2 more." in unused and "the same parameters" in unused
    assert "not compressed for b." in sparse and "sparse_as_dense=True" in sparse
    assert statistics.notes({"a": stats["a"]}, 2) == []
    assert statistics.notes({"c": stats["c0"]}, 2) == ["Nothing has been exchanged yet."]


@pytest.mark.parametrize(
    "rows", [[], [("none", 0, 0, None)], [("compressed", 4000, 40, 0.9), ("dense", 80, 80, 0.0)]]
)
def test_a_picture_of_the_layers(tmp_path, rows):
    layers_plot.draw(
        {f"layer{number}": _row(*row) for number, row in enumerate(rows)}, tmp_path / "layers.png"
    )
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
