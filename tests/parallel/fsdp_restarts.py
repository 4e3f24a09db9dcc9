"""Training with fully_shard whose last rank is killed; torchrun starts all ranks again, with another
number of ranks per host. Started by test_torch_restarts.py.

Arguments: a folder for checkpoints, and the steps after which the state is saved and lost.
"""

import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
from ddp_tools import CODEC, Network
from fsdp_states import sum_of_residuals
from fsdp_tools import loss_of, meshes, sharded

RATE = 0.1


def main(folder, saved_after, lost_after):
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    network, mesh = Network(), meshes(2 if restarts == 0 else 4)
    states = []
    if restarts:
        training = torch.load(folder / "training.pt")
        network.load_state_dict(training["network"])
        states = [torch.load(folder / f"compressor.{one}.pt") for one in range(training["ranks"])]
    compressor = sharded(network, mesh, CODEC)
    first = 0
    if restarts:
        compressor.load_state_dict(states)
        for name, found in sum_of_residuals(compressor, mesh).items():
            assert training["residuals"][name].any(), name
            torch.testing.assert_close(found, training["residuals"][name], rtol=0, atol=1e-6)
        first = training["step"]
        print(f"resumed at {first}", flush=True)
    for step in range(first, 20):
        network.zero_grad()
        loss = loss_of(network, step, rank)
        loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= RATE * parameter.grad
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
    own = torch.cat([one.full_tensor().reshape(-1) for one in network.parameters()]).detach()
    everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, own)
    assert all(torch.equal(one, own) for one in everywhere)
    print(f"done on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
