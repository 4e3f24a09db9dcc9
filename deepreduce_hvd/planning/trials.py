"""The plans that ``schedule="auto"`` tries, see :mod:`deepreduce_hvd.planning.scheduler`."""

import dataclasses
from typing import NamedTuple

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import CODEC, WAYS
from deepreduce_hvd.schedule.density import largest_good
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.optimum import optimal_plan
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.schedule.rules import predict

#: rules whose messages are tried, see :data:`deepreduce_hvd.schedule.rules.RULES`
_RULES = ("plan", "codec", "buckets", "dense", "fp16")


class Trial(NamedTuple):
    """A plan that was tried.

    Attributes:
        rule: the rule that made it.
        predicted: predicted seconds of a step.
        measured: measured seconds of a step, see
            :meth:`~deepreduce_hvd.planning.race.Race.seconds`.
        kept: share of the elements that one rank sends.
    """

    rule: str
    predicted: float
    measured: float
    kept: float

    def in_words(self):
        """Return the rule, and the milliseconds of a step, measured and predicted."""
        return f"{self.rule} {1e3 * self.measured:.1f} ms ({1e3 * self.predicted:.1f} predicted)"


def plans_to_try(profile, communicators, buckets=None, ways=WAYS):
    """Return [(rule, plan as JSON)] for the rules to try, those without a codec last.

    Plans that send every gradient in the same way, and in the same messages where it is encoded,
    are duplicates; only the first one is returned. Predictions do not count: a plan of few messages
    can be faster than one of many for which the same step is predicted.

    Args:
        profile: the profile of all ranks.
        communicators: names of those that plans may use.
        buckets: names of the parameters that share a message, for each message, if something else
            decides that, as PyTorch's DDP does. None if plans decide.
        ways: the ways in which plans may send gradients, see
            :func:`~deepreduce_hvd.planning.layout.ways_of`.
    """
    network, profile, groups = _network_of(profile, buckets)
    plans: list[tuple[str, Plan]] = []
    for rule in _RULES:
        if rule in WAYS and rule not in ways:
            continue
        if rule == "plan":
            found = optimal_plan(
                profile, network, ways=ways, communicators=communicators, groups=groups
            )
        else:
            messages = predict(rule, profile, network, groups=groups)[1]
            found = Plan.of(profile, network, messages)
        if not any(_are_same(found, other) for _, other in plans):
            plans.append((rule, found))
    return [(rule, plan.to_json()) for rule, plan in plans]


def fitted_to_step(profile, seconds, buckets=None):
    """Return {field: value} of a profile, such that the predicted step is the measured one.

    If threads have cores of their own, backward goes on while they encode. If backward needs all
    cores, it waits as if the device encoded. ``encoding_delay`` says where between these two the
    measured step is. If the step takes longer than with a delay of 1, the rest is added to
    ``update_seconds``, so that all plans have it. If it takes less than with 0, the delay is 0.

    Args:
        profile: the profile of all ranks.
        seconds: seconds of a step in which all payloads shared buckets.
        buckets: as for :func:`plans_to_try`.
    """
    network, profile, groups = _network_of(profile, buckets)

    def predicted(delay):
        one = dataclasses.replace(profile, encoding_delay=delay)
        return predict("buckets", one, network, groups=groups)[0].step_seconds

    delay = largest_good(0.0, 1.0, lambda one: predicted(one) <= seconds)
    rest = max(seconds - predicted(delay), 0.0) if delay == 1 else 0.0
    return {"encoding_delay": delay, "update_seconds": profile.update_seconds + rest}


def _network_of(profile, buckets):
    """Return the network, the profile in the order of messages, and their lengths or None."""
    network = Network(profile.hosts, profile.link())
    return (network, profile, None) if buckets is None else (network, *_by_bucket(profile, buckets))


def _are_same(one, other):
    encoded = [
        [message.members for message in plan.messages if message.way == CODEC]
        for plan in (one, other)
    ]
    return encoded[0] == encoded[1] and _ways(one) == _ways(other)


def send_alike(one, other):
    """Return whether two plans send each gradient in the same way, whatever the densities are."""
    ways = [
        {name: (way, communicator) for name, (way, _, communicator) in _ways(plan).items()}
        for plan in (one, other)
    ]
    return ways[0] == ways[1]


def _ways(plan):
    """Return {parameter name: how its gradient is sent}."""
    return {
        name: (message.way, message.density, message.communicator)
        for message in plan.messages
        for name in message.members
    }


def _by_bucket(profile, buckets):
    """Return the profile in the order of buckets, and the number of its parameters in each.

    The parameters of a bucket become ready together. Buckets without any are left out.
    """
    known = {part.name: part for part in profile.parameters}
    parameters, groups, ready = [], [], 0.0
    for names in buckets:
        parts = [known[name] for name in names if name in known]
        if parts:
            ready = max(ready, *(part.ready_seconds for part in parts))
            parameters += [dataclasses.replace(part, ready_seconds=ready) for part in parts]
            groups.append(len(parts))
    return dataclasses.replace(profile, parameters=tuple(parameters)), groups


def expect_one_way(plan):
    """Check that a job with this plan shows what each of its gradients costs with the codec.

    Raises:
        InvalidArgumentError: the plan sends some gradients otherwise, or with other densities.
    """
    ways = {(one.way, one.density, one.communicator) for one in plan.messages}
    if len(ways) > 1 or not all(communicator == "Allgather" for *_, communicator in ways):
        raise InvalidArgumentError(
            "profile: expected a job that compresses all of its gradients alike and exchanges them"
            f" by Allgather, got one with the plan of {plan.in_words()}; measure without schedule=,"
            " or with schedule='auto'"
        )
