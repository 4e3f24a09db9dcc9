"""Test communicators and buckets on stock Horovod with PyTorch.

Started by test_torch_communicators.py under horovodrun.
"""

import itertools
import sys
import zlib

import horovod.torch as hvd
import numpy as np
import sparse_vectors
import torch
from scenario_runner import refused
from torch_tools import (
    assert_equal_everywhere,
    backward,
    gradients,
    local_gradients,
    model,
    run_all,
    sum_over_ranks,
)

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.torch.transport import HorovodTransport

hvd.init()  # the schemes below depend on the number of ranks
COMMUNICATORS = [
    dr.Allgather(), dr.SplitAllgather(), dr.SplitAllgather(dense=None), dr.SplitAllgather(dense=2),
    dr.RecursiveDoubling(),
    dr.GTopK(), dr.GTopK(form="tree"), dr.CLTK(), dr.SharedRandomK(), dr.Auto(),
]  # fmt: skip
#: hosts of two ranks; three ranks are one host
HIERARCHICAL = [
    dr.Hierarchical(dr.Allgather(), 3 if hvd.size() == 3 else 2),
    dr.Hierarchical(dr.RecursiveDoubling(), 1),
]
BUCKETS = [0, 10_000, 1 << 30]
BELOW = 50


def codec_for(communicator, *stages):
    return dr.Codec(
        dr.RandomK(0.1) if communicator == dr.SharedRandomK() else dr.TopK(0.1), *stages
    )


def distributed(network, communicator, codec, prefix="", dense_below=BELOW, **options):
    named = [(prefix + name, parameter) for name, parameter in network.named_parameters()]
    compressor = dr.Compressor(
        codec, communicator=communicator, parameters=named, dense_below=dense_below, **options
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=compressor
    ), compressor


def scenario_sparse_vectors(directory):
    """Test dr.sparse_allreduce.

    This is the first scenario, so that no compressor exists yet.
    """
    sparse_vectors.check(hvd, torch.tensor, torch.Tensor.numpy)
    rank, size = hvd.rank(), hvd.size()
    alone = hvd.add_process_set([size - 1])
    found = sparse_vectors.given(rank)
    if rank == size - 1:
        indices, values, *_ = dr.sparse_allreduce(*found, sparse_vectors.D, process_set=alone)
        order = np.argsort(found[0])
        np.testing.assert_array_equal(indices, found[0][order])
        np.testing.assert_array_equal(values, found[1][order])
    else:
        try:
            dr.sparse_allreduce(*found, sparse_vectors.D, process_set=alone)
        except dr.InvalidArgumentError as error:
            assert "expected one with this rank" in str(error), error
        else:
            raise AssertionError("a rank outside of the process set took part")
    # several sums are in flight, and ranks wait for them in different orders
    communicators = dr.RecursiveDoubling(), dr.Auto(), dr.Auto()
    handles = {
        name: dr.sparse_allreduce_async(
            *sparse_vectors.given(rank, seed), sparse_vectors.D, hvd.Sum, name,
            communicator=communicators[seed],
        )
        for seed, name in enumerate("abc")
    }  # fmt: skip
    try:
        dr.sparse_allreduce_async(*found, sparse_vectors.D, name="b")
    except dr.InvalidArgumentError as error:
        assert "expected a name that no sum in flight has, got 'b'" in str(error), error
    else:
        raise AssertionError("two sums of one name in flight")
    for name in sorted(handles, reverse=rank % 2 == 1):
        indices, values, *_ = handles[name].wait()
        assert handles[name].poll()
        expected = sparse_vectors.dense_sum(size, "abc".index(name))
        np.testing.assert_array_equal(indices, np.flatnonzero(expected))
        np.testing.assert_allclose(values, expected[indices], rtol=1e-5, atol=1e-6)


def scenario_equal_parameters_and_nothing_lost(directory):
    for number, (communicator, bucket_bytes) in enumerate(
        itertools.product(COMMUNICATORS + HIERARCHICAL, BUCKETS[:2])
    ):
        network = model()
        codec = codec_for(communicator, dr.Rice(), dr.QSGD(bits=4))
        optimizer, compressor = distributed(network, communicator, codec, bucket_bytes=bucket_bytes)
        came_in, arrived = {}, {}
        for step in range(2):
            network.zero_grad()
            before = local_gradients(network, step, hvd.rank())
            backward(network, step)
            optimizer.synchronize()
            for name, gradient in gradients(network):
                came_in[name] = came_in.get(name, 0) + before[name].double()
                arrived[name] = arrived.get(name, 0) + gradient.double()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert_equal_everywhere(
                network.named_parameters(), f"{communicator} {bucket_bytes} step {step}"
            )
        for name, state in compressor.state_dict()["parameters"].items():
            kept = state["memory"].get("residual", torch.zeros(came_in[name].numel()))
            total_in = sum_over_ranks(came_in[name].view(-1), f"in.{number}.{name}")
            total = arrived[name].view(-1) * hvd.size() + sum_over_ranks(
                kept, f"kept.{number}.{name}"
            )
            torch.testing.assert_close(
                total,
                total_in,
                rtol=0,
                atol=1e-5 * float(total_in.abs().max()),
                msg=f"{communicator} {name}",
            )


def scenario_horovod_does_what_the_simulator_does(directory):
    """The results equal those of the simulator, except for the order of Horovod's own sums.

    The simulator equals the oracles (tests/test_communicators.py).
    """
    for communicator in COMMUNICATORS:
        if isinstance(communicator, dr.Auto):  # it measures, and then uses one of the others
            continue
        network = model()
        codec = codec_for(communicator, dr.Rice(), dr.QSGD(bits=4))
        optimizer, compressor = distributed(network, communicator, codec, bucket_bytes=1 << 30)
        buckets = []
        for rank in range(hvd.size()):
            members = []
            for name, gradient in reversed(local_gradients(network, 0, rank).items()):
                if gradient.numel() >= BELOW:
                    state = (np.zeros(gradient.numel(), dtype=np.float32),)
                    members.append(
                        BucketMember(
                            name, gradient.reshape(-1).numpy(), state, zlib.crc32(name.encode())
                        )
                    )
            buckets.append(Bucket(codec, dr.Residual(), members, rank=rank))
        expected = Simulator(hvd.size()).run(communicator, buckets)[hvd.rank()]
        backward(network, 0)
        optimizer.synchronize()
        states = compressor.state_dict()["parameters"]
        for number, member in enumerate(buckets[hvd.rank()].members):
            out = np.zeros(member.gradient.size, dtype=np.float32)
            expected.add_to(number, out, 1 / hvd.size())
            got = dict(gradients(network))[member.name].reshape(-1).numpy()
            tolerance = 1e-6 if communicator in (dr.CLTK(), dr.SharedRandomK()) else 0
            np.testing.assert_allclose(
                got, out, rtol=tolerance, atol=tolerance, err_msg=f"{communicator} {member.name}"
            )
            np.testing.assert_array_equal(
                states[member.name]["memory"]["residual"].numpy(), member.state[0]
            )
        with optimizer.skip_synchronize():
            optimizer.step()


def scenario_buckets_change_nothing_with_allgather(directory):
    trained = []
    for bucket_bytes in BUCKETS:
        network = model()
        # all is compressed: with three ranks, Horovod's own sums depend on what it happens to fuse
        codec = dr.Codec(dr.TopK(0.1), dr.Rice(), dr.QSGD(bits=4))
        optimizer, _ = distributed(
            network, dr.Allgather(), codec, dense_below=0, bucket_bytes=bucket_bytes
        )
        for step in range(3):
            network.zero_grad()
            backward(network, step)
            optimizer.step()
        trained.append(network)
    for other in trained[1:]:
        for (name, one), (_, two) in zip(trained[0].named_parameters(), other.named_parameters()):
            assert torch.equal(one, two), name


def scenario_not_finite_on_one_rank_is_nan_on_all(directory):
    for communicator in COMMUNICATORS + HIERARCHICAL:
        network = model()
        optimizer, _ = distributed(
            network, communicator, codec_for(communicator), bucket_bytes=10_000
        )
        loss = sum(parameter.sum() for parameter in network.parameters())
        (loss * (float("nan") if hvd.rank() == hvd.size() - 1 else 1.0)).backward()
        optimizer.synchronize()
        for name, gradient in gradients(network):
            assert gradient.isnan().all(), f"{communicator} {name}"
        with optimizer.skip_synchronize():
            optimizer.step()


def scenario_a_frozen_parameter_does_not_hold_up_its_bucket(directory):
    for communicator in (dr.Allgather(), dr.SplitAllgather()):
        network = model()
        network[2].weight.requires_grad_(False)
        optimizer, _ = distributed(
            network, communicator, dr.Codec(dr.TopK(0.1)), bucket_bytes=1 << 30
        )
        for step in range(2):
            network.zero_grad()
            backward(network, step)
            optimizer.step()
            assert_equal_everywhere(network.named_parameters(), f"{communicator} step {step}")


def no_memory(*_):
    raise MemoryError("none left")


def scenario_a_rank_that_fails_makes_all_raise(directory):
    for number, communicator in enumerate(COMMUNICATORS + HIERARCHICAL):
        network = model()
        optimizer, compressor = distributed(
            network,
            communicator,
            codec_for(communicator),
            prefix=f"failing{number}.",
            bucket_bytes=1 << 30,
        )
        if hvd.rank() == hvd.size() - 1:
            compressor.adapter.host_path.member = no_memory
        backward(network, 0)
        try:
            optimizer.synchronize()
        except dr.PeerFailedError as error:
            assert f"rank {hvd.size() - 1}: MemoryError: none left" in str(error), error
        else:
            raise AssertionError(f"{communicator}: went on silently")


def scenario_messages_too_large_on_one_rank(directory):
    """One rank believes that Horovod carries only 100 bytes, instead of 2 GiB."""
    last, right = hvd.size() - 1, HorovodTransport.most_bytes
    for number, communicator in enumerate(COMMUNICATORS):
        if communicator in (dr.CLTK(), dr.SharedRandomK()):  # they send few bytes, or none
            continue
        network = model()
        optimizer, _ = distributed(
            network, communicator, codec_for(communicator), prefix=f"large{number}."
        )
        try:
            if hvd.rank() == last:
                HorovodTransport.most_bytes = 100
            with refused(rf"messages of rank {last}: expected at most \d+ bytes, .* got \d+; use"):
                backward(network, 0)
                optimizer.synchronize()
        finally:
            HorovodTransport.most_bytes = right


class BreakingTransport:
    """A transport that corrupts the last byte of the first payload that this rank sends.

    The handshake before it is not a payload.
    """

    def __init__(self, transport):
        self.transport = transport
        self.broke = False

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def _broken(self, data):
        if self.broke or data is None or not data.size:
            return data
        self.broke = True
        return np.concatenate([data[:-1], data[-1:] ^ 1])

    def allgather(self, array, name):
        return self.transport.allgather(array if "handshake" in name else self._broken(array), name)

    def alltoall(self, parts, name):
        return self.transport.alltoall(
            [self._broken(part) if rank != self.rank else part for rank, part in enumerate(parts)],
            name,
        )

    def broadcast(self, array, root, name):
        return self.transport.broadcast(self._broken(array), root, name)


def scenario_what_one_rank_breaks_is_an_error_on_all(directory):
    for number, communicator in enumerate(COMMUNICATORS):
        # Auto uses one of the others; SharedRandomK sends only numbers, not payloads
        if isinstance(communicator, (dr.Auto, dr.SharedRandomK)):
            continue
        network = model()
        optimizer, compressor = distributed(
            network,
            communicator,
            codec_for(communicator),
            prefix=f"broken{number}.",
            bucket_bytes=1 << 30,
        )
        if hvd.rank() == 0:  # CLTK's first leader
            compressor.adapter.transport = BreakingTransport(compressor.adapter.transport)
        backward(network, 0)
        try:
            optimizer.synchronize()
        except (dr.PeerFailedError, dr.CorruptPayloadError) as error:
            assert "payload checksum: expected" in str(error) and "rank " in str(error), error
        else:
            raise AssertionError(f"{communicator}: went on silently")


if __name__ == "__main__":
    run_all(dict(globals()), sys.argv[1])
