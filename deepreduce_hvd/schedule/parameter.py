"""What a profile has of one parameter."""

import dataclasses
from typing import Any

import numpy as np

from deepreduce_hvd.communicators.auto import message_bytes
from deepreduce_hvd.schedule.fields import (
    expect,
    expect_keys,
    integer_of,
    number_of,
    pairs_of,
    text_of,
)

#: the densities of payloads that are estimated because none were measured
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
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
        points = tuple((float(density), float(size)) for density, size in self.payload_bytes)
        object.__setattr__(self, "payload_bytes", points)
        where = f"{self.name} payload_bytes"
        densities, sizes = [point[0] for point in points], [point[1] for point in points]
        for density in densities:
            expect(0 < density <= 1, where, "a density in (0, 1]", density)
        expect(densities == sorted(set(densities)), where, "ascending densities", densities)
        good = sizes == sorted(sizes) and (not sizes or sizes[0] > 0)
        expect(good, where, "bytes above 0 that grow with the density", sizes)

    def payload(self, density: float) -> float:
        """Return the bytes of a payload, linear between the known densities.

        Args:
            density: the share of elements that the payload keeps, from 0 to 1.

        Returns:
            Bytes.
        """
        points = self.payload_points()
        return float(np.interp(density, *np.array(points).T))

    def payload_points(self) -> tuple[tuple[float, float], ...]:
        """Return the (density, bytes) pairs of :meth:`payload`, from density 0 to 1."""
        points = self.payload_bytes or tuple(
            (density, message_bytes(density * self.elements, self.elements, DEFAULT_VALUE_BITS))
            for density in DENSITIES
        )
        empty = message_bytes(0, self.elements, 0)
        if points[-1][0] < 1:  # extrapolate with the bytes per element of the last point, capped
            dense = empty + 4.0 * self.elements
            last_density, last = points[-1]
            points = (*points, (1.0, max(last, min(dense, last / last_density))))
        return ((0.0, min(empty, points[0][1])), *points)


def parameter_of(row: Any) -> Parameter:
    expect_keys(row, "parameter", tuple(field.name for field in dataclasses.fields(Parameter)))
    name = text_of(row, "name", "parameter")
    return Parameter(
        name,
        integer_of(row, "elements", name, 1),
        number_of(row, "ready_seconds", name),
        number_of(row, "encode_seconds", name),
        number_of(row, "decode_seconds", name),
        pairs_of(row, "payload_bytes", name),
    )
