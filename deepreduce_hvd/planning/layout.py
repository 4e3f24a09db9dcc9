"""Layout: how the gradients of a step are sent, by the settings of a compressor or by a plan."""

import collections
import dataclasses
import os
import zlib
from collections.abc import Collection, Mapping, Sequence

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import Allgather, Communicator
from deepreduce_hvd.communicators.auto import EXACT_SUMS
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.policies import Policy, recommended_codec, rows_codec, some_of
from deepreduce_hvd.schedule.dag import CODEC, DENSE, WAYS, Message
from deepreduce_hvd.schedule.plan import COMMUNICATORS, Plan
from deepreduce_hvd.schedule.profile import ASSUMED_CODEC
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.validation import expect_stages, shown

_MOST_NAMES = 5
#: a plan's densities may be so much smaller than those of the codec
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the gradients of a step are sent.

    Attributes:
        policies: {parameter name: policy}.
        messages: for each message, in order, the names of the parameters that share it. Parameters
            in no message are assigned to buckets.
        communicators: {parameter name: communicator of its message}. All others use the
            compressor's.
        fingerprint: CRC-32 of the compressor's configuration and this layout; ranks compare it.
        plan: the plan that the layout follows, or None.
    """

    policies: Mapping[str, Policy]
    messages: tuple[tuple[str, ...], ...]
    communicators: Mapping[str, Communicator]
    fingerprint: int
    plan: Plan | None = None

    def notes(self, tables: Collection[str] = (), is_on_trial: bool = False) -> list[str]:
        """Return sentences for the user on a plan, and on what it leaves out besides tables.

        Args:
            tables: names of the embedding tables that were found.
            is_on_trial: whether the plan is being tried.
        """
        if self.plan is None:
            return []
        planned = in_plans(self.policies)
        rows = {name for name, one in self.policies.items() if not one.dense} - {*planned}
        rows.update(tables)
        encoded = (message for message in self.plan.messages if message.way == CODEC)
        kept = [name for one in encoded for name in one.members if self.policies[name].dense]
        messages = [_without(message, {*rows, *kept}) for message in self.plan.messages]
        followed = dataclasses.replace(self.plan, messages=tuple(one for one in messages if one))
        found = [f"Schedule{', on trial' if is_on_trial else ''}: {followed.in_words()}."]
        members = [name for message in self.plan.messages for name in message.members]
        if kept:
            found.append(
                "Sent uncompressed, and not as the plan says, because of dense_below or codec=:"
                f" {some_of(kept)}."
            )
        by_rows = [name for name in members if name in rows]
        if by_rows:
            found.append(f"Sent by their rows, and not as the plan says: {some_of(by_rows)}.")
        left = [name for name in planned if name not in {*members, *tables}]
        if left:
            found.append(
                f"The plan leaves out {len(left)} of the compressed parameters, sent as without a"
                f" plan: {some_of(left)}."
            )
        return found


def _without(message: Message, names: Collection[str]) -> Message | None:
    """Return a message without these members; None if no other is left."""
    left = tuple(name for name in message.members if name not in names)
    return dataclasses.replace(message, members=left) if left else None


def of_settings(policies: Mapping[str, Policy], fingerprint: int) -> Layout:
    """Return the layout of a compressor without a plan."""
    return Layout(policies, (), {}, fingerprint)


def in_plans(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policies that plans may change: those with a codec other than "rows".

    The rows of embedding tables are sent in buckets, whatever a plan says: other ways would send
    more bytes, or delay rows.
    """
    rows = rows_codec()
    return {name: one for name, one in policies.items() if not one.dense and one.codec != rows}


def of_plan(policies: Mapping[str, Policy], fingerprint: int, plan: Plan) -> Layout:
    """Return the layout of a plan.

    Parameters with the codec "rows" are taken out of it, and so are those that the compressor does
    not compress, such as tensors with few elements.

    Args:
        policies: the compressor's own policies. A plan changes those with a codec.
        fingerprint: CRC-32 of the compressor's configuration.
        plan: the plan.

    Raises:
        InvalidArgumentError: the plan is for other parameters, or it needs what a codec or a memory
            does not support.
    """
    planned, changing = dict(policies), in_plans(policies)
    messages, communicators = [], {}
    counts = collections.Counter(name for message in plan.messages for name in message.members)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise InvalidArgumentError(
            f"plan: expected each parameter in one message, got {', '.join(repeated[:_MOST_NAMES])}"
            " more than once"
        )
    for message in plan.messages:
        _expect_members(message, policies)
        members = tuple(name for name in message.members if name in changing)
        for name in members:
            planned[name] = _planned(name, policies[name], message, plan.codec)
        if message.way == CODEC and members:
            messages.append(members)
            communicators.update(dict.fromkeys(members, EXACT_SUMS[message.communicator]))
    text = repr((messages, list(planned.values()), list(communicators.values())))
    return Layout(
        planned, tuple(messages), communicators, zlib.crc32(text.encode(), fingerprint), plan
    )


def with_tables(base: Layout, tables: Mapping[str, Policy]) -> Layout:
    """Return a layout in which embedding tables have other policies, and are in no message.

    Args:
        base: the layout without them.
        tables: {name: policy} of the tables. Their index codecs depend on the rank's devices.
    """
    without = (tuple(one for one in members if one not in tables) for members in base.messages)
    return dataclasses.replace(
        base,
        policies={**base.policies, **tables},
        messages=tuple(members for members in without if members),
        communicators={name: one for name, one in base.communicators.items() if name not in tables},
        fingerprint=zlib.crc32(repr(list(tables)).encode(), base.fingerprint),
    )


def uncompressed_by(schedule: str | Plan | None) -> set[str]:
    """Return the names of the parameters that a plan sends uncompressed.

    Args:
        schedule: the argument ``schedule`` of a compressor.
    """
    messages = schedule.messages if isinstance(schedule, Plan) else ()
    return {name for one in messages if one.way != CODEC for name in one.members}


def _expect_members(message: Message, policies: Mapping[str, Policy]) -> None:
    unknown = [name for name in message.members if name not in policies]
    if unknown:
        raise InvalidArgumentError(
            f"plan: expected names of the compressor's {len(policies)} parameters, got also "
            f"{', '.join(unknown[:_MOST_NAMES])}; make a plan for this model"
        )
    if message.way == CODEC and message.communicator not in EXACT_SUMS:
        raise InvalidArgumentError(
            f"plan: expected one of {', '.join(EXACT_SUMS)}, got {message.communicator}"
        )


def _planned(name: str, policy: Policy, message: Message, made_for: str) -> Policy:
    """Return the policy of a compressed parameter in a message. Its memory stays.

    So does a codec without a ratio, if the plan was made for it.

    Args:
        name: name of the parameter.
        policy: its own policy.
        message: the message.
        made_for: the codec that the plan was made for, as text.
    """
    if message.way != CODEC:
        if not _can_be_added(policy.memory):
            raise InvalidArgumentError(
                "plan: expected Residual or NoMemory for parameters that are sent uncompressed,"
                f" got {policy.memory!r} for {name}"
            )
        return Policy(message.way, None, policy.memory)
    codec, density = policy.codec, message.density
    assert codec is not None and density is not None
    expect_stages(codec, policy.memory, EXACT_SUMS[message.communicator])
    ratio = ratio_of(codec)
    if density == ratio or (ratio is None and made_for == repr(codec)):
        return policy
    sparsifier = codec.sparsifier.with_ratio(density)
    if sparsifier is None:
        raise InvalidArgumentError(
            f"plan: expected one that was made for {codec!r}, whose density no plan can change, got"
            f" one for {made_for} with a density of {density:g} for {name}; make it from a profile"
            " of a job with this codec"
        )
    return Policy(CODEC, codec.with_stages(sparsifier), policy.memory)


def _can_be_added(memory: Memory) -> bool:
    """Return whether a gradient that is sent uncompressed can take along what a memory keeps."""
    return not memory.state or (memory.keeps_everything and len(memory.state) == 1)


def communicators_of(policies: Mapping[str, Policy]) -> tuple[str, ...]:
    """Return the names of the communicators that all codecs and memories of policies support."""
    planned = in_plans(policies).values()
    return tuple(
        name
        for name in COMMUNICATORS
        if all(_supports(one.codec, one.memory, name) for one in planned)
    )


def ways_of(policies: Mapping[str, Policy], sums_float16: bool = True) -> tuple[str, ...]:
    """Return the ways in which ``schedule="auto"`` may send gradients.

    Float16 rounds, and has no numbers above 65504. A memory keeps the rest for later steps. Without
    one, gradients would be lost, or would become infinite, without the user having asked for it.

    Args:
        policies: the policies of a compressor.
        sums_float16: whether sums of float16 are right but for rounding, see
            :meth:`~deepreduce_hvd.Transport.sums_float16`.
    """
    keep = sums_float16 and all(policy.memory.state for policy in in_plans(policies).values())
    return WAYS if keep else (DENSE, CODEC)


def _supports(codec: Codec | None, memory: Memory, communicator: str) -> bool:
    assert codec is not None
    try:
        expect_stages(codec, memory, EXACT_SUMS[communicator])
    except InvalidArgumentError:
        return False
    return True


def ratio_of(codec: Codec) -> float | None:
    """Return the share of elements that a codec sends, after the first steps; None if not fixed."""
    ratio = getattr(codec.sparsifier, "ratio", None)
    return None if ratio is None or codec.sparsifier.with_ratio(ratio) is None else float(ratio)


def expect_schedule(schedule, policies, communicator):
    """Check the argument ``schedule`` of a compressor.

    Raises:
        InvalidArgumentError: not a schedule, or the other settings do not allow it.
    """
    if schedule is None:
        return
    # the comparison of an array has no single truth value
    is_auto = isinstance(schedule, str) and schedule == "auto"
    if not (is_auto or isinstance(schedule, Plan)):
        is_path = isinstance(schedule, os.PathLike) or str(schedule).endswith(".json")
        hint = f"; write schedule=dr.schedule.Plan.load({str(schedule)!r})" if is_path else ""
        raise InvalidArgumentError(
            "Compressor schedule: expected None, 'auto' or a deepreduce_hvd.schedule.Plan, got"
            f" {shown(schedule)}{hint}"
        )
    if isinstance(schedule, Plan):
        _expect_densities(schedule, policies)
    if type(communicator) is not Allgather:
        raise InvalidArgumentError(
            "Compressor schedule: expected communicator=Allgather(), the default, got"
            f" {communicator!r}; leave out communicator=, because a plan chooses the communicator"
            " of each message"
        )
    compressed = set(in_plans(policies).values())
    if is_auto and compressed:
        codecs = {policy.codec for policy in compressed if policy.codec is not None}
        if len(compressed) > 1 or ratio_of(next(iter(codecs))) is None:
            raise InvalidArgumentError(
                "Compressor schedule: expected one codec with a ratio, such as TopK(0.01), for all"
                " compressed parameters but embedding tables with schedule='auto', got"
                f" {', '.join(map(repr, codecs))}"
            )
        memory = next(iter(compressed)).memory
        if not _can_be_added(memory):
            raise InvalidArgumentError(
                "Compressor schedule: expected Residual or NoMemory with schedule='auto', got"
                f" {memory!r}"
            )


def _expect_densities(plan: Plan, policies: Mapping[str, Policy]) -> None:
    """Check that a plan sends no fewer elements than the user's codecs."""
    for name, density in plan.densities().items():
        codec = policies[name].codec if name in policies else None
        ratio = None if codec is None else ratio_of(codec)
        if ratio is not None and density < ratio * (1 - _ROUNDING):
            raise InvalidArgumentError(
                f"plan: expected densities of at least {ratio:g}, which the codec keeps of {name},"
                f" got {density:g}; make a plan with deepreduce-plan --density {ratio:g}, or from a"
                " profile of a job with this codec"
            )


def differences_of(
    schedule: str | Plan | None, policies: Mapping[str, Policy], ranks: int
) -> list[str]:
    """Return a sentence for each thing in which a job differs from that of its plan.

    Args:
        schedule: the argument ``schedule`` of a compressor.
        policies: its own policies.
        ranks: the number of ranks.
    """
    if not isinstance(schedule, Plan):
        return []
    found, planned = [], schedule.hosts * schedule.ranks_per_host
    if ranks not in (1, planned):  # a single rank sends nothing
        found.append(
            f"the plan was made for {planned} ranks, and this job has {ranks}; its messages may not"
            " be the best ones"
        )
    named = [policies[name].codec for name in schedule.densities() if name in policies]
    codecs = dict.fromkeys(repr(codec) for codec in named if codec is not None)
    known = {*codecs, *([ASSUMED_CODEC] if repr(recommended_codec()) in codecs else [])}
    if codecs and schedule.codec not in known:
        found.append(
            f"the plan was made for {schedule.codec}, and this compressor has {', '.join(codecs)};"
            " its messages may not be the best ones"
        )
    return found


def assign_to_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Group tensors into buckets, in the order in which they become ready.

    A bucket is complete once it has at least ``bucket_bytes``. With 0, each tensor has its own
    bucket.

    Args:
        sizes: the number of float32 elements of each tensor.
        bucket_bytes: the size of a bucket in bytes.

    Returns:
        A list of lists of positions in ``sizes``.
    """
    buckets: list[list[int]] = []
    filled = 0
    for position, size in enumerate(sizes):
        if not buckets or filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(position)
        filled += 4 * size
    return buckets
