"""The transport over torch.distributed, on the host, and with NCCL also on a GPU.

torch.distributed matches collectives by their order, not by their names. So a collective is only
described when it is created, and runs when its result is requested. Whoever requests the results
must do so in the same order on all ranks: see :mod:`deepreduce_hvd.communicators.driver`.

Before the data of a collective, all ranks gather a head of fixed size: a checksum of the name, the
sizes of the data, and whether the rank has failed. So ranks that are at different collectives, and
ranks that cannot continue, are found before anything can hang. Heads always go through the host.

Collectives use PyTorch's memory, not NumPy's. A Gloo thread may be the last owner, and releasing
NumPy's memory would make it wait for the interpreter lock.
"""

import contextlib
import hashlib
import itertools
import math
import os
import re
import socket
import time
import weakref
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.communicators.wire import describe
from deepreduce_hvd.errors import InvalidArgumentError, PeerFailedError
from deepreduce_hvd.torch.ddp.device_group import DeviceGroup
from deepreduce_hvd.torch.ddp.failures import describe_failure

_HOST = torch.device("cpu")  # independent of the default device
_HEAD_FIELDS = 2  # checksum of the name, length of a failure's text; the sizes follow
_NAME_BYTES = 256
_TEXT_BYTES = 2000
#: maximum time in seconds to tell the other ranks about a failure
_ANNOUNCE_SECONDS = 5.0
_PAUSE_SECONDS = 1e-3
#: what :mod:`~deepreduce_hvd.torch.ddp.buckets` adds to names
_LOSS_SCALE = re.compile(r"\.loss scale \d+(\.\d+)?(e[+-]?\d+)?")
#: a gather is padded to equal sizes if that makes it at most this many times as large
_MOST_PADDING = 2
#: {numbers of the members, as text: number of groups so far}; a store may outlive its job, so that
#: a name must not occur again
_groups_of: dict[str, int] = {}


class Collective(NamedTuple):
    """A collective that runs when its result is requested.

    Attributes:
        name: its name, equal on all ranks.
        result: function that runs it and returns its result.
    """

    name: str
    result: Callable[[], Any]


class DistributedTransport(Transport):
    """The transport between the ranks of one process group of torch.distributed.

    It has a process group of its own, so that its collectives are never mixed with those of others.
    All ranks create the transport together.

    Args:
        ranks: numbers of the ranks in the job.
        timeout: time limit of each collective, also in the groups of :meth:`by_host`.
    """

    process_set = None
    merges_sums = False

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self._ranks = ranks
        self._timeout = timeout
        self._group = _new_group(ranks, timeout)
        self._device_group: Any = None  # a DeviceGroup, once there is one
        self._hosts: list[str] = []  # name of the host of each rank
        self._by_host: dict[int, tuple[DistributedTransport, DistributedTransport | None]] = {}

    @property
    def ranks(self):
        return list(self._ranks)

    @property
    def local_size(self):  # type: ignore[override]  # raises if hosts have different numbers
        """The number of consecutive ranks on each host, after :meth:`find_hosts`."""
        runs = [len(list(run)) for _, run in itertools.groupby(self._hosts)]
        if len(set(runs)) > 1 or len(runs) > len(set(self._hosts)):
            places = ", ".join(
                f"rank {rank} on {host}" for rank, host in zip(self._ranks, self._hosts)
            )
            raise InvalidArgumentError(
                "Hierarchical: expected the same number of consecutive ranks on each host, got"
                f" {places}; use another communicator, or set ranks_per_host="
            )
        return runs[0]

    def find_hosts(self, name):
        """Learn which ranks are on the same host; called by all ranks together.

        What the launcher tells counts all ranks of the job, but a process group may have some of
        them.
        """
        line = np.frombuffer(f"{_this_host()}\n".encode(errors="backslashreplace"), np.uint8)
        lines = bytes(self.wait(self.allgather(line, name)))
        self._hosts = lines.decode().splitlines()

    @property
    def head_bytes(self):
        """The size in bytes of the head that a rank sends before each collective."""
        return 8 * (_HEAD_FIELDS + self.size)

    def use_device(self, device):
        """Create the NCCL communicator for tensors on a GPU; called by all ranks together.

        From then on, :meth:`allgather` and :meth:`allreduce_in_place` take such tensors. Their
        collectives are ordered on the stream that is current in ``wait``, which does not wait for
        the GPU.
        """
        store, place = _store_and_place(self._ranks)
        self._device_group = DeviceGroup(store, place, self.size, self._timeout, device)
        self._end_device_group = weakref.finalize(self, self._device_group.end)

    def allgather(self, array, name):
        return Collective(name, lambda: self._allgather(array, name))

    def alltoall(self, parts, name):
        return Collective(name, lambda: self._alltoall(parts, name))

    def broadcast(self, array, root, name):
        return Collective(name, lambda: self._broadcast(array, root, name))

    def allreduce(self, array, name):
        return Collective(name, lambda: self._allreduce(array, f"{name}.{array.size}"))

    def allreduce_in_place(self, array, name):
        """Describe a sum in the memory of a tensor. Of a NumPy array, a copy is summed."""
        return Collective(name, lambda: self._sum(array, f"{name}.{math.prod(array.shape)}"))

    def meet(self, name):
        """Describe a collective without data: the ranks get the error of one that has failed."""
        return Collective(name, lambda: self._heads(name, []))

    def any(self, flag, name):
        """Describe a collective that tells whether any rank gives True; heads suffice for it."""
        return Collective(name, lambda: bool(self._heads(name, [int(flag)]).any()))

    def test(self, handle):
        return True

    def wait(self, handle):
        if not isinstance(handle, Collective):  # work of this rank alone
            return handle.result()
        try:
            return handle.result()
        # a rank that is alive has told its own error; the others do not know of this one yet
        except (PeerFailedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise PeerFailedError(
                f"{handle.name}: expected {self.size} ranks to continue, {describe_failure(error)}"
            ) from error

    def by_host(self, ranks_per_host):
        count = self.local_size if ranks_per_host is None else ranks_per_host
        if count not in self._by_host:
            if self.size % count:
                raise InvalidArgumentError(
                    f"Hierarchical: expected hosts with {count} ranks each, got {self.size} ranks"
                )
            first = self.rank - self.rank % count
            within = DistributedTransport(self._ranks[first : first + count], self._timeout)
            across = None
            if first == self.rank:
                across = DistributedTransport(self._ranks[::count], self._timeout)
            self._by_host[count] = within, across
        return self._by_host[count]

    def close(self):
        """Free the process groups; the transport cannot be used after this."""
        self.reset()
        if self._device_group is not None:
            self._end_device_group()
        self._group = self._device_group = None

    def reset(self):
        """Forget the groups of :meth:`by_host`."""
        self._by_host.clear()

    def announce(self, error: Exception) -> None:
        """Tell the other ranks, in place of the next collective, that this rank cannot continue.

        Return after a few seconds if not all ranks start another collective.
        """
        text = describe(error).encode(errors="backslashreplace")[:_TEXT_BYTES]
        deadline = time.monotonic() + _ANNOUNCE_SECONDS
        with contextlib.suppress(RuntimeError):  # the others are gone
            heads = self._gather_heads("", [0], text, deadline)
            if heads is not None:
                self._gather_padded(np.frombuffer(text, np.uint8), heads[:, 1], deadline)

    # --- collectives, which run at once ---

    def _heads(self, name, sizes):
        """Gather the heads of all ranks.

        Args:
            name: the collective's name.
            sizes: up to P numbers.

        Returns:
            The numbers of all ranks, (P, P) int64, zeros where a rank gave fewer.
        """
        heads = self._gather_heads(name, sizes)
        if heads[:, 1].any():
            texts = self._gather_padded(np.zeros(0, np.uint8), heads[:, 1])
            failures = [
                f"rank {rank}: {bytes(text).decode(errors='replace')}"
                for rank, text in zip(self._ranks, texts)
                if text.size
            ]
            raise PeerFailedError("; ".join(failures))
        if (heads[:, 0] != heads[0, 0]).any():
            self._refuse(name)
        return heads[:, _HEAD_FIELDS:]

    def _gather_heads(self, name, sizes, failure=b"", deadline=None):
        missing = self.size - len(sizes)
        fields = [zlib.crc32(name.encode()), len(failure), *sizes, *[0] * missing]
        head = torch.tensor(fields, device=_HOST)
        return self._gather_equal(head, deadline)

    def _gather_equal(self, own, deadline=None):
        """Gather tensors of equal length.

        Returns:
            (P, n) NumPy, or None if that takes until the deadline.
        """
        gathered = torch.empty((self.size, own.numel()), dtype=own.dtype, device=_HOST)
        work = self._group.allgather([list(gathered)], [own])
        while deadline is not None and not work.is_completed():
            if time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_SECONDS)
        work.wait()
        return gathered.numpy()

    def _refuse(self, name):
        own = _padded(np.frombuffer(name.encode()[:_NAME_BYTES], dtype=np.uint8), _NAME_BYTES)
        names = [
            bytes(row).rstrip(b"\0").decode(errors="replace") for row in self._gather_equal(own)
        ]
        shown = "; ".join(f"{name} on rank {rank}" for rank, name in zip(self._ranks, names))
        # long names have lost their ends
        if len(set(names)) > 1 == len({_LOSS_SCALE.sub("", name) for name in names}):
            raise InvalidArgumentError(
                f"expected the same loss scale on every rank, got {shown}; in join(), the scale"
                " must not change, because a rank without batches does not call update() of its"
                " GradScaler"
            )
        raise InvalidArgumentError(
            f"expected the same gradients in the same step on every rank, got {shown}; give every"
            " rank the same model and settings, and the same number of backward passes that"
            " synchronize"
        )

    def _gather_padded(self, array, sizes, deadline=None):
        """Gather (n,) uint8 arrays of ``sizes``.

        Returns:
            A list in rank order; None after the deadline.
        """
        rows = self._gather_equal(_padded(array, int(sizes.max())), deadline)
        return None if rows is None else [row[:size] for row, size in zip(rows, sizes)]

    def _gather_bytes(self, array, sizes):
        """Gather (n,) uint8 arrays of ``sizes``, one after another in rank order."""
        largest, total = int(sizes.max()), int(sizes.sum())
        if self.size * largest <= _MOST_PADDING * total:
            return np.concatenate(self._gather_padded(array, sizes))
        out = torch.empty(total, dtype=torch.uint8, device=_HOST)
        parts = out.split(sizes.tolist())
        parts[self.rank].numpy()[:] = array
        for rank, part in enumerate(parts):
            if part.numel():
                self._group.broadcast(part, rank).wait()
        return out.numpy()

    def _allgather(self, array, name):
        if isinstance(array, torch.Tensor):
            sizes = self._heads(name, [array.numel()])[:, 0]
            return self._device_group.allgather(array, sizes)
        sizes = self._heads(name, [array.size])[:, 0]
        return self._gather_bytes(array, sizes)

    def _alltoall(self, parts, name):
        received = self._heads(name, [part.size for part in parts])[:, self.rank]
        out = torch.empty(int(received.sum()), dtype=torch.uint8, device=_HOST)
        self._group.alltoall_base(
            out,
            torch.tensor(np.concatenate(parts), device=_HOST),
            received.tolist(),
            [part.size for part in parts],
        ).wait()
        return np.split(out.numpy(), np.cumsum(received)[:-1])

    def _broadcast(self, array, root, name):
        size = int(self._heads(name, [0 if array is None else array.size])[root, 0])
        out = (
            torch.empty(size, dtype=torch.uint8, device=_HOST)
            if array is None
            else torch.tensor(array, device=_HOST)
        )
        self._group.broadcast(out, root).wait()
        return out.numpy()

    def _allreduce(self, array, name):
        return self._sum(torch.tensor(array, device=_HOST), name)

    def _sum(self, array, name):
        out = array if isinstance(array, torch.Tensor) else torch.tensor(array, device=_HOST)
        self._heads(name, [out.numel()])
        if out.is_cuda:
            self._device_group.allreduce(out)
            return out
        self._group.allreduce(out).wait()
        return out.numpy()


def _this_host():
    """Return a name of this host. One machine may run several nodes of torchrun, for tests."""
    node = os.environ.get("GROUP_RANK")  # set by torchrun
    return socket.gethostname() if node is None else f"node {node}"


def ranks_and_timeout(group: dist.ProcessGroup) -> tuple[list[int], timedelta]:
    """Return the ranks of a process group, and the timeout of one of its backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    # not all backends have options
    options = [one.options for one in backends if getattr(one, "options", None) is not None]
    timeout = options[0]._timeout if options else dist.default_pg_timeout
    return dist.get_process_group_ranks(group), timeout


def _new_group(ranks, timeout):
    """Create a process group on the host; called by its members, in the same order.

    It is not one of torch.distributed's own: those have names that depend on how many groups a rank
    has, which may differ between the members, and they stay until the program destroys them.
    """
    try:
        store, place = _store_and_place(ranks)
        return dist.ProcessGroupGloo(store, place, len(ranks), timeout)
    except RuntimeError as error:
        raise PeerFailedError(
            f"new process group: expected all {len(ranks)} ranks of the model to call register, "
            f"{describe_failure(error)}"
        ) from error


def _store_and_place(ranks):
    """Return the store of a new process group, and the place of this rank in it."""
    members = ",".join(map(str, ranks))
    number = _groups_of[members] = _groups_of.get(members, 0) + 1
    name = f"deepreduce/{hashlib.sha256(members.encode()).hexdigest()}/{number}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return store, ranks.index(dist.get_rank())


def _padded(array, size):
    """Return a tensor with an array of bytes and zeros behind it."""
    padded = torch.zeros(size, dtype=torch.uint8, device=_HOST)
    padded.numpy()[: array.size] = array
    return padded
