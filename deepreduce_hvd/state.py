"""A compressor's state as plain values and arrays: saved by each rank, loaded by the same or another number of ranks.

What is kept of each parameter is an adapter's slot: ``steps``, ``loss_scale``, ``memory()`` -> {kind: copy of the array} and
``set_memory({kind: array})``.
"""

from deepreduce_hvd.errors import InvalidArgument

_VERSION = 1


def dump(slots, fingerprint, rank, size):
    """This rank's state as a dictionary of plain values and the framework's arrays."""
    return {
        "version": _VERSION,
        "fingerprint": fingerprint,
        "rank": rank,
        "size": size,
        "parameters": {name: {"steps": slot.steps, "loss_scale": slot.loss_scale, "memory": slot.memory()} for name, slot in slots.items()},
    }


def load(slots, state, fingerprint, rank, size):
    """Takes one rank's state, or those of all ranks in rank order (the rule is in Compressor.load_state_dict)."""
    states = list(state) if isinstance(state, (list, tuple)) else [state]
    for one in states:
        _check(one, slots, fingerprint)
    if isinstance(state, dict):
        if (state["size"], state["rank"]) != (size, rank):
            raise InvalidArgument(
                f"compressor state: expected that of rank {rank} of {size}, got that of rank {state['rank']} of {state['size']}; "
                "after a change of the number of ranks give the list of all ranks' states"
            )
        own = states
    else:
        if [one["rank"] for one in states] != list(range(len(states))) or any(one["size"] != len(states) for one in states):
            raise InvalidArgument(
                f"compressor states: expected those of all ranks in rank order, got ranks {[one['rank'] for one in states]} "
                f"of {sorted({one['size'] for one in states})}"
            )
        own = states[rank::size]
    for name, slot in slots.items():
        saved = states[0]["parameters"][name]
        slot.steps = saved["steps"]
        slot.loss_scale = saved["loss_scale"]
        kinds = saved["memory"].keys()
        # 0 * keeps an array of the framework where no old rank's state is this one's
        slot.set_memory({kind: sum((one["parameters"][name]["memory"][kind] for one in own), 0 * saved["memory"][kind]) for kind in kinds})


def _check(state, slots, fingerprint):
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        got = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise InvalidArgument(f"compressor state: expected a dictionary of version {_VERSION}, got {got!r}")
    if state["fingerprint"] != fingerprint:
        raise InvalidArgument(
            f"compressor state: expected one of the same configuration and parameters ({fingerprint:08x}), got {state['fingerprint']:08x}"
        )
    if state["parameters"].keys() != slots.keys():
        raise InvalidArgument(f"compressor state: expected parameters {sorted(slots)}, got {sorted(state['parameters'])}")
