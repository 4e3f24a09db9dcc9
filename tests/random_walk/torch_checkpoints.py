"""Save and load a compressor's state at random steps."""

import io

import horovod.torch as hvd
import numpy as np
import torch

import deepreduce_hvd as dr


class Checkpoints:
    """Saves, loads and restarts a trainer's compressors between two steps.

    Args:
        trainer: a :class:`~torch_trainer.Trainer`.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._saved = {}

    def take(self, number, kind):
        """Perform one ``kind`` of :class:`~torch_program.Step` with compressor ``number``."""
        trainer = self._trainer
        compressor, oracle = trainer.user.compressors[number], trainer.oracles[number]
        state = _read(_written(compressor.state_dict()))
        if kind == "save":
            self._saved[number] = state, oracle.snapshot()
        elif kind == "load" and number in self._saved:
            state, snapshot = self._saved[number]
            compressor.load_state_dict(state)
            oracle.restore(snapshot)
            trainer.forget(number)
        elif kind == "load_now":
            compressor.load_state_dict(state)
        elif kind == "load_list":
            compressor.load_state_dict(self._of_all_ranks(number, state))
        elif kind == "load_other_size":
            states = self._of_all_ranks(number, state)
            # With Hierarchical, only the first rank of a host has a memory. Its states of another
            # number of ranks are tested elsewhere.
            if not isinstance(oracle.settings.communicator, dr.Hierarchical):
                states = self._of_another_size(number, states, oracle)
                trainer.forget(number)
            compressor.load_state_dict(states)
        elif kind == "restart":
            trainer.user.restart(number, state)
            for model in oracle.models.values():
                model.made = [False] * oracle.size

    def _of_all_ranks(self, number, state):
        """Return the states of all ranks of a compressor.

        hvd.allgather_object does not support process sets.
        """
        label, process_set = self._trainer.label, self._trainer.user.sets[number]
        data = torch.frombuffer(bytearray(_written(state)), dtype=torch.uint8)
        lengths = hvd.allgather(
            torch.tensor([data.numel()]), f"{label}.{number}.sizes", process_set=process_set
        )
        gathered = hvd.allgather(data, f"{label}.{number}.states", process_set=process_set)
        return [_read(piece.numpy().tobytes()) for piece in gathered.split(lengths.tolist())]

    def _of_another_size(self, number, states, oracle):
        """Return states as from one rank more or fewer.

        The oracle's memories become those that must follow from them.
        """
        sums = {
            one.name
            for part in self._trainer.program.parts
            # one rank alone shows only to an optimizer that it sums
            if part.compressor == number
            and part.op == "Sum"
            and not (len(states) == 1 and part.by_hand)
            for one in part.parameters
        }
        size = len(states)
        other = max(1, size + (1 if self._trainer.number % 2 else -1))
        order = [place % size for place in range(other)]
        for name, model in oracle.models.items():
            ratio = 1 if name in sums else size / other
            old = [model.states[place] for place in order]
            like = model.states[0]
            model.states = [_sum(old[place::size], like, ratio) for place in range(size)]
        return [
            {**states[old], "rank": place, "size": other} for place, old in enumerate(order)
        ]  # fmt: skip


def _sum(states, like, ratio):
    if not states:
        return tuple(np.zeros_like(part) for part in like)
    sums = (np.sum(parts, axis=0, dtype=np.float64) for parts in zip(*states))
    return tuple((total * ratio).astype(np.float32) for total in sums)


def _written(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _read(data):
    return torch.load(io.BytesIO(data), weights_only=True)
