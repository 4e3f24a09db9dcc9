"""Test DDP's buckets that are encoded and summed on a device, on two ranks under torchrun.

Random programs give the same bits as on the host, with payloads that go through the host and with a
simulated NCCL. Errors of one rank reach both.
"""

import contextlib
import functools
import itertools
import random

import torch
import torch.distributed as dist
from ddp_tools import assert_refused
from ddp_training import (
    RANK,
    PretendedNccl,
    compare,
    expect_same,
    loss_of,
    memories_of,
    model_of,
    pretended_nccl,
    ran,
    replaced,
)
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.torch import ops as operators
from deepreduce_hvd.torch.cuda import device as torch_device, exchange as torch_exchange
from deepreduce_hvd.torch.ddp.buckets import BucketJob
from deepreduce_hvd.torch.ddp.device_buckets import DeviceBucketJob

PROGRAMS = 14
SPARSIFIERS = (
    lambda draw: dr.TopK(draw.choice([0.01, 0.2]), warmup_steps=draw.choice([0, 2])),
    lambda draw: dr.ChunkTopK(0.15),
    lambda draw: dr.Threshold(1e-3),
    lambda draw: dr.RandomK(0.1),
    lambda draw: dr.NoneSparsifier(),
)
INDICES = (dr.RawIndex, dr.Rice, dr.Bitmap, dr.EliasFano, lambda: dr.Bloom(fpr=0.02))
VALUES = (
    dr.RawValue, dr.Float16, dr.BFloat16, dr.FitPoly, lambda: dr.QSGD(bits=4),
    lambda: dr.LloydMax(bits=2),
)  # fmt: skip
MEMORIES = (
    dr.Residual, dr.Residual, dr.NoMemory, lambda: dr.MomentumCorrection(0.9),
    lambda: dr.LowPass(0.3),
)  # fmt: skip


def random_codec(draw):
    return dr.Codec(
        draw.choice(SPARSIFIERS)(draw), index=draw.choice(INDICES)(), value=draw.choice(VALUES)()
    )


def random_options(draw):
    """Return options of ``train``, drawn in the same way on all ranks."""
    codec = random_codec(draw)
    if draw.random() < 0.5:
        codec = {"first.*": random_codec(draw), "last.bias": "dense", "*": codec}
    options = {
        "codec": codec,
        "memory": draw.choice(MEMORIES)(),
        "dtype": draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        "channels_last": draw.random() < 0.3,
        "cap": draw.choice([0.001, 0.01, 25]),
        "dense_below": draw.choice([0, 70, 200]),
        "ddp": {"gradient_as_bucket_view": draw.random() < 0.5},
        "seed": draw.randrange(100),
    }
    if draw.random() < 0.4:
        options["ddp"]["find_unused_parameters"] = True
        options["uses_branch"] = lambda step: (step + RANK) % 3 == 0
        # old gradients of the branch, which no rank uses in some steps
        if draw.random() < 0.6 and not options["memory"].needs_new_gradients:
            options["keeps"] = lambda step, name: name.startswith("branch")
    if draw.random() < 0.4:
        overflows = draw.randrange(4)
        options["loss_scale"] = lambda: 8.0
        options["factor"] = lambda step: float("inf") if (step, RANK) == (overflows, 1) else 8.0
    return options


def ways():
    """Return the two ways of payloads: through the host, and with NCCL."""
    return contextlib.nullcontext(), pretended_nccl()


def scenario_random_programs():
    numbers = [random.randrange(1 << 30) if RANK == 0 else None for _ in range(PROGRAMS)]
    dist.broadcast_object_list(numbers, 0, device=torch.device("cpu"))
    for place, number in enumerate(numbers):
        draw = random.Random(number)
        options = random_options(draw)
        made = PretendedNccl.made
        try:
            with ways()[place % 2]:
                sent, sent_by_host = compare(DeviceBucketJob, **options)
        except BaseException:
            print(f"the program of number {number} failed: {options}", flush=True)
            raise
        assert PretendedNccl.made - made == place % 2
        if place % 2 == 0:
            for name, row in sent.items():
                assert row["sent_bytes"] == sent_by_host[name]["sent_bytes"], (number, name)


def scenario_old_gradients_stay_out_of_residuals():
    """No rank, one rank or all ranks use the branch, whose gradient is never cleared."""
    uses = [(True, True), (False, False), (False, True), (False, False)]
    for place, view in itertools.product((0, 1), (False, True)):
        for path, options in (
            (DeviceBucketJob, {}),
            (BucketJob, {"communicator": dr.SplitAllgather()}),
        ):
            with ways()[place]:
                compare(
                    path,
                    dense_below=100,
                    ddp={"find_unused_parameters": True, "gradient_as_bucket_view": view},
                    uses_branch=lambda step: uses[step][RANK],
                    keeps=lambda step, name: name.startswith("branch"),
                    **options,
                )


def scenario_bytes_with_nccl():
    """Headers go apart from the payloads, and there is one more head: that of the payloads."""
    with pretended_nccl():
        sent, sent_by_host = compare(DeviceBucketJob, cap=25)
    head, entry = 8 * (2 + dist.get_world_size()), 4 + 40
    compressed = [name for name, row in sent.items() if row["path"] == "compressed"]
    more = sum(row["sent_bytes"] - sent_by_host[name]["sent_bytes"] for name, row in sent.items())
    assert len(compressed) == 3 and more == head + 3 * entry, (compressed, more)


def scenario_one_rank_lacks_the_operators():
    """Both ranks then send payloads through the host, and one encodes on the device."""
    made = PretendedNccl.made
    with pretended_nccl(), replaced(operators, HAS_CUDA_OPERATORS=RANK == 0):
        compare(DeviceBucketJob if RANK == 0 else BucketJob)
    assert PretendedNccl.made == made


def failure_of(steps, **options):
    """Train for some steps on the device; return the error, or None."""
    _, model, _ = model_of("cuda:0", **options)
    try:
        for step in range(steps):
            loss_of(model, step).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def expect_failure(found, words, of_peer):
    """Check the errors of both ranks: rank 1 has the cause, and rank 0 gets it."""
    assert found is not None and words in found, found
    if RANK == 0:
        assert found.startswith("PeerFailedError: ") and of_peer in found, found


def scenario_a_rank_cannot_start_to_encode():
    start = torch_device.DevicePath.start_encodings

    def fails(path, members):
        if RANK == 1:
            members[0].on_device = members[0].on_device.cpu()
        return start(path, members)

    for way in ways():
        with way, replaced(torch_device.DevicePath, start_encodings=fails):
            expect_failure(failure_of(2), "gradient: expected a CUDA tensor", "rank 1: ")


def scenario_the_device_cannot_encode():
    start = torch_device.DevicePath.start_encodings

    def fails(path, members):
        rooms, reports = start(path, members)
        if RANK == 1:
            reports[-1, 0] = 2  # the status
        return rooms, reports

    for way in ways():
        with way, replaced(torch_device.DevicePath, start_encodings=fails):
            expect_failure(failure_of(2), "DeepReduceError: parameter ", "rank 1: ")


def scenario_a_payload_is_corrupt():
    """A rank that the device of rank 1 decodes: known at the start of the next step."""
    bytes_on = torch_device._bytes_on

    def damaged(device, gathered):
        there = bytes_on(device, gathered).clone()
        there[-1] ^= RANK
        return there

    for way in ways():
        with way, replaced(torch_device, _bytes_on=damaged):
            expect_failure(failure_of(2), "rank 1: payload checksum: expected ", "rank 1: ")


def scenario_a_header_is_corrupt():
    """With NCCL, headers come apart from the payloads."""
    messages_of = torch_exchange._messages

    def damaged(bucket, headers):
        headers = headers.copy()
        headers[4] ^= RANK  # the magic number of the first payload
        return messages_of(bucket, headers)

    with pretended_nccl(), replaced(torch_exchange, _messages=damaged):
        expect_failure(failure_of(2), "CorruptPayloadError: ", "rank 1: ")


def scenario_states_fit_both_devices():
    """A state from one device continues on the other as on the same one."""
    ends = []
    for first in ("cuda:0", "cpu"):
        for second in ("cuda:0", "cpu"):
            _, model, compressor = model_of(first, memory=dr.MomentumCorrection(0.9))
            loss_of(model, 0).backward()
            state = compressor.state_dict()
            memories = [
                one for named in state["parameters"].values() for one in named["memory"].values()
            ]
            assert {memory.device.type for memory in memories} == {"cpu"}
            network, model, compressor = model_of(second, memory=dr.MomentumCorrection(0.9))
            compressor.load_state_dict(state)
            for slot in compressor.adapter.slots.values():
                for part in slot.state:
                    assert part.device == next(network.parameters()).device
            loss_of(model, 1).backward()
            ends.append([memories_of(compressor)])
    for end in ends[1:]:
        expect_same(end, ends[0], "states")


def scenario_one_rank_compresses_nothing():
    """It adds what a larger job has left to its gradients, on the device as on the host."""
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][RANK]
    for memory in (dr.Residual(), dr.LowPass(0.3), dr.MomentumCorrection(0.9)):
        _, model, compressor = model_of("cpu", memory=memory)
        loss_of(model, 0).backward()
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, compressor.state_dict())
        ends = []
        for device in ("cuda:0", "cpu"):
            network, model, compressor = model_of(
                device, memory=memory, ddp={"process_group": alone}
            )
            compressor.load_state_dict(states)
            found = []
            for step in (1, 2):
                network.zero_grad()
                loss_of(model, step).backward()
                gradients = {
                    name: [one.grad.cpu().clone()] for name, one in network.named_parameters()
                }
                found += [gradients, memories_of(compressor)]
            ends.append(found)
            rows = compressor.stats().values()
            assert {(row["path"], row["sent_bytes"]) for row in rows} == {("none", 0)}
        expect_same(*ends, memory)


def scenario_a_sum_overflows():
    """Gradients are finite, but the sum with the residual exceeds float16: the step is undone."""
    found = []
    for device in ("cuda:0", "cpu"):
        network, model, compressor = model_of(
            device, dtype=torch.float16, loss_scale=lambda: 8.0, codec=dr.Codec(dr.TopK(0.05))
        )
        state = compressor.state_dict()
        residual = torch.zeros(network.first.weight.numel())
        residual[7] = 7e4
        state["parameters"]["first.weight"] |= {"memory": {"residual": residual}, "loss_scale": 8.0}
        compressor.load_state_dict(state)
        loss_of(model, 0).backward()
        assert network.first.weight.grad.flatten()[7].isinf()
        found.append([memories_of(compressor)])
        assert torch.equal(found[-1][0]["first.weight"][0], residual)
    expect_same(*found, "overflow")


def scenario_gradients_accumulate():
    found = []
    for device in ("cuda:0", "cpu"):
        network, model, compressor = model_of(device)
        for step in range(3):
            network.zero_grad()
            with model.no_sync():
                loss_of(model, 10 + step).backward()
            loss_of(model, step).backward()
        gradients = {name: [one.grad.cpu()] for name, one in network.named_parameters()}
        found.append([gradients, memories_of(compressor)])
    expect_same(*found, "accumulated")


class _TableAndLayer(torch.nn.Module):
    """Two matrices; a step uses few rows of the first one, with the gradients that it is given."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = (torch.nn.Parameter(torch.zeros(400, 8)) for _ in range(2))

    def forward(self, rows, numbers):
        return (self.table[rows] * numbers[0, rows]).sum() + (self.layer * numbers[1]).sum()


def scenario_tables_get_the_results_of_the_host():
    for way in ways():
        found = []
        for device, index in (("cuda:0", dr.Rice()), ("cpu", dr.RLE())):
            network = _TableAndLayer().to(device)
            model = DistributedDataParallel(network)
            compressor = dr.Compressor(parameters=network.named_parameters())
            seen = []
            with way if device != "cpu" else contextlib.nullcontext():
                compressor.register(model)
                for step in range(4):
                    random_numbers = torch.Generator().manual_seed(100 * step + RANK)
                    numbers = torch.randn(2, 400, 8, generator=random_numbers)
                    rows = torch.randint(400, (30,), generator=random_numbers)
                    network.zero_grad()
                    model(rows.to(device), numbers.to(device)).backward()
                    gradients = {name: [one.grad.cpu()] for name, one in network.named_parameters()}
                    seen += [gradients, memories_of(compressor)]
            assert compressor.policies["table"].codec.index == index, device
            found.append(seen)
        expect_same(*found, "tables")


def _step(model):
    loss_of(model, 3).backward()


def scenario_profile_and_close():
    ran.clear()
    for way in ways():
        with way:
            _, model, compressor = model_of("cuda:0")
            for step in range(3):
                loss_of(model, step).backward()
            assert compressor.profile().parameters
            compressor.close()
            assert_refused("after close()", functools.partial(_step, model))
    assert set(ran) == {DeviceBucketJob}


for name, scenario in list(globals().items()):
    if name.startswith("scenario_"):
        scenario()
print("as expected")
dist.destroy_process_group()
