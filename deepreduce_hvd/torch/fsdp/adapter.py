"""The adapter of a Compressor for PyTorch's fully_shard (FSDP2).

The parameters are sharded between the ranks of a host, which all have the same number of ranks.
PyTorch gathers parameters and reduce-scatters gradients there, uncompressed. Its all-reduce hook
then gets the shards of the host's average, and this adapter averages them between the hosts.
PyTorch's own hybrid sharding calls the hook after its all-reduce, so it is not used.
"""

import functools
import json
import weakref

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from deepreduce_hvd.adapters.base_adapter import ClosedAdapter
from deepreduce_hvd.checkpoints import sharded_checkpoint
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.coordination.compared_settings import Setting
from deepreduce_hvd.errors import InvalidArgumentError, PeerFailedError
from deepreduce_hvd.torch.ddp.base import DistributedAdapter, expect_unused
from deepreduce_hvd.torch.ddp.buckets import BucketJob
from deepreduce_hvd.torch.ddp.transport import DistributedTransport, ranks_and_timeout
from deepreduce_hvd.torch.fsdp.groups import (
    ParameterGroup,
    expect_no_pass_within_another,
    modules_and_groups,
    values_of_caller,
)
from deepreduce_hvd.torch.fsdp.unexchanged import UnexchangedShards
from deepreduce_hvd.torch.parameters import values_of


def register(compressor, model, mesh):
    """Implement :meth:`Compressor.register <deepreduce_hvd.Compressor.register>` for fully_shard.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        model: a module after fully_shard.
        mesh: the ranks of different hosts that have the same shard.
    """
    expect_unused(compressor)
    if compressor.schedule == "auto":
        raise InvalidArgumentError(
            "register: expected schedule=None or a Plan for a module after fully_shard, whose"
            " shards would get different plans, got 'auto'"
        )
    found = modules_and_groups(model)
    _check_meshes(mesh, found)
    groups = [group for _, group in found]
    _check_parameters(compressor.adapter.slots, groups)
    ranks = found[0][1].mesh_info.shard_process_group
    whole = compressor.adapter.slots
    adapter = FsdpAdapter(compressor, model, groups, mesh.get_group(), ranks)
    adapter.attach()
    for name, slot in adapter.slots.items():
        whole[name].successor = slot  # optimizers that were prepared before look at it
    for (module, _), group in zip(found, adapter.groups):
        module.set_all_reduce_hook(functools.partial(_average, adapter, group))


def _average(adapter, group, buffer):
    """Average the shards of a group between the hosts; the all-reduce hook of fully_shard."""
    parameters, group.divided_after = values_of_caller()
    # a closed compressor has another adapter
    adapter.compressor.adapter.average(group, parameters, buffer)


def _is_in_use(hook):
    """Return whether an all-reduce hook must stay; that of a closed compressor is replaced."""
    if isinstance(hook, functools.partial) and hook.func is _average:
        return not isinstance(hook.args[0].compressor.adapter, ClosedAdapter)
    return hook is not None


def _check_meshes(mesh, found):
    """Raise InvalidArgumentError for meshes that are not those of this module."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = type(mesh).__name__ if not isinstance(mesh, DeviceMesh) else f"{mesh.ndim} dimensions"
        raise InvalidArgumentError(
            "register: expected the one-dimensional DeviceMesh between hosts for a module after "
            f'fully_shard, such as mesh["hosts"], got {got}'
        )
    if not found:
        raise InvalidArgumentError("register: expected parameters in the module, got none")
    for _, group in found:
        if _is_in_use(group._all_reduce_hook):
            raise InvalidArgumentError(
                "register: expected a module without an all-reduce hook, got one that has a hook; "
                "fully_shard allows one; that of a compressor is free after its close()"
            )
        if isinstance(group.mesh_info, DDPMeshInfo):
            raise InvalidArgumentError(
                "register: expected fully_shard with the one-dimensional mesh of the ranks in a"
                " host, got one with a dimension of replicas, which PyTorch sums uncompressed"
                ' before its hook; call fully_shard(module, mesh=mesh["ranks"]) and'
                ' register(module, mesh["hosts"])'
            )
    shards = {
        tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
        for _, group in found
    }
    hosts = dist.get_process_group_ranks(mesh.get_group())
    if len(shards) > 1 or set(hosts) & set(*shards) != {dist.get_rank()}:
        raise InvalidArgumentError(
            "register: expected two dimensions of one mesh, which share only this rank "
            f"{dist.get_rank()}, got the ranks {hosts} between hosts and "
            f"{' and '.join(map(str, map(list, sorted(shards))))} in fully_shard"
        )


def _check_parameters(slots, groups):
    known = {id(slot.parameter) for slot in slots.values()}
    for parameter in (one for group in groups for one in group.fsdp_params):
        name = parameter._module_info.param_name
        if id(getattr(parameter, "_unsharded_param", None)) in known:
            raise InvalidArgumentError(
                f"register: expected shards, got a {name} that is whole since a forward pass; call"
                " reshard() on the network, and on each layer with reshard_after_forward=False,"
                " before you create the compressor and the optimizer"
            )
        if parameter.sharded_param.requires_grad and id(parameter.sharded_param) not in known:
            raise InvalidArgumentError(
                f"register: expected all trained parameters of the model, got none for a {name};"
                " create the compressor after fully_shard, with"
                " parameters=network.named_parameters()"
            )
        if parameter.is_dtensor:
            raise InvalidArgumentError(
                f"register: expected parameters that only fully_shard shards, got a {name} that was"
                " a DTensor before; tensor parallelism is not supported"
            )
        if parameter.device.type != "cpu":
            raise InvalidArgumentError(
                f"register: expected parameters on the host, got a {name} on {parameter.device},"
                " which is not supported yet; on GPUs, use DistributedDataParallel"
            )
    managed = {id(one.sharded_param) for group in groups for one in group.fsdp_params}
    others = [name for name, slot in slots.items() if id(slot.parameter) not in managed]
    if others:
        raise InvalidArgumentError(
            f"register: expected parameters that fully_shard manages, got also {', '.join(others)};"
            " leave out those in ignored_params= and of other models"
        )


class BetweenHosts(DistributedTransport):
    """The transport between ranks that are on different hosts."""

    local_size = 1


class _InHost:
    """The ranks of one host, for a handshake of their own.

    Args:
        adapter: the :class:`FsdpAdapter`.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self.compressor = adapter.compressor
        self.transport = adapter.ranks
        self.agreed = False

    def describe(self, with_steps):
        """Return the settings that do not depend on the shard."""
        slots, hosts = self._adapter.slots, self._adapter.transport.size
        lines = [f"{name} {tuple(slot.parameter.shape)}" for name, slot in slots.items()]
        # without the values of the parameters, which are those of the shard
        described = DistributedAdapter.describe(self._adapter, with_steps)
        return [
            Setting("number of hosts", str(hosts)),
            *(one for one in described if one.name not in _OF_A_SHARD),
            Setting("parameters", lines),
        ]


#: settings that differ between the shards of a host
_OF_A_SHARD = ("shard", "parameters", "embedding tables")
_OTHER_VALUES = (
    "{ranks} registered other values of the parameters than the first host; all hosts must train"
    " the same model, so set a seed before the model is created, or load the same checkpoint on all"
    " hosts; if you load it after this, nothing is wrong"
)


class FsdpAdapter(DistributedAdapter):
    """The side of one Compressor with fully_shard.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        model: the module that is registered.
        groups: PyTorch's parameter groups.
        hosts: process group of the ranks that have the same shard.
        ranks: process group of the ranks of this host.

    Attributes:
        groups: the :class:`~deepreduce_hvd.torch.fsdp.groups.ParameterGroup` of each parameter
            group.
        ranks: transport between the ranks of this host.
        discards: the :class:`~deepreduce_hvd.torch.discards.Discards` of its parameters, or None.
    """

    def __init__(self, compressor, model, groups, hosts, ranks):
        self.discards = None
        self._model = weakref.ref(model)
        whole = compressor.adapter.slots
        by_parameter = {id(slot.parameter): slot for slot in whole.values()}
        self.groups = [ParameterGroup(group, by_parameter) for group in groups]
        sharded = {slot.name: slot for group in self.groups for slot in group.slots}
        between = BetweenHosts(*ranks_and_timeout(hosts))
        slots = {name: sharded[name] for name in whole if name in sharded}
        self.ranks = DistributedTransport(*ranks_and_timeout(ranks))
        super().__init__(compressor, between, slots)

    def attach(self):
        super().attach()
        groups = [group.of_pytorch for group in self.groups]
        self._unexchanged = UnexchangedShards(
            self._model, groups, self.ranks.ranks, self.transport.size
        )

    @property
    def speaks(self):
        return super().speaks and self.ranks.rank == 0

    def agree(self):
        try:
            handshake.agree(_InHost(self))
        except Exception as error:
            self.transport.announce(error)  # the other hosts wait for this rank
            raise
        super().agree()

    def framework_settings(self):
        """Return how fully_shard was called, which must be equal on all hosts."""
        return [
            Setting("shard", f"{self.ranks.rank} of {self.ranks.size}"),
            Setting(
                "parameter groups",
                [
                    ", ".join(
                        f"{slot.name} {tuple(slot.parameter.shape)} by dimension {slot.dim}"
                        for slot in group.slots
                    )
                    for group in self.groups
                ],
            ),
        ]

    def describe(self, with_steps):
        shards = {name: slot.parameter.to_local() for name, slot in self.slots.items()}
        return [*super().describe(with_steps), values_of(shards, self.transport, _OTHER_VALUES)]

    # --- one buffer ---

    def average(self, group, parameters, buffer):
        """Replace the shards in a buffer by their averages over the hosts.

        The results may come after this returns, until the end of the backward pass. Errors are
        raised there, on all ranks.

        Args:
            group: the :class:`~deepreduce_hvd.torch.fsdp.groups.ParameterGroup`.
            parameters: PyTorch's descriptions of the parameters whose shards are in the buffer.
            buffer: (n,) tensor.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            raise InvalidArgumentError(
                "fully_shard: expected gradients that are reduced in a backward pass, got some that"
                " are reduced after it, as PipelineStage of torch.distributed.pipelining does;"
                " pipeline parallelism is not supported"
            )
        backward_pass = self._pass
        if backward_pass is None or backward_pass.task != task:
            backward_pass = self._begin(task)
        # PyTorch ends each root module at the end of the pass, and gradients of one can come after
        # the end of another
        if backward_pass.ended:
            backward_pass.ended = False
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(self._end_backward, backward_pass))
        late = group.may_come_late(parameters, buffer)
        job = BucketJob(self, backward_pass, buffer, group.divisor)

        def shards():
            expect_no_pass_within_another()
            group.expect_registered_parameters()
            slots, gradients = group.shards(parameters, buffer, backward_pass.loss_scale)
            if self.discards is not None:
                for slot in slots:
                    self.discards.made(slot)
            return slots, gradients

        self._start(backward_pass, job, shards)
        if not late:
            job.ended.wait()

    def _end_backward(self, backward_pass):
        """Wait for all results so far; raise the error of any rank of this host."""
        backward_pass.ended = True
        error = backward_pass.end()
        try:
            self._tell_host(error)
        except PeerFailedError:
            if error is None:
                raise
        if error is not None:
            raise error
        for slot in () if self.alone else backward_pass.slots:
            self.look_for_discarded(slot, self)
        self.agree_on_tables()

    def _tell_host(self, error):
        """Tell the other ranks of this host how the pass ended, and receive their outcomes.

        They have other shards, whose exchanges know nothing of this one's. A gradient has NaN or
        Inf if one of its shards has.

        Args:
            error: error of this rank, or None.

        Raises:
            PeerFailedError: a rank has an error.
        """
        if self.ranks.size == 1:
            return
        ended = {
            "void": [slot.name for slot in self.slots.values() if slot.void],
            "error": None if error is None else wire.describe(error),
        }
        line = np.frombuffer(json.dumps(ended).encode() + b"\n", np.uint8)
        name = collective_name(self.compressor.number, "end of backward pass")
        lines = bytes(self.ranks.wait(self.ranks.allgather(line, name))).splitlines()
        everyone = [json.loads(line) for line in lines]
        for slot_name in {slot_name for one in everyone for slot_name in one["void"]}:
            self.slots[slot_name].void = True
        failures = [
            f"rank {rank}: {one['error']}"
            for rank, one in zip(self.ranks.ranks, everyone)
            if one["error"] is not None
        ]
        if failures:
            raise PeerFailedError("; ".join(failures))

    # --- state ---

    def close(self):
        super().close()
        self._unexchanged.close()
        self.ranks.close()

    def state_dict(self):
        self.warn_if_in_step()
        self.close_steps()
        return sharded_checkpoint.dump(
            self.slots, self.compressor.configuration, self.transport, self.ranks
        )

    def load_state_dict(self, state):
        self.close_steps()
        sharded_checkpoint.load(
            self.slots,
            state,
            self.compressor.configuration,
            self.transport,
            self.ranks,
            self.keeper_of,
        )
        self.follow_tables()
