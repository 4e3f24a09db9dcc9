"""Densities whose exchanges are hidden behind the backward pass."""

import math
from collections.abc import Callable

from deepreduce_hvd.schedule.dag import CODEC, DENSE, Message, Model
from deepreduce_hvd.schedule.fields import expect, is_finite
from deepreduce_hvd.schedule.grouping import expect_non_negative
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.profile import Profile

MAX_COMPRESSION = 1000.0
_HALVINGS = 40  # of an interval
_ROUNDING = 1 + 1e-12


def hidden_density(
    hidden: float,
    elements: float,
    bytes_per_element: float,
    latency: float,
    seconds_per_byte: float,
    *,
    ranks: int,
    selection: float = 0.0,
    max_compression: float = MAX_COMPRESSION,
) -> float:
    """Return the largest density of a layer whose selection and exchange need ``hidden`` seconds.

    The closed form of LAGS: k = (hidden - selection - latency) / (bytes per element * (P - 1) *
    seconds per byte), and the density is k / elements, at least 1 / max_compression and at most 1.

    Args:
        hidden: the seconds of backward behind which the layer can hide.
        elements: the number of elements of the layer.
        bytes_per_element: bytes of a payload per element that it keeps.
        latency: seconds of an allgather without bytes.
        seconds_per_byte: seconds per received byte.
        ranks: the number of ranks, P.
        selection: the seconds in which the gradient is selected and encoded.
        max_compression: the inverse of the smallest density.

    Returns:
        The density; 1 for a layer without elements.

    Raises:
        InvalidArgumentError: ``max_compression`` or ``ranks`` is below 1, or a number is not finite
            or negative. Only ``hidden`` may be negative.

    >>> hidden_density(0.5, 1000, 8, 0.1, 1e-3, ranks=2)
    0.05
    """
    expect_non_negative(
        "hidden_density", elements=elements, bytes_per_element=bytes_per_element, latency=latency,
        seconds_per_byte=seconds_per_byte, selection=selection,
    )  # fmt: skip
    expect(is_finite(hidden), "hidden_density hidden", "a finite number", hidden)
    for what, value in (("ranks", ranks), ("max_compression", max_compression)):
        good = is_finite(value) and value >= 1
        expect(good, f"hidden_density {what}", "a finite number of at least 1", value)
    per_element = bytes_per_element * (ranks - 1) * seconds_per_byte
    left = hidden - selection - latency
    without_bytes = elements if left >= 0 else 0.0
    k = without_bytes if per_element == 0 else left / per_element
    return min(max(k / elements, 1 / max_compression), 1.0) if elements > 0 else 1.0


def lags(
    profile: Profile,
    network: Network,
    *,
    max_compression: float = MAX_COMPRESSION,
    hide_behind: str = "next",
) -> list[Message]:
    """Return one message per gradient, each as dense as can be hidden behind backward.

    In the order in which gradients are ready, each one gets the largest density between
    1 / max_compression and ``profile.max_density`` whose exchange ends in time. What ends in time
    uncompressed is sent uncompressed, which also saves its encoding. The density is found in closed
    form: payloads are piecewise linear in it. If denser payloads take longer to encode, halving an
    interval follows. Source: LAGS-SGD (Shi et al. 2019).

    The time of decoding, after backward, is not considered.

    Args:
        profile: the profile.
        network: the network.
        max_compression: the inverse of the smallest density. A codec without a ratio has only the
            density of the profile.
        hide_behind: "next" is the published rule: an exchange is in time if it ends before the next
            layer's gradient is computed. "rest" uses the whole rest of the backward pass, except
            the time that later layers need at the smallest density. The last message then ends with
            backward, or as early as with the smallest density everywhere.

    Returns:
        A list of :class:`Message`, one per parameter.

    Raises:
        InvalidArgumentError: ``max_compression`` is below 1 or not finite, or ``hide_behind`` is
            another text.
    """
    good = is_finite(max_compression) and max_compression >= 1
    expect(good, "lags max_compression", "a finite number of at least 1", max_compression)
    expect(hide_behind in ("next", "rest"), "lags hide_behind", "'next' or 'rest'", hide_behind)
    model = Model(profile, network)
    least = 1 / max_compression if profile.has_ratio else profile.density
    deadlines = _Deadlines(model, least) if hide_behind == "rest" else None
    messages = []
    # seconds by which encoding has delayed backward; when the threads and the network are free
    delay, encoder, free = 0.0, 0.0, 0.0
    for layer, name in enumerate(model.names):
        computed = float(model.ready[layer]) + delay
        last = layer + 1 == model.count
        following = 0.0 if last else float(model.ready[layer + 1] - model.ready[layer])
        uncompressed = max(free, computed) + model.seconds(
            layer, layer + 1, DENSE, None, "Allreduce"
        )
        in_time = computed + following if deadlines is None else deadlines.free[layer]
        if uncompressed <= in_time:
            messages.append(Message((name,)))
            free = uncompressed
            continue

        def encoded(
            density: float, layer: int = layer, computed: float = computed
        ) -> tuple[float, float]:
            """Return when the gradient is encoded, and when backward continues."""
            seconds = float(model.preparation(CODEC, density, layer, layer + 1)[0])
            return max(encoder, computed) + seconds, computed + profile.encoding_delay * seconds

        def hidden(density: float, layer: int = layer, following: float = following) -> float:
            """Return the largest density that is in time if encoding takes as for ``density``."""
            ready, continued = encoded(density)
            if deadlines is None:
                in_time = continued + following
            elif ready > deadlines.encoded[layer] or continued > deadlines.continued[layer]:
                return 0.0
            else:
                in_time = deadlines.sent[layer]
            budget = in_time - max(free, ready)
            return model.density_of(layer, layer + 1, network.largest_payload(budget))

        most = max(min(hidden(least), profile.max_density), least)
        density = largest_good(least, most, lambda tried: hidden(tried) >= tried)
        messages.append(Message((name,), CODEC, density, "Allgather"))
        encoder, continued = encoded(density)
        delay += continued - computed
        free = max(free, encoder) + model.occupied(layer, layer + 1, CODEC, density, "Allgather")
    return messages


def largest_good(least: float, most: float, good: Callable[[float], bool]) -> float:
    """Return the largest number from ``least`` to ``most`` that is good, by halving.

    Numbers below a good one are assumed to be good, and ``least`` too.
    """
    if good(most):
        return most
    low, high = least, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if good(middle):
            low = middle
        else:
            high = middle
        if high - low <= 1e-6 * low:
            break
    return low


class _Deadlines:
    """When each gradient must be done, so that later ones of the smallest density end in time.

    Attributes:
        sent: (L,) latest ends of the messages, in seconds from the start of backward. Allgathers
            may end a little after the next message has started.
        free: (L,) when other messages must have ended.
        encoded: (L,) when each gradient must be encoded.
        continued: (L,) when backward must continue after each gradient.
    """

    def __init__(self, model: Model, least: float) -> None:
        messages = [(layer, layer + 1, CODEC, least, "Allgather") for layer in range(model.count)]
        seconds = [model.seconds(*message) for message in messages]
        occupied = [model.occupied(*message) for message in messages]
        ready = model.prepared(CODEC, least)
        preparation = model.preparation(CODEC, least).tolist()
        delay = model.profile.encoding_delay
        free = finish = 0.0
        for at, taken, until_next in zip(ready.tolist(), seconds, occupied):
            start = max(free, at)
            free, finish = start + until_next, start + taken
        sent, encoded, continued = [max(finish, float(ready[-1]))], [math.inf], [math.inf]
        free_at = list(sent)
        for layer in range(model.count - 1, 0, -1):
            start = sent[-1] - seconds[layer]
            begun = min(start, encoded[-1]) - preparation[layer]  # the latest start of encoding
            backward = float(model.ready[layer] - model.ready[layer - 1])
            continued.append(min(begun, continued[-1] - delay * preparation[layer]) - backward)
            encoded.append(begun)
            free_at.append(start)
            sent.append(start + seconds[layer - 1] - occupied[layer - 1])
        self.sent, self.free = sent[::-1], free_at[::-1]
        self.encoded = [at * _ROUNDING for at in encoded[::-1]]
        self.continued = [at * _ROUNDING for at in continued[::-1]]
