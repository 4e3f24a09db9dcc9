"""Measure what the steps of a job do not show: collectives of several sizes, and other densities.

All ranks measure at the same time, between two steps.
"""

import time
from typing import NamedTuple

import numpy as np

from deepreduce_hvd.codec import decode
from deepreduce_hvd.container import HEADER
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule.tables import Table

#: Sizes of the timed collectives in bytes. The series ends with the first that takes longer than
#: _LONG seconds, or before those larger than all gradients together. What takes longer than
#: _VERY_LONG seconds is timed once.
_SIZES, _LONG, _VERY_LONG = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26), 0.2, 1.0
_REPEATS = 3
#: Horovod sends a gradient of at least this many bytes alone, without a copy.
_ALONE = 1 << 26
#: collectives of up to this many bytes are timed more often, because their times are noisy
_SMALL, _REPEATS_OF_SMALL = 1 << 14, 9
#: {collective that is timed: dtype}, by the names of a profile's tables
_COLLECTIVES = {"allgather": np.uint8, "allreduce": np.float32, "allreduce_fp16": np.float16}
_TOGETHER = 8  # small allgathers that are timed together
_VALUES = 1 << 16  # random values, which are repeated
_CONVERTED = 1 << 22  # elements that are converted to float16 to time it
#: elements that are encoded at these densities
_ENCODED, _DENSITIES = 1 << 20, (0.03, 0.1, 0.25, 0.5, 1.0)


def network_tables(figures, transport, gradients):
    """Return {name of a profile's table: table of seconds by bytes} of this network.

    Args:
        figures: the :class:`~deepreduce_hvd.planning.figures.Figures` of the scheduler.
        transport: transport over the ranks.
        gradients: list of the elements of each gradient.
    """
    tables = {}
    largest = 4 * sum(gradients)
    for kind, dtype in _COLLECTIVES.items():
        largest_gradient = np.dtype(dtype).itemsize * max(gradients)
        points: list[tuple[int, float]] = []
        for size in _SIZES:
            if len(points) > 1 and size > largest:
                break
            merged = transport.merges_sums and not _ALONE <= size <= largest_gradient
            seconds = _repeated(figures, transport, kind, size, 1, merged)
            is_last = bool(points) and seconds[0] > _LONG
            if seconds[0] <= _VERY_LONG:
                more = _REPEATS_OF_SMALL if size <= _SMALL else _REPEATS
                seconds = _repeated(figures, transport, kind, size, more, merged)
            points.append((size, float(np.median(seconds))))
            if is_last:
                break
        tables[kind] = Table(tuple(points))
    return tables


def gather_overlap(figures, transport):
    """Return the seconds of an allgather in which the next one can already be under way.

    A message that waits for another one of the same size takes less time than one alone.
    """
    array = np.resize(random_values(transport.rank), _SMALL // 4).view(np.uint8)
    seconds = []
    for count in (1, _TOGETHER):
        own = [_timed_together(figures, transport, array, count) for _ in range(_REPEATS_OF_SMALL)]
        seconds.append(float(np.median(figures.slowest(transport, own))))
    alone, together = seconds
    return min(max(alone - (together - alone) / (_TOGETHER - 1), 0.0), alone)


def _timed_together(figures, transport, array, count):
    """Return the seconds of several allgathers that start together."""
    transport.wait(transport.allreduce(np.zeros(1, np.float32), figures.name("start")))
    started = time.perf_counter()
    handles = [
        transport.allgather(array, figures.lasting_name(f"together.{number}"))
        for number in range(count)
    ]
    for handle in handles:
        while not transport.test(handle):
            transport.pause(started)
        transport.wait(handle)
    return time.perf_counter() - started


def random_values(rank):
    """Return (n,) float32 random values.

    Each rank has others: Horovod takes less time to sum float16 if all ranks have the same values.
    """
    return np.random.default_rng(rank).standard_normal(_VALUES, np.float32)


def _repeated(figures, transport, kind, size, repeats, merged):
    """Return a list of seconds of a collective of ``size`` bytes, each of the slowest rank."""
    dtype = np.dtype(_COLLECTIVES[kind])
    # float16 sums of zeros take less time than those of gradients
    array = np.resize(1e-3 * random_values(transport.rank), size // dtype.itemsize).astype(dtype)
    # a sum takes the place of its input, so each repetition gets a new copy
    own = [_timed(figures, transport, kind, array.copy(), merged) for _ in range(repeats)]
    return figures.slowest(transport, own)


def _timed(figures, transport, kind, array, merged):
    """Return the seconds of one collective, which is used as in a step.

    With ``merged``, a sum is that of two gradients, which Horovod merges.
    """
    name = figures.lasting_name(f"{kind}.{array.nbytes}")  # as gradients have
    # all ranks start together, or the wait for the last one would count
    transport.wait(transport.allreduce(np.zeros(1, np.float32), figures.name("start")))
    started = time.perf_counter()
    if kind == "allgather":
        handle = transport.allgather(array, name)
        while not transport.test(handle):  # exchanges wait like this, allreduces as below
            transport.pause(started)
        transport.wait(handle)
    else:
        # Horovod copies gradients that it merges, but not a single one
        parts = np.split(array, 2) if merged else [array]
        handles = [
            transport.allreduce_in_place(part, f"{name}.{number}")
            for number, part in enumerate(parts)
        ]
        for handle in handles:
            transport.wait(handle)
    return time.perf_counter() - started


def conversion_seconds(time_fp16, device):
    """Return {name in a profile: seconds per element} of converting to float16 and back.

    Args:
        time_fp16: function of a number of elements and a device that converts so many, and returns
            the seconds (to float16, back).
        device: the device.
    """
    pairs = [time_fp16(_CONVERTED, device) for _ in range(_REPEATS)]
    to_fp16, from_fp16 = np.median(pairs, axis=0) / _CONVERTED
    return {"to_fp16_seconds": float(to_fp16), "from_fp16_seconds": float(from_fp16)}


class CodecCurve(NamedTuple):
    """How payloads of a codec grow with the density.

    Attributes:
        growth: (density, bytes / bytes at the codec's own density) pairs with ascending densities,
            the first of which is the codec's own. Headers do not count.
        max_density: the density at which most of the energy (the sum of squares) is sent.
        seconds_per_kept_element: seconds of encoding for each element more that is sent.
    """

    growth: tuple[tuple[float, float], ...]
    max_density: float
    seconds_per_kept_element: float


def curve_of_policies(policies):
    """Return the :class:`CodecCurve` of the one codec with a ratio that selects elements, or None.

    Args:
        policies: those of the parameters that a profile has. Without "auto", a job may have several
            codecs, or one without a ratio.
    """
    codecs = {one.codec for one in policies if one.codec and one.selects}
    if len(codecs) != 1 or layout.ratio_of(next(iter(codecs))) is None:
        return None
    return curve_of(*codecs)


def curve_of(codec):
    """Return the :class:`CodecCurve` of a codec whose sparsifier has a ratio.

    The host encodes normal random values, because gradients with a residual are nearly normal. With
    few bits per value, more elements can carry less: one bit says the sign, and all elements that
    are sent get the same magnitude.
    """
    ratio, sparsifier = layout.ratio_of(codec), codec.sparsifier
    assert ratio is not None
    gradient = np.random.default_rng(0).standard_normal(_ENCODED, np.float32)
    densities = [ratio, *(density for density in _DENSITIES if density > 1.5 * ratio)]
    sizes, seconds, lost = [], [], []
    for density in densities:
        denser = codec.with_stages(sparsifier.with_ratio(density))
        spent: list[float] = []
        while len(spent) < _REPEATS and sum(spent) < _LONG:  # a custom stage may be slow
            started = time.perf_counter()
            payload = denser.encode(gradient, step=sparsifier.schedule_steps)
            spent.append(time.perf_counter() - started)
        sizes.append(payload.size - HEADER.size)
        seconds.append(float(np.median(spent)))
        lost.append(float(np.square(gradient - decode(payload)).sum()))
    growth = np.maximum.accumulate(sizes) / sizes[0]
    slope = 0.0
    if len(densities) > 1:
        kept = _ENCODED * (np.array(densities) - ratio)
        slope = max(float(kept @ (np.array(seconds) - seconds[0]) / (kept @ kept)), 0.0)
    return CodecCurve(
        tuple(zip(densities, growth.tolist())), densities[int(np.argmin(lost))], slope
    )
