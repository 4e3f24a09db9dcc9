"""One worker of an elastic job, until a file says that it is enough. Started by test_torch_elastic.py under horovodrun."""

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
    return sum_over_ranks(torch.cat([kept for one in parameters.values() for kept in one["memory"].values()]), "kept")


def main(directory, communicator):
    directory = pathlib.Path(directory)
    host = os.environ["HOROVOD_HOSTNAME"]
    (directory / f"process.{host}.{os.environ['HOROVOD_LOCAL_RANK']}").write_text(str(os.getpid()))
    hvd.init()
    network = model()
    codec = dr.Codec(dr.RandomK(0.05), dr.Rice(), dr.QSGD(bits=4))  # whose choices depend on the step counter: a joining rank must learn it
    optimizer, compressor = distributed(network, codec, compressor_options={"communicator": communicator})
    state = hvd.elastic.TorchState(compressor=compressor, model=network, optimizer=optimizer, step=0, kept=None)

    @hvd.elastic.run
    def train(state):
        if state.kept is not None:
            state.save()  # ranks that have only left are made up for at the next step or commit
            kept = kept_by_all(compressor)
            largest = float(state.kept.abs().max())
            entry = {"size": hvd.size(), "step": state.step, "largest": largest, "error": float((kept - state.kept).abs().max())}
            with open(directory / "starts", "a") as starts:
                if hvd.rank() == 0:
                    starts.write(json.dumps(entry) + "\n")
        while not (directory / "enough").exists() or state.step % COMMIT_EVERY:
            optimizer.zero_grad()
            backward(network, state.step)
            optimizer.step()
            state.step += 1
            assert_equal_everywhere(network.named_parameters(), f"step {state.step}")
            state.kept = kept_by_all(compressor)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            if hvd.rank() == 0:
                (directory / "progress.new").write_text(json.dumps({"size": hvd.size(), "step": state.step}))
                (directory / "progress.new").rename(directory / "progress")
            time.sleep(0.02)

    train(state)
    (directory / f"finished.{hvd.rank()}").write_text(str(hvd.size()))


if __name__ == "__main__":
    signal.alarm(600)  # it trains until it is told to stop: not longer than the test, should that be killed
    main(sys.argv[1], {"allgather": dr.Allgather(), "auto": "auto"}[sys.argv[2]])
