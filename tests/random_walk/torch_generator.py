"""Generate random programs for PyTorch.

:func:`make` uses the API as a user may. It leaves out what stock Horovod cannot do, as comments
say.
"""

import dataclasses
import random

import torch
from codecs_table import (
    INDEX_WITH_MEMORY as INDEX,
    MEMORIES,
    SPARSIFIERS,
    VALUE_WITH_MEMORY as VALUE,
)
from own_stages import OwnResidual, Three, WithoutPutBack
from torch_program import CompressorSettings, Parameter, Part, Program, Step, refusal

import deepreduce_hvd as dr

#: what one element of a gradient becomes in a step that overflows
_POISONS = (float("inf"), float("nan"), 6e4)
_STYLES = ("normal", "heavy", "few", "ties", "zero", "common")
_DTYPES = (torch.float32,) * 4 + (torch.float16, torch.bfloat16, torch.float64)
_SHAPES = ((), (1,), (0,), (3, 0), (7,), (64,), (20, 10), (33, 31), (5, 6, 7))
_CHECKPOINTS = ("save", "save", "load", "load_now", "load_list", "load_other_size", "restart")
_RANDOM = (dr.RandomK, dr.NoneSparsifier)


def make(seed, size, steps=None):
    """Return the program of a seed on ``size`` ranks.

    With ``steps``, it has at most this many steps, and begins like the longer program.
    """
    draw = random.Random(f"{seed} {size}")
    refuse = draw.random() < 0.06
    compressors = [_compressor(draw, size) for _ in range(draw.choice((1, 1, 2)))]
    by_hand = set()  # compressors that have a part by hand
    parts = []
    for place in range(max(len(compressors), draw.choice((1, 1, 2, 3)))):
        number = place % len(compressors)
        parts.append(_part(draw, f"s{seed}.{'abc'[place]}", number, compressors[number], by_hand))
    program = Program(seed, size, compressors, parts, [])
    if refuse:
        _spoil(draw, program)
    program = _refused_alone(program) if refusal(program) else program
    program.refused = refusal(program)
    # Memories are in units of one loss. Its scale only changes if all compressors follow it.
    follows = all(settings.loss_scale for settings in program.compressors)
    scale = draw.choice((1.0, 8.0, 1024.0))
    for number in range(draw.randint(4, 8)):
        if follows and draw.random() < 0.3:
            scale *= draw.choice((0.5, 2.0))
        program.steps.append(_step(draw, program, number, scale if follows else 1.0))
    program.steps = program.steps[:steps]
    program.steps[-1].look = True  # so that no error of a step is missed
    return program


def _refused_alone(program):
    """Return the part of a program that is refused, as a program.

    Ranks without this part would not be refused, and would wait.
    """
    for number, settings in enumerate(program.compressors):
        parts = [
            dataclasses.replace(part, compressor=0)
            for part in program.parts
            if part.compressor == number
        ]
        alone = Program(program.seed, program.size, [settings], parts, [])
        if refusal(alone):
            return alone
    return program


def _compressor(draw, size):
    across = (dr.Allgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.SplitAllgather())
    hierarchical = dr.Hierarchical(draw.choice(across), draw.choice((1, size, None)))
    communicator = draw.choice(
        (
            dr.Allgather(), dr.Allgather(), dr.Allgather(), dr.SplitAllgather(),
            dr.SplitAllgather(None), dr.SplitAllgather(4), dr.RecursiveDoubling(), dr.GTopK(),
            dr.GTopK("tree"), dr.CLTK(), dr.SharedRandomK(), dr.Auto(), hierarchical,
        )
    )  # fmt: skip
    sparsifiers = list(SPARSIFIERS.values())
    if isinstance(communicator, dr.SharedRandomK):
        sparsifiers = [one for one in sparsifiers if isinstance(one, _RANDOM)]
    elif dr.GTopK in (type(communicator), type(getattr(communicator, "across", None))):
        sparsifiers = [one for one in sparsifiers if not isinstance(one, dr.Threshold)]
    stages = sparsifiers, list(INDEX.values()), list(VALUE.values())
    codec, other = (dr.Codec(*(draw.choice(one) for one in stages)) for _ in range(2))
    memories = [*MEMORIES.values(), OwnResidual(), Three()]
    memory = dr.Residual() if draw.random() < 0.5 else draw.choice(memories)
    subsets = [(rank,) for rank in range(size)]
    if size > 2:
        subsets += [(first, last) for last in range(size) for first in range(last)]
    others, below = _others(draw, codec, other), draw.choice((0, 0, 1, 10, 100, 1024, None))
    if draw.random() < 0.2:
        communicator, codec, below = dr.Allgather(), None, draw.choice((None, None, 0, 100))
    partial = draw.random() < 0.15 and not isinstance(communicator, dr.Hierarchical)
    return CompressorSettings(
        codec,
        memory,
        communicator,
        bucket_bytes=draw.choice((0, 500, 4000, 1 << 26)),
        threads=draw.randrange(4),
        dense_below=below,
        seed=draw.randrange(1 << 40),
        loss_scale=draw.random() < 0.5,
        ranks=draw.choice(subsets) if partial else None,
        others=others,
    )


def _others(draw, codec, other):
    """Return {end of a name: codec, "dense" or "fp16"} for parameters that differ from ``codec``.

    Names end in the number of the parameter within its part.
    """
    ways = draw.choice(((), (), ("dense", "fp16"), (codec, other, other, "fp16")))
    return {digit: draw.choice(ways) for digit in "0123" if ways and draw.random() < 0.5}


def _parameter(draw, name):
    kind = draw.choice(("dense", "dense", "dense", "channels_last", "transposed"))
    if kind == "channels_last":
        shape = tuple(draw.randint(1, most) for most in (8, 6, 3, 3))
    elif kind == "transposed":
        shape = draw.randint(1, 40), draw.randint(1, 30)
    else:
        shape = draw.choice((*_SHAPES, (draw.randint(1, 2000),)))
    return Parameter(
        name,
        shape,
        draw.choice(_DTYPES),
        kind,
        tied=draw.random() < 0.15,
        twice=draw.random() < 0.05,
        style=draw.choice(_STYLES),
        magnitude=draw.choice((1e-3, 1.0, 1.0, 30.0)),
    )


def _embedding(draw, name):
    shape = draw.choice(((50, 4), (200, 3), (10, 2)))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    return Parameter(name, shape, dtype, "embedding", tied=draw.random() < 0.15)


def _part(draw, name, number, settings, by_hand):
    parameters = [_parameter(draw, f"{name}{place}") for place in range(draw.randint(1, 5))]
    for parameter in parameters[1:]:
        parameter.frozen = draw.random() < 0.1
    hand = number not in by_hand and draw.random() < 0.15
    if hand:
        by_hand.add(number)
    optimizer = draw.choice(("sgd", "momentum", "adam"))
    groups = None
    # Horovod broadcasts the groups from rank 0 of all ranks.
    if not hand and (settings.ranks is None or 0 in settings.ranks) and draw.random() < 0.2:
        groups = draw.choice((1, 2, "lists"))
    if not hand and groups is None and draw.random() < 0.25:
        optimizer = "sgd"  # the other optimizers do not support sparse gradients
        parameters += [_embedding(draw, f"{name}e{place}") for place in range(draw.randint(1, 2))]
    op = draw.choice(("Average", "Average", "Sum"))
    # Horovod pre-divides only averages, and nothing that is grouped.
    divides = op == "Average" and groups is None and not hand
    return Part(
        name,
        parameters,
        number,
        optimizer,
        hand,
        passes=draw.choice((1, 1, 2, 3)),
        op=op,
        predivide=draw.choice((1.0, 1.0, 2.0, 3.0)) if divides else 1.0,
        groups=groups,
        sparse_as_dense=draw.random() < 0.7,
        clip=draw.choice((None, None, 0.1)),
        zero=draw.choice(("none", "zeros")),
        plain_step=draw.random() < 0.3 and not hand,
    )


def _spoil(draw, program):
    """Change a program so that it may be refused."""
    part = draw.choice(program.parts)
    settings = program.compressors[part.compressor]
    way = draw.choice(("gtopk", "shared", "memory", "hierarchical", "groups", "unknown"))
    settings.others = {}
    if way == "gtopk":
        settings.communicator, settings.codec = dr.GTopK(), dr.Codec(dr.Threshold(0.1))
    elif way == "shared":
        settings.communicator, settings.codec = dr.SharedRandomK(), dr.Codec(dr.TopK(0.1))
    elif way == "memory":
        settings.memory = WithoutPutBack()
    elif way == "hierarchical":
        settings.communicator = dr.Hierarchical(dr.Allgather())
        settings.ranks = (program.size - 1,)
        for other in program.parts_of(part.compressor):
            other.groups = None
    elif way == "groups" and not part.by_hand and (settings.ranks is None or 0 in settings.ranks):
        part.groups, part.predivide, part.optimizer, part.passes = 1, 1.0, "sgd", 1
        part.parameters.append(_embedding(draw, f"{part.name}e9"))
    elif way == "unknown" and not part.by_hand and len(part.parameters) > 1:
        part.unknown = True


def _step(draw, program, number, scale):
    trained = [(part, one) for part in program.parts for one in part.parameters if not one.frozen]
    quiet = program.refused is not None  # all ranks refuse it in the first step
    frozen = _frozen(draw, program, trained) if number and not quiet else frozenset()
    unused = {} if quiet else _unused(draw, program, trained)
    events = _events(draw, program, quiet)
    poison, direct = None, ()
    if not quiet and draw.random() < 0.2:
        part, one = draw.choice(trained)
        ranks = program.ranks_of(part)
        if draw.random() < 0.7:
            ranks = (draw.choice(ranks),)
        poison = one.name, ranks, draw.choice(_POISONS)
    elif not quiet and draw.random() < 0.15:
        # Gradients without an optimizer form one step, whoever reduces them, until the next
        # backward pass. So they are not mixed with parts that are reduced by hand.
        hands = {part.compressor for part in program.parts if part.by_hand}
        names = [
            one.name for part, one in trained
            if part.compressor not in hands and one.kind != "embedding" and one.name not in frozen
        ]  # fmt: skip
        direct = tuple(draw.sample(names, min(len(names), 2)))
    look = draw.random() < 0.6
    checkpoint = draw.choice(_CHECKPOINTS) if draw.random() < 0.3 else None
    return Step(scale, frozen, unused, events, poison, direct, look, checkpoint)


def _frozen(draw, program, trained):
    """Return what is frozen in this step. Most of it stays frozen for some steps."""
    before = program.steps[-1].frozen
    rates = {one.name: 0.6 if one.name in before else 0.06 for _, one in trained}
    return frozenset(name for name, rate in rates.items() if draw.random() < rate)


def _unused(draw, program, trained):
    unused = {}
    for part, one in trained:
        ranks = program.ranks_of(part)
        # All ranks must use the same parameters with groups, and where Horovod gathers sparse
        # gradients itself.
        gathers = one.kind == "embedding" and not part.sparse_as_dense
        alike = part.groups is not None or gathers
        for turn in range(part.passes):
            if draw.random() < 0.75:
                continue
            chosen = ranks
            if not alike and draw.random() < 0.6:
                chosen = tuple(rank for rank in ranks if draw.random() < 0.5)
            if chosen:
                unused[one.name, turn] = chosen
    return unused


def _events(draw, program, quiet):
    """Return backward passes and ends of the parts' steps, in random order.

    Some passes are of several parts.
    """
    queues = {}
    for part in program.parts:
        fewer = not quiet and draw.random() < 0.15  # fewer passes than planned
        passes = draw.randint(1, part.passes) if fewer else part.passes
        queues[part.name] = [*range(passes), "finish"]
    events = []
    while any(queues.values()):
        name = draw.choice([name for name, queue in queues.items() if queue])
        event = queues[name].pop(0)
        kind, last = events[-1] if events else ("", ())
        if event == "finish":
            events.append(("finish", name))
        elif kind == "backward" and name not in dict(last) and draw.random() < 0.6:
            events[-1] = "backward", (*last, (name, event))
        else:
            events.append(("backward", ((name, event),)))
    return events
