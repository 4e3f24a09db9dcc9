"""One rank of benchmarks/more_ranks.py: steps whose backward pass sleeps, and real exchanges.

Arguments: whether to measure a profile first, 0 or 1, and the number of measured steps of each row.
"""

import json
import statistics
import sys

from changing_link_worker import BACKWARD, FORWARD, LAYERS
from decisions import decide
from more_ranks_rows import COMMUNICATORS, DENSE, NONE
from replay_worker import Messages, Replay

_WARM_UP = 2  # steps of each row before the measured ones


def main(with_profile, steps):
    total = sum(LAYERS)
    table = [(f"layer{n}", (d,), BACKWARD * d / total) for n, d in enumerate(LAYERS)]
    replay = Replay(table, FORWARD)
    import horovod.torch as hvd

    import deepreduce_hvd as dr

    def say(**row):
        if hvd.rank() == 0:
            print("ROW " + json.dumps(row), flush=True)

    if with_profile:
        auto = replay.compressed("auto", schedule="auto")
        decide(auto, lambda _: replay.step("auto"))
        profile = replay.profile(auto).to_json()
        say(event="profile", profile=profile)
    replay.optimized(NONE, lambda named: hvd.Compression.none)
    Messages(DENSE, replay.add(DENSE), replay.gradients, [len(LAYERS)])
    for name in COMMUNICATORS:
        replay.compressed(name, communicator=getattr(dr, name)())
    taken = {name: [] for name in (NONE, DENSE, *COMMUNICATORS)}
    for number in range(_WARM_UP + steps):
        for name, seconds in taken.items():
            spent = replay.step(name)
            if number >= _WARM_UP:
                seconds.append(spent)
    for name, seconds in taken.items():
        say(
            event="row",
            row=name,
            seconds=statistics.median(seconds),
            fastest=min(seconds),
            slowest=max(seconds),
            steps=steps,
        )


if __name__ == "__main__":
    main(sys.argv[1] == "1", int(sys.argv[2]))
