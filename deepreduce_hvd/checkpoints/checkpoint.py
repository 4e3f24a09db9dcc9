"""Save and load the state of a compressor as plain values and arrays.

Each rank saves its own state. The same or another number of ranks can load it.

The state of each parameter is kept in a slot of the adapter. A slot has these members:

- ``shape``, ``state_names`` and ``follows_loss_scale`` define what its state contains.
- ``steps``, ``loss_scale``, ``reduction`` (one of
  :data:`~deepreduce_hvd.communicators.wire.REDUCTIONS`), ``is_table`` (whether the parameter is an
  embedding table; None if that is not known) and ``memory()``, which returns {name: copy of the
  state array}, are saved.
- ``numpy_of(value)`` returns an array of the framework as a NumPy array, and None for anything
  else.
- ``set_steps(steps)`` and ``set_memory({name: (d,) float32 NumPy array})`` load what was saved.
"""

import math

import numpy as np

from deepreduce_hvd.argument_checks import is_integer, is_number
from deepreduce_hvd.communicators.wire import REDUCTIONS, SUM
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.memories.saturated import saturated_mean

_VERSION = 1
_KEYS = ("version", "fingerprint", "settings", "rank", "size", "parameters")
_PARAMETER_KEYS = ("steps", "loss_scale", "reduction", "is_table", "memory")
#: entries that older states do not have
_NEWER = {"reduction": None, "is_table": None}
_MOST_LISTED = 8
_MOST_KEYS = 3


def dump(slots, configuration, rank, size):
    """Return this rank's state as a dictionary of plain values and arrays of the framework."""
    return {
        "version": _VERSION,
        "fingerprint": configuration.fingerprint,
        "settings": dict(configuration.settings),
        "rank": rank,
        "size": size,
        "parameters": {
            name: {
                "steps": slot.steps,
                "loss_scale": slot.loss_scale,
                "reduction": slot.reduction,
                "is_table": slot.is_table,
                "memory": slot.memory(),
            }
            for name, slot in slots.items()
        },
    }


def load(slots, state, configuration, rank, size, keeper_of=lambda rank: rank):
    """Load the state of one rank, or of all ranks, as for Compressor.load_state_dict.

    Everything is checked before anything is changed. After an error, all slots are unchanged.

    Args:
        slots: {name: slot of the parameter}.
        state: one state, or the list of the states of all ranks.
        configuration: the compressor's
            :class:`~deepreduce_hvd.checkpoints.configuration.Configuration`.
        rank, size: those of this rank now.
        keeper_of: a function that returns the rank whose memory stores the residual of a rank. The
            memory of any other rank is never sent.
    """
    if isinstance(state, (list, tuple)):
        states = {f"compressor state of rank {rank}": one for rank, one in enumerate(state)}
        for where, one in states.items():
            _check_head(where, one, slots)
        _check_ranks(list(states.values()))
        own = [where for old, where in enumerate(states) if keeper_of(old % size) == rank]
        sizes = len(states), size
    else:
        states = {"compressor state": state}
        _check_head("compressor state", state, slots)
        if (state["rank"], state["size"]) != (rank, size):
            raise InvalidArgumentError(
                f"compressor state: expected the state of rank {rank} of {size}, got the "
                "state of rank "
                f"{state['rank']} of {state['size']}; if the number of ranks has changed, pass "
                "the list of all ranks' states"
            )
        own, sizes = list(states), (size, size)
    for where, one in states.items():
        _check_configuration(where, one, configuration)
        _expect_keys(f"{where}: parameters", one["parameters"], slots)
    loaded = [_loaded(name, slot, states, own, sizes) for name, slot in slots.items()]
    if own == ["compressor state"] and keeper_of(rank) != rank:
        _expect_no_memory(slots, loaded, rank, keeper_of(rank))
    for slot, (steps, loss_scale, reduction, is_table, memory) in zip(slots.values(), loaded):
        slot.set_steps(steps)
        slot.loss_scale = loss_scale
        # that of this job if it is known: TensorFlow notes it only while it traces
        slot.reduction = slot.reduction or reduction
        slot.is_table = is_table
        slot.set_memory(memory)


def _expect_no_memory(slots, loaded, rank, keeper):
    for name, (*_, memory) in zip(slots, loaded):
        if any(array.any() for array in memory.values()):
            raise InvalidArgumentError(
                f"compressor state, parameter {name}: expected no memory on rank {rank}, whose "
                f"communicator sends from rank {keeper}, the first rank of its host, got "
                "memory that "
                "is not zero, probably because the hosts had other ranks when the state was saved; "
                "pass the list of all ranks' states on every rank"
            )


def identity(configuration, rank, size, keeper):
    """Return the part of a checkpoint that identifies the compressor and the rank.

    Args:
        configuration, rank, size: those of this rank.
        keeper: the rank whose memory stores the residual of this rank.
    """
    own = {**configuration._asdict(), "rank": rank, "size": size}
    return own if keeper == rank else {**own, "keeper": keeper}


def check_identity(what, found, configuration, rank, size, keeper):
    """Raise InvalidArgumentError unless ``found``, from :func:`identity`, matches this rank."""
    expected = identity(configuration, rank, size, keeper)
    if isinstance(found, dict) and ("keeper" in found) != ("keeper" in expected):
        raise InvalidArgumentError(
            f"{what}: expected the checkpoint of a rank whose memory is on rank {keeper}, got one "
            f"whose memory is on rank {found.get('keeper', found.get('rank'))}; the hosts "
            "had other "
            "ranks when it was saved: pass load_state_dict the list of all ranks' states"
        )
    _expect_keys(what, _with_settings(found), expected)
    _check_configuration(what, found, configuration)
    if (found["rank"], found["size"]) != (rank, size):
        raise InvalidArgumentError(
            f"{what}: expected the checkpoint of rank {rank} of {size}, got the checkpoint of rank "
            f"{found['rank']} of {found['size']}; if the number of ranks has changed, pass "
            "load_state_dict the list of all ranks' states"
        )


def _with_settings(state):
    """Return a state with the entry that older states do not have; anything else unchanged."""
    return {"settings": {}, **state} if isinstance(state, dict) else state


def _check_configuration(where, found, configuration):
    settings = _with_settings(found)["settings"]
    if not isinstance(settings, dict):
        raise InvalidArgumentError(
            f"{where}: settings: expected a dictionary, got {type(settings).__name__}"
        )
    configuration.expect(where, found["fingerprint"], settings)


def _check_head(where, state, slots):
    """Check the entries of a state other than the parameters."""
    if not isinstance(state, dict) or "version" not in state:
        raise InvalidArgumentError(
            f"{where}: expected what Compressor.state_dict() returned, got {in_words(state)}"
        )
    if state["version"] != _VERSION:
        raise InvalidArgumentError(
            f"{where}: expected a dictionary of version {_VERSION}, got {state['version']!r}"
        )
    _expect_keys(where, _with_settings(state), _KEYS)
    rank, size = state["rank"], state["size"]
    if not is_integer(rank) or not is_integer(size) or not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{where}: expected integers 0 <= rank < size, got {rank!r} and {size!r}"
        )


def in_words(given):
    """Return what was given in place of a state, for error messages."""
    if not isinstance(given, dict):
        return "None" if given is None else type(given).__name__
    if not given:
        return "an empty dictionary"
    more = ", …" if len(given) > _MOST_KEYS else ""
    return f"a dictionary with the keys {', '.join(map(str, [*given][:_MOST_KEYS]))}{more}"


def _check_ranks(states):
    ranks, sizes = [one["rank"] for one in states], sorted({one["size"] for one in states})
    if ranks != list(range(len(states))) or sizes != [len(states)]:
        raise InvalidArgumentError(
            "compressor states: expected the states of all ranks in rank order, got ranks "
            f"{ranks} of {sizes}"
        )


def _expect_keys(where, found, expected):
    """Raise InvalidArgumentError unless ``found`` is a dictionary with exactly these keys."""
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{where}: expected a dictionary, got {type(found).__name__}")
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected]
    if missing or unknown:
        kinds = {"no": missing, "also": unknown}
        got = " and ".join(f"{kind} {_listed(keys)}" for kind, keys in kinds.items() if keys)
        raise InvalidArgumentError(f"{where}: expected {_listed(expected)}, got {got}")


def _listed(names):
    names = [str(name) for name in names]
    rest = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + rest or "nothing"


def memory_factor(reduction, old_size, new_size):
    """Return the factor of the memories when the number of ranks changes.

    The gradient that has not been sent yet must stay the same. With a sum, it is the sum of all
    memories. With an average, this sum is divided by the number of ranks, so it needs the factor
    ``new_size / old_size``. A reduction that is not known counts as an average, Horovod's default.
    """
    return 1.0 if reduction == SUM else new_size / old_size


def _loaded(name, slot, states, own, sizes):
    """Return (steps, loss scale, reduction, whether it is a table, memory) of one parameter.

    The memory is the sum of the memories in the states named in ``own``, multiplied for another
    number of ranks. ``sizes`` are the numbers of ranks in the saved job and now.
    """
    parts = {
        where: _Part(f"{where}, parameter {name}", slot, one["parameters"][name])
        for where, one in states.items()
    }
    first = next(iter(parts.values()))
    for part in parts.values():
        for what in ("steps", "loss_scale"):
            if getattr(part, what) != getattr(first, what):
                raise InvalidArgumentError(
                    f"{part.where}: expected the same {what} as in the first state, "
                    f"{getattr(first, what)}, "
                    f"got {getattr(part, what)}"
                )
    reduction, is_table = (_known(parts.values(), what) for what in _NEWER)
    ratio = memory_factor(reduction or slot.reduction, *sizes)
    memory = {}
    for kind in slot.state_names:
        kept = [parts[where].memory[kind] for where in own]
        memory[kind] = (
            saturated_mean(kept, ratio)
            if kept
            else np.zeros(math.prod(slot.shape), dtype=np.float32)
        )
    loss_scale = first.loss_scale if slot.follows_loss_scale else None
    return first.steps, loss_scale, reduction, is_table, memory


def _known(parts, what):
    """Return a value that all states with it have in common, or None."""
    known = [part for part in parts if getattr(part, what) is not None]
    for part in known:
        if getattr(part, what) != getattr(known[0], what):
            raise InvalidArgumentError(
                f"{part.where}: expected the same {what} as in the other states, "
                f"{getattr(known[0], what)!r}, got {getattr(part, what)!r}"
            )
    return getattr(known[0], what) if known else None


class _Part:
    """One parameter in the state of one rank, after checks.

    Attributes:
        memory: {name: (d,) float32 array}.
    """

    def __init__(self, where, slot, saved):
        self.where = where
        if isinstance(saved, dict):
            saved = {**_NEWER, **saved}
        _expect_keys(where, saved, _PARAMETER_KEYS)
        self.steps, self.loss_scale = saved["steps"], saved["loss_scale"]
        self.reduction, self.is_table = saved["reduction"], saved["is_table"]
        if not is_integer(self.steps) or not 0 <= self.steps < 2**63:
            raise InvalidArgumentError(
                f"{where}: expected steps, an integer in [0, 2^63), got {self.steps!r}"
            )
        scale = self.loss_scale
        if scale is not None and not (is_number(scale) and 0 < scale < math.inf):
            raise InvalidArgumentError(
                f"{where}: expected loss_scale None or a positive finite number, got {scale!r}"
            )
        if self.reduction not in REDUCTIONS:
            raise InvalidArgumentError(
                f"{where}: expected a reduction of {', '.join(map(repr, REDUCTIONS))}, got "
                f"{self.reduction!r}"
            )
        if not (self.is_table is None or isinstance(self.is_table, bool)):
            raise InvalidArgumentError(
                f"{where}: expected is_table None, True or False, got {self.is_table!r}"
            )
        # torch.load(weights_only=True) refuses NumPy's numbers in the next state
        self.steps = int(self.steps)
        self.loss_scale = None if scale is None else float(scale)
        _expect_keys(f"{where}, memory", saved["memory"], slot.state_names)
        self.memory = {
            kind: _checked_array(f"{where}, {kind}", slot, saved["memory"][kind])
            for kind in slot.state_names
        }
        self._check_units(slot)

    def _check_units(self, slot):
        """Check that a non-zero memory has a loss scale if and only if the slot follows one."""
        if (self.loss_scale is not None) == slot.follows_loss_scale:
            return
        if any(array.any() for array in self.memory.values()):
            expected = "a number" if slot.follows_loss_scale else "None"
            given = "has" if slot.follows_loss_scale else "does not have"
            raise InvalidArgumentError(
                f"{self.where}: expected loss_scale {expected}, because this Compressor {given} "
                f"loss_scale=, got {self.loss_scale!r}"
            )


def _checked_array(where, slot, value):
    array = slot.numpy_of(value)
    flat = (math.prod(slot.shape),)
    if array is None or array.dtype != np.float32 or array.shape not in (flat, slot.shape):
        got = type(value).__name__
        if hasattr(value, "dtype"):
            got = f"{value.dtype} of shape {tuple(value.shape)}"
        raise InvalidArgumentError(f"{where}: expected a float32 array of shape {flat}, got {got}")
    array = array.reshape(-1)
    if not np.isfinite(array).all():
        first = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InvalidArgumentError(
            f"{where}: expected finite numbers, got {array[first]} at {first}"
        )
    return array
