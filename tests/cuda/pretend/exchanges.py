"""Test exchanges of gradients on a device with two ranks: copies to the host, and failures."""

import pathlib
import runpy

import horovod.torch as hvd
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.torch.cuda import copies as torch_copies, device as torch_device

ranks = runpy.run_path(
    str(pathlib.Path(__file__).resolve().parents[3] / "scripts" / "gpu_ranks.py")
)
train, STEPS = ranks["train"], ranks["STEPS"]
hvd.init()
BUCKETS = 2  # of the parameters in gpu_training.py

copied = []
start = torch_copies.CopiesToHost.start


def counted(self, tensor, stream):
    copied.append(tensor.numel())
    return start(self, tensor, stream)


def copies_of(codec):
    copied.clear()
    train(torch.device("cuda:0"), codec)
    return len(copied)


torch_copies.CopiesToHost.start = counted
rice, deflate = ranks["CODECS"]["Rice, raw"], ranks["CODECS"]["Deflate"]
# the reports, the payloads and the results of each bucket's sums, for any number of gradients
assert copies_of(rice) == STEPS * BUCKETS * 3, copied
# one copy per gradient
assert copies_of(deflate) == STEPS * len(ranks["SHAPES"]), copied
torch_copies.CopiesToHost.start = start


def expect(error, *words):
    try:
        train(torch.device("cuda:0"), rice)
    except error as found:
        assert all(word in str(found) for word in words), found
    else:
        raise SystemExit(f"expected {error.__name__}, got none")


# one rank cannot start to encode one of a bucket's gradients
start_encodings = torch_device.DevicePath.start_encodings


def fails(self, members):
    for member in members:
        if member.name == "second" and hvd.rank() == 1:
            member.on_device = member.on_device.cpu()
    return start_encodings(self, members)


torch_device.DevicePath.start_encodings = fails
expect(dr.PeerFailedError, "rank 1: ", "parameter second: gradient: expected contiguous 1-D ")
torch_device.DevicePath.start_encodings = start_encodings

# the message of one rank is corrupted, which is known when the next step begins
bytes_on = torch_device._bytes_on


def damaged(device, gathered):
    there = bytes_on(device, gathered)
    there[-1] ^= 1  # in the last gradient of the last rank
    return there


torch_device._bytes_on = damaged
expect(dr.CorruptPayloadError, "parameter ", ": rank 1: payload checksum: expected ")
print("as expected")
