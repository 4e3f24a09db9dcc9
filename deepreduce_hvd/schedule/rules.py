"""The rules by which systems schedule their messages, as predictions for one profile."""

from collections.abc import Callable, Sequence

from deepreduce_hvd.schedule import dag
from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16, Message, Model, Timeline
from deepreduce_hvd.schedule.density import lags
from deepreduce_hvd.schedule.fields import expect
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.merge import selection_cost
from deepreduce_hvd.schedule.optimum import optimal_plan
from deepreduce_hvd.schedule.profile import Profile, least_density
from deepreduce_hvd.schedule.published_rules import mg_wfbp, omgs

#: dense bytes of the buckets of ``Compressor(bucket_bytes=)``, by default
BUCKET_BYTES = 64 << 20
#: {name of a rule: what it does}, in the order of tables
RULES = {
    "serial": "dense, one message per gradient, all after backward",
    "one message": "dense, one message after backward (SyncEASGD)",
    "WFBP": "dense, one message per gradient as soon as it is ready",
    "MG-WFBP": "dense, merged by the greedy rule of MG-WFBP",
    "dense": "dense, optimal grouping",
    "fp16": "float16, optimal grouping",
    "top-k": "codec, one message per gradient as soon as it is ready",
    "buckets": "codec, buckets of 64 MiB of gradients: what a Compressor does by default",
    "OMGS": "codec on merged gradients, merged by the corrected greedy rule of OMGS",
    "LAGS": "codec and dense, one message per gradient, densities by LAGS",
    "codec": "codec, optimal grouping",
    "plan": "dense, float16 and codec, grouping and densities chosen together",
}


def predict(
    rule: str,
    profile: Profile,
    network: Network,
    density: float | None = None,
    groups: Sequence[int] | None = None,
) -> tuple[Timeline, tuple[Message, ...]]:
    """Return the timeline of a step under a rule, and its messages.

    Args:
        rule: one of :data:`RULES`.
        profile: the profile.
        network: the network.
        density: the smallest density of the codec. Default: that of the profile, the only one for a
            codec without a ratio.
        groups: lengths of the groups of consecutive parameters that share a message, in place of
            the rule's own grouping. Not for LAGS.
    """
    expect(rule in RULES, "rule", f"one of {', '.join(RULES)}", repr(rule))
    least = least_density(profile, density, "predict density")
    if rule == "plan":
        chosen = optimal_plan(profile, network, density=least, groups=groups)
        return chosen.timeline, chosen.messages
    if rule == "LAGS":
        expect(groups is None, "predict groups", "None for LAGS", groups)
        messages = lags(profile, network, max_compression=1 / least)
    else:
        way, group = _GROUPS[rule]
        grouping = group(Model(profile, network), least) if groups is None else groups
        messages = _messages(profile, grouping, way, least)
    predicted = dag.timeline(
        profile, network, messages, overlap=rule != "serial", merged_selection=rule == "OMGS"
    )
    return predicted, tuple(messages)


def _messages(profile: Profile, grouping: Sequence[int], way: str, density: float) -> list[Message]:
    names, first, messages = [part.name for part in profile.parameters], 0, []
    for length in grouping:
        members = tuple(names[first : first + length])
        if way == CODEC:
            messages.append(Message(members, way, density, "Allgather"))
        else:
            messages.append(Message(members, way))
        first += length
    return messages


def _each(model: Model, density: float) -> list[int]:
    return [1] * model.count


def _all(model: Model, density: float) -> list[int]:
    return [model.count]


def _mg_wfbp(model: Model, density: float) -> list[int]:
    alpha, beta = model.network.reduce_line
    return mg_wfbp(model.ready, 4 * model.elements, alpha, beta)[0]


def _dense(model: Model, density: float) -> list[int]:
    return model.optimal_grouping(DENSE, density)


def _fp16(model: Model, density: float) -> list[int]:
    return model.optimal_grouping(FP16, density)


def _codec(model: Model, density: float) -> list[int]:
    return model.optimal_grouping(CODEC, density)


def _buckets(model: Model, density: float) -> list[int]:
    grouping, length, size = [], 0, 0.0
    for elements in model.elements.tolist():
        length, size = length + 1, size + 4 * elements
        if size >= BUCKET_BYTES:
            grouping.append(length)
            length, size = 0, 0.0
    return [*grouping, length] if length else grouping


def _omgs(model: Model, density: float) -> list[int]:
    per_element = float(model.payloads(density).sum()) / float(model.elements.sum())
    return omgs(
        model.ready,
        model.elements,
        selection_cost(model.selection_per_step()),
        lambda elements: model.network.allgather(per_element * elements),
    )[0]


_GROUPS: dict[str, tuple[str, Callable[[Model, float], list[int]]]] = {
    "serial": (DENSE, _each),
    "one message": (DENSE, _all),
    "WFBP": (DENSE, _each),
    "MG-WFBP": (DENSE, _mg_wfbp),
    "dense": (DENSE, _dense),
    "fp16": (FP16, _fp16),
    "top-k": (CODEC, _each),
    "buckets": (CODEC, _buckets),
    "OMGS": (CODEC, _omgs),
    "codec": (CODEC, _codec),
}
