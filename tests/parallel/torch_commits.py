"""Test what an elastic state goes back to when a rank is lost in one of its calls.

Runs on stock Horovod with PyTorch, from torch_several.py. No rank is lost: a collective raises
Horovod's error on all ranks.
"""

from unittest import mock

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic import state as horovod_state
from torch_gradients_tools import expect
from torch_tools import backward, distributed, model

from deepreduce_hvd.coordination import memory_transfer


class _Trained:
    """Two models with a compressor each, in one elastic state with a commit at step 5.

    Args:
        models_first: whether the state is given its models before the compressors.
    """

    def __init__(self, models_first):
        self.networks = [model() for _ in range(2)]
        pairs = [distributed(network) for network in self.networks]
        self.optimizers = [optimizer for optimizer, _ in pairs]
        self.compressors = [compressor for _, compressor in pairs]
        models = {f"model{number}": one for number, one in enumerate(self.networks)}
        compressors = {f"compressor{number}": one for number, one in enumerate(self.compressors)}
        given = {**models, **compressors} if models_first else {**compressors, **models}
        self.state = hvd.elastic.TorchState(**given, step=0)
        self.state.sync()
        self.train_until(5)
        self.state.save()
        self.committed = self.snapshot()
        self.train_until(12)

    def train_until(self, last):
        for step in range(self.state.step, last):
            for network, optimizer in zip(self.networks, self.optimizers):
                optimizer.zero_grad()
                backward(network, step)
                optimizer.step()
        self.state.step = last

    def snapshot(self):
        values = {"step": torch.tensor(self.state.step)}
        for number, (network, compressor) in enumerate(zip(self.networks, self.compressors)):
            for name, value in network.state_dict().items():
                values[f"{name} of model {number}"] = value.clone()
            for name, one in compressor.state_dict()["parameters"].items():
                values[f"steps of {name} in compressor {number}"] = torch.tensor(one["steps"])
                for kind, part in one["memory"].items():
                    values[f"{kind} of {name} in compressor {number}"] = part.clone()
        return values

    def expect_commit(self, case):
        now = self.snapshot()
        other = [
            name for name, value in self.committed.items() if not torch.equal(now[name], value)
        ]
        expect(not other, f"{case}: expected all to be that of the commit, not", other)


def _lost_in_call(number, function):
    """Return a function like this one, but call ``number`` raises Horovod's error."""
    calls = iter(range(1, 100))

    def call(*arguments, **named):
        if next(calls) == number:
            raise HorovodInternalError("Connection closed by peer")
        return function(*arguments, **named)

    return call


def scenario_a_commit_that_fails_changes_nothing(directory):
    for models_first in (False, True):
        for number in (1, 2):  # in the part of which compressor
            job = _Trained(models_first)
            lost = _lost_in_call(number, memory_transfer.copy_of_other_rank)
            with mock.patch.object(memory_transfer, "copy_of_other_rank", lost):
                try:
                    job.state.commit()
                except HorovodInternalError:
                    job.state.restore()
            job.expect_commit(f"models first: {models_first}, compressor {number}")
            job.state.sync()
            job.expect_commit("after sync")


def scenario_a_sync_that_fails_keeps_the_commit(directory):
    for at in ("broadcast_parameters", "broadcast_object", "a step"):
        job = _Trained(models_first=False)
        lost = _lost_in_call(1, horovod_state.broadcast_parameters)
        try:
            if at == "broadcast_object":  # the last one, of ``step``
                with mock.patch.object(job.state, "_bcast_object", lost):
                    job.state.sync()
            elif at == "broadcast_parameters":
                with mock.patch.object(horovod_state, at, lost):
                    job.state.sync()
            else:
                job.state.sync()
                job.train_until(14)
                raise HorovodInternalError("Connection closed by peer")
        except HorovodInternalError:
            job.state.restore()
        job.expect_commit(at)
        job.state.sync()
        job.expect_commit(f"{at}, after sync")
