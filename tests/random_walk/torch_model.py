"""Parameters of a random program, and the gradients of all its ranks.

Every rank knows all of them.
"""

import zlib

import torch


def make_parameter(parameter):
    """Return the torch parameter, which is equal on all ranks."""
    values = torch.randn(parameter.shape, generator=_generator(parameter.name))
    values = values.to(parameter.dtype)
    if parameter.kind == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    elif parameter.kind == "transposed":
        values = values.t().contiguous().t()
    return torch.nn.Parameter(values, requires_grad=not parameter.frozen)


def dense(gradient):
    """Return a gradient as a contiguous (d,) tensor, in the order of elements."""
    gradient = gradient.detach()
    return (gradient.to_dense() if gradient.is_sparse else gradient).contiguous().view(-1)


def bits(tensor):
    """Return the numbers of a tensor as bytes, in the order of elements."""
    return dense(tensor).view(torch.uint8).numpy().tobytes()


def _generator(*what):
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))


class Gradients:
    """The gradients that the backward passes of a program compute.

    Args:
        program: a :class:`~torch_program.Program`.
    """

    def __init__(self, program):
        self.program = program

    def uses(self, parameter, number, turn, rank):
        """Return whether a rank uses a parameter in backward pass ``turn`` of step ``number``."""
        step = self.program.steps[number]
        trains = not parameter.frozen and parameter.name not in step.frozen
        return trains and rank not in step.unused.get((parameter.name, turn), ())

    def terms(self, parameter, weight, number, turn, rank):
        """Yield the terms of the loss, whose gradients are those of :meth:`of_pass`."""
        for rows, factors in self._factors(parameter, number, turn, rank):
            used = weight
            if rows is not None:
                used = torch.nn.functional.embedding(rows, weight, sparse=True)
            yield (used * factors).sum().double()

    def of_pass(self, parameter, number, turn, rank):
        """Return the dense gradient of one pass, in the parameter's shape."""
        parts = []
        for rows, factors in self._factors(parameter, number, turn, rank):
            if rows is not None:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                factors = zeros.index_add_(0, rows, factors)
            parts.append(factors)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _factors(self, parameter, number, turn, rank):
        """Return [(rows of an embedding or None, factors)]; a tied parameter has two entries."""
        uses = range(2 if parameter.tied else 1)
        return [self._factor(parameter, number, turn, rank, use) for use in uses]

    def _factor(self, parameter, number, turn, rank, use):
        step = self.program.steps[number]
        whose = 0 if parameter.style == "common" else rank
        generator = _generator(parameter.name, number, turn, whose, use)
        rows, shape = None, parameter.shape
        if parameter.kind == "embedding":
            rows = torch.randint(shape[0], (6,), generator=generator)
            shape = (6, shape[1])
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if rows is not None:
            # rows may be equal, so sums must be exact in any order and have no -0.0
            values = (values * 8).round() / 8 + 0.0
        elif parameter.style == "heavy":
            values = values**3
        elif parameter.style == "few":
            values = values * (torch.rand(shape, generator=generator) < 0.05)
        elif parameter.style == "ties":
            values = (2 * values).round()
        elif parameter.style == "zero":
            values = torch.zeros(shape, dtype=torch.float64)
        factors = values.mul(step.scale * parameter.magnitude).to(parameter.dtype)
        if step.poison is not None and turn == 0 and use == 0 and factors.numel():
            name, ranks, value = step.poison
            if name == parameter.name and rank in ranks:
                factors.view(-1)[number % factors.numel()] = value
        return rows, factors
