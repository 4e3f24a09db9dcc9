"""Scenarios on stock Horovod with PyTorch; started by test_torch_parallel.py."""

import itertools
import sys

import horovod.torch as hvd
import numpy as np
import torch
import torch_misuse
import torch_prepared
import torch_refusals
import torch_states
import torch_table_warnings
import torch_tables
from codecs_table import INDEX_WITH_MEMORY as INDEX, MEMORIES, VALUE_WITH_MEMORY as VALUE
from scenario_runner import sample
from torch_tools import (
    ALL_COMPRESSED,
    assert_equal_everywhere,
    backward,
    batch,
    distributed,
    gradients,
    local_gradients,
    model,
    run_all,
    sum_over_ranks,
    train,
)  # fmt: skip
from virtual_ranks import VirtualRanks

import deepreduce_hvd as dr

#: every index codec and every value codec with a plain one, and pairs of lossy codecs
LOSSY = [("rice", "qsgd_4"), ("bloom_p2", "fit_poly"), ("huffman_delta", "quantile")]
CODECS = [*((index, "raw_value") for index in INDEX), *(("raw_index", value) for value in VALUE)]
CODECS += LOSSY


def scenario_every_codec_and_memory(directory):
    train_and_compare(itertools.product(CODECS, ["residual"]))
    train_and_compare(itertools.product(LOSSY, MEMORIES))


def scenario_every_codec_with_every_memory(directory):
    train_and_compare(itertools.product(CODECS, MEMORIES))


def train_and_compare(cases):
    """Check that all ranks have equal parameters after every step.

    With Residual, also check that what is sent plus what is kept equals the input.
    """
    # five has no common divisor with the number of memories, so the sample has all of them
    for number, ((index, value), memory) in enumerate(sample(hvd.size(), cases, every=5)):
        torch.manual_seed(0)
        network = torch.nn.Linear(48, 40)  # one tensor compressed, one dense
        codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
        optimizer, compressor = distributed(network, codec, MEMORIES[memory])
        came_in, arrived = {}, {}
        for step in range(2):
            network.zero_grad()
            loss = network(batch(step)).pow(2).mean()
            before = dict(
                zip(
                    (name for name, _ in network.named_parameters()),
                    torch.autograd.grad(loss, list(network.parameters()), retain_graph=True),
                )
            )
            loss.backward()
            optimizer.synchronize()
            for name, gradient in gradients(network):
                came_in[name] = came_in.get(name, 0) + before[name].double()
                arrived[name] = arrived.get(name, 0) + gradient.double()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert_equal_everywhere(
                network.named_parameters(), f"{index} {value} {memory} step {step} {number}"
            )
        if MEMORIES[memory] == dr.Residual():
            for name, state in compressor.state_dict()["parameters"].items():
                kept = state["memory"].get("residual", torch.zeros(1)).view(-1)
                total_in = sum_over_ranks(came_in[name].view(-1), f"in.{number}.{name}")
                total_kept = sum_over_ranks(
                    kept.expand(total_in.numel()).contiguous(), f"kept.{number}.{name}"
                )
                total_arrived = arrived[name].view(-1) * hvd.size()
                scale = float(total_in.abs().max())
                torch.testing.assert_close(
                    total_arrived + total_kept,
                    total_in,
                    rtol=0,
                    atol=2e-6 * scale,
                    msg=f"{index} {value} {name}",
                )


def scenario_average_is_the_mean_of_what_payloads_decode_to(directory):
    network = model()
    codec = dr.Codec(dr.TopK(0.1))
    optimizer, _ = distributed(network, codec, dr.NoMemory())
    expected = {}
    for rank in range(hvd.size()):
        for name, gradient in local_gradients(network, 0, rank).items():
            flat = gradient.view(-1)
            sent = dr.decode(codec.encode(flat)) if flat.numel() >= 50 else flat
            expected[name] = expected.get(name, 0) + sent.view(gradient.shape) / hvd.size()
    backward(network, 0)
    optimizer.synchronize()
    for name, gradient in gradients(network):
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9)
    with optimizer.skip_synchronize():
        optimizer.step()


def scenario_sum_is_size_times_average(directory):
    averaged, _ = train(1)
    network = model()
    optimizer, _ = distributed(
        network, op=hvd.Sum, optimizer=torch.optim.SGD(network.parameters(), lr=0.1 / hvd.size())
    )
    backward(network, 0)
    optimizer.step()
    for (name, one), (_, other) in zip(averaged.named_parameters(), network.named_parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=name)


def scenario_predivide_factor_changes_nothing(directory):
    plain, _ = train(3)
    divided, _ = train(3, gradient_predivide_factor=3.0)
    for (name, one), (_, other) in zip(plain.named_parameters(), divided.named_parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def scenario_groups_change_nothing(directory):
    plain, _ = train(3)
    by_number, _ = train(3, groups=2)
    network = model()
    parameters = list(network.parameters())
    optimizer, _ = distributed(network, groups=[parameters[:3], parameters[3:]])
    for step in range(3):
        network.zero_grad()
        backward(network, step)
        optimizer.step()
    for (name, one), (_, two), (_, three) in zip(
        plain.named_parameters(), by_number.named_parameters(), network.named_parameters()
    ):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7, msg=name)
        torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-7, msg=name)


def scenario_backward_passes_accumulate(directory):
    network = model()
    optimizer, compressor = distributed(network, backward_passes_per_step=2)
    for step in range(3):
        network.zero_grad()
        backward(network, 2 * step)
        backward(network, 2 * step + 1)
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {step}")
    assert all(row["steps"] == 3 for row in compressor.stats().values())
    # a step with fewer passes than planned: Horovod reduces in synchronize()
    network.zero_grad()
    backward(network, 99)
    optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "short step")


def scenario_process_set(directory):
    """Only some of the ranks train together. With two ranks, each has its own process set."""
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    process_set = hvd.add_process_set(members)
    if hvd.rank() in members:
        network = model()
        optimizer, _ = distributed(
            network, compressor_options={"process_set": process_set}, process_set=process_set
        )
        for step in range(2):
            network.zero_grad()
            backward(network, step)
            optimizer.step()
            assert_equal_everywhere(network.named_parameters(), f"step {step}", process_set)
    hvd.barrier()
    hvd.remove_process_set(process_set)


class _TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList(
            [torch.nn.Linear(48, 30), torch.nn.Linear(48, 30), torch.nn.Linear(48, 30)]
        )


def scenario_missing_gradients(directory):
    """A parameter may have no gradient on some ranks, or on all of them.

    These ranks contribute zeros and keep their residuals.
    """
    network = _TwoHeads()
    optimizer, _ = distributed(network)
    for step in range(4):
        network.zero_grad(set_to_none=True)
        head = hvd.rank() % 2 if step < 3 else 0
        network.heads[head](batch(step)).pow(2).mean().backward()
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {step}")


def scenario_clipping_between_synchronize_and_step(directory):
    network = model()
    optimizer, _ = distributed(network)
    for step in range(3):
        network.zero_grad(set_to_none=step % 2 == 0)
        backward(network, step)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
        norm = torch.stack([gradient.norm() for _, gradient in gradients(network)]).norm()
        assert float(norm) <= 1.001e-3
        with optimizer.skip_synchronize():
            optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {step}")


def scenario_zero_grad_both_ways_train_alike(directory):
    trained = []
    for set_to_none in (True, False):
        network = model()
        optimizer, _ = distributed(network, compressor_options=ALL_COMPRESSED)
        for step in range(3):
            network.zero_grad(set_to_none=set_to_none)
            backward(network, step)
            optimizer.step()
        trained.append(network)
    for one, other in zip(*(network.parameters() for network in trained)):
        assert torch.equal(one, other)


def scenario_gradient_dtypes(directory):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        network = model(dtype=dtype)
        optimizer, compressor = distributed(network)
        for step in range(2):
            network.zero_grad()
            backward(network, step)
            optimizer.step()
            assert all(parameter.grad.dtype == dtype for parameter in network.parameters())
            assert_equal_everywhere(network.named_parameters(), f"{dtype} step {step}")
        row = compressor.stats()["0.weight"]
        assert row["dense_bytes"] == 48 * 64 * torch.finfo(dtype).bits // 8


def scenario_layouts(directory):
    """Elements of channels_last, transposed and expanded gradients keep their positions."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))
    transposed = torch.nn.Parameter(torch.randn(40, 30).t())
    expanded = torch.nn.Parameter(torch.randn(20, 10))
    scalar = torch.nn.Parameter(torch.tensor(2.0))
    network = torch.nn.ParameterDict(
        {"weight": weight, "transposed": transposed, "expanded": expanded, "scalar": scalar}
    )
    optimizer, _ = distributed(
        network,
        dr.Codec(dr.NoneSparsifier()),
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    factor = float(hvd.rank() + 1)
    coefficients = {
        name: torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        for name, parameter in network.items()
    }
    loss = sum(
        (network[name] * coefficients[name]).sum() * factor for name in ("weight", "transposed")
    )
    loss = loss + network["expanded"].sum() * factor + network["scalar"] * factor
    loss.backward()
    optimizer.synchronize()
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    for name in ("weight", "transposed"):
        torch.testing.assert_close(
            network[name].grad, coefficients[name] * mean, rtol=1e-6, atol=0, msg=name
        )
    torch.testing.assert_close(network["expanded"].grad, torch.full((20, 10), mean))
    torch.testing.assert_close(network["scalar"].grad, torch.tensor(mean))
    with optimizer.skip_synchronize():
        optimizer.step()


def scenario_sparse_embedding_gradients(directory):
    """Duplicate rows are merged, the result is sparse, and nothing of the dense size is sent."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(1000, 16, sparse=True)
    # the same shape, so the parameter of a gradient must be identified
    twin = torch.nn.Embedding(1000, 16, sparse=True)
    network = torch.nn.ModuleDict({"table": table, "twin": twin})
    optimizer, compressor = distributed(
        network, dr.Codec(dr.TopK(1.0)), dr.NoMemory(), sparse_as_dense=True
    )
    rows = torch.tensor([3, 3, 7 + hvd.rank()])
    expected = {"table": torch.zeros(1000, 16), "twin": torch.zeros(1000, 16)}
    for rank in range(hvd.size()):
        for row in (3, 3, 7 + rank):
            expected["table"][row] += 1 / hvd.size()
            expected["twin"][row] += 2 / hvd.size()
    (table(rows).sum() + 2 * twin(rows).sum()).backward()
    optimizer.synchronize()
    for name, embedding in network.items():
        assert embedding.weight.grad.is_sparse, name
        assert embedding.weight.grad.coalesce().indices().numel() == 1 + hvd.size(), name
        torch.testing.assert_close(
            embedding.weight.grad.to_dense(), expected[name], rtol=1e-6, atol=0, msg=name
        )
        row = compressor.stats()[f"{name}.weight"]
        # header, probe and 32 pairs; one parameter also counts the roll call
        assert row["sent_bytes"] <= 40 + 16 + 8 * 32 + 4 * hvd.size(), row
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "embedding")


def scenario_virtual_ranks_come_to_the_same(directory):
    """The accuracy laboratory's virtual ranks get what real ranks get, bit for bit."""
    for memory, communicator in (
        (dr.Residual(), dr.Allgather()),
        (dr.MomentumCorrection(0.9), dr.Allgather()),
        (dr.Residual(), dr.GTopK()),
    ):
        network = model()
        named = dict(network.named_parameters())
        codec = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(4))
        settings = {"communicator": communicator, **ALL_COMPRESSED}
        optimizer, _ = distributed(network, codec, memory, compressor_options=settings)
        shapes = {name: parameter.numel() for name, parameter in named.items()}
        ranks = VirtualRanks(hvd.size(), shapes, codec, memory, communicator, dense_below=0)
        for step in range(4):
            expected = ranks.mean(
                [
                    {
                        name: gradient.reshape(-1).numpy()
                        for name, gradient in local_gradients(network, step, rank).items()
                    }
                    for rank in range(hvd.size())
                ]
            )
            optimizer.zero_grad()
            backward(network, step)
            optimizer.synchronize()
            for name, parameter in named.items():
                got = parameter.grad.reshape(-1).numpy()
                np.testing.assert_array_equal(got, expected[name], err_msg=f"{name} in step {step}")
            with optimizer.skip_synchronize():
                optimizer.step()


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    parts = (
        torch_misuse, torch_prepared, torch_states, torch_refusals, torch_tables,
        torch_table_warnings,
    )  # fmt: skip
    run_all({**globals(), **{k: v for part in parts for k, v in vars(part).items()}}, sys.argv[1])
