"""Embedding tables of compressors with a schedule, on TensorFlow: no plan covers them."""

import random
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import random_plans
import tensorflow as tf
from table_programs import COLUMNS, ROWS, decided_at, used_rows
from tensorflow_schedule_tools import equal_times, follow
from tensorflow_tables import loss_of_rows, model
from tensorflow_tools import assert_equal_everywhere, sum_over_ranks

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.planning import scheduler as scheduler_module
from deepreduce_hvd.planning.policies import rows_codec
from deepreduce_hvd.schedule import Message

#: the first step in which all plans had their turns; the default has 50 steps of warm-up
_DECIDED = 230


def _step_of(named, compressor, traced=True):
    """Return a step that reduces the gradients of the rows that it is given."""
    variables = [variable for _, variable in named]

    def step(*rows):
        with tf.GradientTape() as tape:
            value = loss_of_rows(named, rows)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
        return tape.gradient(value, variables)

    if not traced:  # Horovod still makes a graph of the reduction
        return step
    return tf.function(
        step, input_signature=[tf.TensorSpec([None], tf.int64)] * (len(variables) - 1)
    )


def _local(named, rows):
    with tf.GradientTape() as tape:
        value = loss_of_rows(named, rows)
    found = tape.gradient(value, [variable for _, variable in named])
    return [tf.convert_to_tensor(one).numpy().astype(np.float64).ravel() for one in found]


def _memory(compressor):
    return {
        name: entry["memory"]["residual"].astype(np.float64).ravel()
        for name, entry in compressor.state_dict()["parameters"].items()
    }


def scenario_plans_that_change_in_every_step_leave_tables_out(directory):
    """Random plans and random tables, against an oracle: what is found, sent and kept."""
    draw, found, left_out = random.Random(10), 0, set()
    for seed in range(8):
        programs = [used_rows(draw, 2, hvd.size()) for _ in range(7)]
        named = model(2)
        names = [name for name, _ in named]
        compressor = dr.Compressor(parameters=named, schedule="auto", seed=seed)
        reduce = dr.tensorflow.scheduled(compressor)(_step_of(named, compressor, seed % 3 != 2))
        seen: dict[str, list] = {name: [] for name in names}  # steps that were compressed
        for number, step in enumerate(programs):
            plan = None
            if draw.random() < 0.8:
                plan = random_plans.random_plan(draw, names, hvd.size())
            follow(compressor, plan)
            planned = compressor.adapter.auto.scheduler.layout.policies
            before = _memory(compressor)
            rows = [tf.constant(one) for one in step[hvd.rank()]]
            own, results = _local(named, rows), reduce(*rows)
            after, stats = _memory(compressor), compressor.stats()
            for place, name in enumerate(names):
                label, way = f"{seed}.{number}.{name}", planned[name].way
                # all ranks know in the next step what one has seen
                decided = decided_at(seen[name], place) if place < 2 else None
                is_table = bool(decided and decided[1])
                if is_table:
                    found += 1
                    left_out.add(way)
                    way = "codec"
                    total = (own[place] + before[name]).astype(np.float32)
                    sent = dr.decode(rows_codec().encode(total)).astype(np.float64)
                    assert not after[name].any(), label
                else:
                    sent = own[place] + before[name] - after[name]
                assert stats[name]["path"] == {"codec": "compressed"}.get(way, way), label
                expected = sum_over_ranks(sent) / hvd.size()
                rounded = abs(own[place]) + abs(before[name]) + abs(sent)  # as float32
                sizes = sum_over_ranks(rounded)
                limit = 2e-3 if way == "fp16" else 1e-6  # sums of float16 round
                difference = abs(results[place].numpy().ravel() - expected)
                assert (difference <= limit * (sizes + 1e-3)).all(), (label, difference.max())
                if way == "codec":
                    seen[name].append(step)
            assert_equal_everywhere(results, f"planned {seed} {number}")
            for (_, variable), result in zip(named, results):
                variable.assign_sub(1e-3 * result)
        compressor.close()
    assert found > 20 and left_out == {"codec", "dense", "fp16"}, (found, left_out)


def _rows_of(step):
    """Return the rows of two tables: few of the first, and all of the second."""
    few = (np.arange(9) + step) % ROWS + hvd.rank() % 2
    return tf.constant(few % ROWS), tf.range(ROWS, dtype=tf.int64)


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_finds_tables_before_it_plans(directory):
    """The plan leaves the table out, and another job with this plan finds it again."""
    named = model(2)
    compressor = dr.Compressor(parameters=named, schedule="auto")
    function = _step_of(named, compressor)
    step = dr.tensorflow.scheduled(compressor)(function)
    with equal_times(compressor):
        for number in range(_DECIDED):
            results = step(*_rows_of(number))
            row = compressor.stats()["table0"]
            sent = row["path"], row["sent_values"]
            assert number < 2 or sent == ("compressed", 9 * COLUMNS), (number, sent)
    assert function.experimental_get_tracing_count() == 1
    assert_equal_everywhere(results, "auto with a table")
    plan = compressor.plan
    members = {name for message in plan.messages for name in message.members}
    assert members == {"table1", "kernel"}, plan
    trials = compressor.adapter.auto.scheduler.trials
    kept = [trial.kept for trial in trials]
    assert min(kept) < 0.02 and max(kept) == 1, kept
    notes = compressor.adapter.notes()
    assert "table0" in notes[0] and "leaves out" not in " ".join(notes), notes
    assert {part.name for part in compressor.profile().parameters} == members

    encoded = Message(("table0", "kernel"), "codec", 0.25, "Allgather")
    uncompressed = Message(("table1",), "dense")
    for given in (plan, random_plans.plan_of([encoded, uncompressed], hvd.size())):
        named = model(2)
        compressor = dr.Compressor(parameters=named, schedule=given)
        step = _step_of(named, compressor)
        for number in range(4):
            step(*_rows_of(number))
            row = compressor.stats()["table0"]
            assert number < 2 or row["sent_values"] == 9 * COLUMNS, (given, number)
        assert names_of(compressor.adapter.slots) == ["table0"]
        notes = compressor.adapter.notes()
        assert "table0" in notes[0] and "leaves out" not in " ".join(notes), notes
        compressor.close()


def scenario_tables_while_one_plan_stays(directory):
    """The graph follows what is found or loaded, not only a new plan."""
    uncompressed = random_plans.plan_of([Message(("table0", "kernel"), "dense")], hvd.size())
    for case in ("found in the last step before", "loaded", "forgotten"):
        named = model(1)
        compressor = dr.Compressor(parameters=named, schedule="auto")
        step = dr.tensorflow.scheduled(compressor)(_step_of(named, compressor))
        follow(compressor, None)
        for number in range(1 if case.startswith("found") else 3):
            step(_rows_of(number)[0])
        state = compressor.state_dict()
        follow(compressor, uncompressed)
        if case != "found in the last step before":
            assert names_of(compressor.adapter.slots) == ["table0"]
            known = case == "loaded"
            for is_known in (not known, known):
                state["parameters"]["table0"]["is_table"] = is_known or None
                compressor.load_state_dict(state)
                results = step(_rows_of(3)[0])
        for number in range(4, 8):
            results = step(_rows_of(number)[0])
        row = compressor.stats()["table0"]
        way = "dense" if case == "forgotten" else "compressed"
        assert row["path"] == way and (way == "dense" or row["sent_values"] == 9 * COLUMNS), row
        assert names_of(compressor.adapter.slots) == ([] if way == "dense" else ["table0"]), case
        assert_equal_everywhere(results, f"one plan, {case}")
        compressor.close()
