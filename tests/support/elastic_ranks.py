"""A simulated job whose ranks join and leave, with the real keepers of memories."""

import warnings

import numpy as np
from threaded_ranks import Group, Lost, ThreadedTransport, on_all

from deepreduce_hvd.checkpoints import checkpoint
from deepreduce_hvd.checkpoints.configuration import Configuration
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.compared_settings import Setting, step_counters
from deepreduce_hvd.coordination.elastic import MemoryKeeper, save_together

SIZES = {"a": 3, "b": 1, "dense": None}
CONFIGURATION = Configuration(0x1234ABCD, {})


class Slot:
    """The slot of a parameter, with NumPy arrays."""

    follows_loss_scale = False

    def __init__(self, size):
        self.shape = () if size is None else (size,)
        self.state_names = () if size is None else ("residual",)
        self.steps = 0
        self.loss_scale = self.reduction = self.is_table = None
        self.residual = None if size is None else np.zeros(size, dtype=np.float32)

    def memory(self):
        return {} if self.residual is None else {"residual": self.residual.copy()}

    @staticmethod
    def numpy_of(value):
        return value

    def set_steps(self, steps):
        self.steps = steps

    def set_memory(self, arrays):
        if self.residual is not None:
            self.residual[...] = arrays["residual"]


class Worker:
    """A process with its adapter.

    ``model`` stands for the elastic state of a framework. It is the number of steps.
    """

    process_set = None
    configuration = CONFIGURATION
    number = 0
    agreed = True
    per_host = 1
    reduction = "sum"
    #: whether the state saves the model in ``sync``, as on TensorFlow, or only in ``save``
    saves_in_sync = True

    def __init__(self, seed, begins_at=0, transport=None):
        self.random = np.random.default_rng(seed)
        self.slots = {name: Slot(size) for name, size in SIZES.items()}
        self.adapter = self.compressor = self
        self.transport = transport
        self.host = object()  # a host of its own; workers with the same object share a host
        if begins_at:
            for slot in self.slots.values():
                slot.steps, slot.reduction = begins_at, self.reduction
            self.kept_in_a_step(self.random)
        self.keeper = MemoryKeeper(self, Lost)
        self.model = self.saved_model = begins_at

    # the session

    def state_dict(self):
        return checkpoint.dump(
            self.slots, self.configuration, self.transport.rank, self.transport.size
        )

    def follow_tables(self):
        self.tables = [name for name, slot in self.slots.items() if slot.is_table]

    def close_steps(self):
        pass

    def abandon(self):
        handshake.forget(self)

    def keeper_of(self, rank):
        return rank - rank % self.per_host

    def describe(self, with_steps):
        return [
            Setting("model", list(self.slots)),
            *([step_counters(self.slots)] if with_steps else []),
        ]

    # training

    def step(self):
        self.keeper.follow()
        self.model += 1
        for slot in self.slots.values():
            slot.steps += 1
            slot.reduction = self.reduction
        self.kept_in_a_step(self.random)

    def kept_in_a_step(self, random):
        for slot in self.slots.values():
            if slot.residual is not None:
                slot.residual += random.integers(-9, 10, slot.residual.size)

    def save(self):
        save_together([self.keeper])
        self.saved_model = self.model

    def synced(self, model):
        """Take the model of rank 0, as after ``sync`` of the keeper."""
        self.model = model
        if self.saves_in_sync:
            self.saved_model = model
            self.keeper.adopt()

    def restore(self):
        self.keeper.restore()
        self.model = self.saved_model

    @property
    def kept(self):
        return np.concatenate(
            [slot.residual for slot in self.slots.values() if slot.residual is not None]
        )


class Job:
    """Workers in the order of their ranks, and the update in their memories after each step."""

    def __init__(self, size, begins_at=0):
        """Form a job; its ranks have loaded a state of step ``begins_at`` unless that is 0."""
        self.moments = {}
        self.group = Group(size)
        self.workers = [
            Worker(seed, begins_at, ThreadedTransport(self.group, seed)) for seed in range(size)
        ]
        if begins_at:
            self.moments[begins_at] = self.kept()
            return
        self.expect_success("sync")

    def form(self, interrupted=()):
        self.group = Group(len(self.workers), interrupted)
        hosts = [worker.host for worker in self.workers]
        for rank, worker in enumerate(self.workers):
            worker.transport = ThreadedTransport(
                self.group, rank, local_size=hosts.count(worker.host)
            )

    def call(self, action, names=None):
        """Call an action of each worker or its keeper; ``names`` has one action per worker."""
        actions = names or [action] * len(self.workers)
        functions = [
            worker.keeper.sync if name == "sync" else getattr(worker, name)
            for worker, name in zip(self.workers, actions)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return on_all(self.group, functions)

    def expect_success(self, action):
        assert self.call(action) == [None] * len(self.workers)
        if action == "sync":
            for worker in self.workers:
                worker.synced(self.workers[0].model)

    def step(self, count=1):
        for _ in range(count):
            self.expect_success("step")
            self.moments[self.workers[0].model] = self.kept()

    def kept(self):
        combine = np.sum if Worker.reduction == "sum" else np.mean
        return combine([worker.kept for worker in self.workers], axis=0, dtype=np.float64)

    def expect_kept(self, expected):
        # sums of integers are exact; a ratio of numbers of ranks is rounded
        rounding = 0 if Worker.reduction == "sum" else 1e-6
        np.testing.assert_allclose(self.kept(), expected, rtol=rounding, atol=20 * rounding)

    def lose(self, *ranks):
        self.workers = [worker for rank, worker in enumerate(self.workers) if rank not in ranks]

    def fail(self):
        """Do what Horovod's elastic loop does after a failure."""
        for worker in self.workers:
            worker.restore()
        self.form()
        self.expect_success("sync")

    def expect_moment(self, steps):
        assert [worker.model for worker in self.workers] == [steps] * len(self.workers)
        self.expect_kept(self.moments[steps])
        assert {slot.steps for worker in self.workers for slot in worker.slots.values()} == {steps}
        self.step(2)  # and training continues from there
        self.expect_success("save")
        self.fail()
        self.expect_kept(self.moments[steps + 2])
