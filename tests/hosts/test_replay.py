"""Test the replay of steps: sizes of the networks, and a device that sleeps."""

import math
import time

import architectures
import pytest
from replay_worker import TOTALS, Device, layers


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
