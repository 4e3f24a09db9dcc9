"""Shared by the scenarios of gradients: models with known gradients, and reports."""

import horovod.torch as hvd
import torch
from torch_tools import run_all

import deepreduce_hvd as dr

EVERYTHING = dr.Codec(dr.NoneSparsifier())


def communicators():
    """Return one communicator per kind: whole payloads, partial sums, values at common indices."""
    per_host = 2 if hvd.size() % 2 == 0 else hvd.size()
    return [
        dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(),
        dr.GTopK(form="tree"), dr.CLTK(), dr.SharedRandomK(),
        dr.Hierarchical(dr.Allgather(), per_host), dr.Hierarchical(dr.GTopK(), 1),
    ]  # fmt: skip


def codec_for(communicator, ratio=0.1):
    return dr.Codec(
        dr.RandomK(ratio) if communicator == dr.SharedRandomK() else dr.TopK(ratio),
        dr.Rice(),
        dr.QSGD(bits=4),
    )


def named(**shapes):
    """Return a model whose parameters have these shapes, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in shapes.items()
        }
    )


def coefficients(shape, step, rank=None, scale=1.0):
    rank = hvd.rank() if rank is None else rank
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(network, step, names=None):
    """Return a loss whose gradient for each parameter is :func:`coefficients`."""
    return sum(
        (network[name] * coefficients(network[name].shape, step).to(network[name].dtype)).sum()
        for name in names or list(network)
    )


def residual(compressor, name):
    return compressor.state_dict()["parameters"][name]["memory"]["residual"]


_found = []


def expect(condition, *what):
    """Record an error if ``condition`` is false.

    If a rank raised at once, the others would wait for it.
    """
    if not condition:
        _found.append(" ".join(map(str, what)))


def reporting(scenario):
    """Wrap a scenario, so that it raises at its end what :func:`expect` has recorded."""

    def run(directory):
        _found.clear()
        scenario(directory)
        assert not _found, "\n".join(_found)

    return run


def run_reporting(namespace, directory):
    """Run the scenarios of a module. Each raises what :func:`expect` has recorded."""
    hvd.init()
    torch.set_num_threads(1)
    scenarios = {
        name: reporting(value) for name, value in namespace.items() if name.startswith("scenario_")
    }
    run_all(scenarios, directory)
