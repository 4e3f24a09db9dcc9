"""Test what is printed to a terminal whose encoding is not UTF-8."""

import contextlib
import io
import pathlib

import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd import __main__ as check, plan
from deepreduce_hvd.terminal import show

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "größe–"  # Latin-1 has no dash
#: {encoding: the name in it}
PRINTED = {"ascii": r"gr\xf6\xdfe\u2013", "latin-1": r"größe\u2013", "utf-8": NAME}


def printed(encoding, function, *arguments):
    """Return what a function prints to a terminal with an encoding."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):  # after --help
        function(*arguments)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", PRINTED)
def test_what_the_encoding_lacks_is_escaped(encoding):
    # a path can have bytes that are no text
    text = printed(encoding, show, f"{NAME}\n\udcff")
    assert text == f"{PRINTED[encoding]}\n\\udcff\n"


def test_a_stream_without_an_encoding():
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        show(NAME)
    assert stream.getvalue() == f"{NAME}\n"


@pytest.mark.parametrize("encoding", PRINTED)
def test_the_plan_command_prints_ascii(encoding):
    layers = str(ROOT / "results" / "schedule-layers.csv")
    text = printed(encoding, plan.main, [layers, "--hosts", "2", "--link", "1gbit:25us"])
    assert text.isascii() and "25 us per message" in text and "\nplan " in text
    text = printed(encoding, plan.main, ["--help"])
    assert text.isascii() and "--density" in text


@pytest.mark.parametrize("encoding", PRINTED)
def test_check_prints_any_path(encoding):
    text = printed(encoding, check._Report().good, "", f"/home/{NAME}")
    assert f"/home/{PRINTED[encoding]}" in text
    assert printed(encoding, check.main, ["--help"]).isascii()


@pytest.mark.parametrize("encoding", PRINTED)
def test_summary_prints_any_name(encoding):
    import horovod.torch as hvd

    hvd.init()
    network = torch.nn.ModuleDict({NAME: torch.nn.Linear(40, 50)})
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=100)
    network[NAME](torch.ones(3, 40)).sum().backward()
    for parameter in network.parameters():
        compressor.decompress(*compressor.compress(parameter.grad))
    text = printed(encoding, compressor.summary)
    assert f"{PRINTED[encoding]}.weight" in text
