"""Test the roll call of a step on ranks of one process."""

from types import SimpleNamespace

import numpy as np
import pytest

from deepreduce_hvd.coordination.roll_call import REPEATED, RollCall
from deepreduce_hvd.errors import InvalidArgumentError


def roll_call(size, present, repeated):
    """Return the roll call of rank 0; the ranks that are not present contribute zeros."""
    given = {}
    for rank in present:
        transport = SimpleNamespace(
            size=size, rank=rank, ranks=range(size), test=lambda handle: True,
            allreduce=lambda array, name, rank=rank: given.setdefault(rank, array),
            wait=lambda handle: sum(given.values()),
        )  # fmt: skip
        call = RollCall(transport, "step", repeated)
        if rank == 0:
            first = call
    return first


@pytest.mark.parametrize("repeated", [1, REPEATED])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_missing_ranks_are_found(size, repeated):
    present = [rank for rank in range(size) if rank % 3 != 1]
    call = roll_call(size, present, repeated)
    assert call.sent_bytes == np.float32().nbytes * size * repeated
    assert call.result() == [rank for rank in range(size) if rank not in present]
    if size == 1:
        call.wait()
    else:
        with pytest.raises(InvalidArgumentError, match="got nothing from rank"):
            call.wait()
