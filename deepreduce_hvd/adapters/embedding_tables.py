"""Embedding tables among the parameters, which need another codec than other parameters.

A batch uses few rows of a table, and the gradient of all other rows is zero. Error feedback delays
rows that are seldom used, which costs accuracy (docs/accuracy.md). So a compressor looks at the
first gradients. Tables that have the default codec get the codec "rows". For all others, it warns.
"""

import functools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.layout import Layout, with_tables
from deepreduce_hvd.planning.policies import ROWS, Policy, rows_codec, some_of
from deepreduce_hvd.schedule.dag import CODEC, DENSE
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.stages.sparsifiers import Threshold

_MOST_NAMES = 5
_COLLECTIVE = "deepreduce.tables"


def may_be(shape: tuple[int, ...], policy: Policy) -> bool:
    """Return whether a parameter could be an embedding table whose rows are delayed."""
    if len(shape) != 2 or policy.codec is None or not policy.delays:
        return False
    sparsifier, elements = policy.codec.sparsifier, math.prod(shape)
    if isinstance(sparsifier, Threshold) and sparsifier.keeps_all:
        return False
    return sparsifier.most_selected(elements, sparsifier.schedule_steps) != elements


def uses_few(count: Any, rows: Any) -> Any:
    """Return whether a gradient in which ``count`` rows are not zero is that of a table.

    The numbers may be tensors. Other layers have more such rows. A layer before ReLU or dropout has
    zeros in the rows of outputs that are off for all samples of a batch.
    """
    return 4 * count < rows


def uses_most(count: Any, rows: Any) -> Any:
    """Return whether a gradient in which ``count`` rows are not zero is that of another layer."""
    return 4 * count >= 3 * rows


def has_changed(new: Any, count: Any) -> Any:
    """Return whether a gradient is that of a table because of ``new`` rows among its ``count``."""
    return 3 * new >= count


def looks_like_table(used: np.ndarray, before: np.ndarray | None, biased: bool) -> bool | None:
    """Return whether a gradient is that of a table, or None if the next gradient has to decide.

    If a batch uses between a quarter and three quarters of the rows, it matters whether other
    batches use other rows. Rows that are used in each step are not delayed more than other
    parameters. The outputs of a layer with dropout change like the rows of a table, but such a
    layer usually has a bias.

    Args:
        used: (rows,) bool array of which rows are not zero; some of them.
        before: that of an earlier gradient, or None.
        biased: whether a bias belongs to the parameter.
    """
    count, rows = np.count_nonzero(used), len(used)
    if uses_few(count, rows):
        return True
    if biased or uses_most(count, rows):
        return False
    return None if before is None else bool(has_changed(np.count_nonzero(used & ~before), count))


def has_bias(name: str, names: Container[str]) -> bool:
    """Return whether a bias belongs to a parameter, by their names.

    Args:
        name: name of the parameter, such as "layer.weight", or one of those from which PyTorch's
            weight and spectral norms compute it.
        names: names of all parameters.
    """
    whole = re.sub(r"(^|\.)parametrizations\.(\w+)\.original\d?$", r"\1\2", name)
    stem = re.sub(r"weight(_orig|_g|_v)?$", "", whole)
    return stem != whole and f"{stem}bias" in names


class EmbeddingTables:
    """The embedding tables among the parameters of one compressor.

    ``is_table`` of a slot is what all ranks have decided: True, False, or None as long as all
    gradients of the parameter were zero, or the first ones did not tell. The policies of the
    compressor follow it. Rows that are zero on one rank may be used on others. So the ranks decide
    together, from the first gradients that are not zero on some rank, or from those after them.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        is_on_gpu: function of a parameter's name that returns whether a GPU encodes its gradient.
    """

    def __init__(self, compressor: Any, is_on_gpu: Callable[[str], bool]) -> None:
        self._compressor = compressor
        self._is_on_gpu = is_on_gpu
        # names of parameters whose codec does not change, and which are known to be tables or not
        self._looked_at: set[str] = set()
        # {name: which rows the first gradient of an undecided parameter used}
        self._used_before: dict[str, np.ndarray] = {}
        self._delayed: list[str] = []  # tables among them, until a warning names them
        # the last layout without tables, and (name, policy) of each table -> that with these tables
        self._base: Layout | None = None
        self._layouts: dict[tuple, Layout] = {}

    def is_undecided(self, slot: Any) -> bool:
        """Return whether the next gradient of a slot may show that it is a table, or another layer.

        The answer is the same on all ranks.
        """
        return slot.is_table is None and slot.name in self._compressor.table_candidates

    def expects(self, slot: Any) -> bool:
        """Return whether the next gradient of a slot is to be looked at."""
        if slot.name in self._compressor.table_candidates:
            return slot.is_table is None and not slot.dense
        return slot.name not in self._looked_at and may_be(slot.shape, slot.policy)

    def note_rows(self, slot: Any, used: np.ndarray) -> tuple[bool, bool]:
        """Note which rows of a gradient are not zero.

        Args:
            slot: slot of the parameter.
            used: (rows,) bool array.

        Returns:
            Whether the gradient looks like that of a table, and whether it looks like that of
            another layer. A gradient of zeros looks like neither: the parameter may not be used in
            this step. Nor does one that only the next gradient can tell.
        """
        if not used.any():
            return False, False
        name = slot.name
        before = self._used_before.pop(name, None)
        biased = has_bias(name, self._compressor.first_policies)
        as_table = looks_like_table(used, before, biased)
        if as_table is None:
            self._used_before[name] = used
            return False, False
        if name not in self._compressor.table_candidates:
            self._looked_at.add(name)
            if as_table:
                self._delayed.append(name)
        return as_table, not as_table

    def decide(self, slot: Any, as_table: bool, as_other: bool) -> None:
        """Decide whether a parameter is a table, as all ranks do at the same step.

        Args:
            slot: slot of the parameter, which is undecided.
            as_table: whether it looks like a table on some rank.
            as_other: whether it looks like another layer on some rank.
        """
        if as_table or as_other:
            slot.is_table = not as_other
            self._used_before.pop(slot.name, None)
        if as_table and as_other:
            self._delayed.append(slot.name)

    def forget_rows(self) -> None:
        """Forget which rows the first gradients used, when training goes on from another state."""
        self._used_before = {}

    def follow(self, slots: Mapping[str, Any]) -> None:
        """Set the policies of the compressor to what the slots say.

        A loaded state may be of a compressor that had other candidates: what it says on parameters
        that are none here is forgotten.

        Args:
            slots: slots of the parameters, by name.
        """
        compressor = self._compressor
        for name, slot in slots.items():
            if name not in compressor.table_candidates:
                slot.is_table = None
            elif slot.is_table is not None:
                self._used_before.pop(name, None)
        compressor.policies = {
            **compressor.first_policies,
            **{name: self.policy_of(slots[name]) for name in names_of(slots)},
        }

    def policy_of(self, slot: Any) -> Policy:
        """Return the policy of a parameter now, without a plan."""
        if not slot.is_table:
            found: Policy = self._compressor.first_policies[slot.name]
            return found
        return _rows(self._is_on_gpu(slot.name))

    def layout_of(self, base: Layout, slots: Iterable[Any]) -> Layout:
        """Return the layout of a step: ``base``, with the policies of the tables among some slots.

        As long as ``base`` stays, the same tables on the same devices give the same object.

        Args:
            base: the layout without tables.
            slots: slots of the step. With several optimizers, another rank may not know the tables
                of the others yet.
        """
        if base is not self._base:
            self._base, self._layouts = base, {}
        tables = {slot.name: self.policy_of(slot) for slot in slots if slot.is_table}
        if not tables:
            return base
        key = tuple(tables.items())
        if key not in self._layouts:
            self._layouts[key] = with_tables(base, tables)
        return self._layouts[key]

    def take_delayed(self) -> list[str]:
        """Return the tables that keep their codec and are not yet named in a warning."""
        delayed, self._delayed = self._delayed, []
        return delayed


def names_of(slots: Mapping[str, Any]) -> list[str]:
    """Return the names of the tables that have the codec "rows", of slots by name."""
    return [name for name, slot in slots.items() if slot.is_table]


def notes(slots: Mapping[str, Any]) -> list[str]:
    """Return sentences on the tables for the user, for :meth:`Compressor.summary`."""
    names = names_of(slots)
    return [f'Embedding tables, with the codec "rows": {some_of(names)}.'] if names else []


@functools.cache
def _rows(on_gpu: bool) -> Policy:
    """Return the policy of a table. One object saves the comparison of its stages."""
    return Policy(CODEC, rows_codec(on_gpu), NoMemory())


def agree(tables: EmbeddingTables, slots: Iterable[Any], seen: Mapping[str, Any], transport: Any):
    """Decide with the other ranks which parameters are tables, at the end of a backward pass.

    With Horovod, this is not needed: there, probes tell what all ranks have seen.

    Args:
        tables: the tables of the compressor.
        slots: slots that are undecided, the same on all ranks.
        seen: {name: what :meth:`EmbeddingTables.note_rows` returned for the gradient of this pass}.
        transport: transport over the ranks, which all call this.
    """
    undecided = list(slots)
    if not undecided:
        return
    own = [seen.get(slot.name, (False, False)) for slot in undecided]
    handle = transport.allreduce(np.ravel(own).astype(np.float32), _COLLECTIVE)
    for slot, (table, other) in zip(undecided, transport.wait(handle).reshape(-1, 2)):
        tables.decide(slot, table > 0, other > 0)


def warning(names: Iterable[str], compressor: Any) -> str:
    """Return the warning about the tables of a compressor with these names."""
    listed = list(names)
    way, effect = ROWS, "send all used rows in each step"
    if not _can_have_rows(compressor):
        way, effect = DENSE, "send them uncompressed"
    patterns = ", ".join(f'"{_literal(name)}": "{way}"' for name in listed[:_MOST_NAMES])
    return (
        f"the gradient of {some_of(listed)} is zero in most rows, as that of an embedding table."
        " Error feedback delays rows that are seldom used, which costs accuracy. To"
        f" {effect}, write dr.Compressor({{{patterns}}}, parameters=...)"
    )


def _can_have_rows(compressor: Any) -> bool:
    """Return whether a compressor accepts the codec "rows" for some of its parameters."""
    try:
        compressor.communicator.check(rows_codec(), NoMemory())
    except InvalidArgumentError:
        return False
    return True


def _literal(name):
    """Return a pattern that matches only this name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
