"""One worker of an elastic job on TensorFlow, until a file says that it is enough.

Started by test_tensorflow_elastic.py under horovodrun.
"""

import json
import os
import pathlib
import signal
import sys
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_tools import (
    assert_equal_everywhere,
    batch,
    compressor_of,
    make_step,
    model,
    sum_over_ranks,
    variables,
)

import deepreduce_hvd as dr
from deepreduce_hvd.tensorflow import elastic as tensorflow_elastic

COMMIT_EVERY = 3


class Network:
    """What a state asks of a Keras model and of its optimizer."""

    def __init__(self, named):
        self.variables = variables(named)


class Optimizer:
    def variables(self):
        return []


def training(named, compressor):
    """What the variables and all ranks' memories are together: a moment of training."""
    parameters = compressor.state_dict()["parameters"]
    kept = np.concatenate(
        [kept.reshape(-1) for one in parameters.values() for kept in one["memory"].values()]
    )
    return np.concatenate(
        [variable.numpy().reshape(-1) for variable in variables(named)]
    ), sum_over_ranks(kept)


def largest_difference(moment, other):
    return max(float(np.abs(one - two).max()) for one, two in zip(moment, other))


def commits_go_on(directory):
    """Whether the test wants commits, in rank 0's view."""
    return bool(
        hvd.broadcast(tf.constant(int(not (directory / "no_commits").exists())), 0, name="commits")
    )


def main(directory, communicator, kind):
    directory = pathlib.Path(directory)
    host = os.environ["HOROVOD_HOSTNAME"]
    (directory / f"process.{host}.{os.environ['HOROVOD_LOCAL_RANK']}").write_text(str(os.getpid()))
    hvd.init()
    named = model()
    # whose choices depend on the step counter: a joining rank must learn it
    codec = dr.Codec(dr.RandomK(0.05), dr.Rice(), dr.QSGD(bits=4))
    compressor = compressor_of(named, codec, communicator=communicator)
    step = tf.function(make_step(named, compressor))
    if kind == "stock":  # Horovod's own state, which knows nothing of the compressor
        state = hvd.elastic.TensorFlowKerasState(Network(named), Optimizer(), step=0)
    else:
        state = tensorflow_elastic.TensorFlowKerasState(
            Network(named), Optimizer(), compressor=compressor, step=0, committed=None
        )
    # the moment after the last step, which is not in the state: Horovod takes that back to the last
    # commit
    newest = []

    @hvd.elastic.run
    def train(state):
        if kind == "ours" and state.committed is not None:
            now = training(named, compressor)
            errors = [largest_difference(now, moment) for moment in (state.committed, *newest)]
            entry = {
                "size": hvd.size(),
                "step": state.step,
                "kept": float(np.abs(now[1]).max()),
                "error": min(errors),
                "moment": errors.index(min(errors)),
            }
            with open(directory / "starts", "a") as starts:
                if hvd.rank() == 0:
                    starts.write(json.dumps(entry) + "\n")
        while not (directory / "enough").exists() or state.step % COMMIT_EVERY:
            step(batch(state.step))
            state.step += 1
            assert_equal_everywhere(variables(named), f"step {state.step}")
            newest[:] = [training(named, compressor)]
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
        return "enough"

    assert train(state) == "enough", "training ended in silence"
    (directory / f"finished.{hvd.rank()}").write_text(str(hvd.size()))


if __name__ == "__main__":
    # it trains until it is told to stop: not longer than the test, should that be killed
    signal.alarm(900)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    main(
        sys.argv[1],
        {"allgather": dr.Allgather(), "doubling": dr.RecursiveDoubling()}[sys.argv[2]],
        sys.argv[3],
    )
