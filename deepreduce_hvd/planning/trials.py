"""The plans that ``schedule="auto"`` tries, see :mod:`deepreduce_hvd.planning.scheduler`."""

import dataclasses
from typing import NamedTuple

from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16, Message
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.optimum import optimal_plan
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.schedule.rules import predict

_WITHOUT_CODEC = ("dense", "fp16")
#: rules whose messages are tried, see :data:`deepreduce_hvd.schedule.rules.RULES`
_RULES = ("plan", "codec", "buckets", *_WITHOUT_CODEC)
#: how a number of parameters is sent, in words
_WORDS = {CODEC: "compressed", DENSE: "uncompressed", FP16: "as float16"}
#: A plan is tried if its predicted step is at most this many times as long as the shortest.
_CLOSE = 1.5
#: What needs no codec is also tried if its prediction is at most this many times as long as the
#: shortest measured step. Its prediction is the more reliable one.
_POSSIBLY_FASTER = 1.25


class Trial(NamedTuple):
    """A plan that was tried.

    Attributes:
        rule: the rule that made it.
        predicted: predicted seconds of a step.
        measured: measured seconds of a step, the largest of all ranks.
        kept: share of the elements that one rank sends.
    """

    rule: str
    predicted: float
    measured: float
    kept: float


def plans_to_try(profile, communicators, buckets=None):
    """Return [(rule, plan as JSON)] for the rules to try, without repetitions.

    Args:
        profile: the profile of all ranks.
        communicators: names of those that plans may use.
        buckets: names of the parameters that share a message, for each message, if something else
            decides that, as PyTorch's DDP does. None if plans decide.
    """
    network = Network(profile.hosts, profile.link())
    groups = None
    if buckets is not None:
        profile, groups = _by_bucket(profile, buckets)
    plans: dict[tuple[Message, ...], tuple[str, str]] = {}
    for rule in _RULES:
        if rule == "plan":
            found = optimal_plan(profile, network, communicators=communicators, groups=groups)
        else:
            messages = predict(rule, profile, network, groups=groups)[1]
            found = Plan.of(profile, network, messages)
        plans.setdefault(found.messages, (rule, found.to_json()))
    return list(plans.values())


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


def next_plan(plans, trials):
    """Return the next of the (rule, plan) pairs that is worth a trial, and the rest; None if none
    is.

    Args:
        plans: pairs that are left; those without a codec come last.
        trials: the trials so far.
    """
    if not trials:
        return plans[0], plans[1:]
    shortest = min([plan.step_seconds for _, plan in plans] + [one.predicted for one in trials])
    measured = min(one.measured for one in trials)
    for number, (rule, plan) in enumerate(plans):
        limit = _CLOSE * shortest
        if rule in _WITHOUT_CODEC:
            limit = max(limit, _POSSIBLY_FASTER * measured)
        if plan.step_seconds <= limit:
            return plans[number], plans[number + 1 :]
    return None


def in_words(plan):
    """Return how many parameters are sent in which way."""
    parts: list[str] = []
    for way, words in _WORDS.items():
        own = [message for message in plan.messages if message.way == way]
        if not own:
            continue
        parameters = sum(len(message.members) for message in own)
        noun = "" if parts else " parameter" if parameters == 1 else " parameters"
        parts.append(f"{parameters}{noun} {words}")
        if way == CODEC:
            parts[-1] += f" in {len(own)} message{'' if len(own) == 1 else 's'}"
    return ", ".join(parts)
