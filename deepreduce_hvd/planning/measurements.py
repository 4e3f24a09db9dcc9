"""Measure what the steps of a job do not show: collectives of several sizes, and other densities.

All ranks measure at the same time, between two steps.
"""

import time

import numpy as np

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule.links import Table

#: Sizes of the timed collectives in bytes. The series ends with the first that takes longer than
#: _LONG seconds, which is timed once, or before those larger than all gradients together.
_SIZES, _LONG = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26), 0.2
_REPEATS = 3
#: collectives of up to this many bytes are timed more often, because their times are noisy
_SMALL, _REPEATS_OF_SMALL = 1 << 14, 9
#: {collective that is timed: dtype}, by the names of a profile's tables
_COLLECTIVES = {"allgather": np.uint8, "allreduce": np.float32, "allreduce_fp16": np.float16}
_VALUES = 1 << 16  # random values, which are repeated
_CONVERTED = 1 << 22  # elements that are converted to float16 to time it
#: elements that are encoded to time it, and a density at which it takes longer
_ENCODED, _DENSER = 1 << 20, 0.25


def network_tables(figures, transport, largest):
    """Return {name of a profile's table: table of seconds by bytes} of this network.

    Args:
        figures: the :class:`~deepreduce_hvd.planning.figures.Figures` of the scheduler.
        transport: transport over the ranks.
        largest: bytes of all gradients together.
    """
    tables = {}
    for kind in _COLLECTIVES:
        points: list[tuple[int, float]] = []
        for size in _SIZES:
            if len(points) > 1 and size > largest:
                break
            seconds = _repeated(figures, transport, kind, size, 1)
            is_last = bool(points) and seconds[0] > _LONG
            if not is_last:
                more = _REPEATS_OF_SMALL if size <= _SMALL else _REPEATS
                seconds = _repeated(figures, transport, kind, size, more)
            points.append((size, float(np.median(seconds))))
            if is_last:
                break
        tables[kind] = Table(tuple(points))
    return tables


def _random_values():
    return np.random.default_rng(0).standard_normal(_VALUES, np.float32)


def _repeated(figures, transport, kind, size, repeats):
    """Return (repeats,) float64 seconds of a collective of ``size`` bytes.

    Each is that of the slowest rank.
    """
    dtype = np.dtype(_COLLECTIVES[kind])
    # float16 sums of zeros take less time than those of gradients
    array = np.resize(1e-3 * _random_values(), size // dtype.itemsize).astype(dtype)
    # a sum takes the place of its input, so each repetition gets a new copy
    own = [_timed(figures, transport, kind, array.copy()) for _ in range(repeats)]
    everywhere = figures.gathered(transport, np.array(own, np.float64).tobytes())
    return np.stack([np.frombuffer(part, np.float64) for part in everywhere]).max(0)


def _timed(figures, transport, kind, array):
    """Return the seconds of one collective, which is used as in a step."""
    name = figures.lasting_name(f"{kind}.{array.nbytes}")  # as gradients have
    # all ranks start together, or the wait for the last one would count
    transport.wait(transport.allreduce(np.zeros(1, np.float32), figures.name("start")))
    started = time.perf_counter()
    if kind == "allgather":
        handle = transport.allgather(array, name)
        while not transport.test(handle):  # exchanges wait like this, allreduces as below
            transport.pause()
        transport.wait(handle)
    else:
        # Horovod copies gradients that it merges, but not a single one
        parts = np.split(array, 2) if transport.merges_sums else [array]
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


def seconds_of_density(codec):
    """Return {name in a profile: seconds} of encoding, for each element more that is sent.

    Args:
        codec: a codec whose sparsifier has a ratio; it encodes on the host.
    """
    ratio, sparsifier = layout.ratio_of(codec), codec.sparsifier
    if ratio is None or ratio >= _DENSER:
        return {}
    denser = Codec(sparsifier.with_ratio(_DENSER), codec.index, codec.value)
    gradient = np.resize(_random_values(), _ENCODED)
    medians = []
    for one in (codec, denser):
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            one.encode(gradient, step=sparsifier.schedule_steps)
            seconds.append(time.perf_counter() - started)
        medians.append(np.median(seconds))
    more = (medians[1] - medians[0]) / ((_DENSER - ratio) * _ENCODED)
    return {"seconds_per_kept_element": max(float(more), 0.0)}
