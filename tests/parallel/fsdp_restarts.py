"""Train with fully_shard and lose the last rank.

torchrun then starts all ranks again, with another number of ranks per host. Started by
test_torch_restarts.py.

Arguments: a folder for checkpoints, and the steps after which the state is saved and lost.
"""

import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
from ddp_tools import CODEC, Network
from fsdp_states import expect_equal_everywhere, sum_of_residuals, train
from fsdp_tools import meshes, sharded


def main(folder, saved_after, lost_after):
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    network, mesh = Network(), meshes(4 if restarts else 2)
    first = 0
    if restarts:
        training = torch.load(folder / "training.pt")
        network.load_state_dict(training["network"])
        states = [torch.load(folder / f"compressor.{one}.pt") for one in range(training["ranks"])]
    compressor = sharded(network, mesh, CODEC)
    if restarts:
        compressor.load_state_dict(states)
        for name, found in sum_of_residuals(compressor, mesh).items():
            assert training["residuals"][name].any(), name
            update = training["residuals"][name] * 4 / 2  # the average of twice as many hosts
            torch.testing.assert_close(found, update, rtol=0, atol=1e-6)
        first = training["step"]
        print(f"resumed at {first}", flush=True)
    for step in range(first, 20):
        train(network, step, 1)
        if restarts == 0 and step + 1 == saved_after:
            torch.save(compressor.state_dict(), folder / f"compressor.{rank}.pt")
            training = {
                "network": {name: one.full_tensor() for name, one in network.named_parameters()},
                "residuals": sum_of_residuals(compressor, mesh),
                "step": step + 1,
                "ranks": dist.get_world_size(),
            }
            if rank == 0:
                torch.save(training, folder / "training.pt")
            dist.barrier()
        if restarts == 0 and step + 1 == lost_after and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    steps = {row["steps"] for row in compressor.stats().values() if row["elements"]}
    assert steps == {20}, steps
    expect_equal_everywhere(network)
    print(f"done on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
