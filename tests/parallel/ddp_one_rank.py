"""Jobs of one rank with PyTorch's DDP, which compress nothing; run by ddp_scenarios.py."""

import random

import numpy as np
import torch
import torch.distributed as dist
from codecs_table import MEMORIES
from ddp_tools import SMALL_BUCKETS, Network, distributed, gradients_of, loss_of

import deepreduce_hvd as dr
from deepreduce_hvd.statistics import summary_lines


def scenario_one_rank_compresses_nothing_and_adds_what_a_larger_job_has_left(directory):
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([one]) for one in range(size)][rank]
    for seed in range(12):
        draw = random.Random(seed)
        memory = MEMORIES[sorted(MEMORIES)[seed % len(MEMORIES)]]
        codec = dr.Codec(dr.TopK(draw.choice([0.01, 0.2])), value=draw.choice([None, dr.QSGD(4)]))
        ddp = {"gradient_as_bucket_view": draw.random() < 0.5, **SMALL_BUCKETS}
        dtype = draw.choice([torch.float32, torch.float32, torch.float64])
        model, compressor = distributed(Network(dtype), codec, memory, ddp)
        for step in range(2):
            model.zero_grad()
            loss_of(model, step, rank).backward()
        states = [None] * size
        dist.all_gather_object(states, compressor.state_dict())
        network = Network(dtype)
        model, resumed = distributed(network, codec, memory, {**ddp, "process_group": alone})
        if draw.random() < 0.7:
            resumed.load_state_dict(states)
        left = resumed.state_dict()["parameters"]
        for step in range(3):
            what = f"seed {seed} {memory} {ddp}, step {step}"
            network.zero_grad()
            expected = gradients_of(
                network, lambda own, step=step: loss_of(own, step, 0).backward()
            )
            loss_of(model, step, 0).backward()
            for name, parameter in network.named_parameters():
                gradient, state = expected[name], list(left[name]["memory"].values())
                if any(bool(part.any()) for part in state):
                    own = gradient.reshape(-1).float().numpy()
                    total, state = memory.accumulate(own, [part.numpy().ravel() for part in state])
                    state = memory.update(own, total, state, np.arange(own.size), total)
                    kinds = zip(left[name]["memory"], state)
                    left[name]["memory"] = {kind: torch.from_numpy(part) for kind, part in kinds}
                    gradient = torch.from_numpy(total).view(gradient.shape).to(dtype)
                torch.testing.assert_close(parameter.grad, gradient, msg=f"{what}, {name}")
        assert summary_lines(resumed.stats(), 1, ())[0].startswith(
            "Nothing was exchanged: there is"
        )
        rows = resumed.stats().values()
        assert {(row["path"], row["sent_bytes"]) for row in rows} == {("none", 0)}, rows
        for name, saved in resumed.state_dict()["parameters"].items():
            for kind, part in saved["memory"].items():
                torch.testing.assert_close(part.ravel(), left[name]["memory"][kind].ravel())
