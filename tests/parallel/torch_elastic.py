"""One worker of an elastic job, until a file says that it is enough.

Started by test_torch_elastic.py under horovodrun.
"""

import json
import os
import pathlib
import signal
import sys
import time

import horovod.torch as hvd
import torch
from torch_tools import assert_equal_everywhere, backward, distributed, model, sum_over_ranks

import deepreduce_hvd as dr

COMMIT_EVERY = 3


def kept_by_all(compressor):
    """The sum of all ranks' memories, (n,) float64."""
    parameters = compressor.state_dict()["parameters"]
    return sum_over_ranks(
        torch.cat([kept for one in parameters.values() for kept in one["memory"].values()]), "kept"
    )


def training(network, compressor):
    """What the parameters and all ranks' memories are together: a moment of training."""
    return torch.cat(
        [parameter.detach().double().reshape(-1) for parameter in network.parameters()]
    ), kept_by_all(compressor)


def largest_difference(moment, other):
    return max(float((one - two).abs().max()) for one, two in zip(moment, other))


def commits_go_on(directory):
    """Whether the test wants commits, in rank 0's view."""
    return bool(
        hvd.broadcast(
            torch.tensor(not (directory / "no_commits").exists()).int(), 0, name="commits"
        )
    )


def main(directory, communicator):
    directory = pathlib.Path(directory)
    host = os.environ["HOROVOD_HOSTNAME"]
    (directory / f"process.{host}.{os.environ['HOROVOD_LOCAL_RANK']}").write_text(str(os.getpid()))
    hvd.init()
    network = model()
    # whose choices depend on the step counter: a joining rank must learn it
    codec = dr.Codec(dr.RandomK(0.05), dr.Rice(), dr.QSGD(bits=4))
    optimizer, compressor = distributed(
        network, codec, compressor_options={"communicator": communicator}
    )
    state = hvd.elastic.TorchState(
        compressor=compressor, model=network, optimizer=optimizer, step=0, committed=None
    )
    # the moment after the last step, which is not in the state: Horovod takes that back to the last
    # commit
    newest = []

    @hvd.elastic.run
    def train(state):
        if state.committed is not None:
            if commits_go_on(directory):
                state.save()  # ranks that have only left are made up for at the next step or commit
            now = training(network, compressor)
            errors = [largest_difference(now, moment) for moment in (state.committed, *newest)]
            entry = {
                "size": hvd.size(),
                "step": state.step,
                "kept": float(now[1].abs().max()),
                "error": min(errors),
                "moment": errors.index(min(errors)),
            }
            with open(directory / "starts", "a") as starts:
                if hvd.rank() == 0:
                    starts.write(json.dumps(entry) + "\n")
        while not (directory / "enough").exists() or state.step % COMMIT_EVERY:
            optimizer.zero_grad()
            backward(network, state.step)
            optimizer.step()
            state.step += 1
            assert_equal_everywhere(network.named_parameters(), f"step {state.step}")
            newest[:] = [training(network, compressor)]
            state.committed = newest[0]
            if state.step % COMMIT_EVERY == 0 and commits_go_on(directory):
                state.commit()
            else:
                state.check_host_updates()
            if hvd.rank() == 0:
                (directory / "progress.new").write_text(
                    json.dumps({"size": hvd.size(), "step": state.step})
                )
                (directory / "progress.new").rename(directory / "progress")
            time.sleep(0.02)

    train(state)
    (directory / f"finished.{hvd.rank()}").write_text(str(hvd.size()))


if __name__ == "__main__":
    # it trains until it is told to stop: not longer than the test, should that be killed
    signal.alarm(600)
    main(
        sys.argv[1],
        {
            "allgather": dr.Allgather(),
            "auto": "auto",
            "hierarchical": dr.Hierarchical(dr.Allgather(), 1),
        }[sys.argv[2]],
    )
