"""Test several optimizers on one compressor, sparse gradients, and the cost of a step.

Runs on stock Horovod with PyTorch. Started by test_torch_several.py under horovodrun.
"""

import gc
import resource
import sys
import threading

import horovod.torch as hvd
import torch
import torch_commits
import torch_direct
import torch_loss_scale
import torch_programs
from scenario_runner import refused
from torch_gradients_tools import expect, loss_of, named, residual, run_reporting
from torch_tools import assert_equal_everywhere, batch, distributed, model

import deepreduce_hvd as dr

# --- several optimizers, names and sparse gradients ---


def scenario_optimizers_take_turns(directory):
    """Several optimizers that share a compressor train as with one compressor each.

    Their backward passes and steps come in any order. Some ranks do not use all parameters.
    """

    def trained(shared):
        networks = [named(a=(40, 30), b=(30, 30), unused=(30, 30)), named(c=(40, 30), d=(30, 30))]
        pairs = [
            [(f"{number}.{name}", parameter) for name, parameter in network.items()]
            for number, network in enumerate(networks)
        ]
        options = {"dense_below": 0, "bucket_bytes": 1 << 30}
        one = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=pairs[0] + pairs[1], **options)
        optimizers = []
        for network, pair in zip(networks, pairs):
            compressor = (
                one if shared else dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=pair, **options)
            )
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            optimizers.append(
                hvd.DistributedOptimizer(optimizer, named_parameters=pair, compression=compressor)
            )

        def backward(number, step):
            names = [
                name for name in networks[number] if name != "unused" or (step + hvd.rank()) % 2
            ]
            loss_of(networks[number], step, names).backward()

        def finish(number):
            optimizers[number].step()
            optimizers[number].zero_grad()

        for step, order in enumerate(("bBfF", "bBFf", "bfBF", "bfbBfF", "Bbfb FBf F")):
            for position, letter in enumerate(order.replace(" ", "")):
                number = int(letter.isupper())
                backward(number, 10 * step + position) if letter in "bB" else finish(number)
            for number, network in enumerate(networks):
                assert_equal_everywhere(network.named_parameters(), f"turns {step} {number}")
        return networks

    for one, other in zip(trained(True), trained(False)):
        for name in one:
            expect(torch.equal(one[name], other[name]), name, "differs")


def scenario_one_optimizer_skips_and_the_other_does_not(directory):
    network = named(a=(40, 30), b=(40, 30))
    pairs = list(network.named_parameters())
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.1)), parameters=pairs, dense_below=0, loss_scale=lambda: 1.0
    )
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.1),
            named_parameters=[(name, parameter)],
            compression=compressor,
        )
        for name, parameter in pairs
    ]
    for step in range(3):
        kept = {name: residual(compressor, name).clone() for name in network}
        loss = loss_of(network, step, ["a"]) * (
            float("inf") if step == 1 and hvd.rank() == 0 else 1.0
        )
        (loss + loss_of(network, step, ["b"])).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
        for name in network:
            unchanged = torch.equal(residual(compressor, name), kept[name])
            expect(
                unchanged == (step == 1 and name == "a"),
                step,
                name,
                "unchanged" if unchanged else "changed",
            )
        for optimizer in optimizers:
            optimizer.zero_grad()


def scenario_every_parameter_travels_its_own_way(directory):
    """Sums equal those of Horovod alone, of float16, and of a separate compressor."""
    ways = {"plain": "dense", "short": "fp16", "other": dr.Codec(dr.TopK(0.2), index=dr.Rice())}
    shapes = dict.fromkeys((*ways, "rest"), (40, 30))
    network = named(**shapes)
    codec = dr.Codec(dr.TopK(0.1))
    compressors = [
        dr.Compressor({**ways, "*": codec}, parameters=network.items(), dense_below=0),
        dr.Compressor(ways["other"], parameters=[("other", network["other"])], dense_below=0),
        dr.Compressor(codec, parameters=[("rest", network["rest"])], dense_below=0),
    ]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=network.items(), compression=compressors[0]
    )
    for step in range(3):
        optimizer.zero_grad()
        loss_of(network, step, list(shapes)).backward()
        optimizer.synchronize()
        got = {name: parameter.grad.clone() for name, parameter in network.items()}
        loss = loss_of(network, step, list(shapes))
        own = dict(zip(shapes, torch.autograd.grad(loss, list(network.parameters()))))
        for name, gradient in own.items():
            network[name].grad = gradient  # the compressor finds the parameter by its gradient
        expected = {
            "plain": hvd.allreduce(own["plain"]),
            "short": hvd.allreduce(own["short"], compression=hvd.Compression.fp16),
            "other": hvd.allreduce(own["other"], compression=compressors[1]),
            "rest": hvd.allreduce(own["rest"], compression=compressors[2]),
        }
        for name, one in expected.items():
            # with more than two ranks, Horovod's own sums depend on what it fuses
            exact = hvd.size() < 3 or name in ("other", "rest")
            tolerance = 0.0 if exact else 2e-3 if name == "short" else 1e-6
            close = torch.allclose(got[name], one, rtol=tolerance, atol=tolerance)
            expect(close, name, f"differs in step {step}")
        assert_equal_everywhere(got.items(), f"ways {step}")
        with optimizer.skip_synchronize():
            optimizer.step()
    stats = compressors[0].stats()
    paths = [stats[name]["path"] for name in shapes]
    expect(paths == ["dense", "fp16", "compressed", "compressed"], "paths are", paths)
    sent = [stats[name]["sent_bytes"] for name in shapes]
    expect(sent[:2] == [4800, 2400], "sent bytes are", sent)


def scenario_an_optimizer_that_was_replaced_but_is_alive_is_named(directory):
    """The graph of the last loss keeps its hooks, which would exchange each gradient once more."""
    network = model()
    network[0].requires_grad_(False)
    optimizer, compressor = distributed(network)
    for step in range(2):
        loss = network(batch(step)).square().mean()
        network.zero_grad()
        loss.backward()
        optimizer.step()
    network[0].requires_grad_(True)
    del optimizer
    gc.collect()
    replaced = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=network.named_parameters(),
        compression=compressor,
    )
    loss = network(batch(2)).square().mean()
    with refused(r"4\.\w+: expected one hvd.DistributedOptimizer .* got two; .* the last loss"):
        loss.backward()
    del replaced


def scenario_a_parameter_under_two_names_has_one_memory(directory):
    """Tied weights with two names have one memory, in an optimizer and in hvd.allreduce."""
    network = named(tied=(40, 30))
    pairs = [("first", network["tied"]), ("last", network["tied"])]
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=pairs, dense_below=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=pairs,
        compression=compressor,
    )
    loss_of(network, 0).backward()
    optimizer.step()
    hvd.allreduce(network["tied"].grad, compression=compressor, name="two names")
    steps = {name: saved["steps"] for name, saved in compressor.state_dict()["parameters"].items()}
    expect(steps == {"first": 0, "last": 2}, steps)


def scenario_sparse_gradients_that_horovod_sums_itself(directory):
    """Without sparse_as_dense=True, sparse gradients go through Horovod uncompressed.

    If one of them overflows, the step is skipped for all parameters.
    """
    for poisoned in (False, True):
        network = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(100, 16, sparse=True), "dense": torch.nn.Linear(16, 16)}
        )
        optimizer, compressor = distributed(
            network, dr.Codec(dr.TopK(0.1)), compressor_options={"loss_scale": lambda: 1.0}
        )
        kept = residual(compressor, "dense.weight").clone()
        looked_up = network["table"](torch.tensor([3, 3, 7 + hvd.rank()])).sum()
        (
            network["dense"](torch.ones(16)).sum()
            + looked_up * (float("inf") if poisoned and hvd.rank() == 0 else 1.0)
        ).backward()
        optimizer.synchronize()
        gradient = network["table"].weight.grad.to_dense()
        row = compressor.stats()["table.weight"]
        expect(
            (row["path"], row["steps"]) == ("sparse", 1) and row["sent_bytes"] >= 2 * 16 * 4, row
        )
        if poisoned:
            expect(not gradient.isfinite().all(), "finite")
            expect(
                torch.equal(residual(compressor, "dense.weight"), kept),
                "the residual changed in the skipped step",
            )
        else:
            torch.testing.assert_close(gradient[3], torch.full((16,), 2.0))
            torch.testing.assert_close(
                gradient[7 : 7 + hvd.size()], torch.full((hvd.size(), 16), 1 / hvd.size())
            )
            expect(
                not torch.equal(residual(compressor, "dense.weight"), kept),
                "nothing was compressed",
            )
        with optimizer.skip_synchronize():
            optimizer.step()


def scenario_rows_without_a_gradient_do_not_move(directory):
    """With the default codec of small tensors, neither padding nor rows that no rank looked up."""
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(60, 16, padding_idx=0, sparse=sparse)
        before = table.weight.detach().clone()
        pairs = list(table.named_parameters())
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        optimizer = hvd.DistributedOptimizer(
            kind(table.parameters(), lr=0.1),
            named_parameters=pairs,
            compression=dr.Compressor(parameters=pairs),
            sparse_as_dense=sparse,
        )
        draw = torch.Generator().manual_seed(hvd.rank())
        for _ in range(20):
            optimizer.zero_grad()
            words = torch.randint(30, (8,), generator=draw)  # 0 is padding
            (table(words) * torch.randn(8, 16, generator=draw)).sum().backward()
            optimizer.synchronize()
            expect(table.weight.grad.is_sparse == sparse, "sparse", table.weight.grad.is_sparse)
            if sparse:
                rows = set(table.weight.grad.coalesce().indices().flatten().tolist())
                expect(rows and rows <= set(range(1, 30)), "rows", rows)
            with optimizer.skip_synchronize():
                optimizer.step()
        expect(torch.equal(table.weight[0], before[0]), "padding moved", table.weight[0])
        expect(torch.equal(table.weight[30:], before[30:]), "rows without a gradient moved")
        expect(not torch.equal(table.weight[1:30], before[1:30]), "nothing moved")


def scenario_equal_embeddings_with_nan(directory):
    """NaN on one rank in one of two otherwise equal sparse gradients skips the step everywhere.

    This holds whether Horovod reduces the gradients during backward or in synchronize().
    """
    # With 2, only one of two planned passes runs. Horovod then reduces in synchronize().
    for passes in (1, 2):
        network = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(200, 8, sparse=True) for name in ("one", "two")}
        )
        optimizer, compressor = distributed(
            network, dr.Codec(dr.TopK(0.02)), compressor_options={"loss_scale": lambda: 1.0},
            sparse_as_dense=True,
            backward_passes_per_step=passes,
        )  # fmt: skip
        for step in range(3):
            optimizer.zero_grad()
            kept = {name: residual(compressor, f"{name}.weight").clone() for name in network}
            factor = float("nan") if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0
            rows = torch.arange(step, step + 9)
            (network["one"](rows).sum() + factor * network["two"](rows).sum()).backward()
            optimizer.synchronize()
            finite = all(
                bool(embedding.weight.grad.coalesce().values().isfinite().all())
                for embedding in network.values()
            )
            expect(finite == (step != 1), passes, step, finite)
            for name in network:
                unchanged = torch.equal(residual(compressor, f"{name}.weight"), kept[name])
                expect(unchanged == (step == 1), passes, step, name, unchanged)
            with optimizer.skip_synchronize():
                if finite:
                    optimizer.step()


# --- costs ---


def resident():
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def scenario_gradients_are_released_with_the_last_result(directory):
    elements = 20 << 20  # more than malloc caches
    for dtype in (torch.float32, torch.bfloat16):
        network = torch.nn.ParameterDict(
            {"weight": torch.nn.Parameter(torch.zeros(elements, dtype=dtype))}
        )
        optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.001)))
        used = []
        for _ in range(3):
            (network["weight"] * 1.0).sum().backward()
            optimizer.step()
            before = resident()
            network.zero_grad(set_to_none=True)
            used.append(before - resident())
        released = used[-1] / (elements * dtype.itemsize)
        expect(released > 0.9, dtype, f"released {used} of {elements * dtype.itemsize} bytes")


class Looks(dict):
    """A dictionary that counts how often the main thread iterates its values.

    The thread that watches long waits iterates them at any time.
    """

    count = 0

    def values(self):
        self.count += threading.current_thread() is threading.main_thread()
        return super().values()


def scenario_a_step_asks_once(directory):
    """A step reads the loss scale once, and iterates over all parameters at most once.

    This holds with an optimizer and with hvd.allreduce.
    """
    asked = []
    network = torch.nn.ModuleDict(
        {f"layer{number}": torch.nn.Linear(30, 30) for number in range(20)}
    )
    network["table"] = torch.nn.Embedding(100, 30, sparse=True)
    network["twin"] = torch.nn.Embedding(100, 30, sparse=True)
    optimizer, compressor = distributed(
        network,
        compressor_options={"loss_scale": lambda: asked.append(1) or 2.0},
        sparse_as_dense=True,
    )
    layers = [network[f"layer{number}"] for number in range(20)]

    def optimizer_steps(step):
        rows = network["table"](torch.arange(4)) + network["twin"](torch.arange(4))
        sum(layer(rows).sum() for layer in layers[step:]).backward()
        optimizer.step()

    # gradients are set by hand: the optimizer's hooks reduce those that backward computes
    def allreduce_alone(step):
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, step)
        one, *rest = (parameter.grad for parameter in reversed(parameters))
        hvd.allreduce(one, compression=compressor, name=f"one.{step}")
        hvd.grouped_allreduce(rest, compression=compressor, name=f"rest.{step}")

    for step in range(4):
        optimizer.zero_grad()
        adapter = compressor.adapter
        looked = [Looks(adapter.slots), Looks(adapter._parameters._by_id)]
        if step:  # ranks compare all parameters before the first step
            adapter.slots, adapter._parameters._by_id = looked
        (allreduce_alone if step == 3 else optimizer_steps)(step)
        expect(len(asked) == step + 1, step, f"asked {len(asked)} times")
        counts = [one.count for one in looked]
        expect(max(counts) <= 1, step, f"looked through all parameters {counts} times")


if __name__ == "__main__":
    modules = torch_direct, torch_commits, torch_loss_scale, torch_programs
    scenarios = {name: value for module in modules for name, value in vars(module).items()}
    run_reporting({**globals(), **scenarios}, sys.argv[1])
