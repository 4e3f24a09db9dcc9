"""Test state that is kept between steps, saved and loaded, on PyTorch.

Run by torch_scenarios.py.
"""

import horovod.torch as hvd
import torch
from codecs_table import MEMORIES, VALUE
from own_stages import OwnResidual
from scenario_runner import expect_statistics_that_add_up, sample
from torch_tools import (
    ALL_COMPRESSED,
    assert_equal_everywhere,
    backward,
    batch,
    distributed,
    model,
    sum_over_ranks,
    train,
)

import deepreduce_hvd as dr


def scenario_loss_scaling_skips_an_overflow_everywhere(directory):
    """If one rank overflows, every rank skips the step.

    Every residual then equals, bit for bit, its value before the step.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    network = model()
    optimizer, compressor = distributed(
        network, compressor_options={"loss_scale": scaler.get_scale}
    )
    for step in range(5):
        network.zero_grad()
        before = {
            name: parameter.detach().clone() for name, parameter in network.named_parameters()
        }
        kept = compressor.state_dict()["parameters"]
        loss = network(batch(step)).pow(2).mean()
        if step == 2 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        changed = any(
            not torch.equal(parameter, before[name])
            for name, parameter in network.named_parameters()
        )
        assert changed == (step != 2), f"step {step}: parameters changed: {changed}"
        if step == 2:
            assert scaler.get_scale() == 512.0
            for name, state in compressor.state_dict()["parameters"].items():
                for kind, part in state["memory"].items():
                    assert torch.equal(part, kept[name]["memory"][kind]), (
                        f"{name} {kind} changed in the skipped step"
                    )
        assert_equal_everywhere(network.named_parameters(), f"step {step}")


def scenario_residuals_follow_the_loss_scale(directory):
    """A loss scale that changes by powers of two gives bit-identical training."""
    trained = []
    for scales in ((1.0, 1.0, 1.0, 1.0), (1.0, 4.0, 2.0, 16.0)):
        network = model()
        current = [1.0]
        optimizer, _ = distributed(
            network,
            compressor_options={"loss_scale": lambda current=current: current[0], **ALL_COMPRESSED},
        )
        for step, scale in enumerate(scales):
            current[0] = scale
            network.zero_grad()
            (network(batch(step)).pow(2).mean() * scale).backward()
            optimizer.synchronize()
            for parameter in network.parameters():
                parameter.grad /= scale
            with optimizer.skip_synchronize():
                optimizer.step()
        trained.append(network)
    for one, other in zip(*(network.parameters() for network in trained)):
        assert torch.equal(one, other)


def scenario_resumed_equals_uninterrupted(directory):
    for memory in sample(hvd.size(), MEMORIES.values()):

        def run(network, optimizer, steps):
            for step in steps:
                network.zero_grad()
                backward(network, step)
                optimizer.step()

        codec = dr.Codec(dr.TopK(0.05), value=VALUE["quantile_16"])
        whole = model()
        optimizer, compressor = distributed(whole, codec, memory, compressor_options=ALL_COMPRESSED)
        run(whole, optimizer, range(3))
        saved = directory / f"state.{hvd.size()}.{hvd.rank()}.pt"
        torch.save({"model": whole.state_dict(), "compressor": compressor.state_dict()}, saved)
        run(whole, optimizer, range(3, 6))

        resumed = model(seed=9)
        checkpoint = torch.load(saved, weights_only=True)
        resumed.load_state_dict(checkpoint["model"])
        optimizer, other = distributed(resumed, codec, memory, compressor_options=ALL_COMPRESSED)
        other.load_state_dict(checkpoint["compressor"])
        run(resumed, optimizer, range(3, 6))
        for (name, one), (_, two) in zip(whole.named_parameters(), resumed.named_parameters()):
            assert torch.equal(one, two), f"{memory} {name}"
        one, two = compressor.state_dict()["parameters"], other.state_dict()["parameters"]
        for name in one:
            for kind in one[name]["memory"]:
                assert torch.equal(one[name]["memory"][kind], two[name]["memory"][kind]), (
                    f"{memory} {name} {kind}"
                )


def scenario_states_of_another_world_size(directory):
    """The mean of residuals over all ranks survives a change of the number of ranks.

    It is the update that waits in them, because gradients are averaged. The states of the run with the other number of ranks are loaded if they exist.
    """
    _, compressor = train(2)
    torch.save(compressor.state_dict(), directory / f"world.{hvd.size()}.{hvd.rank()}.pt")
    hvd.barrier()
    for size in (2, 3):
        paths = [directory / f"world.{size}.{rank}.pt" for rank in range(size)]
        if not all(path.exists() for path in paths):
            continue
        states = [torch.load(path, weights_only=True) for path in paths]
        compressor.load_state_dict(states)
        for name, state in compressor.state_dict()["parameters"].items():
            for kind, part in state["memory"].items():
                now = sum_over_ranks(part, f"world.{size}.{name}.{kind}")
                saved = sum(one["parameters"][name]["memory"][kind].double() for one in states)
                saved *= hvd.size() / size
                torch.testing.assert_close(now, saved, rtol=0, atol=1e-6 * float(saved.abs().max()))
        if size != hvd.size():
            for wrong in (states[0], states[:1], states[::-1]):
                try:
                    compressor.load_state_dict(wrong)
                except dr.InvalidArgumentError as error:
                    assert "expected" in str(error)
                else:
                    raise AssertionError("a state of another world was taken")


def scenario_the_update_in_memories_does_not_depend_on_the_number_of_ranks(directory):
    """The states of any number of ranks apply their sum with Sum, and their mean with Average."""
    for op in (hvd.Average, hvd.Sum):
        network = model()
        optimizer, compressor = distributed(
            network, dr.Codec(dr.TopK(1.0)), compressor_options=ALL_COMPRESSED, op=op
        )
        for size in (1, 2, 3, 5):
            backward(network, size)  # shows the operation
            optimizer.step()
            own, states, totals = compressor.state_dict(), [], {}
            generator = torch.Generator().manual_seed(size)
            for rank in range(size):
                states.append({**own, "rank": rank, "size": size, "parameters": {}})
                for name, one in own["parameters"].items():
                    residual = torch.randn(one["memory"]["residual"].shape, generator=generator)
                    states[-1]["parameters"][name] = {**one, "memory": {"residual": residual}}
                    totals[name] = totals.get(name, 0) + residual.double()
            compressor.load_state_dict(states)
            for parameter in network.parameters():
                parameter.grad = torch.full_like(parameter, 1e-20)
            optimizer.synchronize()
            for name, parameter in network.named_parameters():
                expected = totals[name] / (size if op == hvd.Average else 1)
                found = parameter.grad.double().view(-1)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            with optimizer.skip_synchronize():
                optimizer.step()


def scenario_a_memory_of_the_users_own(directory):
    """A custom memory, run by NumPy, trains bit for bit like the equal built-in memory.

    This holds with every communicator.
    """
    lossy = {"index": dr.Rice(), "value": dr.QSGD(bits=4)}
    topk, random = dr.Codec(dr.TopK(0.1), **lossy), dr.Codec(dr.RandomK(0.1), **lossy)
    cases = [
        (topk, dr.Allgather()), (topk, dr.SplitAllgather()), (topk, dr.RecursiveDoubling()),
        (topk, dr.GTopK()), (topk, dr.CLTK()),
        (random, dr.SharedRandomK()),
        (topk, dr.Hierarchical(dr.Allgather(), ranks_per_host=hvd.size())),
    ]  # fmt: skip
    for codec, communicator in cases:
        trained = []
        for memory in (dr.Residual(), OwnResidual()):
            options = {"communicator": communicator, **ALL_COMPRESSED}
            trained.append(train(2, codec, memory, compressor_options=options))
        (one, built_in), (other, own) = trained
        for (name, first), (_, second) in zip(one.named_parameters(), other.named_parameters()):
            assert torch.equal(first, second), f"{communicator} {name}"
        for name, state in own.state_dict()["parameters"].items():
            twin = built_in.state_dict()["parameters"][name]["memory"]["residual"]
            assert torch.equal(state["memory"]["kept"], twin), f"{communicator} {name}"


def scenario_statistics_add_up(directory):
    _, compressor = train(2)
    expect_statistics_that_add_up(compressor, roll_call_bytes=4 * hvd.size())
