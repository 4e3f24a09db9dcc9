"""Embedding tables: those with the default codec get "rows"; a warning names the others."""

import copy
import itertools
import random
import warnings

import horovod.torch as hvd
import numpy as np
import torch
from scenario_runner import refused
from table_programs import COLUMNS, ROWS, decided_at, used_rows
from torch_tools import assert_equal_everywhere
from virtual_ranks import VirtualRanks

import deepreduce_hvd as dr
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.planning.policies import rows_codec


class Model(torch.nn.Module):
    """Some tables, and a layer of the same shape, which uses all of its rows."""

    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.ModuleList(torch.nn.Embedding(ROWS, COLUMNS) for _ in range(tables))
        self.layer = torch.nn.Linear(COLUMNS, ROWS)

    def forward(self, rows):
        """Return a loss that uses ``rows``, one array for each table."""
        found = [table(one) for table, one in zip(self.table, rows)]
        return sum((self.layer(one).pow(2) + 1).sum() for one in found)


def warnings_of(network, compressor, steps, **options):
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


def scenario_tables_get_the_codec_rows(directory):
    """Random programs: when tables are found, what is sent then, and that nothing is lost."""
    draw, found, late = random.Random(3), 0, set()
    for seed in range(20):
        programs = [used_rows(draw, 3, hvd.size()) for _ in range(5)]
        decided = [decided_at(programs, number) for number in range(3)]
        network = Model(3)
        compressor = dr.Compressor(parameters=network.named_parameters(), seed=seed)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=1e-6),
            named_parameters=network.named_parameters(), compression=compressor,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, step in enumerate(programs, 1):
                kept = compressor.state_dict()["parameters"]
                known = dict(compressor.policies)
                reference = copy.deepcopy(network)
                rows = [torch.from_numpy(one) for one in step[hvd.rank()]]
                optimizer.zero_grad()
                reference(rows).backward()
                network(rows).backward()
                optimizer.step()
                for place in range(3):
                    name = f"table.{place}.weight"
                    is_known = decided[place] is not None and number > decided[place][0]
                    is_table = is_known and decided[place][1]
                    assert isinstance(known[name].codec.sparsifier, dr.Threshold) == is_table
                    if not is_table:
                        continue
                    found += 1
                    own = reference.table[place].weight.grad.numpy().ravel()
                    total = own + kept[name]["memory"]["residual"].numpy().ravel()
                    sent = torch.from_numpy(dr.decode(known[name].codec.encode(total))).double()
                    label = f"{seed}.{number}.{place}"
                    mean = hvd.allreduce(sent, name=f"mean.{label}")
                    sizes = hvd.allreduce(sent.abs(), name=f"sizes.{label}", op=hvd.Sum)
                    got = network.table[place].weight.grad.ravel()
                    assert bool(((got - mean).abs() <= 2**-22 * sizes).all()), (label, name)
                    left = compressor.state_dict()["parameters"][name]["memory"]["residual"]
                    assert not left.any(), (seed, number, name)
                assert_equal_everywhere(network.named_parameters(), f"tables {seed} {number}")
        assert [str(one.message) for one in caught if "table" not in str(one.message)] == []
        for place, one in enumerate(decided):
            uses = [any(len(used[place]) for used in step.values()) for step in programs]
            if one is not None and one[0] > 1 + uses.index(True):
                late.add(one[1])
        tables = [f"table.{place}.weight" for place in range(3) if (decided[place] or (0, 0))[1]]
        assert names_of(compressor.adapter.slots) == tables
        compressor.close()
    assert found > 20 and late == {True, False}, (found, late)


def scenario_rows_of_a_step_before_loading_do_not_count(directory):
    """The first gradient after loading an earlier state leaves open what a table is, as before."""
    network = Model(1)
    compressor = dr.Compressor(parameters=network.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=1e-4),
        named_parameters=network.named_parameters(), compression=compressor,
    )  # fmt: skip
    state = compressor.state_dict()
    for first in (0, 150):
        optimizer.zero_grad()
        network([torch.arange(first, first + 150)]).backward()
        optimizer.step()
        assert compressor.state_dict()["parameters"]["table.0.weight"]["is_table"] is None
        compressor.load_state_dict(state)


def scenario_tables_keep_the_momentum_of_a_prepared_optimizer(directory):
    """They are found before the first step of the optimizer. All other layers have no momentum."""
    SGD, RMSprop, Adam, RAdam, NAdam = (
        getattr(torch.optim, name) for name in ("SGD", "RMSprop", "Adam", "RAdam", "NAdam")
    )
    rate = {"momentum": 0, "nesterov": False, "lr": 1e-3}
    for changing, (make, without, keeps) in itertools.product((False, True), (
        (lambda own: SGD(own, 1e-4, momentum=0.9), rate, True),
        (lambda own: SGD(own, 1e-4, momentum=0.9, weight_decay=1, nesterov=True), rate, True),
        (lambda own: RMSprop(own, 1e-4, momentum=0.9), rate, True),
        (lambda own: Adam(own, 0.01, weight_decay=0.1), {"betas": (0, 0.999)}, True),
        (lambda own: RAdam(own, 0.01), {"betas": (0, 0.999)}, True),
        (lambda own: NAdam(own, 0.01), {"betas": (0, 0.999)}, False),
    )):  # fmt: skip
        network = Model(1)
        reference = copy.deepcopy(network)
        own, other = reference.table[0].weight, reference.layer.weight
        expected = [make([own]), make([other])]
        momenta = dict(expected[0].param_groups[0])
        for one in expected[keeps and "betas" in without :]:
            one.param_groups[0].update(without)
        compressor = dr.Compressor(parameters=network.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            dr.prepare(make(network.parameters()), compressor),
            named_parameters=network.named_parameters(), compression=compressor,
        )  # fmt: skip
        for step in range(6):
            optimizer.zero_grad()
            # in the first steps, no row is used
            rows = torch.arange(step, step + 9 * (step > 1)) + hvd.rank()
            if changing:  # 45 % of the rows, others in the second step
                rows = (torch.arange(180) + 99 * step + hvd.rank()) % ROWS
            (network([rows]) + network.layer(torch.ones(COLUMNS)).sum()).backward()
            optimizer.step()
            own.grad, other.grad = network.table[0].weight.grad, network.layer.weight.grad
            # it is known in the third step, or in the second one if the first does not tell
            if "momentum" in without and step == 2 - changing:
                expected[0].param_groups[0].update(momenta)
                expected[0].state[own]["momentum_buffer"] = torch.zeros_like(own)
            for one in expected:
                one.step()
            torch.testing.assert_close(network.table[0].weight, own, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(network.layer.weight, other, rtol=1e-5, atol=1e-7)


def scenario_a_loaded_state_knows_the_tables(directory):
    """Training goes on bit for bit, also where the next gradient looks otherwise."""
    for kind, settings in ((torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})):
        for compressor_first in (False, True):
            _resume(kind, settings, compressor_first)


def _resume(kind, settings, compressor_first):
    def distributed(network, compressor):
        return hvd.DistributedOptimizer(
            dr.prepare(kind(network.parameters(), 1e-4, **settings), compressor),
            named_parameters=network.named_parameters(), compression=compressor,
        )  # fmt: skip

    def train(network, optimizer, numbers):
        for step in numbers:
            optimizer.zero_grad()
            # the second "table" uses few rows only after the state was saved
            used = [step, step + 9 + 300 * (step > 2)], [step, step + 9 + 300 * (step < 3)]
            network([torch.arange(*one) + hvd.rank() for one in used]).backward()
            optimizer.step()

    network = Model(2)
    compressor = dr.Compressor(parameters=network.named_parameters())
    optimizer = distributed(network, compressor)
    train(network, optimizer, range(3))
    resumed, state = Model(2), compressor.state_dict()
    resumed.load_state_dict(network.state_dict())
    entries = state["parameters"]
    known = [entries[f"table.{number}.weight"]["is_table"] for number in range(2)]
    assert known == [True, False] and entries["layer.weight"]["is_table"] is False
    other = dr.Compressor(parameters=resumed.named_parameters())
    if compressor_first:
        other.load_state_dict(state)
    again = distributed(resumed, other)
    if hvd.rank() == 0:
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(state)
    hvd.broadcast_optimizer_state(again, 0)
    policies = {name: repr(one) for name, one in compressor.policies.items()}
    assert {name: repr(one) for name, one in other.policies.items()} == policies
    train(network, optimizer, range(3, 7))
    train(resumed, again, range(3, 7))
    for (name, one), own in zip(network.named_parameters(), resumed.parameters()):
        assert torch.equal(one, own), name
    fresh = Model(2)
    alone = dr.Compressor(parameters=fresh.named_parameters())
    if hvd.rank() == 0:
        alone.load_state_dict(state)
        for slot in alone.adapter.slots.values():
            slot.set_steps(0)
    fresh([torch.arange(9)] * 2).backward()
    with refused("embedding tables"):
        hvd.allreduce(fresh.layer.weight.grad, compression=alone)


def scenario_optimizers_that_step_in_any_order_and_not_in_every_step(directory):
    """One of them has only uncompressed gradients; a table is used for the first time later."""
    draw = random.Random(5)
    networks = [Model(1), Model(1), torch.nn.Linear(3, 2)]
    named = [
        (f"{number}.{name}", parameter)
        for number, network in enumerate(networks)
        for name, parameter in network.named_parameters()
    ]
    compressor = dr.Compressor(parameters=named)
    optimizers = [
        hvd.DistributedOptimizer(
            dr.prepare(torch.optim.AdamW(network.parameters(), 1e-3), compressor),
            named_parameters=[pair for pair in named if pair[0].startswith(f"{number}.")],
            compression=compressor,
        )
        for number, network in enumerate(networks)
    ]
    own = random.Random(hvd.rank())  # orders differ between ranks
    for step in range(12):
        turn = [number for number in range(3) if draw.random() < 0.6]
        for number in own.sample(turn, len(turn)):
            optimizers[number].zero_grad()
            rows = torch.arange(step, step + 5 * (step > 3 * number)) + hvd.rank()
            given = torch.ones(3) if number == 2 else [rows]
            layer = networks[number] if number == 2 else networks[number].layer
            loss = networks[number](given).sum() + layer(torch.ones(layer.in_features)).sum()
            loss.backward()
        for number in own.sample(turn, len(turn)):
            optimizers[number].step()
        assert_equal_everywhere(named, f"optimizers in any order {step}")
    assert names_of(compressor.adapter.slots) == ["0.table.0.weight", "1.table.0.weight"]


def scenario_tables_of_direct_calls_and_tables_that_ranks_see_in_other_ways(directory):
    network = Model(1)
    compressor = dr.Compressor(parameters=network.named_parameters())
    weight = network.table[0].weight
    for step in range(3):
        network.zero_grad()
        network([torch.arange(9) + step]).backward()
        hvd.allreduce(weight.grad, compression=compressor)
        assert compressor.policies["table.0.weight"].codec == rows_codec()
    assert compressor.stats()["table.0.weight"]["sent_values"] == 9 * COLUMNS
    network = Model(1)
    compressor = dr.Compressor(parameters=network.named_parameters())
    used = 20 if hvd.rank() else 300  # of 400
    (said,) = warnings_of(network, compressor, [[np.arange(used)]] * 2)
    assert '"table.0.weight": "rows"' in said, said


def scenario_momentum_of_tables_needs_no_warning(directory):
    network = torch.nn.Embedding(ROWS, COLUMNS)
    compressor = dr.Compressor(parameters=network.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), 0.1, momentum=0.9),
        named_parameters=network.named_parameters(), compression=compressor,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            network(torch.arange(9)).sum().backward()
            optimizer.step()


def scenario_virtual_ranks_find_the_same_tables(directory):
    """The accuracy laboratory's default gets what a compressor's default gets, bit for bit."""
    network = Model(4)
    named = dict(network.named_parameters())
    shapes = {name: one.numel() for name, one in named.items()}
    codecs = {name: dr.recommended_codec(one.shape) for name, one in named.items()}
    columns = {name: one.shape[1] for name, one in named.items() if one.dim() == 2}
    ranks = VirtualRanks(hvd.size(), shapes, codecs, dense_below=32, columns=columns)
    compressor = dr.Compressor(parameters=network.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=1e-4),
        named_parameters=network.named_parameters(), compression=compressor,
    )  # fmt: skip

    def rows_of(step, rank):
        few, half = torch.arange(30 + rank), torch.arange(180)
        return few + step, torch.arange(300), half, (half + 90 * step + rank) % ROWS

    for step in range(4):
        gradients = []
        for rank in range(hvd.size()):
            copied = copy.deepcopy(network)
            copied(rows_of(step, rank)).backward()
            gradients.append(
                {name: one.grad.reshape(-1).numpy() for name, one in copied.named_parameters()}
            )
        expected = ranks.mean(gradients)
        optimizer.zero_grad()
        network(rows_of(step, hvd.rank())).backward()
        optimizer.step()
        for name, parameter in named.items():
            got = parameter.grad.reshape(-1).numpy()
            np.testing.assert_array_equal(got, expected[name], err_msg=f"{name} in step {step}")
    found = {name for name, one in ranks.memories.items() if one == dr.NoMemory()}
    assert found == {"table.0.weight", "table.3.weight"}


def scenario_rows_get_what_the_codec_decodes_to(directory):
    """All non-zero elements are sent in each step, and nothing is kept."""
    network = Model(2)
    compressor = dr.Compressor({"table*": "rows"}, parameters=network.named_parameters())
    codec = compressor.policies["table.0.weight"].codec
    used = [np.arange(9) + hvd.rank(), np.array([5, 5, 300 - hvd.rank()])]
    network([torch.from_numpy(one) for one in used]).backward()
    expected = []
    for number, table in enumerate(network.table):
        sent = dr.decode(codec.encode(table.weight.grad.numpy().ravel()))
        mean = hvd.allreduce(torch.from_numpy(sent), op=hvd.Average, name=f"expected.{number}")
        expected.append(mean.reshape(ROWS, COLUMNS))
    assert not warnings_of(network, compressor, [used])
    rows, state = compressor.stats(), compressor.state_dict()["parameters"]
    for number, table in enumerate(network.table):
        torch.testing.assert_close(table.weight.grad, expected[number], rtol=1e-6, atol=0)
        name = f"table.{number}.weight"
        assert rows[name]["sent_values"] == COLUMNS * len(set(used[number].tolist()))
        assert not state[name]["memory"], state[name]
