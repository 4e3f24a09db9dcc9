"""The slowest of several ranks: the largest of each measured number."""

import dataclasses
from collections.abc import Sequence

from deepreduce_hvd.schedule.fields import expect
from deepreduce_hvd.schedule.parameter import Parameter
from deepreduce_hvd.schedule.tables import Table


def slowest(parts: Sequence[Parameter], density: float | None = None) -> Parameter:
    """Return the measurements of a parameter on the slowest rank.

    Args:
        parts: those of each rank.
        density: what takes the place of the ranks' own densities, for a codec without a ratio.

    Raises:
        InvalidArgumentError: the payloads of the ranks have different densities.
    """
    rows = [part.payload_bytes for part in parts]
    if density is not None:
        rows = [tuple((density, size) for _, size in points) for points in rows]
    densities = [[at for at, _ in points] for points in rows]
    expect(
        all(one == densities[0] for one in densities),
        f"{parts[0].name} payload_bytes",
        "the same densities in all profiles",
        densities,
    )
    return dataclasses.replace(
        parts[0],
        ready_seconds=max(part.ready_seconds for part in parts),
        encode_seconds=max(part.encode_seconds for part in parts),
        decode_seconds=max(part.decode_seconds for part in parts),
        payload_bytes=_largest(rows),
    )


def slowest_table(name: str, tables: Sequence[Table | None]) -> Table | None:
    """Return the table with the largest seconds of several ranks; None if no rank has one.

    Args:
        name: the name of the table, for the message.
        tables: those of each rank.

    Raises:
        InvalidArgumentError: some ranks have none, or one of other bytes.
    """
    known = [table.points for table in tables if table is not None]
    if not known:
        return None
    sizes = ["none" if one is None else [size for size, _ in one.points] for one in tables]
    expect(
        all(one == sizes[0] for one in sizes),
        f"link {name}",
        "a table of the same bytes in all profiles",
        sizes,
    )
    return Table(_largest(known))


def _largest(rows: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    return tuple((points[0][0], max(value for _, value in points)) for points in zip(*rows))
