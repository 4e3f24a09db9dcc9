"""Test the replay of steps: sizes of the networks, and a device that sleeps."""

import math
import time

import architectures
import pytest
from replay_worker import TOTALS, Device, Messages, Replay, layers


@pytest.mark.parametrize(
    "network, parameters, elements",
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("bert_base", 199, 109_482_240),
        ("lstm", 11, 66_034_000),
    ],
)
def test_networks_have_their_published_sizes(network, parameters, elements):
    rows = getattr(architectures, network)()
    assert len(rows) == len({name for name, *_ in rows}) == parameters
    assert sum(math.prod(shape) for _, shape, _ in rows) == elements
    table, forward = layers(network)
    assert sum(seconds for *_, seconds in table) + forward == pytest.approx(TOTALS[network])


def test_a_device_is_busy_for_the_sum_of_its_seconds():
    device = Device()
    started = time.perf_counter()
    for _ in range(400):
        device.run(1e-4)
        sum(range(300))  # work of the host, which must not count as time of the device
    spent = time.perf_counter() - started
    assert spent >= 0.0395


def test_messages_are_the_members_of_a_group(monkeypatch):
    """Each gradient is in one message, and its sum comes back."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    table = [(f"layer{number}", (size,), 0.0) for number, size in enumerate((5, 3, 7, 2))]
    replay = Replay(table, 0.0)
    import horovod.torch as hvd

    sizes, allreduce = [], hvd.allreduce_async_

    def doubled(tensor, **options):
        sizes.append(tensor.numel())
        return allreduce(tensor.mul_(2), **options)

    monkeypatch.setattr(hvd, "allreduce_async_", doubled)
    Messages("merged", replay.add("merged"), replay.gradients, [1, 2, 1])
    prepared = replay.gradients.flat.clone()
    for _ in range(2):
        replay.step("merged")
        assert replay.gradients.flat.equal(2 * prepared)
    assert sizes == [2, 7 + 3, 5] * 2
