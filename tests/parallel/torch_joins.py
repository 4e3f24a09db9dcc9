"""Test data that ends earlier on some ranks, which then call hvd.join().

Run by torch_protocol.py.
"""

import horovod.torch as hvd
import torch
from torch_gradients_tools import expect, named
from torch_tools import backward, distributed, model

import deepreduce_hvd as dr


def expect_a_missing_rank_to_be_named(what, missing, take_part):
    """Check that an error names the ``missing`` ranks, which have called hvd.join().

    Each of the other ranks gets the error when it takes part, and then joins them.
    """
    if hvd.rank() not in missing:
        try:
            take_part()
            expect(False, what, "went on silently")
        except dr.InvalidArgumentError as error:
            told = (
                f"got nothing from rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing))}, as after hvd.join()"
            )
            expect(told in str(error), what, "got:", error)
        # before one of these ranks joins, all of them must have processed what they have started
        hvd.allreduce(torch.zeros(1), name="told")
    hvd.join()


def scenario_data_that_ends_earlier_on_some_ranks(directory):
    """Ranks without data are named after an odd and after an even number of steps.

    The sizes of messages stay the same, so that Horovod caches them, or they change.
    """
    constant = dr.Codec(dr.TopK(0.05), dr.RawIndex(), dr.RawValue())
    for communicator in (
        dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.CLTK(),
        dr.SharedRandomK(), dr.Hierarchical(dr.Allgather(), 1), dr.Auto(),
    ):  # fmt: skip
        for count, codec in ((3, constant), (4, constant), (3, dr.Codec(dr.TopK(0.05), dr.Rice()))):
            if communicator == dr.SharedRandomK():
                codec = dr.Codec(dr.RandomK(0.05), codec.index, codec.value)
            network = model()
            optimizer, _ = distributed(
                network,
                codec,
                compressor_options={"communicator": communicator, "bucket_bytes": 10_000},
            )
            for step in range(count):
                optimizer.zero_grad()
                backward(network, step)
                optimizer.step()
            missing = list(range(1, hvd.size()))

            def take_part(network=network, optimizer=optimizer):
                backward(network, 9)
                optimizer.step()

            expect_a_missing_rank_to_be_named(f"{communicator} {count}", missing, take_part)


def scenario_a_rank_without_data(directory):
    network = model()
    optimizer, _ = distributed(network)
    expect_a_missing_rank_to_be_named(
        "no data", [0], lambda: (backward(network, 0), optimizer.step())
    )


def scenario_data_that_ends_earlier_without_an_optimizer(directory):
    network = model()
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=50)
    backward(network, 0)
    gradient = network[0].weight.grad
    for step in range(3):
        hvd.allreduce(gradient, compression=compressor, name=f"apart.{step}")
    take_part = lambda: hvd.allreduce(gradient, compression=compressor, name="apart")  # noqa: E731
    expect_a_missing_rank_to_be_named("apart", [hvd.size() - 1], take_part)


def scenario_what_is_not_compressed_may_end_earlier(directory):
    """In Horovod's own allreduce, ranks that have joined contribute zeros."""
    network = named(weight=(8,))
    optimizer, _ = distributed(network, compressor_options={"dense_below": 50})
    for step in range(2 if hvd.rank() == 0 else 1):
        optimizer.zero_grad()
        network["weight"].sum().backward()
        optimizer.synchronize()
        expect(
            torch.allclose(
                network["weight"].grad, torch.full((8,), 1 / hvd.size() if step else 1.0)
            ),
            step,
            network["weight"].grad,
        )
    hvd.join()
