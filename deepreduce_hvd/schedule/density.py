"""Densities whose exchanges are hidden behind the backward pass."""

from deepreduce_hvd.schedule.dag import CODEC, DENSE, Message, Model
from deepreduce_hvd.schedule.fields import expect
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.profile import Profile

MAX_COMPRESSION = 1000.0


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
        The density.

    >>> hidden_density(0.5, 1000, 8, 0.1, 1e-3, ranks=2)
    0.05
    """
    per_element = bytes_per_element * (ranks - 1) * seconds_per_byte
    left = hidden - selection - latency
    without_bytes = elements if left >= 0 else 0.0
    k = without_bytes if per_element == 0 else left / per_element
    return min(max(k / elements, 1 / max_compression), 1.0)


def lags(
    profile: Profile,
    network: Network,
    *,
    max_compression: float = MAX_COMPRESSION,
    hide_behind: str = "next",
) -> list[Message]:
    """Return one message per gradient, each as dense as can be hidden behind backward.

    In the order in which gradients are ready, each one gets the largest density between
    1 / max_compression and 1 whose exchange ends in time. What ends in time uncompressed is sent
    uncompressed, which also saves its encoding. The density is found in closed form: payloads are
    piecewise linear in it. Source: LAGS-SGD (Shi et al. 2019).

    The time of decoding, after backward, is not considered.

    Args:
        profile: the profile.
        network: the network.
        max_compression: the inverse of the smallest density.
        hide_behind: "next" is the published rule: an exchange is in time if it ends before the next
            layer's gradient is computed. "rest" uses the whole rest of the backward pass, except
            the time that later layers need at the smallest density. The last message then ends with
            backward, or as early as with the smallest density everywhere.

    Returns:
        A list of :class:`Message`, one per parameter.

    Raises:
        InvalidArgumentError: ``max_compression`` is below 1, or ``hide_behind`` is another text.
    """
    expect(max_compression >= 1, "lags max_compression", "a number of at least 1", max_compression)
    expect(hide_behind in ("next", "rest"), "lags hide_behind", "'next' or 'rest'", hide_behind)
    model = Model(profile, network)
    least = 1 / max_compression
    reserved = _latest_ends(model, least) if hide_behind == "rest" else None
    messages = []
    encoded, free = 0.0, 0.0  # seconds of encoding so far; when the network is free
    for layer, name in enumerate(model.names):
        computed = float(model.ready[layer]) + encoded
        ready = computed + float(model.encode[layer])
        last = layer + 1 == model.count
        following = 0.0 if last else float(model.ready[layer + 1] - model.ready[layer])
        uncompressed = max(free, computed) + model.seconds(
            layer, layer + 1, DENSE, None, "Allreduce"
        )
        in_time = computed + following if reserved is None else reserved[layer]
        if uncompressed <= in_time:
            messages.append(Message((name,)))
            free = uncompressed
            continue
        in_time = ready + following if reserved is None else reserved[layer]
        budget = in_time - max(free, ready)
        density = model.density_of(layer, layer + 1, network.largest_payload(budget))
        density = min(max(density, least), 1.0)
        messages.append(Message((name,), CODEC, density, "Allgather"))
        encoded += float(model.encode[layer])
        free = max(free, ready) + model.seconds(layer, layer + 1, CODEC, density, "Allgather")
    return messages


def _latest_ends(model: Model, least: float) -> list[float]:
    """Return when each message must end, so that later ones of density ``least`` end in time."""
    seconds = [
        model.seconds(layer, layer + 1, CODEC, least, "Allgather") for layer in range(model.count)
    ]
    ready = model.ready + model.encode.cumsum()
    finish = 0.0
    for at, taken in zip(ready.tolist(), seconds):
        finish = max(finish, at) + taken
    latest = [max(finish, float(ready[-1]))]
    for taken in reversed(seconds[1:]):
        latest.append(latest[-1] - taken)
    return latest[::-1]
