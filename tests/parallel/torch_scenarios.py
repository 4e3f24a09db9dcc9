"""What must hold on every rank, on stock Horovod with PyTorch; started by test_torch_parallel.py
under horovodrun.
"""

import itertools
import sys

import horovod.torch as hvd
import torch
from codecs_table import INDEX, MEMORIES, VALUE
from own_stages import OwnResidual
from scenario_runner import expect_statistics_that_add_up
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
)  # fmt: skip

import deepreduce_hvd as dr


def scenario_every_codec_and_memory(directory):
    """Equal parameters after every step, and for memories that keep everything: sent + kept = what
    came in.
    """
    # every codec of either kind beside a plain one, and lossy ones together
    codecs = [(index, "raw_value") for index in INDEX] + [("raw_index", value) for value in VALUE]
    codecs += [("rice", "qsgd_4"), ("bloom_p2", "fit_poly"), ("huffman_delta", "quantile")]
    for number, ((index, value), memory) in enumerate(itertools.product(codecs, MEMORIES)):
        torch.manual_seed(0)
        network = torch.nn.Linear(48, 40)  # one tensor compressed, one dense: there are many rounds
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


def _train(steps, codec=None, memory=None, sparsity=0.05, **options):
    network = model()
    optimizer, compressor = distributed(
        network, codec or dr.Codec(dr.TopK(sparsity)), memory, **options
    )
    for step in range(steps):
        network.zero_grad()
        backward(network, step)
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {step} {sorted(options)}")
    return network, compressor


def scenario_sum_is_size_times_average(directory):
    averaged, _ = _train(1)
    network = model()
    optimizer, _ = distributed(
        network, op=hvd.Sum, optimizer=torch.optim.SGD(network.parameters(), lr=0.1 / hvd.size())
    )
    backward(network, 0)
    optimizer.step()
    for (name, one), (_, other) in zip(averaged.named_parameters(), network.named_parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=name)


def scenario_predivide_factor_changes_nothing(directory):
    plain, _ = _train(3)
    divided, _ = _train(3, gradient_predivide_factor=3.0)
    for (name, one), (_, other) in zip(plain.named_parameters(), divided.named_parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def scenario_groups_change_nothing(directory):
    plain, _ = _train(3)
    by_number, _ = _train(3, groups=2)
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
    # a step with fewer passes than planned: Horovod compresses what is there at synchronize()
    network.zero_grad()
    backward(network, 99)
    optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "short step")


def scenario_process_set(directory):
    """Only some of the ranks train together; with two ranks, each alone in a set of one."""
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
    """A parameter without a gradient on some ranks, then on all: zeros there, and its residual goes
    on.
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


def scenario_loss_scaling_skips_an_overflow_everywhere(directory):
    """An overflow on one rank: every rank skips, and every residual is bit for bit what it was
    before the step.
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
    """The same training with a loss scale that changes by powers of two, bit for bit."""
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
    """channels_last, transposed and expanded gradients arrive where they belong."""
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
    """Duplicates are merged, the result is sparse, and nothing of the dense size is sent."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(1000, 16, sparse=True)
    # the same shape: which one a gradient belongs to must be told
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
        # header, probe, 32 pairs; in one parameter the roll call
        assert row["sent_bytes"] <= 40 + 16 + 8 * 32 + 4 * hvd.size(), row
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_equal_everywhere(network.named_parameters(), "embedding")


def scenario_resumed_equals_uninterrupted(directory):
    for memory in MEMORIES.values():

        def run(network, optimizer, steps):
            for step in steps:
                network.zero_grad()
                backward(network, step)
                optimizer.step()

        codec = dr.Codec(dr.TopK(0.05), value=list(VALUE.values())[-1])
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
    """The residuals' sum over all ranks survives a change of the number of ranks; needs the other
    run's states when there.
    """
    network, compressor = _train(2)
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
                torch.testing.assert_close(now, saved, rtol=0, atol=1e-6 * float(saved.abs().max()))
        if size != hvd.size():
            for wrong in (states[0], states[:1], states[::-1]):
                try:
                    compressor.load_state_dict(wrong)
                except dr.InvalidArgumentError as error:
                    assert "expected" in str(error)
                else:
                    raise AssertionError("a state of another world was taken")


def scenario_a_memory_of_the_users_own(directory):
    """Run by NumPy, it trains bit for bit as the built-in memory that does the same, with every
    communicator.
    """
    lossy = {"index": dr.Rice(), "value": dr.QSGD(bits=4)}
    topk, random = dr.Codec(dr.TopK(0.1), **lossy), dr.Codec(dr.RandomK(0.1), **lossy)
    cases = [
        (topk, dr.Allgather()), (topk, dr.SplitAllgather()), (topk, dr.RecursiveDoubling()), (topk, dr.GTopK()), (topk, dr.CLTK()),
        (random, dr.SharedRandomK()), (topk, dr.Hierarchical(dr.Allgather(), ranks_per_host=hvd.size())),
    ]  # fmt: skip
    for codec, communicator in cases:
        trained = []
        for memory in (dr.Residual(), OwnResidual()):
            options = {"communicator": communicator, **ALL_COMPRESSED}
            trained.append(_train(2, codec, memory, compressor_options=options))
        (one, built_in), (other, own) = trained
        for (name, first), (_, second) in zip(one.named_parameters(), other.named_parameters()):
            assert torch.equal(first, second), f"{communicator} {name}"
        for name, state in own.state_dict()["parameters"].items():
            twin = built_in.state_dict()["parameters"][name]["memory"]["residual"]
            assert torch.equal(state["memory"]["kept"], twin), f"{communicator} {name}"


def scenario_statistics_add_up(directory):
    _, compressor = _train(2)
    expect_statistics_that_add_up(compressor, roll_call_bytes=4 * hvd.size())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    run_all(globals(), sys.argv[1])
