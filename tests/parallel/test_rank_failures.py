"""Test a rank that hangs, is killed, ends or raises an error: the others name it, and end."""

import re

import pytest
import survivors

_RAISED = (
    r"got rank {last} ended in step [67] by ValueError: a bad batch at .*rank_failures\.py:\d+ "
    r"in raise_an_error"
)
_ENDED = r"got rank {last} reached the end of its program after 6 steps"
_SILENT = r"expected all \d ranks to continue, got no sign of life from rank(s \d,)? {last} within"

TORCH = ("torch_rank_failures.py",)
TENSORFLOW = ("tensorflow_rank_failures.py", "allgather")
IN_ROUNDS = ("tensorflow_rank_failures.py", "rounds")


def expect_to_say(worker, ranks, failure, *messages, **environment):
    """Check that all other ranks print the ``messages`` and end with an error.

    The last rank fails. The ``messages`` are regular expressions.
    """
    script, *arguments = worker
    texts, statuses, _ = survivors.run(ranks, script, failure, *arguments, **environment)
    assert all(status not in (0, None) for status in statuses), f"{statuses}\n{texts}"
    for rank, text in enumerate(texts[:-1]):
        for message in messages:
            assert re.search(message.format(last=ranks - 1), text, re.DOTALL), (
                f"rank {rank} said:\n{text[-6000:]}"
            )
    # A rank that fails early may also name ranks that fail only because it ends. The last rank to
    # fail names only the killed one.
    if _SILENT in messages:
        assert any(
            f"no sign of life from rank {ranks - 1} within" in text for text in texts[:-1]
        ), texts


@pytest.mark.parametrize(
    ("worker", "ranks", "failure", "message"),
    [
        (TORCH, 2, "raises in backward", _RAISED),
        pytest.param(TORCH, 3, "raises in backward", _RAISED, marks=pytest.mark.slow),
        pytest.param(TORCH, 2, "killed", _SILENT, marks=pytest.mark.slow),
        pytest.param(TORCH, 3, "killed", _SILENT, marks=pytest.mark.slow),
        pytest.param(TORCH, 2, "ends", _ENDED, marks=pytest.mark.slow),
        pytest.param(TENSORFLOW, 2, "raises", _RAISED, marks=pytest.mark.slow),
        pytest.param(TENSORFLOW, 3, "killed", _SILENT, marks=pytest.mark.slow),
        pytest.param(IN_ROUNDS, 2, "killed", _SILENT, marks=pytest.mark.slow),
    ],
)
def test_survivors_say_who_is_gone(worker, ranks, failure, message):
    expect_to_say(worker, ranks, failure, message)
