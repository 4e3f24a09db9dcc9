"""Test what a compressor reports: scalars for a writer, the table, its notes and the plot."""

import numpy as np
import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd import layers_plot, statistics


@pytest.fixture(autouse=True)
def initialized_horovod():
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


def stepped(network):
    """Return a compressor that has exchanged the gradients of a network once."""
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=100)
    network(torch.ones(3, 40)).sum().backward()
    for parameter in network.parameters():
        if parameter.grad is not None:
            compressor.decompress(*compressor.compress(parameter.grad))
    return compressor


def test_summary_is_a_table(capsys):
    stepped(torch.nn.Linear(40, 50)).summary()
    *lines, note = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["parameter", "elements"]
    assert [line.split()[0] for line in lines[1:]] == ["weight", "bias", "total"]
    assert "sent B also has small control messages" in note


def test_what_is_sent_besides_payloads():
    network = torch.nn.Linear(40, 50)
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=100)
    assert [row["dense_bytes"] for row in compressor.stats().values()] == [0, 0]
    assert "0 until a gradient" in statistics.FIELDS["dense_bytes"]
    compressed, dense = stepped(network).stats().values()
    parts = ("header_bytes", "index_bytes", "value_bytes", "order_bytes")
    rest = compressed["sent_bytes"] - sum(compressed[part] for part in parts)
    assert rest == 24 + 4, "the first probe and the roll call"
    assert dense["sent_bytes"] == dense["dense_bytes"] == 200
    assert not any(dense[part] for part in parts)


def test_a_summary_on_one_rank_says_how_to_start_several(capsys):
    network = torch.nn.Linear(40, 50)
    dr.Compressor(parameters=network.named_parameters()).summary()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Nothing was exchanged: there is one rank here.")
    assert "horovodrun -np 2" in line


def test_a_summary_tells_frozen_parameters_from_unused_ones(capsys):
    network = torch.nn.Linear(40, 50)
    network.big = torch.nn.Linear(400, 50).requires_grad_(False)
    network.forgotten = torch.nn.Linear(40, 50, bias=False)
    stepped(network).summary()
    *_, frozen, unused = capsys.readouterr().out.splitlines()
    assert frozen == "No gradient is exchanged for frozen parameters: big.weight, big.bias."
    assert unused.startswith("No gradient has been exchanged yet for forgotten.weight. Is it used?")


def test_a_summary_knows_frozen_variables():
    tf = pytest.importorskip("tensorflow")
    variables = [
        tf.Variable(tf.zeros((40, 50)), name="kernel"),
        tf.Variable(tf.zeros((40, 50)), trainable=False, name="frozen"),
    ]
    assert dr.Compressor(parameters=variables).adapter.frozen() == {"frozen:0"}


def _row(path, dense_bytes, sent_bytes, error):
    return statistics.row(
        dense_bytes // 4, dense_bytes, sent_bytes, int(path != "none"), 0, 0, path=path,
        payload=None, kept=None
    ) | {"relative_error": error}  # fmt: skip


def test_a_summary_names_what_was_not_compressed():
    stats = {"a": _row("compressed", 4000, 40, 0.9), "b": _row("sparse", 800, 99, 0.0)}
    stats |= {f"c{number}": _row("none", 0, 0, None) for number in range(7)}
    unused, sparse = statistics.notes(stats)
    assert "c0, c1, c2, c3, c4 and 2 more." in unused and "the same parameters" in unused
    assert "not compressed for b." in sparse and "sparse_as_dense=True" in sparse
    assert statistics.notes({"a": stats["a"]}) == []
    table, why = statistics.summary_lines({"c": stats["c0"]}, 2, frozen={"c"})
    assert "parameter" in table and why.startswith("Nothing has been exchanged yet. ")


STATS = {
    "weight": _row("compressed", 4000, 40, 0.9),
    "bias": _row("dense", 80, 80, 0.0),
    "unused": _row("none", 0, 0, None),
}


def test_what_a_plot_shows():
    of_bytes, of_errors = layers_plot.figure_of(STATS).axes
    assert [label.get_text() for label in of_bytes.get_yticklabels()] == list(STATS)
    assert of_bytes.get_title() == "sent 120 of 4,080 bytes: 2.94%"
    dense, sent = of_bytes.containers
    assert [bar.get_width() for bar in dense] == [4000, 80, 0] and dense.get_label() == "dense"
    assert [bar.get_width() for bar in sent] == [40, 80, 0] and sent.get_label() == "sent"
    assert of_bytes.get_xscale() == "log" and of_bytes.yaxis_inverted()
    (line,) = of_errors.lines
    assert line.get_xydata().tolist() == [[0.9, 0], [0.0, 1]]


@pytest.mark.parametrize(
    ("name", "written", "signature"),
    [
        ("layers.png", "layers.png", b"\x89PNG"),
        ("layers.PDF", "layers.PDF", b"%PDF"),
        ("layers", "layers.png", b"\x89PNG"),
    ],
)
def test_the_file_of_a_plot(tmp_path, name, written, signature):
    stepped(torch.nn.Linear(40, 50)).plot(tmp_path / name)
    content = (tmp_path / written).read_bytes()
    assert content.startswith(signature) and len(content) > 5000


def test_a_plot_that_is_refused(tmp_path):
    compressor = dr.Compressor(parameters=torch.nn.Linear(40, 50).named_parameters())
    with pytest.raises(
        dr.InvalidArgumentError,
        match="plot: expected a step with exchanged gradients, got none. .* one rank here.*horovodrun",
    ):
        compressor.plot(tmp_path / "layers.png")
    with pytest.raises(dr.InvalidArgumentError, match="got none. Nothing has been exchanged yet"):
        layers_plot.draw({"unused": STATS["unused"]}, tmp_path / "layers.png", 2)
    compressor = stepped(torch.nn.Linear(40, 50))
    for path, message in (
        (tmp_path / "layers.xyz", r"expected an extension of .*, png, .*, got '.*layers\.xyz'"),
        (None, "expected one such as 'layers.png', got None"),
        (3, "expected one such as 'layers.png', got 3"),
    ):
        with pytest.raises(dr.InvalidArgumentError, match=f"plot path: {message}"):
            compressor.plot(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20])
def test_the_relative_error_does_not_depend_on_the_scale(scale):
    values = (np.random.default_rng(0).standard_normal(10_000) * scale).astype(np.float32)
    codec, kept = dr.Codec(dr.TopK(0.01)), values.copy()
    payload = codec.encode(values)
    kept -= dr.decode(payload)
    found = statistics.row(
        10_000, 40_000, payload.size, 1, 0.1, 0.1, path="compressed", payload=payload, kept=kept
    )
    assert found["relative_error"] == pytest.approx(0.958, abs=0.01)
