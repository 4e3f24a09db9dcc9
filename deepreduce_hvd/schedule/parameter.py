"""What a profile has of one parameter."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np

from deepreduce_hvd.communicators.auto import index_bits, message_bytes
from deepreduce_hvd.schedule.fields import expect, expect_keys, pairs_of, set_fields, text_of

#: the smallest density of payloads that are estimated because none were measured
_LEAST_DENSITY = 0.001
#: the largest ratio of two neighbouring densities of :meth:`Parameter.payload_points`
_STEP = 1.06
#: the default codec: top 1 %, 1 bit per value
DEFAULT_DENSITY, DEFAULT_VALUE_BITS = 0.01, 1.0


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Measurements of one parameter.

    Attributes:
        name: the name of the parameter.
        elements: the number of its elements.
        ready_seconds: when backward has computed its gradient, without any encoding. Time 0 is the
            start of backward.
        encode_seconds: seconds in which one rank selects and encodes its gradient.
        decode_seconds: seconds in which one rank decodes the payload of one rank.
        payload_bytes: (density, bytes) pairs with ascending densities. If it is empty, payloads are
            estimated, with 1 bit per value and indices close to the information bound.
    """

    name: str
    elements: int
    ready_seconds: float
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    payload_bytes: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        text_of(vars(self), "name", "parameter")
        set_fields(
            self, self.name, ("ready_seconds", "encode_seconds", "decode_seconds"), {"elements": 1}
        )
        points = pairs_of(vars(self), "payload_bytes", self.name)
        object.__setattr__(self, "payload_bytes", points)
        where = f"{self.name} payload_bytes"
        densities, sizes = [point[0] for point in points], [point[1] for point in points]
        for density in densities:
            expect(0 < density <= 1, where, "a density in (0, 1]", density)
        expect(densities == sorted(set(densities)), where, "ascending densities", densities)
        good = sizes == sorted(sizes) and (not sizes or sizes[0] > 0)
        expect(good, where, "bytes above 0 that grow with the density", sizes)

    def payload(self, density: float) -> float:
        """Return the bytes of a payload, linear between :meth:`payload_points`.

        Args:
            density: the share of elements that the payload keeps, from 0 to 1.

        Returns:
            Bytes.
        """
        points = self.payload_points()
        return float(np.interp(density, *np.array(points).T))

    def payload_points(self) -> tuple[tuple[float, float], ...]:
        """Return the (density, bytes) pairs of :meth:`payload`, from density 0 to 1.

        Between two known densities, the bits per value are linear in the logarithm of the density,
        as the bits per index are. So bytes do not grow in proportion to the density.
        """
        d = self.elements
        points = self.payload_bytes or tuple(
            (density, message_bytes(density * d, d, DEFAULT_VALUE_BITS))
            for density in (_LEAST_DENSITY, 1.0)
        )
        empty = message_bytes(0, d, 0)
        if points[-1][0] < 1:  # extrapolate with the bytes per element of the last point, capped
            dense = empty + 4.0 * d
            last_density, last = points[-1]
            points = (*points, (1.0, max(last, min(dense, last / last_density))))
        found = [(0.0, min(empty, points[0][1])), points[0]]
        for (low, smaller), (high, larger) in itertools.pairwise(points):
            ends = _value_bits(smaller, low * d, d), _value_bits(larger, high * d, d)
            densities, shares, indices = _between(low, high)
            bits = indices + ends[0] + shares * (ends[1] - ends[0])
            sizes = np.clip(empty + densities * (d * bits / 8), smaller, larger)
            found += zip(densities.tolist(), np.maximum.accumulate(sizes).tolist())
            found.append((high, larger))
        return tuple(found)


@functools.lru_cache(maxsize=256)
def _between(low: float, high: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (densities between two, their logarithmic shares of the way, bits per index)."""
    count = math.ceil(math.log(high / low) / math.log(_STEP))
    shares = np.arange(1, count) / max(count, 1)
    densities = low * (high / low) ** shares
    return densities, shares, np.array([index_bits(density, 1.0) for density in densities.tolist()])


def _value_bits(size: float, count: float, d: float) -> float:
    """Return the bits per value of ``count`` of d elements in ``size`` bytes, besides indices."""
    return max(8 * (size - message_bytes(0, d, 0)) / count - index_bits(count, d), 0.0)


def parameter_of(row: Any) -> Parameter:
    expect_keys(row, "parameter", tuple(field.name for field in dataclasses.fields(Parameter)))
    return Parameter(**row)
