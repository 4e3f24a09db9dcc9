"""A user's actions on one rank: creating and using parameters, compressors and optimizers."""

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from torch_model import make_parameter

import deepreduce_hvd as dr


def process_set_of(ranks, known):
    """Return the process set of these ranks, which is kept in ``known``.

    Horovod lets a set be added only once.
    """
    if ranks is None:
        return hvd.global_process_set
    if ranks not in known:
        present = process_sets._basics._get_process_set_ids_and_ranks()
        numbers = [number for number, members in present.items() if tuple(members) == ranks]
        if numbers:
            known[ranks] = hvd.ProcessSet(list(ranks))
            known[ranks].process_set_id = numbers[0]
        else:
            known[ranks] = hvd.add_process_set(list(ranks))
    return known[ranks]


def make_optimizer(part, weights):
    """Return PyTorch's optimizer of a part, over ``weights`` by name."""
    parameters = [weights[one.name] for one in part.parameters]
    if part.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)
    momentum = 0.9 if part.optimizer == "momentum" else 0
    # A power of two: PyTorch rounds a step by a sparse gradient differently from one by a dense
    # gradient, and Horovod gives dense zeros to ranks that have not used an embedding.
    return torch.optim.SGD(parameters, lr=2**-7, momentum=momentum)


class User:
    """One rank's side of a program.

    Args:
        program: a :class:`~torch_program.Program`.
        known: {ranks: process set}, which outlives programs.
        made: a set to which compressors are added.

    Attributes:
        parts: {name: Part} that this rank trains.
        weights: {name: parameter} of these parts.
        optimizers: {name of a part: optimizer}.
        compressors: {number: compressor}.
        sets: the process sets of all compressors.
        scale: the current loss scale.
    """

    def __init__(self, program, known, made):
        self.program = program
        # every rank creates all process sets
        self.sets = [process_set_of(settings.ranks, known) for settings in program.compressors]
        own = [part for part in program.parts if hvd.rank() in program.ranks_of(part)]
        self.parts = {part.name: part for part in own}
        self.weights = {one.name: make_parameter(one) for part in own for one in part.parameters}
        self.compressors = {}
        self.optimizers = {}
        self.scale = 1.0
        self._made = made

    def make_compressor(self, number):
        settings = self.program.compressors[number]
        parts = self.program.parts_of(number)
        given = [one for part in parts for one in part.parameters[part.unknown :]]
        ends = {one.name[-1] for one in given}
        others = {f"*{end}": codec for end, codec in settings.others.items() if end in ends}
        self.compressors[number] = dr.Compressor(
            {**others, "*": settings.codec} if others else settings.codec,
            settings.memory,
            settings.communicator,
            [(same.name, self.weights[one.name]) for one in given for same in one.under_all_names],
            bucket_bytes=settings.bucket_bytes,
            threads=(settings.threads + hvd.rank()) % 4,
            dense_below=settings.dense_below,
            seed=settings.seed,
            process_set=None if settings.ranks is None else self.sets[number],
            loss_scale=(lambda: self.scale) if settings.loss_scale else None,
        )
        self._made.add(self.compressors[number])

    def make_optimizer(self, part, state=None):
        optimizer = make_optimizer(part, self.weights)
        if not part.by_hand:
            groups = part.groups
            if groups == "lists":
                trained = [self.weights[one.name] for one in part.parameters if not one.frozen]
                groups = [trained[::2], trained[1::2]]
            optimizer = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=[(one.name, self.weights[one.name]) for one in part.parameters],
                compression=self.compressors[part.compressor],
                backward_passes_per_step=part.passes,
                op=getattr(hvd, part.op),
                gradient_predivide_factor=part.predivide,
                groups=groups,
                sparse_as_dense=part.sparse_as_dense,
                process_set=self.sets[part.compressor],
            )
        if state is not None:
            optimizer.load_state_dict(state)
        self.optimizers[part.name] = optimizer

    def begin(self, step):
        """Begin a step: freeze its parameters, and set gradients to None or zeros."""
        self.scale = step.scale
        for part in self.parts.values():
            for one in part.parameters:
                weight = self.weights[one.name]
                weight.requires_grad_(not one.frozen and one.name not in step.frozen)
                if part.zero == "none" or weight.grad is None:
                    weight.grad = None
                else:
                    weight.grad.zero_()

    def reduce(self, part, number, parameters):
        """Reduce the gradients of some ``parameters`` of a part.

        With ``plain_step``, this also steps the optimizer.
        """
        optimizer = self.optimizers[part.name]
        if part.by_hand:
            self._reduce_by_hand(part, number, parameters)
        elif part.plain_step:
            optimizer.step()
        else:
            optimizer.synchronize()

    def _reduce_by_hand(self, part, number, parameters):
        weights = [self.weights[one.name] for one in parameters]
        grads = [weight.grad for weight in weights]
        label = f"{part.name}.{number}"
        if number % 2 and grads:
            options = self._options(part)
            reduced = hvd.grouped_allreduce(grads, name=label, **options)
        else:
            reduced = [
                self.allreduce(part, grad, f"{label}.{place}") for place, grad in enumerate(grads)
            ]
        for weight, grad in zip(weights, reduced):
            weight.grad = grad

    def allreduce(self, part, grad, label):
        """Return the result of ``hvd.allreduce(grad, compression=)``."""
        return hvd.allreduce(grad, name=label, **self._options(part))

    def _options(self, part):
        return {
            "op": getattr(hvd, part.op),
            "compression": self.compressors[part.compressor],
            "process_set": self.sets[part.compressor],
        }

    def step(self, part):
        """Step an optimizer whose gradients are already reduced."""
        # sparse gradients are not clipped
        if part.clip is not None and not any(one.kind == "embedding" for one in part.parameters):
            weights = [self.weights[one.name] for one in part.parameters]
            torch.nn.utils.clip_grad_norm_(weights, part.clip)
        if part.by_hand:
            self.optimizers[part.name].step()
        else:
            with self.optimizers[part.name].skip_synchronize():
                self.optimizers[part.name].step()

    def restart(self, number, state):
        """Create a compressor anew, with its parameters and optimizers, as a new process would."""
        parts = self.program.parts_of(number)
        saved = {part.name: self.optimizers.pop(part.name).state_dict() for part in parts}
        for part in parts:
            for one in part.parameters:
                values = self.weights[one.name].detach().clone()
                self.weights[one.name] = torch.nn.Parameter(values, requires_grad=not one.frozen)
        self.make_compressor(number)
        self.compressors[number].load_state_dict(state)
        for part in parts:
            self.make_optimizer(part, saved[part.name])
