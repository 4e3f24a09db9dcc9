"""The profile of a job's last steps, from what the slots and the step times have measured."""

import math
from typing import NamedTuple

from deepreduce_hvd.container import HEADER
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule.parameter import Parameter
from deepreduce_hvd.schedule.profile import Profile


class Costs(NamedTuple):
    """Measured costs of one parameter: seconds per step, and bytes of its last payload or None."""

    encode: float
    decode: float
    payload: int | None

    @classmethod
    def of_steps(cls, ends, before, slot):
        """Return the costs of a parameter in the steps between two results of :func:`totals`.

        Args:
            ends: its totals at the end of these steps.
            before: its totals before them.
            slot: slot of the parameter.
        """
        encode, decode, steps = (now - then for now, then in zip(ends, before))
        steps = max(steps, 1)  # it may have had no gradient
        return cls(encode / steps, decode / steps, slot.payload_bytes)

    def points(self, density, growth=None):
        """Return the (density, bytes) pairs that are known of payloads.

        Args:
            density: density of the last payload.
            growth: None, or (density, bytes / bytes at ``density``) pairs, without the bytes of
                headers.
        """
        if self.payload is None:
            return ()
        body = self.payload - HEADER.size
        points = growth or ((density, 1.0),)
        return tuple((at, HEADER.size + factor * body) for at, factor in points)


def measured_profile(policies, times, slots, ranks, tables, costs=None, growth=None, **measured):
    """Return the :class:`~deepreduce_hvd.schedule.Profile` of this rank.

    Args:
        policies: {parameter name: :class:`~deepreduce_hvd.planning.policies.Policy`}.
        times: the :class:`~deepreduce_hvd.planning.step_times.StepTimes`.
        slots: slots of the parameters, by name.
        ranks: number of ranks. Each counts as a host of its own, because all of them exchange
            payloads.
        tables: names of the embedding tables that were found.
        costs: {parameter name: :class:`Costs`}; None for the averages over all steps.
        growth: as for :meth:`Costs.points`.
        measured: what else was measured, as arguments of ``Profile``.

    Raises:
        InvalidArgumentError: no step with a compressed gradient is complete yet, the codecs have
            different ratios, or one without a ratio sent nothing.
    """
    costs = costs or {
        name: Costs.of_steps(total, (0.0, 0.0, 0), slots[name])
        for name, total in totals(slots).items()
    }
    names, elements = profiled(policies, times, slots, tables), elements_of(slots)
    if not names:
        raise InvalidArgumentError(
            "profile: expected some complete steps with compressed gradients, besides those of"
            " embedding tables, got none"
        )
    ready = times.ready
    codecs = [policies[name].codec for name in names]
    ratio = density = _expect_one_ratio(codecs)
    if ratio is None:
        sent = sum(slots[name].statistics()["sent_values"] for name in names)
        density = sent / sum(elements[name] for name in names)
        if not density:
            raise InvalidArgumentError("profile: expected a last step that sent elements, got none")
        measured = {**measured, "max_density": density}
    parts = [
        Parameter(
            name, elements[name], max(ready[name], 0.0), costs[name].encode,
            costs[name].decode / ranks, costs[name].points(density, growth),
        )
        for name in names
    ]  # fmt: skip
    return Profile(
        tuple(parts), times.rest, hosts=ranks, codec=repr(codecs[0]), density=density,
        has_ratio=ratio is not None, **measured,
    )  # fmt: skip


def _expect_one_ratio(codecs):
    """Return the ratio of codecs, or None if they have none.

    Raises:
        InvalidArgumentError: they have different ratios, while a profile has one density.
    """
    ratios = {layout.ratio_of(codec) for codec in codecs}
    if len(ratios) > 1 or (ratios == {None} and len(set(codecs)) > 1):
        raise InvalidArgumentError(
            "profile: expected compressed gradients of one density, got the codecs"
            f" {', '.join(map(repr, dict.fromkeys(codecs)))}; measure a job with one of them"
        )
    return ratios.pop()


def profiled(policies, times, slots, tables):
    """Return the names of a profile's parameters, in the order in which gradients become ready.

    These are all of which the last complete steps selected elements. If they selected of none,
    these are all that they compressed. Embedding tables are left out, unless the user has given all
    compressed parameters the codec "rows".

    Args:
        policies, times, slots, tables: as for :func:`measured_profile`.
    """
    ready, elements = times.ready, elements_of(slots)
    counted = layout.in_plans(policies) or policies
    compressed = [
        name
        for name in sorted(ready, key=ready.__getitem__)
        if name in counted and not policies[name].dense and elements[name] and name not in tables
    ]
    return [name for name in compressed if policies[name].selects] or compressed


def totals(slots):
    """Return {parameter name: (seconds of encoding, of decoding, number of steps)} of this job."""
    return {
        name: (slot.encode_seconds, slot.decode_seconds, slot.steps - slot.untimed_steps)
        for name, slot in slots.items()
    }


def elements_of(slots):
    """Return {parameter name: number of elements that this rank sends or compresses}."""
    return {name: math.prod(slot.shape) for name, slot in slots.items()}
