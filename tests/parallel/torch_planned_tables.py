"""Embedding tables of compressors with a schedule: no plan covers them."""

import copy
import random
from unittest import mock

import horovod.torch as hvd
import random_plans
import torch
from scenario_runner import sample
from table_programs import COLUMNS, ROWS, decided_at, used_rows
from torch_tables import Model
from torch_tools import assert_equal_everywhere, follow_layout, sum_over_ranks

import deepreduce_hvd as dr
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.planning import layout, scheduler as scheduler_module
from deepreduce_hvd.planning.policies import rows_codec
from deepreduce_hvd.schedule import Message

_LARGE = ["table.0.weight", "table.1.weight", "layer.weight"]
#: the first step in which all plans had their turns; the default has 50 steps of warm-up
_DECIDED = 230


def _distributed(network, codec=None, **options):
    compressor = dr.Compressor(codec, parameters=network.named_parameters(), **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=1e-6),
        named_parameters=network.named_parameters(), compression=compressor,
    )  # fmt: skip
    return optimizer, compressor


def _backward(network, rows):
    network.zero_grad()
    network(rows).backward()


def _memory(compressor):
    return {
        name: entry["memory"].get("residual", torch.zeros(1)).double().ravel()
        for name, entry in compressor.state_dict()["parameters"].items()
    }


def scenario_plans_that_change_in_every_step_leave_tables_out(directory):
    """Random plans and random tables, against an oracle: what is found, sent and kept."""
    draw, found, ways = random.Random(7), 0, set()
    for seed in range(14):
        programs = [used_rows(draw, 2, hvd.size()) for _ in range(7)]
        network = Model(2)
        optimizer, compressor = _distributed(network, schedule="auto", seed=seed)
        scheduler = compressor.adapter.scheduler
        seen: dict[str, list] = {name: [] for name in _LARGE}  # steps that were compressed
        for number, step in enumerate(programs):
            plan = random_plans.random_plan(draw, _LARGE, hvd.size())
            first = compressor.first_policies, compressor.fingerprint
            scheduler.layout = (
                layout.of_plan(*first, plan) if draw.random() < 0.8 else layout.of_settings(*first)
            )
            follow_layout(compressor)
            planned = scheduler.layout.policies
            before, reference = _memory(compressor), copy.deepcopy(network)
            rows = [torch.from_numpy(one) for one in step[hvd.rank()]]
            _backward(reference, rows)
            _backward(network, rows)
            optimizer.step()
            after, stats = _memory(compressor), compressor.stats()
            own = {name: one.grad.double().ravel() for name, one in reference.named_parameters()}
            for place, (name, parameter) in enumerate(
                (name, one) for name, one in network.named_parameters() if name in _LARGE
            ):
                label = f"{seed}.{number}.{name}"
                decided = decided_at(seen[name], place) if place < 2 else None
                is_table, way = bool(decided and decided[1]), planned[name].way
                if is_table:
                    found += 1
                    ways.add(way)
                    way, total = "codec", own[name] + before[name]
                    payload = rows_codec().encode(total.float().numpy())
                    sent = torch.from_numpy(dr.decode(payload)).double()
                    assert not after[name].any(), label
                else:
                    sent = own[name] + before[name] - after[name]
                assert stats[name]["path"] == {"codec": "compressed"}.get(way, way), label
                expected = sum_over_ranks(sent, f"sent.{label}") / hvd.size()
                rounded = own[name].abs() + before[name].abs() + sent.abs()  # as float32
                sizes = sum_over_ranks(rounded, f"sizes.{label}")
                limit = 2e-3 if way == "fp16" else 1e-6  # sums of float16 round
                got = parameter.grad.double().ravel()
                difference = (got - expected).abs()
                assert bool((difference <= limit * (sizes + 1e-3)).all()), label
                if way == "codec":
                    seen[name].append(step)
            assert_equal_everywhere(network.named_parameters(), f"planned {seed} {number}")
        tables = [
            name
            for place, name in enumerate(_LARGE[:2])
            if (decided_at(seen[name], place) or (0, False))[1]
        ]
        assert names_of(compressor.adapter.slots) == tables, (seed, tables)
        compressor.close()
    assert found > 20 and ways == {"codec", "dense", "fp16"}, (found, ways)


def _rows_of(step):
    """Return the rows of two tables: few of the first, and all of the second."""
    return [torch.arange(step, step + 9) % ROWS + hvd.rank() % 2, torch.arange(ROWS)]


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_finds_tables_before_it_plans(directory):
    """The plan leaves the table out, and another job with this plan finds it again."""
    network = Model(2)
    optimizer, compressor = _distributed(network, schedule="auto")
    times = compressor.adapter.times
    for step in range(_DECIDED):
        _backward(network, _rows_of(step))
        if times.seconds is not None:  # equal, and much longer than predicted: all plans take part
            times.seconds = 1.0
        optimizer.step()
        row = compressor.stats()["table.0.weight"]
        assert step < 2 or (row["path"], row["sent_values"]) == ("compressed", 9 * COLUMNS), step
    assert_equal_everywhere(network.named_parameters(), "auto with a table")
    plan = compressor.plan
    members = {name for message in plan.messages for name in message.members}
    assert members == {"table.1.weight", "layer.weight"}, plan
    kept = [trial.kept for trial in compressor.adapter.scheduler.trials]
    assert min(kept) < 0.02 and max(kept) == 1, kept
    notes = compressor.adapter.notes()
    assert "table.0.weight" in notes[0] and "leaves out" not in " ".join(notes), notes
    profiled = {part.name for part in compressor.profile().parameters}
    assert profiled == members, profiled

    encoded = Message(("table.0.weight", "table.1.weight"), "codec", 0.25, "Allgather")
    uncompressed = Message(("layer.weight",), "dense")
    for given in (plan, random_plans.plan_of([encoded, uncompressed], hvd.size())):
        trained = []
        for _ in range(2):
            network = Model(2)
            optimizer, compressor = _distributed(network, schedule=given)
            for step in range(4):
                _backward(network, _rows_of(step))
                optimizer.step()
                row = compressor.stats()["table.0.weight"]
                assert step < 2 or row["sent_values"] == 9 * COLUMNS, (given, step)
            notes = compressor.adapter.notes()
            assert "table.0.weight" in notes[0], notes
            trained.append([*network.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*trained)), given


def scenario_a_table_that_a_plan_sends_uncompressed_stays_so(directory):
    network = Model(1)
    plan = random_plans.plan_of([Message(("table.0.weight",), "dense")], hvd.size())
    optimizer, compressor = _distributed(network, schedule=plan)
    for step in range(3):
        _backward(network, _rows_of(step)[:1])
        optimizer.step()
    assert compressor.stats()["table.0.weight"]["path"] == "dense"
    assert names_of(compressor.adapter.slots) == []


@mock.patch.object(scheduler_module, "_COLD_STEPS", 1)
def scenario_auto_with_tables_that_the_user_names(directory):
    """Plans cover the other parameters; without any, there is no plan."""
    codec = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.LloydMax(bits=1))
    for codecs, planned in (
        ({"table.*": "rows", "*": codec}, {"layer.weight"}),
        ("rows", set()),
        (None, set()),  # found, and all other parameters are sent uncompressed
    ):
        network = Model(2)
        options = {} if codecs else {"dense_below": ROWS * COLUMNS}
        if codecs is None:
            network.layer = torch.nn.Linear(COLUMNS, 9)
        optimizer, compressor = _distributed(network, codecs, schedule="auto", **options)
        for step in range(70):
            _backward(network, [_rows_of(step)[0]] * 2)
            optimizer.step()
        notes = " ".join(compressor.adapter.notes())
        if planned:
            members = {name for one in compressor.plan.messages for name in one.members}
            assert members == planned and "leaves out" not in notes, (compressor.plan, notes)
        else:
            assert compressor.plan is None, codecs
            assert "no gradient besides those of embedding tables is compressed" in notes, notes
        for name in _LARGE[:2]:
            row = compressor.stats()[name]
            assert (row["path"], row["sent_values"]) == ("compressed", 9 * COLUMNS), codecs
        assert_equal_everywhere(network.named_parameters(), f"named {codecs}")
        compressor.summary()


def scenario_optimizers_that_share_auto_and_step_in_another_order_on_each_rank(directory):
    """A table is first used while the job measures, tries plans, or follows one."""
    own = torch.Generator().manual_seed(hvd.rank())
    cases = (ROWS, 54), (4, 54), (ROWS, 40), (ROWS, 53), (ROWS, 55)
    # three ranks that wait in other orders keep both cores busy
    for outputs, first_used in sample(hvd.size(), cases, every=len(cases)):
        torch.manual_seed(0)
        parts = {"table": torch.nn.Embedding(ROWS, 8), "layer": torch.nn.Linear(8, outputs)}
        named = [*torch.nn.ModuleDict(parts).named_parameters()]
        compressor = dr.Compressor(parameters=named, schedule="auto")
        optimizers = {
            name: hvd.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=1e-6),
                named_parameters=[pair for pair in named if pair[0].startswith(name)],
                compression=compressor,
            )
            for name, part in parts.items()
        }
        for step in range(70):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            found = parts["table"](torch.randint(ROWS, (20,), generator=own))
            answers = parts["layer"](torch.randn(20, 8, generator=own))
            (answers.pow(2).sum() + found.pow(2).sum() * float(step >= first_used)).backward()
            for name in sorted(optimizers, reverse=bool(hvd.rank() % 2)):
                optimizers[name].step()
        assert_equal_everywhere(named, f"orders {outputs} {first_used}")
        row, found = compressor.stats()["table.weight"], names_of(compressor.adapter.slots)
        assert found == ["table.weight"], first_used
        assert (row["path"], row["sent_values"] <= 20 * 8) == ("compressed", True), row
        planned = compressor.plan.messages if compressor.plan else ()
        assert bool(planned) == (outputs == ROWS), (outputs, first_used, compressor.plan)
        compressor.close()


def scenario_auto_with_optimizers_of_which_each_rank_uses_one(directory):
    """A rank passes the gradients that it has not made when their optimizer steps, and not before.

    So another optimizer begins the step of the job on each rank. At first, one optimizer has all
    parameters that are trained.
    """
    torch.manual_seed(0)
    parts = torch.nn.ModuleDict({name: torch.nn.Linear(40, 40) for name in ("trunk", "one", "two")})
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.1)), parameters=parts.named_parameters(), schedule="auto"
    )
    optimizers = []
    for owned in (("trunk", "one"), ("two",)):
        named = [pair for pair in parts.named_parameters() if pair[0].startswith(owned)]
        optimizer = torch.optim.SGD([one for _, one in named], lr=1e-3)
        optimizers.append(hvd.DistributedOptimizer(optimizer, named, compressor))
    for step in range(60):
        parts.zero_grad()
        parts["two"].requires_grad_(step >= 3)
        used = ("one", "two")[(step // 3 + hvd.rank()) % 2] if step >= 3 else "one"
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(step + hvd.rank()))
        parts[used](parts["trunk"](inputs)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert compressor.plan is not None, "there is no plan"
    assert_equal_everywhere(parts.named_parameters(), "one optimizer per rank")


@mock.patch.object(scheduler_module, "_COLD_STEPS", 1)
def scenario_steps_that_compress_nothing_but_tables(directory):
    """They are no steps to plan by: with tables that are named, found, or both."""
    own = torch.Generator().manual_seed(hvd.rank())
    codec = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.LloydMax(bits=1))
    for codecs, every, planned in (
        ({"table.0.weight": "rows"}, None, False),  # the other one is found
        ({"table.*": "rows", "*": codec}, 10, True),
    ):
        network = Model(2)
        named = [*network.named_parameters()]
        compressor = dr.Compressor(codecs, parameters=named, schedule="auto")
        tables, layer = (
            hvd.DistributedOptimizer(
                torch.optim.SGD([one for _, one in pairs], lr=1e-6), named_parameters=pairs,
                compression=compressor,
            )
            for pairs in (named[:2], named[2:])
        )  # fmt: skip
        for step in range(120):
            count = 0 if step == 60 and hvd.rank() else 9 + 5 * hvd.rank()
            rows = [torch.randint(ROWS, (count,), generator=own) for _ in range(2)]
            if every is not None and step % every == 0:
                layer.zero_grad()
                network.layer(torch.ones(1, COLUMNS)).sum().backward()
                layer.step()
            tables.zero_grad()
            sum(table(one).pow(2).sum() for table, one in zip(network.table, rows)).backward()
            tables.step()
        assert_equal_everywhere(named, f"nothing but tables {planned}")
        covered = {name for one in (compressor.plan or random_plans.plan_of([], 2)).messages
                   for name in one.members}  # fmt: skip
        assert covered <= {"layer.weight"} and (planned or not covered), compressor.plan
        compressor.summary()
        compressor.close()
