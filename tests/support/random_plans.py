"""Random plans: groups of parameters that are sent in random ways."""

from deepreduce_hvd.communicators import Allgather
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule import Message, Plan

_SUMS = ("Allgather", "SplitAllgather", "RecursiveDoubling")
_DENSITIES = (0.05, 0.01, 0.3, 1.0)


def plan_of(messages, hosts, codec=""):
    """Return a plan with these messages and no predictions."""
    return Plan(tuple(messages), (), 0.0, "none", codec, hosts, 1, "none")


def random_plan(draw, names, hosts, codec="", least=0.0):
    """Return a plan with the names in random groups, in the order of backward, or in no group.

    ``least`` is the smallest density.
    """
    left, messages = [*names][::-1], []
    while left:
        length = draw.randint(1, len(left))
        members, left = tuple(left[:length]), left[length:]
        way = draw.choice(("codec", "codec", "dense", "fp16"))
        if draw.random() < 0.15:
            continue  # parameters without a message go into buckets
        if way == "codec":
            messages.append(
                Message(members, way, max(draw.choice(_DENSITIES), least), draw.choice(_SUMS))
            )
        else:
            messages.append(Message(members, way))
    return plan_of(messages, hosts, codec)


def takes_any_plan(compressor):
    """Return whether a compressor's codecs, memories and communicator allow every random plan."""
    compressed = [policy for policy in compressor.policies.values() if not policy.dense]
    return compressor.communicator == Allgather() and all(
        layout.ratio_of(policy.codec) is not None
        and (policy.memory.keeps_everything or not policy.memory.state)
        for policy in compressed
    )
