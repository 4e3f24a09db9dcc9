"""What the compressor keeps of each PyTorch parameter, and how it is saved and loaded."""

import torch

from deepreduce_hvd import payload as container, wire
from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.torch import decode_sum_flat

_STATE_VERSION = 1


class Slot:
    """State and figures of one named parameter."""

    def __init__(self, name, parameter, key, memory, dense_below, keep_backup):
        self.name = name
        self.parameter = parameter
        self.key = key
        d = parameter.numel()
        self.dense = d < dense_below
        self.state_names = () if self.dense else memory.state
        self.state = tuple(torch.zeros(d, dtype=torch.float32) for _ in self.state_names)
        self.backup = tuple(torch.zeros_like(part) for part in self.state) if keep_backup else ()
        # |value| of the last k-th largest element: a hint that saves a pass and never changes the bytes
        self.threshold = torch.zeros(1, dtype=torch.float32)
        self.loss_scale = None
        self.failure = None
        self.steps = 0
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        self.payload = None
        self.dense_bytes = 0
        self.sent_bytes = 0

    def back_up(self):
        for kept, part in zip(self.backup, self.state):
            kept.copy_(part)

    def restore(self):
        """Undoes the last step."""
        self.payload = None
        for kept, part in zip(self.backup, self.state):
            part.copy_(kept)

    def count_dense(self, tensor, reduced):
        self.dense_bytes = tensor.numel() * tensor.element_size()
        self.sent_bytes = reduced.numel() * reduced.element_size()

    def count_payload(self, payload, tensor):
        self.payload = payload
        self.dense_bytes = tensor.numel() * tensor.element_size()
        self.sent_bytes = payload.numel() + wire.PROBE_BYTES

    def statistics(self, memory):
        """One row of Compressor.stats()."""
        steps = max(self.steps, 1)
        row = {
            "elements": self.parameter.numel(), "dense_bytes": self.dense_bytes, "sent_bytes": self.sent_bytes,
            "header_bytes": 0, "index_bytes": 0, "value_bytes": 0, "order_bytes": 0, "sent_values": 0,
            "relative_error": 0.0 if self.dense else None,
            "encode_seconds": self.encode_seconds / steps, "decode_seconds": self.decode_seconds / steps,
            "steps": self.steps, "path": "dense" if self.dense else "compressed",
        }  # fmt: skip
        if self.dense or self.payload is None or self.failure is not None:
            return row
        parts = container.read(self.payload.numpy())
        row.update(
            header_bytes=container.HEADER.size, index_bytes=len(parts.index), value_bytes=len(parts.values),
            order_bytes=len(parts.order_map), sent_values=parts.count,
        )  # fmt: skip
        # what is kept is exactly what the payload lacks only for memories that keep all of it
        if memory.keeps_everything and not parts.flags & container.NON_FINITE:
            kept = self.state[0]
            accumulated = decode_sum_flat([self.payload], kept.clone(), 1.0)
            norm = float(accumulated.norm())
            row["relative_error"] = float(kept.norm()) / norm if norm > 0 else 0.0
        return row


def dump(slots, fingerprint, transport):
    """This rank's state as a dictionary of plain values and tensors."""
    return {
        "version": _STATE_VERSION,
        "fingerprint": fingerprint,
        "rank": transport.rank,
        "size": transport.size,
        "parameters": {
            name: {
                "steps": slot.steps,
                "loss_scale": slot.loss_scale,
                "memory": {kind: part.clone() for kind, part in zip(slot.state_names, slot.state)},
            }
            for name, slot in slots.items()
        },
    }


def load(slots, state, fingerprint, transport):
    """Takes one rank's state, or those of all ranks in rank order (the rule is in Compressor.load_state_dict)."""
    states = list(state) if isinstance(state, (list, tuple)) else [state]
    for one in states:
        _check(one, slots, fingerprint)
    size, rank = transport.size, transport.rank
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
        slot.threshold.zero_()
        for kind, part in zip(slot.state_names, slot.state):
            part.zero_()
            for one in own:
                part += one["parameters"][name]["memory"][kind]


def _check(state, slots, fingerprint):
    if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
        got = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise InvalidArgument(f"compressor state: expected a dictionary of version {_STATE_VERSION}, got {got!r}")
    if state["fingerprint"] != fingerprint:
        raise InvalidArgument(
            f"compressor state: expected one of the same configuration and parameters ({fingerprint:08x}), got {state['fingerprint']:08x}"
        )
    if state["parameters"].keys() != slots.keys():
        raise InvalidArgument(f"compressor state: expected parameters {sorted(slots)}, got {sorted(state['parameters'])}")
