"""Train as one worker of an elastic job, on any framework.

The worker trains until a file tells it to stop. It records the state at each start of training.
"""

import json
import os
import time

import numpy as np

COMMIT_EVERY = 3
#: Fewest elements of a gradient that Horovod sums. When a rank is killed during a sum, Horovod
#: 0.28.1 on another rank continues with its next message, of 8 bytes. Another rank may still wait
#: for a part of the sum. If this part has fewer than 8 bytes, Gloo aborts the rank
#: ("op.preamble.length <= op.nbytes"), with or without compression. Gloo splits the sum of three
#: ranks into six parts.
FEWEST_ELEMENTS = 24


def announce(directory):
    """Write the number of this process, so that the test can kill it."""
    host, local_rank = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
    (directory / f"process.{host}.{local_rank}").write_text(str(os.getpid()))


def largest_difference(snapshot, other):
    return max(float(np.abs(one - two).max()) for one, two in zip(snapshot, other))


class Worker:
    """The loop of an elastic training, and its records.

    Args:
        hvd: the Horovod module of the framework.
        step: function of a number that makes this step and checks that all ranks agree.
        snapshot: function that returns the parameters and the mean of all ranks' memories, two arrays.
        as_rank_0: function that returns rank 0's value of an int.
    """

    def __init__(self, directory, hvd, step, snapshot, as_rank_0):
        self.directory, self.hvd = directory, hvd
        self._step, self._snapshot, self._as_rank_0 = step, snapshot, as_rank_0
        # the snapshot after the last step; not in the state, because Horovod resets the state to the
        # last commit
        self._newest = []

    def commits_go_on(self):
        """Return whether the test wants commits, according to rank 0."""
        return bool(self._as_rank_0(int(not (self.directory / "no_commits").exists())))

    def note_start(self, state):
        now = self._snapshot()
        errors = [
            largest_difference(now, snapshot) for snapshot in (state.committed, *self._newest)
        ]
        entry = {
            "size": self.hvd.size(),
            "step": state.step,
            "kept": float(np.abs(now[1]).max()),
            "error": min(errors),
            "snapshot": errors.index(min(errors)),
        }
        with open(self.directory / "starts", "a") as starts:
            if self.hvd.rank() == 0:
                starts.write(json.dumps(entry) + "\n")

    def train(self, state):
        while not (self.directory / "enough").exists() or state.step % COMMIT_EVERY:
            self._step(state.step)
            state.step += 1
            self._newest[:] = [self._snapshot()]
            state.committed = self._newest[0]
            if state.step % COMMIT_EVERY == 0 and self.commits_go_on():
                state.commit()
            else:
                state.check_host_updates()
            if self.hvd.rank() == 0:
                (self.directory / "progress.new").write_text(
                    json.dumps({"size": self.hvd.size(), "step": state.step})
                )
                (self.directory / "progress.new").rename(self.directory / "progress")
            time.sleep(0.02)

    def finish(self):
        (self.directory / f"finished.{self.hvd.rank()}").write_text(str(self.hvd.size()))
