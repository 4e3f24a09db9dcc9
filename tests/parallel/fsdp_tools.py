"""Shared by the workers for fully_shard: sharded models, and the oracle of hosts and shards."""

import copy
import functools
import traceback

import numpy as np
import torch
import torch.distributed as dist
from ddp_tools import Oracle, batch, sums_densely
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import deepreduce_hvd as dr

#: ways to call fully_shard: names of the modules of each call; "" is the whole network
WHOLE = [[""]]
LAYERS = [["convolution"], ["first"], ["last"], [""]]  # the branch is in the group of the whole
TOGETHER = [["first", "last"], [""]]


@functools.cache
def meshes(hosts):
    """Return the mesh of all ranks, (hosts, ranks)."""
    size = dist.get_world_size() // hosts
    return init_device_mesh("cpu", (hosts, size), mesh_dim_names=("hosts", "ranks"))


def shard(network, mesh, calls=LAYERS, **options):
    """Call fully_shard on the modules of each call."""
    for names in calls:
        modules = [network.get_submodule(name) for name in names]
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **options)


def sharded(network, mesh, codec=None, memory=None, calls=LAYERS, policy=None, **options):
    """Shard a network and return its compressor."""
    shard(network, mesh["ranks"], calls, mp_policy=policy or MixedPrecisionPolicy())
    settings = {"dense_below": 200, **options}
    compressor = dr.Compressor(
        codec or dr.Codec(dr.TopK(0.05)), memory, parameters=network.named_parameters(), **settings
    )
    compressor.register(network, mesh["hosts"])
    return compressor


def loss_of(network, step, rank, branch=True, dtype=torch.float32):
    return network(batch(step, rank, dtype), branch).float().pow(2).mean()


class Reference:
    """The network without fully_shard, with the current parameters of the ranks.

    Args:
        policy: MixedPrecisionPolicy of the sharded network.
    """

    def __init__(self, network, policy=None):
        self._network = copy.deepcopy(network)
        policy = policy or MixedPrecisionPolicy()
        dtype = next(network.parameters()).dtype
        self._dtype = policy.param_dtype or dtype
        self._reduce_dtype = policy.reduce_dtype or self._dtype

    def follow(self, sharded_network):
        """Copy the parameters of the sharded network. All ranks call this."""
        own = dict(self._network.named_parameters())
        with torch.no_grad():
            for name, parameter in sharded_network.named_parameters():
                own[name].copy_(parameter.full_tensor())

    def gradients(self, step, rank, branch=True, factor=1.0):
        """Return {name: gradient} of one batch of a rank, before they are reduced."""
        network = copy.deepcopy(self._network).to(self._dtype)
        (loss_of(network, step, rank, branch, self._dtype) * factor).backward()
        return {name: one.grad for name, one in network.named_parameters()}

    def accumulated(self, batches):
        """Return the sum of gradients in the dtype in which fully_shard adds them."""
        total = {
            name: None if one is None else one.to(self._reduce_dtype, copy=True)
            for name, one in batches[0].items()
        }
        for other in batches[1:]:
            for name, one in other.items():
                if one is not None:
                    total[name] += one
        return total

    def on_hosts(self, gradients, mesh):
        """Return, for each host, {name: this rank's shard of the host's average}.

        Args:
            gradients: {name: gradient} of each rank.
            mesh: the mesh of all ranks; from three ranks in a host on, sums depend on the order.
        """
        hosts, ranks = mesh.shape
        place = mesh.get_local_rank("ranks")
        result = []
        for host in range(hosts):
            mine = gradients[host * ranks : (host + 1) * ranks]
            means = {}
            for name in mine[0]:
                if mine[0][name] is None:
                    continue
                if self._reduce_dtype in (torch.float32, torch.bfloat16):
                    mean = sum(one[name] for one in mine) / ranks
                else:  # divided before, up to two ranks
                    mean = sum(one[name] / ranks for one in mine)
                parts = torch.chunk(mean, ranks)
                means[name] = parts[place] if place < len(parts) else mean[:0]
            result.append(means)
        return result


class ShardOracle(Oracle):
    """Simulates the ranks that hold the same shard.

    Args:
        compressor: this rank's compressor.
        network: the sharded network.
        mesh: the mesh of all ranks.
        dtype: dtype in which gradients are reduced.
    """

    leaves_out = False

    def __init__(self, compressor, network, mesh, dtype=torch.float32):
        self._dtype = dtype
        super().__init__(compressor, network)
        self.size, self.rank = mesh["hosts"].size(), mesh.get_local_rank("hosts")
        self.state = [copy.deepcopy(self.state[0]) for _ in range(self.size)]
        self._steps = dict.fromkeys(self._parameters, 0)

    def _parameters_of(self, network):
        return {
            name: torch.zeros(parameter.to_local().shape, dtype=self._dtype)
            for name, parameter in network.named_parameters()
        }

    def _watch(self, compressor):
        average = compressor.adapter.average
        names = {id(slot.parameter): slot.name for slot in compressor.adapter.slots.values()}

        def watched(group, parameters, buffer):
            if group.exchanges:
                self._buckets.append([names[id(one.sharded_param)] for one in parameters])
            average(group, parameters, buffer)

        compressor.adapter.average = watched

    def mean(self, gradients):
        empty = [name for name, one in self._parameters.items() if not one.numel()]
        self._buckets = [[name for name in names if name not in empty] for names in self._buckets]
        return super().mean(gradients)

    def _exchange(self, policy, communicator, names, gradients):
        self.step = self._steps[names[0]]
        for name in names:
            self._steps[name] += 1
        return super()._exchange(policy, communicator, names, gradients)

    def compare(self, compressor, network, gradients, what, earlier=None):
        """Check gradients, memories and payloads of this rank after a backward pass.

        Args:
            compressor: this rank's compressor.
            network: the sharded network.
            gradients: for each host, {name: shard, or None for zeros that backward did not
                compute}.
            what: text for a failure.
            earlier: {name: gradient before this pass}.

        Returns:
            {name: gradient} after this pass.
        """
        expected, result = self.mean(gradients), {}
        for name, parameter in network.named_parameters():
            where = f"{what}, {name}"
            if parameter.grad is None:
                assert name not in expected, f"{where}: no gradient"
                continue
            found = parameter.grad.to_local()
            result[name] = found.clone()
            if not found.numel():
                continue
            wanted = expected[name].to(found.dtype)
            if earlier and name in earlier:
                wanted = earlier[name] + wanted
            policy = self._layout.policies[name]
            if self.size == 1:  # one host: its own sums depend on the order of its ranks
                near = 8 * torch.finfo(self._dtype).eps
                largest = float(wanted.abs().max())
                torch.testing.assert_close(found, wanted, msg=where, rtol=near, atol=near * largest)
                continue
            if self.size > 2 and (policy.dense or sums_densely(self._communicator(name))):
                tolerance = max(2e-3, 2 * torch.finfo(self._dtype).eps) if policy.dense else 1e-5
                torch.testing.assert_close(found, wanted, msg=where, rtol=tolerance, atol=1e-5)
                continue
            assert torch.equal(found, wanted), f"{where}: {(found - wanted).abs().max()} apart"
            if not policy.dense:
                self._compare_state(compressor.adapter.slots[name], where)
        return result

    def _compare_state(self, slot, where):
        for kind, mine in zip(slot.state_names, self.state[self.rank][slot.name]):
            kept = slot.memory()[kind].reshape(-1).numpy()
            np.testing.assert_array_equal(kept, mine, err_msg=f"{where}, {kind}")
        payload = self.payloads[slot.name]
        if payload is not None:
            np.testing.assert_array_equal(slot.payload.numpy(), payload, err_msg=where)


def expect_on_all_ranks(check):
    """Run a check; raise on all ranks if it fails on any.

    So no rank waits for the others.
    """
    try:
        check()
        found = None
    except Exception:
        found = traceback.format_exc()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if any(everywhere):
        raise AssertionError(next(filter(None, everywhere)))
