"""One rank of benchmarks/replay.py: backward passes that sleep, and real exchanges.

Backward sleeps for the seconds of a layer and then gives a prepared gradient to the parameter, so
that hooks run when they would on a device that computes beside the host. All rows share the memory
of one gradient. Prepared values are copied into it while forward would run.
"""

import dataclasses
import json
import math
import os
import queue
import statistics
import sys
import threading
import time

import architectures
import numpy as np
from decisions import decide
from turns import seconds_in_turns

#: seconds of forward and backward; a third is forward
TOTALS = {"resnet50": 0.18, "vgg16": 0.27, "bert_base": 0.25, "lstm": 0.12}
#: row -> rule of the model
RULES = {
    "none": "dense",
    "fp16 messages": "fp16",
    "one message": "one message",
    "one per gradient": "WFBP",
    "64 MiB buckets": "buckets",
    "MG-WFBP": "MG-WFBP",
    "OMGS": "OMGS",
    "LAGS": "LAGS",
    "auto": "plan",
}
LOCAL = "no exchange"
_FEWEST, _MOST = 3, 10  # turns of each row
_SHORTEST_SLEEP = 3e-4


def layers(network):
    """Return [(name, shape, backward seconds)] in network order, and the seconds of forward."""
    rows = getattr(architectures, network)()
    total = sum(work for *_, work in rows)
    backward = TOTALS[network] * 2 / 3
    return [(name, shape, backward * work / total) for name, shape, work in rows], backward / 2


class Device:
    """A device that is busy for given seconds."""

    def __init__(self):
        self._owed = 0.0

    def run(self, seconds):
        """Sleep; what is too short to sleep for, and what was slept too long, is made up later."""
        self._owed += seconds
        if self._owed > _SHORTEST_SLEEP:
            started = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - started


class Gradients:
    """The gradients of all rows, one after another as backward makes them ready, in one array."""

    def __init__(self, table, seed):
        import torch

        self.table = table
        sizes = [math.prod(shape) for _, shape, _ in table][::-1]
        draw = np.random.default_rng(seed)
        values = draw.standard_normal(sum(sizes), dtype=np.float32)
        values *= np.exp(draw.standard_normal(sum(sizes), dtype=np.float32))
        values *= np.float32(1e-3)
        self.flat = torch.from_numpy(values)
        self._prepared = self.flat.clone()
        self.bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self.parameters = torch.zeros(sum(sizes))

    def fill(self):
        self.flat.copy_(self._prepared)

    def views(self, flat):
        """Return parts of ``flat`` with the shapes of the parameters, in network order."""
        pairs = zip(self.bounds, self.bounds[1:])
        parts = [flat[first:last] for first, last in pairs][::-1]
        return [part.view(shape) for part, (_, shape, _) in zip(parts, self.table)]


class Row:
    """One setting: parameters with the memory that all rows share, and a step."""

    def __init__(self, name, gradients, device, forward_seconds):
        import torch

        self._gradients, self._device, self._forward = gradients, device, forward_seconds
        # Horovod keeps what it knows of a tensor by name
        self.named = [
            (f"{name}.{own}", torch.nn.Parameter(view))
            for (own, *_), view in zip(gradients.table, gradients.views(gradients.parameters))
        ]
        self._views = gradients.views(gradients.flat)
        self._layer = _layer_function(device)
        self._start = torch.zeros((), requires_grad=True)
        self.end = lambda: None

    def step(self):
        """Make a step; return its seconds."""
        started = time.perf_counter()
        for _, parameter in self.named:
            parameter.grad = None
        self._gradients.fill()
        self._device.run(max(self._forward - (time.perf_counter() - started), 0.0))
        value = self._start
        for (_, parameter), view, (*_, seconds) in zip(
            self.named, self._views, self._gradients.table
        ):
            value = self._layer.apply(value, parameter, view, seconds)
        value.backward()
        self.end()
        return time.perf_counter() - started


def _layer_function(device):
    import torch

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context, value, parameter, gradient, seconds):
            context.gradient, context.seconds = gradient, seconds
            return value.clone()

        @staticmethod
        def backward(context, above):
            device.run(context.seconds)
            # a new view: PyTorch keeps it instead of a copy
            return above, context.gradient.view(context.gradient.shape), None, None

    return Layer


class Messages:
    """Uncompressed messages with given members, sent one after another by a thread.

    Horovod itself would merge messages that wait. The members of a message are copied into it, and
    the sums are copied back.
    """

    def __init__(self, name, row, gradients, grouping):
        import horovod.torch as hvd

        self._hvd, self._queue, self._name = hvd, queue.Queue(), name
        parameters = [parameter for _, parameter in row.named][::-1]
        first = 0
        for number, length in enumerate(grouping):
            self._add(number, parameters[first : first + length], gradients, first)
            first += length
        row.end = self._queue.join
        threading.Thread(target=self._send, daemon=True).start()

    def _add(self, number, members, gradients, first):
        """Let the gradients of ``members`` share message ``number``; ``first`` is the first's."""
        import torch

        bounds = gradients.bounds[first : first + len(members) + 1]
        own = gradients.flat[bounds[0] : bounds[-1]]
        message = own if len(members) == 1 else torch.empty_like(own)
        for start, end, parameter in zip(bounds, bounds[1:], members):
            part = slice(start - bounds[0], end - bounds[0])
            last = end == bounds[-1]

            def ready(_, part=part, last=last):
                if message is not own:
                    message[part].copy_(own[part])
                if last:
                    self._queue.put((number, message, own))

            parameter.register_post_accumulate_grad_hook(ready)

    def _send(self):
        while True:
            number, message, own = self._queue.get()
            handle = self._hvd.allreduce_async_(message, name=f"{self._name}.{number}")
            while not self._hvd.poll(handle):
                time.sleep(1e-4)
            self._hvd.synchronize(handle)
            if message is not own:
                own.copy_(message)
            self._queue.task_done()


def _optimizer(row, compression):
    """Let a row's gradients go through Horovod's optimizer, whose own step does nothing."""
    import horovod.torch as hvd
    import torch

    class Still(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            pass

    parameters = [parameter for _, parameter in row.named]
    optimizer = hvd.DistributedOptimizer(
        Still(parameters), named_parameters=row.named, compression=compression
    )
    row.end = optimizer.step
    return optimizer


class Replay:
    """The rows of one rank, which share the memory of the gradients.

    Args:
        table: [(name, shape, backward seconds)] in network order.
        forward: seconds of forward.

    Attributes:
        rows: {name: Row}.
        table: [(name, shape, backward seconds)] in network order.
    """

    def __init__(self, table, forward):
        # the names of all rows: without a place for each, Horovod negotiates again in every step
        os.environ["HOROVOD_CACHE_CAPACITY"] = "8192"
        import horovod.torch as hvd
        import torch

        hvd.init()
        torch.set_num_threads(1)
        self.table, self._forward = table, forward
        self.gradients, self._device = Gradients(self.table, hvd.rank()), Device()
        self.rows, self._optimizers = {}, []

    def add(self, name):
        """Add a row that exchanges nothing, and return it."""
        self.rows[name] = Row(name, self.gradients, self._device, self._forward)
        return self.rows[name]

    def optimized(self, name, make):
        """Add a row of Horovod's optimizer; return its compression.

        Args:
            name: the name of the row.
            make: function of named parameters that makes the compression.
        """
        row = self.add(name)
        compression = make(row.named)
        self._optimizers.append(_optimizer(row, compression))
        return compression

    def compressed(self, name, **options):
        """Add a row with the default codec, without its first denser steps; return it."""
        import deepreduce_hvd as dr

        codec = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1))
        return self.optimized(name, lambda named: dr.Compressor(codec, parameters=named, **options))

    def profile(self, auto):
        """Return what a compressor with ``schedule="auto"`` has measured, of the slowest ranks.

        Adds the row :data:`LOCAL`.
        """
        import horovod.torch as hvd

        from deepreduce_hvd.schedule import Profile

        self.add(LOCAL)
        local_seconds = statistics.median(self.step(LOCAL) for _ in range(5))
        texts = hvd.allgather_object(auto.profile().to_json())
        profile = Profile.merged([Profile.from_json(text) for text in texts])
        # time 0 of the profile is the first gradient
        forward = max(local_seconds - profile.backward_seconds, 0.0)
        return dataclasses.replace(profile, forward_seconds=forward)

    def step(self, name):
        """Make a step of a row; return the seconds of the slowest rank."""
        import horovod.torch as hvd
        import torch

        spent = torch.tensor(self.rows[name].step(), dtype=torch.float64)
        return float(hvd.allreduce(spent, op=hvd.Max, name="slowest"))


def main(network, seconds):
    replay = Replay(*layers(network))
    import horovod.torch as hvd

    import deepreduce_hvd as dr
    from deepreduce_hvd.schedule import Network, Plan
    from deepreduce_hvd.schedule.rules import predict

    auto = replay.compressed("auto", schedule="auto")
    before = decide(auto, lambda _: replay.step("auto"))
    profile = replay.profile(auto)
    link = Network(profile.hosts, profile.link())
    messages = {row: predict(rule, profile, link)[1] for row, rule in RULES.items()}
    messages["auto"] = auto.plan.messages
    predicted = {row: Plan.of(profile, link, found) for row, found in messages.items()}
    # the same prediction with float16 assumed to take half the time of float32
    plainer = dataclasses.replace(
        profile, allreduce_fp16=None, to_fp16_seconds=0.0, from_fp16_seconds=0.0
    )
    plain_link = Network(profile.hosts, plainer.link())
    plain = {
        row: Plan.of(plainer, plain_link, found).step_seconds for row, found in messages.items()
    }

    def renamed(row):
        def of_row(name):
            return f"{row}.{name.partition('.')[2]}"

        found = [
            dataclasses.replace(one, members=tuple(map(of_row, one.members)))
            for one in messages[row]
        ]
        return dataclasses.replace(predicted[row], messages=tuple(found))

    def grouping(row):
        """Number of gradients per message; unplanned gradients are added to these messages."""
        names = [f"auto.{name}" for name, *_ in replay.table][::-1]
        last = sorted(names.index(one.members[-1]) + 1 for one in messages[row])
        return np.diff([0, *last[:-1], len(names)]).tolist()

    replay.optimized("none", lambda named: hvd.Compression.none)
    replay.optimized("fp16", lambda named: hvd.Compression.fp16)
    groupings = {name: grouping(name) for name in ("one message", "MG-WFBP")}
    groupings["one per gradient"] = [1] * len(replay.table)
    for name, lengths in groupings.items():
        Messages(name, replay.add(name), replay.gradients, lengths)
    replay.compressed("64 MiB buckets")
    replay.optimized("fp16 messages", lambda named: dr.Compressor("fp16", parameters=named))
    for name in ("OMGS", "LAGS"):
        replay.compressed(name, schedule=renamed(name))

    started = time.perf_counter()

    def enough(turns):
        late = time.perf_counter() - started > seconds
        return turns >= _FEWEST and hvd.broadcast_object(late)

    found = seconds_in_turns(replay.rows, replay.step, _MOST, enough)
    if hvd.rank():
        return
    optimum = predict("plan", profile, link)[0].step_seconds
    for name, taken in found.items():
        plan = predicted.get(name)
        print("ROW " + json.dumps({
            "row": name, "seconds": statistics.median(taken), "fastest": min(taken),
            "slowest": max(taken),
            "steps": len(taken), "messages": len(messages.get(name, ())),
            "predicted": plan.step_seconds if plan else None,
            "predicted_without_fp16": plain.get(name), "optimum": optimum,
            "steps_to_decide": before if name == "auto" else None,
            "encode": sum(part.encode_seconds for part in profile.parameters),
            "decode": 2 * sum(part.decode_seconds for part in profile.parameters),
            "tables": {
                kind: getattr(profile, kind).points
                for kind in ("allgather", "allreduce", "allreduce_fp16")
            }
            if name == "auto"
            else {},
            "chosen": " ".join(auto.adapter.notes()[:1]) if name == "auto" else "",
            "trials": [trial._asdict() for trial in auto.adapter.scheduler.trials] if name == "auto" else [],
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
