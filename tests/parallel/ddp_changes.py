"""What a program does after register with PyTorch's DDP: layers are trained later, memory formats
change, gradients are discarded, steps are compiled. Run by ddp_scenarios.py.
"""

import functools
import itertools
import random
import warnings

import torch
import torch.distributed as dist
from ddp_registration import random_part
from ddp_tools import CODEC, Network, assert_equal_everywhere, batch, discarding_program, loss_of
from scenario_runner import refused, texts_of_warnings
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr


def _backward(model, step):
    loss = loss_of(model, step, dist.get_rank())
    loss.backward()
    return loss


def scenario_layers_that_were_frozen_at_register_are_trained_later(directory):
    """Random ones are frozen, and trained from a random step on; all ranks stay equal."""
    warned = set()
    for seed in range(16):
        draw = random.Random(seed)
        network = Network()
        parameters = dict(network.named_parameters())
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": draw.random() < 0.5}
        model = DistributedDataParallel(network, **ddp)
        frozen = {"last.weight", *random_part(draw, parameters)} - {"branch.weight"}
        for name in frozen:
            parameters[name].requires_grad_(False)
        compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=0)
        compressor.register(model)
        alike = draw.random() < 0.5  # whether only the frozen ones have momentum
        momentum = {
            name: 0.9 * (name in frozen) if alike else draw.choice([0, 0.9]) for name in parameters
        }
        groups = [{"params": [one], "momentum": momentum[name]} for name, one in parameters.items()]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        begin, thaw = draw.randint(1, 3), draw.random() < 0.8
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(6):
                if step == begin and thaw:
                    for name in frozen:
                        parameters[name].requires_grad_(True)
                optimizer.zero_grad()
                if alike:  # the optimizer makes the gradients in its step
                    optimizer.step(functools.partial(_backward, model, step))
                else:
                    _backward(model, step)
                    optimizer.step()
        what = f"seed {seed}: frozen {frozen}, trained again {thaw} from step {begin}"
        assert_equal_everywhere(network.named_parameters(), what)
        trained = parameters if thaw else parameters.keys() - frozen
        said = sum("momentum" in str(one.message) for one in caught)
        assert said == any(momentum[name] for name in trained), f"{what}: {momentum} {said}"
        warned.add((alike, said))
    assert warned >= {(True, 0), (True, 1), (False, 1)}, warned


def scenario_a_memory_format_that_changes_after_ddp_is_refused(directory):
    """DDP keeps the order of elements that it found, and so does the residual."""
    for seed in range(16):
        draw = random.Random(seed)
        first, changes = draw.random() < 0.5, draw.choice([None, "before register", 0, 1, 3])
        network = Network(channels_last=first)
        model = DistributedDataParallel(
            network, gradient_as_bucket_view=draw.random() < 0.5,
            find_unused_parameters=draw.random() < 0.5,
        )  # fmt: skip
        other = torch.contiguous_format if first else torch.channels_last
        if changes == "before register":
            network.to(memory_format=other)
        compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=0)
        compressor.register(model)

        def train(network=network, model=model, other=other, changes=changes):
            for step in range(5):
                if step == changes:
                    network.to(memory_format=other)
                network.zero_grad()
                loss_of(model, step, dist.get_rank()).backward()

        if changes is None:
            train()
            gradients = [(name, one.grad) for name, one in network.named_parameters()]
            assert_equal_everywhere(gradients, f"seed {seed}")
            continue
        expected = "parameter convolution.weight: expected the memory format"
        with refused(expected):
            train()


def scenario_gradients_that_are_discarded_are_warned_of(directory):
    """Random programs step, discard what they got, or add more to it."""
    outcomes = set()
    for seed in range(30):
        draw = random.Random(seed)
        network = Network()
        model = DistributedDataParallel(network, gradient_as_bucket_view=draw.random() < 0.5)
        scales = draw.random() < 0.4
        compressor = dr.Compressor(
            CODEC, parameters=network.named_parameters(), dense_below=0,
            loss_scale=(lambda: 1.0) if scales else None,
        )  # fmt: skip
        compressor.register(model)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        discarded, said = discarding_program(
            draw,
            optimizer,
            lambda step, model=model: loss_of(model, step, dist.get_rank()).backward(),
        )
        assert len(said) == (discarded and not scales), f"seed {seed}: {said}"
        outcomes.add((discarded, scales))
    assert len(outcomes) == 4, outcomes


class Patches(torch.nn.Module):
    """Parameters whose strides mean little, because dimensions have one element."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.positions = torch.nn.Parameter(torch.randn(1, 7, 4, 4)[:, :3])
        self.mix = torch.nn.Conv2d(3, 16, 1)
        self.depthwise = torch.nn.Conv2d(16, 16, 3, groups=16)

    def forward(self, images):
        return self.depthwise(self.mix(images + self.positions))


def scenario_a_memory_format_that_changes_no_order_is_accepted(directory):
    for as_view, changes in itertools.product((True, False), (None, 0, 2)):
        network = Patches()
        model = DistributedDataParallel(network, gradient_as_bucket_view=as_view)
        compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=0)
        compressor.register(model)
        for step in range(3):
            if step == changes:
                for layer in (network.mix, network.depthwise):
                    layer.to(memory_format=torch.channels_last)
            network.zero_grad()
            model(batch(step, dist.get_rank())).pow(2).mean().backward()
            gradients = [(name, one.grad) for name, one in network.named_parameters()]
            assert_equal_everywhere(gradients, f"{as_view} {changes} {step}")


def scenario_gradients_that_a_closure_makes_are_not_discarded(directory):
    """LBFGS makes gradients several times per step, and uses all of them."""
    network = Network()
    model = DistributedDataParallel(network)
    compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=0)
    compressor.register(model)
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.01, max_iter=4)

    def closure():
        optimizer.zero_grad()
        return _backward(model, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*LBFGS needs complete gradients")
        for _ in range(3):
            optimizer.step(closure)
    assert compressor.adapter.progress() > 3


def scenario_a_step_that_is_compiled_as_a_whole(directory):
    """Dynamo does not trace the compressor, and the result is that of the same step, eagerly."""

    def trained(compiles):
        torch._dynamo.reset()
        network = Network()
        model = DistributedDataParallel(network)
        compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=0)
        compressor.register(model)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        dr.prepare(optimizer, compressor)

        def step(images):
            optimizer.zero_grad()
            model(images).pow(2).mean().backward()
            optimizer.step()

        run = torch.compile(step, backend="eager") if compiles else step
        for number in range(3):
            run(batch(number, dist.get_rank()))
        return list(network.named_parameters())

    for (name, one), (_, other) in zip(trained(True), trained(False)):
        assert torch.equal(one, other), name
    traced = {one.co_filename for one in torch._dynamo.utils.get_compilation_metrics()}
    assert any(path.endswith("ddp_changes.py") for path in traced), traced
    assert not any("deepreduce_hvd/" in path for path in traced), traced


def scenario_an_optimizer_whose_state_is_sharded(directory):
    """ZeroRedundancyOptimizer steps as the optimizer that it shards, with and without prepare."""
    for kind, prepares in itertools.product((torch.optim.SGD, torch.optim.AdamW), (False, True)):
        options = {"lr": 0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
        results = []
        for shards in (False, True):
            network = Network()
            model = DistributedDataParallel(network)
            compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=0)
            compressor.register(model)
            parameters = [*network.parameters()]
            if shards:
                optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=kind, **options)
                inner = optimizer.optim
            else:
                optimizer = inner = kind(parameters, **options)
            if prepares:
                dr.prepare(inner, compressor)

            def train(optimizer=optimizer, model=model):
                for step in range(4):
                    optimizer.zero_grad()
                    _backward(model, step)
                    optimizer.step()

            ours = [text for text in texts_of_warnings(train) if "deepreduce_hvd: " in text]
            assert len(ours) == (not prepares), ours  # that the optimizer has momentum
            results.append([one.detach().clone() for one in parameters])
            assert_equal_everywhere(network.named_parameters(), f"{kind.__name__} {prepares}")
        for plain, sharded in zip(*results):
            torch.testing.assert_close(sharded, plain, rtol=1e-6, atol=1e-7)
