"""Test that TensorFlow's GPU kernels, in the emulator, give the same bits as the host kernels."""

import functools
import importlib.util
import pathlib

import numpy as np
import pytest
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE, gradient
from launch import TENSORFLOW_SCENARIOS, horovodrun, report_of, scenarios
from sampling import parametrize_product, some
from tensorflow_kernels import CASES, DTYPES, HOST, RECOMMENDED, outcome, table_of, tf

import deepreduce_hvd as dr

# the emulator's kernels and TensorFlow's headers take minutes to compile
pytestmark = pytest.mark.slow

_HERE = pathlib.Path(__file__).resolve().parent


def same_encoding(kernels, codec, memory, values, dtype="float32", steps=2, rows=1, **attributes):
    """Encode some steps on both sides, and return the payloads."""
    states = [
        [
            tf.Variable(gradient(values.size, key=11 + part) * np.float32(0.1))
            for part in range(len(memory.state))
        ]
        for _ in range(2)
    ]
    payloads = []
    for step in range(steps):
        given = tf.cast(tf.constant(np.roll(values, step)), dtype)
        made = [
            outcome(
                lambda: encode(
                    given,
                    table_of(codec, memory, rows),
                    [7, step, 3, 5],
                    [part.handle for part in state],
                    [],
                    **attributes,
                )
            )
            for encode, state in zip((HOST[0], kernels.encode), states)
        ]
        assert made[0] == made[1]
        for host, device in zip(*states):
            assert host.numpy().tobytes() == device.numpy().tobytes()
        payloads.append(made[0])
    return payloads


@parametrize_product(
    index=["raw_index", "bitmap", "rice", "elias_fano", "bloom_p0", "bloom_p2"], case=CASES
)
def test_index_codecs(kernels, index, case):
    same_encoding(kernels, dr.Codec(dr.TopK(0.05), index=INDEX[index]), dr.Residual(), CASES[case])


@parametrize_product(
    value=["float16", "bfloat16", "qsgd_4", "qsgd_5_l2", "fit_poly", "fit_dexp"], case=CASES
)
def test_value_codecs(kernels, value, case):
    same_encoding(kernels, dr.Codec(dr.TopK(0.05), value=VALUE[value]), dr.Residual(), CASES[case])


@parametrize_product(memory=MEMORIES, dtype=DTYPES)
def test_memories_and_dtypes(kernels, memory, dtype):
    same_encoding(kernels, RECOMMENDED, MEMORIES[memory], CASES["plain"], dtype, steps=3)
    same_encoding(kernels, dr.Codec(dr.NoneSparsifier()), MEMORIES[memory], CASES["odd"], dtype)


@pytest.mark.parametrize("sparsifier", SPARSIFIERS)
def test_sparsifiers_and_schedules(kernels, sparsifier):
    same_encoding(
        kernels,
        dr.Codec(SPARSIFIERS[sparsifier]),
        dr.Residual(),
        CASES["plain"],
        steps=5,
        rows=SPARSIFIERS[sparsifier].schedule_steps + 1,
    )


@pytest.mark.parametrize("memory", ["no_memory", "residual", "momentum_correction"])
@pytest.mark.parametrize(
    ("index", "value"), [(dr.RLE(), None), (dr.Huffman(), dr.Deflate()), (None, dr.Quantile())]
)
def test_codecs_that_stay_on_the_host_go_there(kernels, index, value, memory):
    codec = dr.Codec(dr.TopK(0.05), index=index, value=value)
    assert not kernels.supports(codec.fields(dr.Residual())) and kernels.supports(
        RECOMMENDED.fields(dr.Residual())
    )
    for case in ("plain", "empty", "nan"):
        same_encoding(kernels, codec, MEMORIES[memory], CASES[case])


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(RECOMMENDED, "float32"), (dr.Codec(dr.TopK(0.05), index=dr.RLE()), "bfloat16")],
)
@pytest.mark.parametrize("notices", [False, True])
def test_failures_are_those_of_the_host_and_notices_where_asked_for(kernels, codec, dtype, notices):
    wrong = table_of(codec)
    wrong[0, 1] = 2  # an invalid ratio of TopK
    given = tf.cast(tf.constant(CASES["odd"]), dtype)
    made = [
        outcome(lambda: encode(given, wrong, [7, 0, 3, 5], [], [], notices=notices))
        for encode in (HOST[0], kernels.encode)
    ]
    assert made[0] == made[1]
    assert (
        (made[0][:4] == b"DRER" and b"expected a ratio in (0, 1]" in made[0])
        if notices
        else made[0][0] == "InvalidArgumentError"
    )
    # a residual where the codec has none
    made = [
        outcome(
            lambda: encode(
                given,
                table_of(codec),
                [0] * 4,
                [tf.Variable(tf.zeros(77)).handle],
                [],
                notices=notices,
            )
        )
        for encode in (HOST[0], kernels.encode)
    ]
    assert made[0] == made[1] and (
        made[0][:4] == b"DRER" if notices else "expected no residual" in made[0][1]
    )
    # variables of a wrong shape never cause a notice
    short = [tf.Variable(tf.zeros(3)).handle]
    made = [
        outcome(
            lambda: encode(
                given, table_of(codec, dr.Residual()), [0] * 4, short, [], notices=notices
            )
        )
        for encode in (HOST[0], kernels.encode)
    ]
    assert (
        made[0] == made[1]
        and (
            "residual: expected an initialized float variable of 77 elements, got float of "
            "shape [3]"
        )
        in made[0][1]
    )


def test_records_are_refused_on_a_gpu(kernels):
    records = [
        tf.Variable(np.int64(0)),
        tf.Variable(np.float32(0)),
        tf.Variable(np.zeros(2)),
        tf.Variable(np.zeros(0, np.uint8), shape=[None]),
    ]
    handles = [record.handle for record in records]
    _, message = outcome(
        lambda: kernels.encode(tf.ones([4]), table_of(RECOMMENDED), [0] * 4, [], handles)
    )
    assert "expected no records (host only), got 4" in message
    payload = HOST[0](tf.ones([4]), table_of(RECOMMENDED), [0] * 4, [], [])
    _, message = outcome(
        lambda: kernels.decode(
            payload, np.float64(1), [4], 1, [], [], handles[2:3], [], T=tf.float32
        )
    )
    assert "expected no record (host only), got 1" in message


def test_readers_of_a_residual_see_no_later_step(kernels):
    residual = tf.Variable(tf.zeros([100]))
    before = residual.read_value()
    kernels.encode(
        tf.constant(gradient(100)),
        table_of(RECOMMENDED, dr.Residual()),
        [0] * 4,
        [residual.handle],
        [],
    )
    assert not before.numpy().any() and residual.numpy().any()


#: the scenario of pretend_tensorflow/on_simulated_gpu.py
_ON_THE_GPU = "compressed_on_the_gpu"
#: without those of embedding tables, which keep the default codec on a GPU
_OF_THE_HOST = [
    name for worker in TENSORFLOW_SCENARIOS if "_table" not in worker for name in scenarios(worker)
]
_WITHOUT_NCCL = (*some(5, _OF_THE_HOST), _ON_THE_GPU)
#: scenarios of tests/parallel that depend on whether a collective runs on the host or with NCCL
_WITH_NCCL = (
    "average_is_the_mean_of_what_payloads_decode_to",
    "groups_change_nothing_but_the_messages",
    "sum_and_predivide",
    "process_set",
    "gradient_dtypes",
    "embeddings",
    "two_compressors_in_one_function",
    "a_non_finite_gradient_reaches_every_rank",
    _ON_THE_GPU,
)


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize(("collectives", "wanted"), [("host", _WITHOUT_NCCL), ("nccl", _WITH_NCCL)])
def test_two_ranks_train_as_on_the_host(collectives, wanted, tmp_path):
    """TensorFlow's scenarios pass on stock Horovod with variables on a simulated GPU."""
    directory = tmp_path / collectives  # the script reads this from the name
    directory.mkdir()
    folders = [_HERE, _HERE.parent / "parallel", _HERE.parents[1] / "scripts"]
    reports = report_of(
        2,
        _HERE / "pretend_tensorflow" / "on_simulated_gpu.py",
        directory,
        wanted,
        functools.partial(horovodrun, folders=folders),
    )
    failed = [
        f"{scenario}, rank {rank}: {outcome}"
        for scenario, ranks in reports.items()
        for rank, outcome in ranks.items()
        if outcome is not None
    ]
    assert not failed, "\n".join(failed)
    assert set(reports) == set(wanted)
