"""What must hold on every rank with PyTorch's DDP, without Horovod; started by test_torch_ddp.py
under torchrun.
"""

import itertools
import sys
import warnings

import ddp_changes
import ddp_loss_scale
import ddp_misuse
import ddp_one_rank
import ddp_random
import ddp_registration
import ddp_schedule
import ddp_states
import ddp_tools
import ddp_uncompressed
import ddp_unused
import numpy as np
import torch
import torch.distributed as dist
from ddp_tools import (
    CODEC,
    SMALL_BUCKETS,
    Network,
    Oracle,
    assert_equal_everywhere,
    distributed,
    gradients_of,
    loss_of,
    main,
    warnings_of_two_steps,
)
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import rows_codec


def train(steps, *, network=None, codec=CODEC, memory=None, branch=None, ddp=None, **options):
    """Train and hold each step to the oracle; return (network, model, compressor, oracle).

    Args:
        branch: function of (step, rank) that returns whether a batch uses the branch.
    """
    network = Network() if network is None else network
    model, compressor = distributed(
        network, codec, memory, {**SMALL_BUCKETS, **(ddp or {})}, **options
    )
    oracle = Oracle(compressor, network)
    branch = branch or (lambda step, rank: True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        expected = [
            gradients_of(
                network, lambda other: loss_of(other, step, rank, branch(step, rank)).backward()
            )
            for rank in range(dist.get_world_size())
        ]
        loss_of(model, step, dist.get_rank(), branch(step, dist.get_rank())).backward()
        oracle.check(compressor, network, expected, f"{ddp} {options}")
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {step}")
    return network, model, compressor, oracle


def scenario_average_and_memory_are_those_of_the_simulated_ranks(directory):
    _, _, compressor, _ = train(4)
    for name, row in compressor.stats().items():
        dense = row["elements"] < 200
        assert row["path"] == ("dense" if dense else "compressed") and row["steps"] == 4, name
        if not dense:
            assert row["sent_bytes"] >= sum(
                row[f"{part}_bytes"] for part in ("header", "index", "value", "order")
            )
            assert 0 < row["relative_error"] < 1 and row["encode_seconds"] > 0


def scenario_default_compressor(directory):
    network = Network()
    model = DistributedDataParallel(network)
    compressor = dr.Compressor(parameters=network.named_parameters())
    compressor.register(model)
    loss_of(model, 0, dist.get_rank()).backward()
    assert_equal_everywhere([(n, p.grad) for n, p in network.named_parameters()], "default")


def scenario_every_communicator(directory):
    size = dist.get_world_size()
    for communicator in (
        dr.SplitAllgather(), dr.SplitAllgather(dense=2), dr.RecursiveDoubling(), dr.GTopK(),
        dr.GTopK(form="tree"), dr.CLTK(), dr.SharedRandomK(), dr.Hierarchical(dr.Allgather(), size),
        dr.Hierarchical(dr.RecursiveDoubling(), 1), dr.Hierarchical(dr.Allgather()),
    ):  # fmt: skip
        chooses = dr.RandomK(0.1) if communicator == dr.SharedRandomK() else dr.TopK(0.1)
        if communicator == dr.Hierarchical(dr.Allgather()):
            # the simulator has no hosts of its own
            model, _ = distributed(Network(), dr.Codec(chooses), communicator=communicator)
            loss_of(model, 0, dist.get_rank()).backward()
            assert_equal_everywhere(
                [(n, p.grad) for n, p in model.module.named_parameters()], communicator
            )
        else:
            train(3, codec=dr.Codec(chooses), communicator=communicator)


def scenario_auto_loses_nothing(directory):
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS, communicator="auto")
    came_in = dict.fromkeys(dict(network.named_parameters()), 0)
    arrived = dict(came_in)
    for step in range(3):
        network.zero_grad()
        for rank in range(dist.get_world_size()):
            own = gradients_of(network, lambda other: loss_of(other, step, rank).backward())
            came_in = {name: came_in[name] + own[name].double() for name in came_in}
        loss_of(model, step, dist.get_rank()).backward()
        for name, parameter in network.named_parameters():
            arrived[name] = arrived[name] + parameter.grad.double() * dist.get_world_size()
    for name, saved in compressor.state_dict()["parameters"].items():
        if saved["memory"]:
            kept = saved["memory"]["residual"].double().reshape(came_in[name].shape)
            dist.all_reduce(kept)
            torch.testing.assert_close(arrived[name] + kept, came_in[name], rtol=0, atol=1e-6)
    assert "predicted" in compressor.stats()["first.weight"]["communicator"]


def scenario_dtypes_and_layouts(directory):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        train(3, network=Network(dtype))
    for as_view in (False, True):
        train(3, network=Network(channels_last=True), ddp={"gradient_as_bucket_view": as_view})


def scenario_unused_parameters_keep_their_residuals(directory):
    # no rank, one rank, and all ranks use the branch
    uses = [(True, True), (False, False), (False, True), (True, True), (False, False)]
    for ddp in ({}, {"gradient_as_bucket_view": True}):
        train(
            5,
            branch=lambda step, rank: uses[step][rank % 2],
            ddp={"find_unused_parameters": True, **ddp},
        )


def scenario_static_graph(directory):
    train(4, ddp={"static_graph": True})
    train(4, ddp={"static_graph": True}, branch=lambda step, rank: False)


def scenario_uneven_inputs(directory):
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS)
    oracle = Oracle(compressor, network)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = 2 + 2 * rank  # rank 0 has the fewest batches
    with model.join():
        for step in range(mine):
            network.zero_grad()
            expected = [
                gradients_of(network, lambda other: loss_of(other, step, one).backward())
                if step < 2 + 2 * one
                else dict.fromkeys(dict(network.named_parameters()))
                for one in range(size)
            ]
            loss_of(model, step, rank).backward()
            oracle.check_here(compressor, network, expected, "join")
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= 0.1 * parameter.grad
    steps = {row["steps"] for row in compressor.stats().values()}
    assert steps == {2 + 2 * (size - 1)}, steps
    # what a rank without batches had kept before, it still has
    own = compressor.state_dict()["parameters"]
    for name, kept in oracle.state[rank].items():
        if rank == size - 1 and own[name]["memory"]:
            np.testing.assert_array_equal(own[name]["memory"]["residual"].reshape(-1), kept[0])


def scenario_loss_scale_and_a_rank_with_inf(directory):
    scale = [1024.0]
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS, loss_scale=lambda: scale[0])
    oracle = Oracle(compressor, network)

    def scaled(other, step, rank, factor=1.0):
        (loss_of(other, step, rank) * scale[0] * factor).backward()

    def expected(step):
        return [
            gradients_of(network, lambda other: scaled(other, step, rank))
            for rank in range(dist.get_world_size())
        ]

    scaled(model, 0, dist.get_rank())
    oracle.check(compressor, network, expected(0), "loss scale")
    before = compressor.state_dict()["parameters"]
    network.zero_grad()
    # rank 1 overflows
    scaled(model, 1, dist.get_rank(), float("inf") if dist.get_rank() == 1 else 1.0)
    for name, parameter in network.named_parameters():
        assert not torch.isfinite(parameter.grad).all(), name
    after = compressor.state_dict()["parameters"]
    for name, saved in before.items():
        for kind, kept in saved["memory"].items():
            assert torch.equal(kept, after[name]["memory"][kind]), name
    network.zero_grad()
    scale[0] = 512.0
    for state in oracle.state:
        for parts in state.values():
            for part in parts:
                part *= 0.5
    oracle.step = 2
    oracle._buckets.clear()
    scaled(model, 2, dist.get_rank())
    oracle.check(compressor, network, expected(2), "loss scale")


def scenario_non_finite_without_loss_scale(directory):
    network = Network()
    model, compressor = distributed(network, CODEC, ddp=SMALL_BUCKETS)
    loss_of(model, 0, dist.get_rank()).backward()
    before = compressor.state_dict()["parameters"]
    network.zero_grad()
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (loss_of(model, 1, dist.get_rank()) * factor).backward()
    assert all(torch.isnan(p.grad).all() for p in network.parameters() if p.numel() >= 200)
    if dist.get_rank() == 1:
        after = compressor.state_dict()["parameters"]
        for name, saved in before.items():
            for kind, kept in saved["memory"].items():
                assert torch.equal(kept, after[name]["memory"][kind]), name


def scenario_several_models(directory):
    networks = [Network(), Network()]
    with torch.no_grad():
        for parameter in networks[1].parameters():
            parameter *= 0.5
    pairs = [distributed(network, CODEC, ddp=SMALL_BUCKETS) for network in networks]
    oracles = [Oracle(compressor, network) for (_, compressor), network in zip(pairs, networks)]
    rank = dist.get_rank()
    for step in range(3):
        expected = [
            [
                gradients_of(network, lambda other: loss_of(other, step, one).backward())
                for one in range(dist.get_world_size())
            ]
            for network in networks
        ]
        for network in networks:
            network.zero_grad()
        if step == 1:  # one backward pass through both
            (loss_of(pairs[0][0], step, rank) + loss_of(pairs[1][0], step, rank)).backward()
        else:
            for model, _ in pairs[:: 1 if step else -1]:
                loss_of(model, step, rank).backward()
        for (_, compressor), oracle, network, own in zip(pairs, oracles, networks, expected):
            oracle.check(compressor, network, own, "several models")


def scenario_momentum_is_warned_about_and_prepared(directory):
    for prepared in (False, True):
        network = Network()
        model, compressor = distributed(network, CODEC)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        if prepared:
            dr.prepare(optimizer, compressor)
        caught = warnings_of_two_steps(network, model, lambda: [optimizer])
        found = [one for one in caught if "momentum" in str(one.message)]
        assert len(found) == (not prepared), found
        for one in found:
            assert one.filename == ddp_tools.__file__, one  # at the call of step
            assert str(one.message).endswith("before you create a learning rate scheduler"), one
        assert_equal_everywhere(network.named_parameters(), f"momentum {prepared}")


def scenario_compiled_model(directory):
    network = Network()
    model, compressor = distributed(network, CODEC, ddp={"bucket_cap_mb": 1})
    oracle = Oracle(compressor, network)
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        network.zero_grad()
        expected = [
            gradients_of(network, lambda other: loss_of(other, step, rank).backward())
            for rank in range(dist.get_world_size())
        ]
        loss_of(compiled, step, dist.get_rank()).backward()
        oracle.check(compressor, network, expected, "compiled")


def scenario_loss_scaler(directory):
    network = Network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, compressor = distributed(network, CODEC, loss_scale=scaler.get_scale)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    skipped, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        factor = float("inf") if (step, dist.get_rank()) == (3, 1) else 1.0
        before = [parameter.detach().clone() for parameter in network.parameters()]
        scaler.scale(loss_of(model, step, dist.get_rank()) * factor).backward()
        scales.append(compressor.adapter.slots["branch.weight"].loss_scale)
        scaler.step(optimizer)
        scaler.update()
        if all(torch.equal(*pair) for pair in zip(before, network.parameters())):
            skipped.append(step)
        assert_equal_everywhere(network.named_parameters(), f"scaler {step}")
    assert skipped == [3], skipped
    assert scales == [2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10], scales


def scenario_random_programs(directory):
    for seed in range(25):
        ddp_random.run(seed)


def scenario_an_embedding_table_gets_the_codec_rows_or_is_named(directory):
    """With half of the rows in each step, the second step decides."""
    network = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
    choices = (None, 0), (dr.recommended_codec(), 1), ({"0.*": "rows"}, 0)
    for used, (codec, tables) in itertools.product((9, 140), choices):
        model = DistributedDataParallel(network)
        compressor = dr.Compressor(codec, parameters=network.named_parameters())
        compressor.register(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                network.zero_grad()
                rows = (torch.arange(used) + used * step + dist.get_rank()) % 300
                model(rows).pow(2).sum().backward()
            compressor.state_dict()
        said = [str(one.message) for one in caught if "embedding table" in str(one.message)]
        assert len(said) == tables, (codec, said)
        assert all('Compressor({"0.weight": "rows"}' in text for text in said), said
        assert_equal_everywhere(
            [(name, one.grad) for name, one in network.named_parameters()], "a table"
        )
        policies = compressor.policies
        assert (policies["0.weight"].codec == rows_codec()) == (tables == 0), policies
        assert policies["1.weight"].codec == dr.recommended_codec(), policies
        compressor.close()


def scenario_many_random_programs(directory):
    first = 25 + 40 * (dist.get_world_size() - 2)  # others on each number of ranks
    for seed in range(first, first + 40):
        ddp_random.run(seed)


if __name__ == "__main__":
    parts = (
        ddp_states, ddp_schedule, ddp_uncompressed, ddp_one_rank, ddp_registration, ddp_changes,
        ddp_loss_scale, ddp_misuse, ddp_unused,
    )  # fmt: skip
    main({**globals(), **{name: one for part in parts for name, one in vars(part).items()}})
    sys.exit()
