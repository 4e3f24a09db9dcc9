"""The state of a compressor with fully_shard: each rank saves the memories of its own shards.

A state has the form of :mod:`deepreduce_hvd.checkpoints.checkpoint`, but its rank and size count
hosts. Four more entries give the number of the shard, the number of shards, the dimension along
which each parameter is divided, and the number by which PyTorch divides the average of each
parameter after the exchange. The memories are in units of what is exchanged, so that their units
depend on this number. It is None before the first step, and older states do not have it.
"""

import math

import numpy as np

from deepreduce_hvd.argument_checks import is_integer, is_number
from deepreduce_hvd.checkpoints import checkpoint
from deepreduce_hvd.errors import InvalidArgumentError

_NUMBERS = ("shard", "shards")
_KEYS = (*_NUMBERS, "dims", "divided_after")


def bounds(size, shard, shards):
    """Return (start, stop) of a shard of ``size`` rows, as fully_shard divides them."""
    rows = -(-size // shards)
    return min(shard * rows, size), min((shard + 1) * rows, size)


def dump(slots, configuration, hosts, ranks):
    """Return the state of this rank.

    Args:
        slots: {name: :class:`~deepreduce_hvd.torch.fsdp.groups.ShardSlot`}.
        configuration: the compressor's
            :class:`~deepreduce_hvd.checkpoints.configuration.Configuration`.
        hosts: transport over the ranks that have the same shard, one per host.
        ranks: transport over the ranks of this host, which together have all shards.
    """
    state = checkpoint.dump(slots, configuration, hosts.rank, hosts.size)
    dims = {name: slot.dim for name, slot in slots.items()}
    divided_after = {name: slot.divided_after for name, slot in slots.items()}
    return {
        **state,
        "shard": ranks.rank,
        "shards": ranks.size,
        "dims": dims,
        "divided_after": divided_after,
    }


def load(slots, state, configuration, hosts, ranks, keeper_of):
    """Load the state of this rank, or a list of the states of all ranks.

    The arguments are those of :func:`dump`; ``state`` and ``keeper_of`` are those of
    :func:`deepreduce_hvd.checkpoints.checkpoint.load`. A list may come from a job with another
    number of hosts or of shards.
    """
    if isinstance(state, (list, tuple)):
        loaded, states = _by_host(slots, state, ranks), state
    else:
        _check("compressor state", state)
        if (state["shard"], state["shards"]) != (ranks.rank, ranks.size):
            raise InvalidArgumentError(
                f"compressor state: expected that of shard {ranks.rank} of {ranks.size}, got that"
                f" of shard {state['shard']} of {state['shards']}; if the number of ranks has"
                " changed, pass the list of all ranks' states"
            )
        for name, slot in slots.items():
            saved = state["dims"].get(name, slot.dim)
            if saved != slot.dim:
                raise InvalidArgumentError(
                    f"compressor state, parameter {name}: expected shards along dimension"
                    f" {slot.dim}, got shards along dimension {saved!r}; pass the list of all"
                    " ranks' states"
                )
        loaded, states = _without_shard(state), [state]
    divisors = {name: _divisor(name, slot, states, ranks) for name, slot in slots.items()}
    checkpoint.load(slots, loaded, configuration, hosts.rank, hosts.size, keeper_of)
    for name, slot in slots.items():
        slot.divided_after = divisors[name]  # the next step rescales the memory, if it needs to


def _divisor(name, slot, states, ranks):
    """Return the number by which PyTorch divided the averages of a parameter after the exchange."""
    saved = [state.get("divided_after", {}).get(name) for state in states]
    found = [one for one in saved if one is not None]
    for one in found:
        if not is_number(one) or not 0 < one < math.inf:
            raise InvalidArgumentError(
                f"compressor state, parameter {name}: expected None or a positive finite number in"
                f" divided_after, got {one!r}"
            )
    if len(set(found)) > 1:
        raise InvalidArgumentError(
            f"compressor states, parameter {name}: expected the same divided_after in all states,"
            f" got {' and '.join(map(str, sorted(set(found))))}"
        )
    if found:
        return found[0]
    shards = states[0]["shards"]
    if shards != ranks.size and slot.is_divided_after and _remember(name, slot, states):
        raise InvalidArgumentError(
            f"compressor states, parameter {name}: expected divided_after, the number by which"
            " PyTorch divided gradients after the exchange, because it depends on the number of"
            f" shards, which was {shards} and is {ranks.size}, got states without it, of an earlier"
            " version; load them with the earlier number of ranks per host, and save them again"
            " after a step"
        )
    return None


def _remember(name, slot, states):
    """Return whether any state has a memory of a parameter that is not zero."""
    memories = [_parameters_of(state).get(name, {}).get("memory") for state in states]
    arrays = [
        slot.numpy_of(value)
        for memory in memories
        if isinstance(memory, dict)
        for value in memory.values()
    ]
    return any(array is not None and array.any() for array in arrays)


def _check(where, state):
    if (
        not isinstance(state, dict)
        or not all(is_integer(state.get(key)) for key in _NUMBERS)
        or not isinstance(state.get("dims"), dict)
        or not isinstance(state.get("divided_after", {}), dict)
    ):
        raise InvalidArgumentError(
            f"{where}: expected a state of fully_shard, with the integers shard and shards and the"
            f" dictionaries dims and divided_after, got {checkpoint.in_words(state)}"
        )


def _without_shard(state):
    return {key: value for key, value in state.items() if key not in _KEYS}


def _by_host(slots, states, ranks):
    """Return one state for each host of the saved job, with the memories of this rank's shard."""
    for number, state in enumerate(states):
        _check(f"compressor state of rank {number}", state)
    shards = states[0]["shards"] if states else 0
    by_place = {(state.get("rank"), state["shard"]): state for state in states}
    hosts = len(states) // max(shards, 1)
    places = [(host, shard) for host in range(hosts) for shard in range(shards)]
    sizes = {state["shards"] for state in states}
    if sorted(by_place, key=repr) != sorted(places, key=repr) or len(sizes) > 1 or not states:
        raise InvalidArgumentError(
            "compressor states: expected one state of each shard of each host, got (host, shard) "
            f"{[(state.get('rank'), state['shard']) for state in states]} of {sorted(sizes)} shards"
        )
    return [
        _joined(slots, [by_place[host, shard] for shard in range(shards)], ranks)
        for host in range(hosts)
    ]


def _joined(slots, states, ranks):
    """Merge the states of all shards of one host into one state for this rank's shard."""
    first = states[0]
    for other in states[1:]:
        for key in ("version", "fingerprint", "size", "dims"):
            if other.get(key) != first.get(key):
                raise InvalidArgumentError(
                    f"compressor states of host {first['rank']}: expected the same {key}, got "
                    f"{first.get(key)!r} and {other.get(key)!r}"
                )
    parts = [_parameters_of(state) for state in states]
    for part in parts[1:]:
        different = part.keys() ^ parts[0].keys()
        if different:
            raise InvalidArgumentError(
                f"compressor states of host {first['rank']}: expected the same parameters in all "
                f"shards, got {', '.join(sorted(map(str, different)))} not in all of them"
            )
    parameters = {
        name: _joined_parameter(
            name, slots[name], [part[name] for part in parts], first["dims"].get(name), ranks
        )
        if name in slots
        else saved
        for name, saved in parts[0].items()
    }
    return {**_without_shard(first), "parameters": parameters}


def _parameters_of(state):
    """Return the valid parameter entries of one state; {} if there are none."""
    found = state.get("parameters")
    entries = found if isinstance(found, dict) else {}
    return {name: saved for name, saved in entries.items() if isinstance(saved, dict)}


def _joined_parameter(name, slot, parts, dim, ranks):
    """Return the entry of one parameter for this rank's shard.

    ``dim`` is the dimension along which it was divided when it was saved. Only what merging needs
    is checked here. :func:`deepreduce_hvd.checkpoints.checkpoint.load` checks everything else.
    """
    # states from before the first step do not know the reduction
    known = [part["reduction"] for part in parts if part.get("reduction") is not None]
    for what in ("steps", "loss_scale", "reduction"):
        values = known if what == "reduction" else [part.get(what) for part in parts]
        found = {repr(value) for value in values}
        if len(found) > 1:
            raise InvalidArgumentError(
                f"compressor states, parameter {name}: expected the same {what} in all shards, got "
                f"{', '.join(sorted(found))}"
            )
    shape = tuple(slot.parameter.shape)
    if not is_integer(dim) or not 0 <= dim < len(shape):
        raise InvalidArgumentError(
            f"compressor states, parameter {name}: expected a dimension below {len(shape)} in dims,"
            f" got {dim!r}"
        )
    memory = {}
    for kind in slot.state_names:
        arrays = []
        for shard, part in enumerate(parts):
            start, stop = bounds(shape[dim], shard, len(parts))
            own = (*shape[:dim], stop - start, *shape[dim + 1 :])
            saved = part.get("memory")
            array = slot.numpy_of(saved.get(kind)) if isinstance(saved, dict) else None
            if array is None or array.size != np.prod(own, dtype=np.int64):
                raise InvalidArgumentError(
                    f"compressor states, parameter {name}, {kind}: expected an array of shape {own}"
                    f" in shard {shard} of {len(parts)}, got"
                    f" {type(saved).__name__ if array is None else array.shape}"
                )
            arrays.append(array.reshape(own))
        whole = np.concatenate(arrays, axis=dim)
        start, stop = bounds(shape[slot.dim], ranks.rank, ranks.size)
        memory[kind] = whole.take(range(start, stop), axis=slot.dim).reshape(-1)
    reduction = known[0] if known else None
    merged = {"reduction": reduction, "is_table": _is_table(parts), "memory": memory}
    return {**parts[0], **merged}


def _is_table(parts):
    """Return what all shards say that know whether a parameter is an embedding table.

    Return None if none of them knows it, or if they do not agree: the job finds out again.
    """
    known = [part["is_table"] for part in parts if part.get("is_table") is not None]
    return known[0] if known and all(one == known[0] for one in known) else None
