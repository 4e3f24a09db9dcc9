"""Prepared optimizers, and the warning about optimizers with momentum that are not."""

import itertools
import warnings

import horovod.torch as hvd
import torch
from torch_tools import ALL_COMPRESSED, assert_equal_everywhere, backward, model

import deepreduce_hvd as dr


def scenario_prepared_optimizers(directory):
    """A prepared optimizer trains like one that was created without momentum.

    An optimizer with momentum that is not prepared causes one warning.
    """

    def trained(prepare, make):
        network = model()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            named = list(network.named_parameters())
            compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=named, **ALL_COMPRESSED)
            optimizer = make(network.parameters())
            if prepare:
                dr.prepare(optimizer, compressor)
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=named, compression=compressor
            )
            for step in range(5):
                optimizer.zero_grad()
                backward(network, step)
                optimizer.step()
        assert_equal_everywhere(named, f"prepared {prepare}")
        texts = [str(one.message) for one in said]
        return network, [text for text in texts if "write optimizer = dr.prepare" in text]

    SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
    for with_momentum, without in (
        (lambda own: SGD(own, 0.01, momentum=0.9), lambda own: SGD(own, 0.1)),
        (lambda own: AdamW(own, 0.01), lambda own: AdamW(own, 0.01, betas=(0.0, 0.999))),
    ):
        network, said = trained(True, with_momentum)
        assert not said, said
        expected, said = trained(False, without)
        assert not said, said
        for (name, one), other in zip(network.named_parameters(), expected.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=name)
        _, said = trained(False, with_momentum)
        assert len(said) == 1 and said[0].startswith("deepreduce_hvd: "), said


def scenario_broadcast_optimizer_state_reaches_prepared_optimizers(directory):
    """The first rank resumes, and broadcasts the learning rate and what else its optimizer has."""
    # with the default codec, the layers may be embedding tables, which keep their momentum
    codecs = dr.Codec(dr.TopK(0.05)), None
    ways = "elastic", "wrapped", "plain", "plain, RMSprop"
    for bias, way, codec in itertools.product((True, False), ways, codecs):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Linear(20, 40, bias=bias), torch.nn.Tanh(), torch.nn.Linear(40, 30, bias=bias)
        )
        named = list(network.named_parameters())
        compressor = dr.Compressor(codec, parameters=named, dense_below=50)

        def made(parameters, rate):
            # Horovod makes a step to create a state, in which weight decay would change parameters
            kind = torch.optim.RMSprop if "RMSprop" in way else torch.optim.SGD
            return kind(parameters, rate, momentum=0.9)

        optimizer = dr.prepare(made(network.parameters(), 0.1), compressor)
        if hvd.rank() == 0:
            other = made(network.parameters(), 0.025)
            network(torch.ones(4, 20)).sum().backward()
            other.step()
            optimizer.load_state_dict(other.state_dict())
        if "plain" in way:  # before Horovod's optimizer begins with an empty state
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compressor
        )
        if way == "elastic":
            state = hvd.elastic.TorchState(network, optimizer)
            state.sync()
        else:
            hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        if way == "wrapped":
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.025, (bias, way, codec)
        for step in range(3):
            torch.manual_seed(hvd.rank() + 10 * step)
            optimizer.zero_grad()
            network(torch.randn(4, 20)).pow(2).mean().backward()
            optimizer.step()
        assert_equal_everywhere(named, f"{bias} {way} {codec}")
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # as for a rank that joins
        # the state that it saves is that of a plain optimizer
        plain = made(network.parameters(), 0.1)
        plain.load_state_dict(optimizer.state_dict())
        plain.step()
