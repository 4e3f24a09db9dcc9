"""One rank of benchmarks/changing_link.py, which changes the links when this prints "decided"."""

import json
import statistics
import time
import zlib

from decisions import decide, has_decided
from replay_worker import Replay

#: elements of the layers, in network order, and seconds of forward and backward
LAYERS, FORWARD, BACKWARD = (8_000, *[60_000] * 4, *[200_000] * 6), 0.05, 0.1
#: steps of "auto" before the change, and after it; more until a plan is chosen, if plans take turns
_BEFORE, _AFTER, _MOST_MORE = 20, 150, 200
_TURNS = 20
FIXED = ("none", "fp16", "64 MiB buckets")


def main():
    total = sum(LAYERS)
    table = [(f"layer{n}", (d,), BACKWARD * d / total) for n, d in enumerate(LAYERS)]
    replay = Replay(table, FORWARD)
    import horovod.torch as hvd

    auto = replay.compressed("auto", schedule="auto")

    def say(**row):
        if hvd.rank() == 0:
            print("ROW " + json.dumps(row), flush=True)

    def step():
        began = time.perf_counter()
        seconds = replay.step("auto")
        plan = "" if auto.plan is None else auto.plan.to_json()
        # trials change the plan too
        trying = not has_decided(auto)
        say(
            event="step",
            began=began,
            seconds=seconds,
            plan=zlib.crc32(plan.encode()),
            trying=trying,
        )

    watch = auto.adapter.scheduler.step_ends
    before = decide(auto, lambda _: replay.step("auto"))
    auto.adapter.scheduler.step_ends = watch
    for _ in range(_BEFORE):
        step()
    say(event="decided", steps=before, chosen=auto.adapter.notes()[0])
    for number in range(_AFTER + _MOST_MORE):
        if number >= _AFTER and has_decided(auto):
            break
        step()
    auto.adapter.scheduler.step_ends = lambda *_: None
    say(event="changed", chosen=auto.adapter.notes()[0])

    replay.optimized("none", lambda named: hvd.Compression.none)
    replay.optimized("fp16", lambda named: hvd.Compression.fp16)
    replay.compressed("64 MiB buckets")
    taken = {name: [] for name in (*FIXED, "auto")}
    for number in range(_TURNS):
        for name, seconds in taken.items():
            spent = replay.step(name)
            if number >= 2:
                seconds.append(spent)
    for name, seconds in taken.items():
        say(event="row", row=name, seconds=statistics.median(seconds), steps=len(seconds))


if __name__ == "__main__":
    main()
