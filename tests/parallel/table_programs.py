"""Random programs of embedding tables, and what they decide; shared by both frameworks."""

import numpy as np

#: the shape of the tables
ROWS, COLUMNS = 400, 8


def used_rows(draw, tables, ranks):
    """Return {rank: rows of each table} of one step; all ranks draw the same ones."""
    counts = [draw.choice((0, 1, 7, 99, 100, 150, 250, 299, 300, 400)) for _ in range(tables)]
    # from a part of the table, so that the rows of two steps may have more or less in common
    return {
        rank: [
            np.array(
                draw.sample(
                    range(draw.choice((count, 300, ROWS)) if count < 300 else ROWS),
                    count if draw.random() < 0.8 else 0,
                ),
                np.int64,
            )
            for count in counts
        ]
        for rank in range(ranks)
    }


def decided_at(programs, table):
    """Return the step that decides on a table: the first one in which some rank knows.

    Args:
        programs: for each step, {rank: rows of each table}.
        table: number of the table.

    Returns:
        (number of the step, from 1; whether it is a table), or None if it stays unknown.
    """
    number, says = _said(programs, table)
    return (number, all(says)) if says else None


def ranks_disagree(programs, table):
    """Return whether the gradient looks like a table's on one rank, and like another's elsewhere.

    Args:
        programs, table: as for :func:`decided_at`.
    """
    return len(set(_said(programs, table)[1])) == 2


def _said(programs, table):
    """Return the step in which some rank knows, and what the ranks say then: a list of bool."""
    first_rows: dict[int, set] = {}
    for number, step in enumerate(programs, 1):
        says = []
        for rank, used in step.items():
            rows = set(used[table].tolist())
            if 0 < len(rows) < 100:
                says.append(True)
            elif len(rows) >= 300:
                says.append(False)
            elif rows and rank in first_rows:
                says.append(3 * len(rows - first_rows[rank]) >= len(rows))
            elif rows:
                first_rows[rank] = rows
        if says:
            return number, says
    return None, []
