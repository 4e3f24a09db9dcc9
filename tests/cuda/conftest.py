"""Fixtures: the schedules of the emulated device, and TensorFlow's kernels."""

import emulation
import pytest


@pytest.fixture(
    params=emulation.SCHEDULES, ids=lambda schedule: f"schedule{schedule[0]}-{schedule[1]}"
)
def schedule(request):
    emulation.set_schedule(*request.param)
    yield request.param
    emulation.set_schedule()


@pytest.fixture(scope="session")
def kernels():
    """TensorFlow's operators with the GPU kernels."""
    import emulated

    from deepreduce_hvd.tensorflow import ops as adapter

    class Kernels:
        encode = staticmethod(emulated.labelled(adapter.operators.deepreduce_encode))
        decode = staticmethod(emulated.labelled(adapter.operators.deepreduce_decode_sum))
        supports = staticmethod(emulated.supports)

    return Kernels
