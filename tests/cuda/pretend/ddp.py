"""Test that DDP gives the same results on a device and on the host, on two ranks under torchrun."""

import torch
import torch.distributed as dist
from ddp_tools import assert_refused
from ddp_training import RANK, compare, loss_of, model_of
from random_plans import plan_of

import deepreduce_hvd as dr
from deepreduce_hvd.errors import PeerFailedError
from deepreduce_hvd.schedule import Message
from deepreduce_hvd.torch.ddp.buckets import BucketJob
from deepreduce_hvd.torch.ddp.device_buckets import DeviceBucketJob

DEFLATE = dr.Codec(dr.TopK(0.05), value=dr.Deflate())


def scenario_settings():
    plan = plan_of(
        [
            Message(("first.weight",), "dense"),
            Message(("branch.weight",), "fp16"),
            Message(("image",), "codec", 0.3, "SplitAllgather"),
        ],
        2,
    )
    for options in (
        {},
        {"codec": "dense"},
        {"codec": DEFLATE},
        {"ddp": {"gradient_as_bucket_view": True}},
        {"channels_last": True},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        {"communicator": dr.GTopK()},
        {"communicator": dr.SplitAllgather()},
        {"communicator": dr.Hierarchical(dr.Allgather(), 2)},
        {"schedule": plan},
        {
            "ddp": {"find_unused_parameters": True},
            "uses_branch": lambda step: (step + RANK) % 3 == 0,
        },
        {
            "loss_scale": lambda: 8.0,
            "factor": lambda step: float("inf") if (step, RANK) == (2, 1) else 8.0,
        },
    ):
        on_host = options.keys() & {"communicator", "schedule"} or options.get("codec") == DEFLATE
        sent, sent_by_host = compare(BucketJob if on_host else DeviceBucketJob, **options)
        for name, row in sent.items():
            assert row["sent_bytes"] == sent_by_host[name]["sent_bytes"], (options, name)


def scenario_join():
    found = []
    for device in ("cuda:0", "cpu"):
        network, model, compressor = model_of(device)
        with model.join():
            for step in range(2 + 2 * RANK):
                network.zero_grad()
                loss_of(model, step).backward()
        found.append(compressor.state_dict()["parameters"])
    for name, saved in found[0].items():
        for kind, memory in saved["memory"].items():
            assert torch.equal(memory, found[1][name]["memory"][kind]), name


def scenario_errors():
    model = model_of("cuda:0", loss_scale=lambda: 8.0 if RANK else "none")[1]
    try:
        loss_of(model, 0).backward()
    except (PeerFailedError, ValueError) as error:
        assert "none" in str(error), error
    else:
        raise AssertionError("expected an error")
    model = model_of("cuda:0")[1]
    loss_of(model, 0).backward()
    torch.cuda.is_current_stream_capturing = lambda: True
    assert_refused("that a CUDA graph captures", lambda: loss_of(model, 1).backward())
    torch.cuda.is_current_stream_capturing = lambda: False


for scenario in (scenario_settings, scenario_join, scenario_errors):
    scenario()
print("as expected")
dist.destroy_process_group()
