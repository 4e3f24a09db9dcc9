"""Check that nothing is lost.

The inputs must equal the results of optimizers plus what the memories of all ranks keep.
"""

import horovod.torch as hvd
import numpy as np
import torch
from own_stages import OwnResidual, Three, WithoutPutBack
from torch_model import dense

import deepreduce_hvd as dr

_EPSILON = 2.0**-24
_KEEP_ALL = (dr.Residual, OwnResidual, Three, WithoutPutBack)
#: maximum number of roundings to float32 of an element, per rank and step
_ROUNDINGS = 32


def keeps_all(memory):
    """Return whether the first array of a memory is everything that was not sent."""
    return isinstance(memory, _KEEP_ALL) or memory == dr.LowPass(1)


class Balance:
    """The balance of one compressor's parameters, in units of the unscaled loss.

    Args:
        trainer: the :class:`~torch_trainer.Trainer`.
        number: the number of the compressor.
    """

    def __init__(self, trainer, number):
        self.trainer = trainer
        self.number = number
        self.oracle = trainer.oracles[number]
        self.memory = self.oracle.settings.memory
        names = [name for name, model in self.oracle.models.items() if not model.dense]
        self._accounts = {name: _Account() for name in names}

    def forget(self):
        """Forget the balances after memories were replaced, until the next look."""
        for account in self._accounts.values():
            account.known = False

    def count(self, part, results, void):
        """Add the gradients of a step, and its ``results`` by name.

        Both are in units of the scaled loss.
        """
        trainer = self.trainer
        scale = trainer.program.steps[trainer.number].scale
        factor, _ = trainer.factor(part)
        for name in results.keys() & self._accounts.keys():
            account = self._accounts[name]
            if not void:
                gradients = [one.double().numpy() / scale for one in trainer.gradients_of(name)]
                arrived = dense(results[name]).double().numpy() / factor / scale
                states = self.oracle.models[name].states
                kept = [state[0] / np.float64(scale) for state in states if state]
                account.add(gradients, arrived, kept)
            elif not self.oracle.settings.loss_scale:
                account.known = False  # a void step loses what was sent, as documented

    def look(self):
        """Compare memories with those of the oracle, and what they keep with the balance."""
        trainer, oracle = self.trainer, self.oracle
        saved = trainer.user.compressors[self.number].state_dict()["parameters"]
        for name, model in oracle.models.items():
            self._compare(name, model, saved[name])
        names = list(self._accounts)
        flat = [part.view(-1) for name in names for part in saved[name]["memory"].values()]
        if not flat:
            return
        gathered = hvd.allgather(
            torch.cat(flat).view(1, -1), f"{trainer.label}.{self.number}.kept",
            process_set=trainer.user.sets[self.number],
        ).numpy()  # fmt: skip
        start = 0
        for name in names:
            model = oracle.models[name]
            arrays = []
            for _ in self.memory.state:
                arrays.append(gathered[:, start : start + model.d])
                start += model.d
            if not oracle.knows_sums:
                rows = range(oracle.size)
                model.states = [tuple(array[row].copy() for array in arrays) for row in rows]
            if keeps_all(self.memory):
                kept = arrays[0] / np.float64(model.loss_scale or 1.0)
                problem = self._accounts[name].check(kept, torch.finfo(model.dtype))
                trainer.expect(problem is None, name, problem)

    def _compare(self, name, model, saved):
        expect = self.trainer.expect
        steps = saved["steps"]
        expect(steps == model.steps, name, "is at step", steps, "not", model.steps)
        if model.dense:
            return
        same = saved["loss_scale"] == model.loss_scale
        expect(same, name, "follows loss scale", saved["loss_scale"], "not", model.loss_scale)
        if not self.oracle.knows_sums:
            return
        own = model.states[self.oracle.ranks.index(hvd.rank())]
        for (kind, got), wanted in zip(saved["memory"].items(), own, strict=True):
            got = got.view(-1).numpy()
            where = np.flatnonzero(got != wanted)
            expect(
                not where.size, name, kind, "at", where[:4], "is", got[where[:4]], "not",
                wanted[where[:4]], "as expected",
            )  # fmt: skip


class _Account:
    """The balance of one parameter."""

    def __init__(self):
        self.known = True
        self._balance = 0.0  # what memories must keep
        self._steps = 0
        self._largest = 0.0

    def add(self, gradients, arrived, kept):
        self._balance = self._balance + sum(gradients) - arrived
        self._steps += 1
        for part in (*gradients, arrived, *kept):
            self._largest = max(self._largest, np.abs(part).max(initial=0))

    def check(self, kept, info):
        """Return what is wrong with ``kept`` (ranks, d), or None.

        ``info`` is the finfo of the gradients' dtype.
        """
        total = kept.sum(axis=0)
        if not self.known:
            self.known, self._balance, self._steps = True, total, 0
            return None
        largest = max(self._largest, np.abs(kept).max(initial=0))
        roundings = _ROUNDINGS * _EPSILON * largest + info.eps * largest + info.tiny
        error = np.abs(self._balance - total)
        if (error <= len(kept) * (self._steps + 1) * roundings).all():
            return None
        return f"is out of balance by {error.max()} at {error.argmax()}; the largest is {largest}"
