"""Test errors of one rank, and usage that is an error on every rank, with PyTorch.

Every rank must get an error and continue with the next scenario. Run by torch_scenarios.py.
"""

import horovod.torch as hvd
import torch
from scenario_runner import refused
from torch_tools import assert_equal_everywhere, backward, batch, distributed, model

import deepreduce_hvd as dr


def scenario_other_k_in_rounds(directory):
    with refused(r"expected the same compressor configuration on every rank"):
        network = model()
        codec = dr.Codec(dr.TopK(0.02 if hvd.rank() == 1 else 0.05))
        optimizer, _ = distributed(network, codec, compressor_options={"communicator": dr.CLTK()})
        backward(network, 0)
        optimizer.step()


def scenario_other_communicator_on_one_rank(directory):
    with refused(r"expected the same compressor configuration on every rank"):
        network = model()
        communicator = dr.SplitAllgather() if hvd.rank() == 1 else dr.GTopK()
        optimizer, _ = distributed(network, compressor_options={"communicator": communicator})
        backward(network, 0)
        optimizer.step()


def scenario_other_order_on_one_rank(directory):
    with refused(r"expected the same compressor configuration on every rank"):
        network = model()
        named = list(network.named_parameters())
        ordered = named[::-1] if hvd.rank() == 1 else named
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=ordered, dense_below=50)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compressor
        )
        backward(network, 0)
        optimizer.step()


def scenario_other_layers_frozen_on_one_rank(directory):
    with refused(r"freeze the same ones"):
        network = model()
        optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.05)))
        for step in range(2):
            if step == 1:
                network[2 if hvd.rank() == 1 else 0].weight.requires_grad_(False)
            optimizer.zero_grad()
            backward(network, step)
            optimizer.step()


def scenario_adasum(directory):
    with refused(r"expected a gradient, got a parameter, which op=Adasum passes"):
        network = model()
        optimizer, _ = distributed(network, op=hvd.Adasum)
        backward(network, 0)
        optimizer.step()


def scenario_min_as_the_operation(directory):
    with refused(r"expected Horovod to sum or average"):
        network = model()
        optimizer, _ = distributed(network, op=hvd.Min)
        backward(network, 0)
        optimizer.step()


def scenario_a_step_that_would_reduce_the_gradients_again(directory):
    """step() after synchronize(), without skip_synchronize(); also with a scaler of losses."""
    for scales in (False, True):
        network = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
        options = {"loss_scale": scaler.get_scale} if scales else {}
        optimizer, compressor = distributed(network, compressor_options=options)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(network(batch(step)).pow(2).mean()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.01)
            if step < 3:
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
        before = [one.detach().clone() for one in network.parameters()]
        with refused(
            r"SGD\.step: expected `with optimizer\.skip_synchronize\(\):` around step\(\)"
        ):
            scaler.step(optimizer)
        assert all(map(torch.equal, before, network.parameters()))
        compressor.close()


def scenario_a_step_after_gradients_that_were_cleared(directory):
    """A rank without a batch may step then: it has nothing that was reduced before."""
    network = model()
    optimizer, _ = distributed(network)
    for step in range(6):
        if step % 3 != 2 or hvd.rank() != 0:
            backward(network, step)
        if step % 3 == 1:  # a bad batch
            optimizer.synchronize()
        else:
            optimizer.step()
        network.zero_grad(set_to_none=step < 3)
    assert_equal_everywhere(network.named_parameters(), "after gradients that were cleared")


def scenario_unnamed_gradient(directory):
    with refused(r"expected the gradient of one of the 6 named parameters"):
        network, other = model(), model()
        _, compressor = distributed(other)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1),
            named_parameters=network.named_parameters(),
            compression=compressor,
        )
        backward(network, 0)
        optimizer.step()


def scenario_elastic_state_without_the_compressor(directory):
    with refused(r"elastic training: expected an elastic state with the compressor"):
        network = model()
        optimizer, _ = distributed(network)

        @hvd.elastic.run
        def train(state):
            backward(network, 0)
            optimizer.step()

        train(hvd.elastic.TorchState(model=network, optimizer=optimizer))
