"""Test what ranks must agree on, with stock Horovod and PyTorch.

These are configurations and process sets. Started by test_torch_protocol.py under horovodrun.
"""

import contextlib
import faulthandler
import io
import sys

import horovod.torch as hvd
import torch
import torch_joins
from protocol_tools import SAME, before_last, on_last
from scenario_runner import refused
from torch_gradients_tools import expect, named, run_reporting
from torch_tools import assert_equal_everywhere, backward, distributed, model, parts_on

import deepreduce_hvd as dr
from deepreduce_hvd.torch.transport import HorovodTransport


def expect_refusal(what, expected, run):
    """Check that every rank raises an error with the text ``expected`` in the first step.

    No rank may wait and no collective may be left over: all ranks must reach the next scenario.
    """
    try:
        run()
        expect(False, what, "went on silently")
    except dr.InvalidArgumentError as error:
        expect(expected in str(error), what, "got:", error)
    hvd.barrier()


def one_step(network, **options):
    optimizer, compressor = distributed(
        network, options.pop("codec", None), options.pop("memory", None), compressor_options=options
    )
    backward(network, 0)
    optimizer.step()
    return compressor


# --- configurations ---


def scenario_ranks_that_differ_are_told_in_what(directory):
    """If a setting differs between ranks, the error names it and both values.

    Some communicators measure, or create process sets, before their first exchange. They do so
    after the comparison.
    """
    last = f" on rank {hvd.size() - 1}"

    def told(name, other, usual, shown_other=None, shown_usual=None, run=None, **options):
        expected = (
            f"{SAME}{name}={shown_usual or usual} on {before_last(hvd)} and "
            f"{shown_other or other}{last}"
        )
        expect_refusal(
            name,
            expected,
            run or (lambda: one_step(model(), **options, **{name: on_last(hvd, other, usual)})),
        )

    told("dense_below", 50, 300)
    told("dense_below", 1 << 20, 0)  # on one rank everything is dense
    told("bucket_bytes", 0, 1 << 20)
    told("seed", 1, 0)
    told("codec", dr.Codec(dr.TopK(0.02)), dr.Codec(dr.TopK(0.05)))
    told("memory", dr.NoMemory(), dr.Residual())
    told("loss_scale", lambda: 1.0, None, "given", "not given")
    for other in (dr.Auto(), dr.Hierarchical(dr.Allgather(), 1), dr.CLTK(), dr.GTopK()):
        for usual in (dr.Allgather(), dr.SplitAllgather()):
            told("communicator", other, usual)
            told("communicator", usual, other)


def scenario_ranks_with_other_parameters_are_told_which(directory):
    """If parameters differ between ranks, the error names them.

    They may differ in number, order, names, shapes, in which are frozen, and in the steps of a
    state that one rank has not loaded.
    """

    def parameters(*entries):
        return lambda: dr.Compressor(parameters=entries, dense_below=0).compress(entries[0][1].grad)

    def parameter(*shape):
        made = torch.nn.Parameter(torch.ones(shape))
        made.grad = torch.ones(shape)
        return made

    a, b, other = ("a", parameter(30, 4)), ("b", parameter(4, 30)), ("b", parameter(4, 31))
    at = f"{SAME}parameters, number "
    last = f"rank {hvd.size() - 1}"
    expect_refusal(
        "number",
        f"{SAME}number of parameters=2 on {before_last(hvd)} and 1 on {last}",
        parameters(*on_last(hvd, [a], [a, b])),
    )
    expect_refusal(
        "order",
        f"{at}0=a (30, 4) on {before_last(hvd)} and b (4, 30) on {last}",
        parameters(*on_last(hvd, [b, a], [a, b])),
    )
    expect_refusal(
        "name",
        f"{at}1=b (4, 30) on {before_last(hvd)} and c (4, 30) on {last}",
        parameters(a, on_last(hvd, ("c", b[1]), b)),
    )
    expect_refusal(
        "shape",
        f"{at}1=b (4, 30) on {before_last(hvd)} and b (4, 31) on {last}",
        parameters(a, on_last(hvd, other, b)),
    )

    network = model()
    network[on_last(hvd, 2, 0)].weight.requires_grad_(False)
    expected = (
        f"{SAME}frozen parameters, number 0=0.weight frozen on {before_last(hvd)} and 0.weight "
        f"trained on {last}"
    )
    expect_refusal("frozen", expected, lambda: one_step(network))

    network = model()
    state = one_step(model()).state_dict()
    optimizer, compressor = distributed(network)
    if hvd.rank() < hvd.size() - 1:
        compressor.load_state_dict(state)
    backward_and_step = lambda: (backward(network, 0), optimizer.step())  # noqa: E731
    expected = (
        f"{SAME}steps, number 0=0.weight at step 1 on {before_last(hvd)} and 0.weight at step 0 "
        f"on {last}"
    )
    expect_refusal("steps", expected, backward_and_step)


def scenario_ranks_compare_once(directory):
    """Ranks compare their settings in the first step, and again when ranks may have changed."""
    network = model()
    optimizer, compressor = distributed(network)
    transport = compressor.adapter.transport
    names, started = [], transport.allgather

    def noting(array, name):
        names.append(name)
        return started(array, name)

    transport.allgather = noting
    for step in range(4):
        if step == 2:
            compressor.adapter.abandon()
        optimizer.zero_grad()
        backward(network, step)
        optimizer.step()
        handshakes = [name for name in names if "handshake" in name]
        expect(len(handshakes) == (1 if step < 2 else 2) and "handshake" in names[0], step, names)
    assert_equal_everywhere(network.named_parameters(), "compare once")


def scenario_compressors_may_take_turns_in_any_order(directory):
    """Each rank may begin with another compressor, also in the first backward pass."""
    networks = [named(first=(40, 30)), named(second=(30, 30))]
    optimizers = [distributed(network)[0] for network in networks]
    for step in range(2):
        for number in range(2):
            next(networks[(number + hvd.rank()) % 2].parameters()).sum().backward()
        for network, optimizer in zip(networks, optimizers):
            optimizer.step()
            optimizer.zero_grad()
            assert_equal_everywhere(network.named_parameters(), f"turns {step}")


def scenario_a_compressor_that_one_rank_lacks(directory):
    """A compressor that only one rank has is an error.

    Otherwise the other ranks would wait for messages under the names of another compressor.
    """
    if hvd.rank() == 0:
        kept = dr.Compressor(parameters=model().named_parameters())
    expect_refusal(
        "more on rank 0",
        "create the same compressors in the same order on every rank",
        lambda: one_step(model()),
    )
    if hvd.rank() > 0:  # all ranks have created the same number of compressors again
        kept = dr.Compressor(parameters=model().named_parameters())
    del kept


def scenario_horovod_and_the_compressor_have_other_process_sets(directory):
    """The compressor does not wait for ranks outside of Horovod's process set.

    This holds for an optimizer and for hvd.allreduce.
    """
    some = hvd.add_process_set([0]) if hvd.size() == 2 else hvd.add_process_set([0, 1])
    expected = (
        f"expected Horovod to sum or average over the {hvd.size()} ranks of the compressor's "
        "process set, got another set"
    )
    network = model()
    named = list(network.named_parameters())
    compressor = dr.Compressor(parameters=named, dense_below=50)
    if some.included():
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compressor, process_set=some
        )
        for call in (
            lambda: backward(network, 0),
            lambda: hvd.allreduce(named[0][1].grad, compression=compressor, process_set=some),
        ):
            try:
                call()
                expect(False, "went on silently")
            except dr.InvalidArgumentError as error:
                expect(expected in str(error), error)
    hvd.barrier()
    hvd.remove_process_set(some)


# --- process sets ---


def scenario_process_sets_that_are_there_already(directory):
    """Hierarchical uses process sets that are already registered.

    The user or another compressor may have registered them. If one was removed, Hierarchical
    registers a new one.
    """
    mine = hvd.add_process_set([1])
    for turn in range(3):
        network = model()
        optimizer, _ = distributed(
            network, compressor_options={"communicator": dr.Hierarchical(dr.Allgather(), 1)}
        )
        backward(network, 0)
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"sets {turn}")
        if turn == 1:
            hvd.remove_process_set(mine)
    transport = HorovodTransport(hvd.global_process_set)
    for rank in range(hvd.size()):  # Horovod allows only one set with the same ranks
        hvd.remove_process_set(transport._process_set([rank]))


def scenario_compressors_of_overlapping_process_sets_in_any_order(directory):
    """Compressors on overlapping process sets may be used for the first time in any order.

    Rank 0 begins with the compressor of all ranks, rank 1 with that of ranks 0 and 1. Each would
    wait for the other.
    """
    if hvd.size() < 3:  # two sets of the same ranks have one handshake
        return
    some = hvd.add_process_set([0, 1])
    parts = parts_on(hvd.global_process_set, some)
    for network, _ in reversed(parts) if hvd.rank() == 1 else parts:
        backward(network, 0)
    for _, optimizer in parts:
        optimizer.step()
    assert_equal_everywhere(parts[0][0].named_parameters(), "overlapping process sets")
    hvd.remove_process_set(some)


def scenario_a_rank_waits_elsewhere_for_one_that_waits_in_a_handshake(directory):
    """A rank that waits elsewhere takes part in a handshake that another rank waits in.

    Rank 1 waits in the handshake of ranks 1 and 2. Rank 2 has no gradient for it yet. It waits for
    the next collective of rank 1.
    """
    if hvd.size() < 3:
        return
    some = hvd.add_process_set([1, 2])
    parts = parts_on(hvd.global_process_set, some)
    for step in range(2):
        if hvd.rank() == 1 and step == 1:
            backward(parts[1][0], 0)
        backward(parts[0][0], step)
        # end the job if it hangs
        faulthandler.dump_traceback_later(60, exit=True)
        parts[0][1].step()
        parts[0][1].zero_grad()
        faulthandler.cancel_dump_traceback_later()
    if hvd.rank() == 2:
        backward(parts[1][0], 0)
    for _, optimizer in parts[1:]:
        optimizer.step()
    assert_equal_everywhere(parts[0][0].named_parameters(), "elsewhere")
    hvd.remove_process_set(some)


def scenario_ranks_outside_of_a_process_set_have_the_same_compressors(directory):
    """Every rank makes the compressors of all process sets, in the same order.

    A rank outside of one takes no part in its handshake, and has no state.
    """
    some = hvd.add_process_set(list(range(hvd.size() - 1)))
    networks, optimizers, compressors = [], [], []
    for members in (some, hvd.global_process_set):
        network = model()
        compressor = dr.Compressor(
            parameters=network.named_parameters(), dense_below=50, process_set=members
        )
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
            optimizer = dr.prepare(sgd, compressor)
        expect(("prepared SGD" in said.getvalue()) == (hvd.rank() == 0), said.getvalue())
        optimizers.append(
            hvd.DistributedOptimizer(
                optimizer, named_parameters=network.named_parameters(), compression=compressor,
                process_set=members,
            )
        )  # fmt: skip
        networks.append(network)
        compressors.append(compressor)
    # the compressor of some ranks still waits for its handshake at the first step of the other
    for number in (1, 0, 1):
        backward(networks[number], 0)
        optimizers[number].step()
        optimizers[number].zero_grad()
    assert_equal_everywhere(networks[1].named_parameters(), "all ranks")
    compressors[0].summary()
    if some.included():
        compressors[0].load_state_dict(compressors[0].state_dict())
    else:
        backward(networks[0], 1)  # hooks compress on the members only
        message = (
            rf"expected a rank of the compressor's process set, .*got rank {hvd.rank()}; leave"
        )
        for call in (
            compressors[0].state_dict,
            lambda: compressors[0].load_state_dict({}),
            lambda: compressors[0].compress(networks[0][0].weight.grad),
        ):
            with refused(message):
                call()
    hvd.barrier()
    for compressor in compressors:
        compressor.close()
    hvd.remove_process_set(some)


# --- memories that are not sent ---


def scenario_a_memory_on_a_rank_that_does_not_send_it(directory):
    """Only a rank that sends its memory may load one.

    The states are those of a job with one rank per host. Here all ranks are on one host, and only
    the first of them sends its memory. From a list of all states, it loads the sum.
    """
    network = model()
    optimizer, compressor = distributed(
        network, compressor_options={"communicator": dr.Hierarchical(dr.Allgather())}
    )
    own = compressor.state_dict()
    states = []
    for rank in range(hvd.size()):
        parameters = {}
        for name, entry in own["parameters"].items():
            memory = {
                kind: torch.full_like(part, 1.0 + rank) for kind, part in entry["memory"].items()
            }
            parameters[name] = {**entry, "steps": 3, "memory": memory}
        states.append({**own, "rank": rank, "parameters": parameters})
    try:
        compressor.load_state_dict(states[hvd.rank()])
        expect(hvd.rank() == 0, "took a memory that it would never send")
    except dr.InvalidArgumentError as error:
        told = f"expected no memory on rank {hvd.rank()}, whose communicator sends from rank 0"
        expect(hvd.rank() > 0 and told in str(error), error)
    compressor.load_state_dict(states)
    total = sum(range(1, hvd.size() + 1)) if hvd.rank() == 0 else 0
    for entry in compressor.state_dict()["parameters"].values():
        expect(all(bool((part == total).all()) for part in entry["memory"].values()), entry)
    compressor.load_state_dict(compressor.state_dict())
    backward(network, 0)
    optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "handed on")


if __name__ == "__main__":
    run_reporting({**globals(), **vars(torch_joins)}, sys.argv[1])
