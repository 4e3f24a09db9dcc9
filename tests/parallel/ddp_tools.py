"""What the workers for PyTorch's DDP share: models, the oracle, and what all ranks must agree
on.
"""

import copy
import datetime
import faulthandler
import sys
import traceback
import types
import warnings
import zlib

import numpy as np
import scenario_runner
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.torch.ops import DTYPES

CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4))
SMALL_BUCKETS = {"bucket_cap_mb": 0.01}


def run_all(namespace, directory):
    """Run the scenarios of a module, as under Horovod."""
    world = types.SimpleNamespace(size=dist.get_world_size, rank=dist.get_rank)
    scenario_runner.run_all(namespace, directory, world, dist.barrier)


class Network(torch.nn.Module):
    """A small network with a branch that a batch may leave out, and a convolution."""

    def __init__(self, dtype=torch.float32, channels_last=False):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.first = torch.nn.Linear(8 * 4, 60)
        self.branch = torch.nn.Linear(60, 60)
        self.last = torch.nn.Linear(60, 3)
        self.to(dtype)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, images, branch=True):
        hidden = self.first(self.convolution(images).tanh().flatten(1)).tanh()
        return self.last(self.branch(hidden).tanh() if branch else hidden)


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 3, 4, 4, generator=generator).to(dtype)


def warnings_of_two_steps(network, model, optimizers):
    """Train for two steps, and return the warnings. ``optimizers`` returns those of a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            network.zero_grad()
            loss_of(model, step, dist.get_rank()).backward()
            for optimizer in optimizers():
                optimizer.step()
    return caught


def discarding_program(draw, optimizer, backward, steps=5):
    """Run a random program that steps, discards what it got, or adds more to it.

    Args:
        draw: random.Random.
        optimizer: optimizer of all parameters.
        backward: function of a step that makes gradients.
        steps: number of backward passes.

    Returns:
        Whether it has discarded a gradient after a step, and the warnings about that.
    """
    last, stepped, discarded = "step", False, False

    def run():
        nonlocal last, stepped, discarded
        for step in range(steps):
            # DDP gives the gradients other memory after its first backward pass
            now = draw.choice(["step", "step", "discard", "add"]) if step else "step"
            backward(step)
            discarded = discarded or (last == "discard" and stepped)
            if now == "step":
                optimizer.step()
                stepped = True
            if now != "add":
                optimizer.zero_grad()
            last = now

    texts = scenario_runner.texts_of_warnings(run)
    return discarded, [text for text in texts if "before a step of" in text]


def loss_of(network, step, rank, branch=True):
    dtype = next(network.parameters()).dtype
    return network(batch(step, rank, dtype), branch).pow(2).mean()


def distributed(network, codec=None, memory=None, ddp=None, **options):
    """Return (DDP model, compressor) for ``network``; ``ddp`` are options of DDP."""
    model = DistributedDataParallel(network, **(ddp or {}))
    settings = {"dense_below": 200, **options}
    compressor = dr.Compressor(
        codec or dr.Codec(dr.TopK(0.05)), memory, parameters=network.named_parameters(), **settings
    )
    compressor.register(model)
    return model, compressor


def assert_equal_everywhere(tensors, what):
    """Check that (name, tensor) pairs are bit-identical on all ranks."""
    own = torch.cat([tensor.detach().double().reshape(-1) for _, tensor in tensors])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    for rank, other in enumerate(gathered):
        assert torch.equal(other, gathered[0]), f"{what}: rank {rank} differs from rank 0"


def gradients_of(network, backward, old=None):
    """Return {name: gradient or None} that ``backward(copy)`` makes on a copy of the network.

    Args:
        network: the network.
        backward: function of a copy.
        old: {name: gradient} before the backward pass; None for none.
    """
    other = copy.deepcopy(network)
    for name, parameter in other.named_parameters():
        kept = (old or {}).get(name)
        parameter.grad = None if kept is None else kept.clone()
    backward(other)
    return {name: parameter.grad for name, parameter in other.named_parameters()}


def sums_densely(communicator):
    """Return whether a communicator uses torch.distributed's own sums."""
    return isinstance(communicator, (dr.CLTK, dr.SharedRandomK, dr.Hierarchical))


class _RecordingMember(BucketMember):
    """A bucket member that keeps its payload."""

    payload = None

    def encode(self, bucket):
        self.payload = super().encode(bucket)
        return self.payload


class Oracle:
    """What all ranks do with their gradients, simulated in this process with the NumPy codec.

    Args:
        compressor: this rank's compressor, for its settings.
        network: the network before the first step.
    """

    #: whether parameters that no rank uses are left out of sums that are encoded
    leaves_out = True

    def __init__(self, compressor, network):
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self._settings, self._layout = compressor, compressor.adapter.layout
        self._parameters = self._parameters_of(network)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self.state = [
            {
                name: [
                    np.zeros(parameter.numel(), dtype=np.float32)
                    for _ in self._layout.policies[name].memory.state
                ]
                for name, parameter in self._parameters.items()
            }
            for _ in range(self.size)
        ]
        self.step = 0
        self.payloads = {}
        self._buckets = []
        self._watch(compressor)

    def _parameters_of(self, network):
        """Return {name: tensor of the shape and dtype of what this rank sends}."""
        return dict(network.named_parameters())

    def _watch(self, compressor):
        """Note the names of the parameters of each bucket."""
        average = compressor.adapter.average

        def watched(bucket):
            self._buckets.append([self._names[id(one)] for one in bucket.parameters()])
            return average(bucket)

        compressor.adapter.average = watched

    def mean(self, gradients):
        """Return {name: mean} of the gradients {name: tensor or None} of all ranks.

        The buckets are those that DDP has just used.
        """
        result = {}
        for names in self._buckets:
            if self.size == 1:  # nothing is sent
                for name in names:
                    own, zeros = gradients[0][name], torch.zeros_like(self._parameters[name])
                    result[name] = zeros if own is None else own
                    self.payloads[name] = None
                continue
            ways = {name: (self._layout.policies[name], self._communicator(name)) for name in names}
            for policy, communicator in dict.fromkeys(ways.values()):
                alike = [name for name in names if ways[name] == (policy, communicator)]
                if self.leaves_out and not policy.dense and not communicator.sends_payloads:
                    unused = [name for name in alike if all(own[name] is None for own in gradients)]
                    result.update(
                        (name, torch.zeros_like(self._parameters[name])) for name in unused
                    )
                    self.payloads.update(dict.fromkeys(unused))
                    alike = [name for name in alike if name not in unused]
                    if not alike:
                        continue
                if not policy.dense:
                    result.update(self._exchange(policy, communicator, alike, gradients))
                    continue
                for name in alike:
                    result[name] = self._summed(policy.way, name, [own[name] for own in gradients])
        self._buckets.clear()
        self.step += 1
        return result

    def _summed(self, way, name, parts):
        """Return the mean of uncompressed gradients, in the precision in which they are sent."""
        zeros = torch.zeros_like(self._parameters[name])
        wide = torch.promote_types(zeros.dtype, torch.float32)
        dtype = torch.float16 if way == "fp16" else wide
        sent = [
            self._rounded(name, rank, part) if way == "fp16" and part is not None else part
            for rank, part in enumerate(parts)
        ]
        total = sum((zeros if part is None else part).to(dtype) for part in sent)
        return (total.to(wide) / self.size).to(zeros.dtype)

    def _rounded(self, name, rank, part):
        """Return what a rank sends as float16; its residual keeps the rest."""
        if not self.state[rank][name]:
            return part.half()
        (residual,) = self.state[rank][name]
        kept = torch.from_numpy(residual).view(part.shape)
        total = part.to(torch.promote_types(part.dtype, torch.float32)) + kept
        if not total.isfinite().all():
            return part.half()
        limit = 65504 / (self.size * (1 + self.size / 2048))
        sent = total.clamp(-limit, limit).half()
        kept.copy_(total - sent)
        return sent

    def _communicator(self, name):
        return self._layout.communicators.get(name, self._settings.communicator)

    def _exchange(self, policy, communicator, names, gradients):
        settings = self._settings
        buckets = []
        for rank, own in enumerate(gradients):
            members = [self._member(name, rank, own[name]) for name in names]
            if rank == self.rank:
                recorded = members
            buckets.append(
                Bucket(policy.codec, policy.memory, members, settings.seed, self.step, rank)
            )
        outcomes = Simulator(self.size).run(communicator, buckets)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        self.payloads.update((member.name, member.payload) for member in recorded)
        means = {}
        for number, name in enumerate(names):
            parameter = self._parameters[name]
            mean = np.zeros(parameter.numel(), dtype=np.float32)
            outcomes[0].add_to(number, mean, 1 / self.size)
            means[name] = torch.from_numpy(mean).view(parameter.shape).to(parameter.dtype)
        return means

    def _member(self, name, rank, gradient):
        parameter = self._parameters[name]
        flat = torch.zeros(parameter.shape, dtype=parameter.dtype) if gradient is None else gradient
        flat = flat.contiguous().view(-1)
        bits = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
        return _RecordingMember(
            name, bits.numpy(), self.state[rank][name], zlib.crc32(name.encode()),
            DTYPES[flat.dtype], held=gradient is None,
        )  # fmt: skip

    def check(self, compressor, network, gradients, what, old=None):
        """Check this rank's averages, memory and payloads after a step, bit for bit.

        Dense sums depend, from three ranks on, on the order of additions. If the check of any rank
        fails, all ranks raise, so that none waits for the others.

        Args:
            compressor, network: those of this rank.
            gradients: {name: gradient or None if a rank did not make it} of each rank.
            what: the step, for messages.
            old: {name: gradient of this rank from before}, of parameters that it had kept.
        """
        try:
            self.check_here(compressor, network, gradients, what, old)
            found = None
        except Exception:
            found = traceback.format_exc()
        everywhere = [None] * self.size
        dist.all_gather_object(everywhere, found)
        if any(everywhere):
            raise AssertionError(next(filter(None, everywhere)))

    def check_here(self, compressor, network, gradients, what, old=None):
        """Do the same without a collective."""
        expected = self.mean(gradients)
        for name, gradient in (old or {}).items():
            if all(own[name] is None for own in gradients):  # DDP leaves it as it was
                expected[name] = gradient
        kept = compressor.state_dict()["parameters"]
        for name, parameter in network.named_parameters():
            where = f"{what}, step {self.step - 1}, {name}"
            found = parameter.grad
            if found is None:
                assert all(own[name] is None for own in gradients), f"{where}: no gradient"
                continue
            policy = self._layout.policies[name]
            dense = policy.dense
            if self.size > 2 and (dense or sums_densely(self._communicator(name))):
                rounded = {}
                if policy.way == "fp16":  # sums are rounded to float16, and results to their dtype
                    rounded = {"rtol": max(2e-3, 2 * torch.finfo(found.dtype).eps), "atol": 1e-5}
                torch.testing.assert_close(found, expected[name], msg=where, **rounded)
                continue
            assert torch.equal(found, expected[name]), (
                f"{where}: {(found - expected[name]).abs().max()} apart"
            )
            if dense:
                continue
            state = self.state[self.rank][name]
            for kind, mine in zip(policy.memory.state, state):
                saved = kept[name]["memory"][kind].reshape(-1).numpy()
                np.testing.assert_array_equal(saved, mine, err_msg=f"{where}, {kind}")
            payload, slot = self.payloads[name], compressor.adapter.slots[name]
            if payload is not None:
                np.testing.assert_array_equal(slot.payload.numpy(), payload, err_msg=where)


def assert_refused(expected, function):
    """Check that a function raises InvalidArgumentError with a text."""
    try:
        function()
    except dr.InvalidArgumentError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"expected an error with {expected!r}")


def main(namespace):
    """Run the scenarios that the command line names: ``DIRECTORY [NAME ...]``."""
    faulthandler.enable()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    run_all(namespace, sys.argv[1])
    dist.destroy_process_group()
