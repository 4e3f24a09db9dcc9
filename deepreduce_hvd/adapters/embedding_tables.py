"""Embedding tables among the parameters, which need another codec than other parameters.

A batch uses few rows of a table, and the gradient of all other rows is zero. Error feedback delays
rows that are seldom used, which costs accuracy (docs/accuracy.md). So a compressor looks at the
first gradients. Tables that have the default codec get the codec "rows". For all others, it warns.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.coordination.roll_call import REPEATED
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.policies import ROWS, Policy, rows_codec
from deepreduce_hvd.schedule.dag import CODEC, DENSE
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.stages.sparsifiers import Threshold

_MOST_NAMES = 5


def may_be(shape: tuple[int, ...], policy: Policy) -> bool:
    """Return whether a parameter could be an embedding table whose rows are delayed."""
    if len(shape) != 2 or policy.codec is None or not policy.delays:
        return False
    sparsifier, elements = policy.codec.sparsifier, math.prod(shape)
    if isinstance(sparsifier, Threshold) and sparsifier.keeps_all:
        return False
    return sparsifier.most_selected(elements, sparsifier.schedule_steps) != elements


def is_table(used: int, rows: int) -> bool:
    """Return whether a gradient with ``used`` rows that are not zero is that of a table.

    With more used rows, the codec "rows" saves less, and other layers have such gradients too: the
    first layer of a network gets zeros for pixels that are black in all images of a batch.
    """
    return 0 < 4 * used < rows


class TableSearch:
    """The embedding tables among the parameters of one compressor, as first gradients show them.

    Rows that are zero on one rank may be used on others, and all ranks must send a parameter alike.
    So they tell each other what they have seen, at the end of the first step. For parameters
    without a gradient in that step, they do so again after 2, 4, 8, ... steps.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        is_on_gpu: function of a parameter's name that returns whether a GPU encodes its gradient.
    """

    def __init__(self, compressor: Any, is_on_gpu: Callable[[str], bool]) -> None:
        self._compressor = compressor
        self._is_on_gpu = is_on_gpu
        self._before = compressor.policies
        self._candidates = sorted(compressor.table_candidates)
        self._decided: dict[str, bool] = {}  # name -> whether it is a table
        self.forget()

    def forget(self) -> bool:
        """Begin anew, with the policies that the compressor had at first.

        Returns:
            Whether they have changed.
        """
        changed = bool(self.tables)
        self._compressor.policies = self._before
        self._seen: dict[str, bool] = {}  # name -> whether its first gradient is that of a table
        self._decided = {}
        self._delayed: list[str] = []  # tables that stay as they are, until a warning names them
        self._steps = 0
        return changed

    @property
    def tables(self) -> list[str]:
        """The names of the tables that have the codec "rows"."""
        return [name for name, is_table in self._decided.items() if is_table]

    @property
    def fingerprint(self) -> int:
        """CRC-32 of the compressor's configuration and its tables."""
        fingerprint: int = self._compressor.fingerprint
        return zlib.crc32(repr(self.tables).encode(), fingerprint)

    def expects(self, slot: Any) -> bool:
        """Return whether the gradient of a slot is to be looked at."""
        name = slot.name
        looked_at = name in self._seen or name in self._decided
        return not looked_at and may_be(slot.shape, slot.policy)

    def note(self, name: str, used: int, rows: int) -> None:
        """Note how many rows of a gradient are not zero.

        If all of them are zero, a later gradient is looked at: the parameter may not be used in
        this step.
        """
        if used:
            self._seen[name] = is_table(used, rows)
            if self._seen[name] and name not in self._candidates:
                self._delayed.append(name)

    def agree(self, transport: Transport, proceed: Callable[[], None]) -> dict[str, bool]:
        """Decide with the other ranks, at the end of a step, which parameters are tables.

        A parameter is a table if it looks like one on some rank, and on no rank like another layer.

        Args:
            transport: transport over the ranks, which all call this at the end of a step.
            proceed: function to call again and again while this rank waits.

        Returns:
            {name: whether it is a table} of the parameters for which this is known now.
        """
        self._steps += 1
        is_turn = self._steps & (self._steps - 1) == 0  # a power of two
        names = [name for name in self._candidates if name not in self._decided]
        if not names or not is_turn or transport.size == 1:
            return {}
        seen = [self._seen.get(name) for name in names]
        own = [1, *(one is True for one in seen), *(one is False for one in seen)]
        # in elastic training, short sums are a danger, see REPEATED
        counts = np.zeros(max(len(own), transport.size * REPEATED), dtype=np.float32)
        counts[: len(own)] = own
        name = collective_name(self._compressor.number, f"tables.{self._steps}")
        handle = transport.allreduce(counts, name)
        while not transport.test(handle):
            proceed()
            transport.pause()
        present, *counts = transport.wait(handle)[: len(own)].tolist()
        if present < transport.size:  # a rank without data, in hvd.join(), gives zeros
            return {}
        as_table, as_other = counts[: len(names)], counts[len(names) :]
        return {
            name: not other
            for name, table, other in zip(names, as_table, as_other)
            if table or other
        }

    def decide(self, decided: dict[str, bool]) -> bool:
        """Give the codec "rows" to the tables among some parameters.

        Args:
            decided: {name: whether it is a table}, the same on all ranks.

        Returns:
            Whether some policies have changed.
        """
        decided = {name: one for name, one in decided.items() if name in self._candidates}
        self._decided.update(decided)
        found = {
            name: Policy(CODEC, rows_codec(self._is_on_gpu(name)), NoMemory())
            for name, is_table in decided.items()
            if is_table
        }
        self._compressor.policies = {**self._compressor.policies, **found}
        return bool(found)

    def delayed(self) -> list[str]:
        """Return the tables that were found since the last call and stay delayed."""
        delayed, self._delayed = self._delayed, []
        return delayed

    def notes(self) -> list[str]:
        """Return sentences for the user."""
        if not self.tables:
            return []
        return [f'Embedding tables, with the codec "rows": {_some(self.tables)}.']


def warning(names: Iterable[str], compressor: Any) -> str:
    """Return the warning about the tables of a compressor with these names."""
    listed = list(names)
    way, effect = ROWS, "send all used rows in each step"
    if not _can_have_rows(compressor):
        way, effect = DENSE, "send them uncompressed"
    patterns = ", ".join(f'"{_literal(name)}": "{way}"' for name in listed[:_MOST_NAMES])
    return (
        f"the gradient of {_some(listed)} is zero in most rows, as that of an embedding table."
        " Error feedback delays rows that are seldom used, which costs accuracy. To"
        f" {effect}, write dr.Compressor({{{patterns}}}, parameters=...)"
    )


def _can_have_rows(compressor: Any) -> bool:
    """Return whether a compressor accepts the codec "rows" for some of its parameters."""
    try:
        compressor.communicator.check(rows_codec(), NoMemory())
    except InvalidArgumentError:
        return False
    return compressor.schedule is None  # plans need one codec


def _some(names):
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _literal(name):
    """Return a pattern that matches only this name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
