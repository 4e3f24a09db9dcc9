"""What ``schedule="auto"`` measures of a codec, against direct encoding."""

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning.measured_profile import Costs
from deepreduce_hvd.planning.measurements import curve_of, network_tables
from deepreduce_hvd.schedule import Parameter

CODECS = {
    "the default": dr.recommended_codec(),
    "pairs": dr.Codec(dr.TopK(0.002)),
    "QSGD": dr.Codec(dr.TopK(0.02), index=dr.EliasFano(), value=dr.QSGD(4)),
    "RandomK": dr.Codec(dr.RandomK(0.05), index=dr.Rice(), value=dr.Float16()),
}


@pytest.mark.parametrize("name", CODECS)
def test_payloads_at_other_densities_are_predicted_from_one(name):
    codec = CODECS[name]
    curve, ratio = curve_of(codec), codec.sparsifier.ratio
    gradient = np.random.default_rng(7).standard_normal(300_000, np.float32)
    step = codec.sparsifier.schedule_steps

    def payload(density):
        denser = dr.Codec(codec.sparsifier.with_ratio(density), codec.index, codec.value)
        return denser.encode(gradient, step=step).size

    points = Costs(0.0, 0.0, payload(ratio)).points(codec, curve.growth)
    parameter = Parameter("p", gradient.size, 0.0, 0.0, 0.0, points)
    assert parameter.payload_bytes[0] == (ratio, payload(ratio))
    for density in (0.1, 0.25, 0.5):
        assert parameter.payload(density) == pytest.approx(payload(density), rel=0.05)
    assert curve.seconds_per_kept_element >= 0


def test_one_bit_per_value_carries_most_at_half_of_the_elements():
    # of a normal distribution, sign x mean of the largest 54 % keeps most of the energy
    assert curve_of(dr.recommended_codec()).max_density == 0.5
    assert curve_of(dr.Codec(dr.TopK(0.01))).max_density == 1.0


def test_a_codec_that_is_already_dense():
    curve = curve_of(dr.Codec(dr.TopK(1.0)))
    assert curve == (((1.0, 1.0),), 1.0, 0.0)


def test_without_a_payload_or_a_ratio_nothing_is_known():
    growth = ((0.01, 1.0), (0.1, 7.0))
    assert Costs(0.0, 0.0, None).points(dr.recommended_codec(), growth) == ()
    assert Costs(0.0, 0.0, 90).points(dr.Codec(dr.Threshold(0.1)), growth) == ()


class Recorder:
    """Figures and a transport of one rank, which note the bytes of each sum."""

    merges_sums = True

    def __init__(self, rank=0):
        self.rank = rank
        self.sums = []
        self.last = None  # what was summed last

    def name(self, label):
        return label

    lasting_name = name

    def slowest(self, transport, seconds):
        return seconds

    def allgather(self, array, name):
        return 0

    def allreduce(self, array, name):
        return 0

    def allreduce_in_place(self, array, name):
        self.sums.append((name.rpartition(".")[0], array.nbytes))
        self.last = array
        return 0

    def test(self, handle):
        return True

    def wait(self, handle):
        pass


def test_sums_are_timed_as_horovod_makes_them():
    """It merges gradients, with copies, but sends one of 64 MiB alone."""
    many, one = Recorder(), Recorder()
    for recorder, gradients in ((many, [1 << 22] * 8), (one, [1 << 24])):
        tables = network_tables(recorder, recorder, gradients)
        assert [size for size, _ in tables["allreduce"].points][-1] == 1 << 26
    largest = ("allreduce.67108864", 1 << 26)
    assert largest not in many.sums and ("allreduce.67108864", 1 << 25) in many.sums
    assert largest in one.sums and ("allreduce.16777216", 1 << 23) in one.sums
    # in float16, the same gradient has half of the bytes
    assert ("allreduce_fp16.67108864", 1 << 25) in one.sums


def test_each_rank_sums_values_of_its_own():
    """Horovod sums equal float16 values faster (benchmarks/float16_sums.py)."""
    one, other = Recorder(0), Recorder(1)
    for recorder in (one, other):
        network_tables(recorder, recorder, [1 << 16])
        assert recorder.last.dtype == np.float16
    assert (one.last != other.last).mean() > 0.99
