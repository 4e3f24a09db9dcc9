"""TensorFlow's kernels for GPUs under the emulator: what they make is, bit for bit, what the
kernels of the host make.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE, gradient
from sampling import parametrize_product

import deepreduce_hvd as dr

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
adapter = pytest.importorskip("deepreduce_hvd.tensorflow.ops")
# the emulator's kernels and TensorFlow's headers take minutes to compile
pytestmark = pytest.mark.slow

DTYPES = ("float32", "float16", "bfloat16", "float64")
CASES = {
    "plain": gradient(1500),
    "odd": gradient(77, key=2),
    "one": np.array([3.5], dtype=np.float32),
    "empty": np.zeros(0, dtype=np.float32),
    "zeros": np.zeros(300, dtype=np.float32),
    "ties": np.round(gradient(600) * 4).astype(np.float32),
    "nan": np.where(np.arange(500) == 77, np.float32(np.nan), gradient(500)),
    "inf": np.where(np.arange(500) == 3, np.float32(-np.inf), gradient(500)),
}
RECOMMENDED = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4))


@pytest.fixture(scope="module", autouse=True)
def kernels():
    import emulated

    class Kernels:
        encode = staticmethod(emulated.labelled(adapter.operators.deepreduce_encode))
        decode = staticmethod(emulated.labelled(adapter.operators.deepreduce_decode_sum))
        supports = staticmethod(emulated.supports)

    return Kernels


HOST = (adapter.operators.deepreduce_encode, adapter.operators.deepreduce_decode_sum)


def table_of(codec, memory=None, rows=1):
    return np.array([codec.fields(memory or dr.NoMemory(), step) for step in range(rows)])


def outcome(work):
    """What a kernel makes, as bytes, or how it refuses."""
    try:
        return work().numpy().tobytes()
    except tf.errors.OpError as error:
        # from a graph it comes after where the operator was made
        message = error.message.split("\n\t [[")[0].rpartition("\n")[2]
        return type(error).__name__, adapter._DECORATION.sub("", message)


def same_encoding(kernels, codec, memory, values, dtype="float32", steps=2, rows=1, **attributes):
    """Encodes some steps on both sides; returns the payloads."""
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
    wrong[0, 1] = 2  # the ratio of TopK
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
    # variables that do not fit are never a notice
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
        and "residual: expected an initialized float variable of 77 elements, got float of shape [3]"
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


# --- sums ---


def messages_of(codecs, members, ranks, d=400, dtype="float32"):
    """(the ranks' messages one after another, their lengths); every member and rank has a codec and
    a gradient of its own.
    """
    payloads = [
        HOST[0](
            tf.cast(tf.constant(gradient(d, key=31 * rank + member)), dtype),
            table_of(codecs[(rank * members + member) % len(codecs)]),
            [1, 2, 3, rank],
            [],
            [],
        )
        for rank in range(ranks)
        for member in range(members)
    ]
    return tf.concat(payloads, 0), np.array([payload.shape[0] for payload in payloads])


def same_sum(
    kernels,
    messages,
    lengths,
    codec,
    d=400,
    initial=None,
    member=0,
    members=1,
    scale=0.25,
    spent=(),
    ranks=None,
):
    """Both kernels' answers, the GPU's with hints and without; returns the host's. As many ranks as
    there are lengths for, unless said.
    """
    ranks = len(lengths) // members if ranks is None else ranks
    initial = [] if initial is None else [initial]
    attributes = {"member": member, "members": members, "variable": "kernel", "T": tf.float32}
    expected = outcome(
        lambda: HOST[1](messages, np.float64(scale), [d], ranks, initial, [], [], [], **attributes)
    )
    hints = [tf.constant(lengths, tf.int64), table_of(codec)]
    for given in (hints, []):
        made = outcome(
            lambda: kernels.decode(
                messages,
                np.float64(scale),
                [d],
                ranks,
                initial,
                list(spent),
                [],
                given,
                **attributes,
            )
        )
        assert plain(made) == plain(expected), f"with {len(given)} hints"
    return expected


def plain(answer):
    """Which NaN a sum with NaN makes is the processor's choice."""
    if isinstance(answer, tuple):
        return answer
    array = np.frombuffer(answer, np.float32)
    return np.where(np.isnan(array), np.float32(np.nan), array).tobytes()


@pytest.mark.parametrize(
    "codec",
    [
        RECOMMENDED,
        dr.Codec(dr.TopK(0.05), index=INDEX["bloom_p2"], value=dr.FitPoly()),
        dr.Codec(dr.NoneSparsifier()),
        dr.Codec(dr.TopK(0.05), index=dr.RLE()),
    ],
)
def test_sums_of_many_ranks_and_members(kernels, codec):
    messages, lengths = messages_of([codec], members=3, ranks=4)
    for member in range(3):
        total = same_sum(kernels, messages, lengths, codec, member=member, members=3)
        assert np.frombuffer(total, np.float32).any()
    same_sum(
        kernels,
        messages,
        lengths,
        codec,
        member=1,
        members=3,
        initial=tf.constant(gradient(400, key=5)),
    )
    same_sum(
        kernels,
        messages,
        lengths,
        codec,
        member=1,
        members=3,
        spent=[tf.constant(gradient(400, key=6))],
    )
    same_sum(
        kernels,
        messages,
        lengths,
        codec,
        member=1,
        members=3,
        spent=[tf.cast(gradient(400), tf.bfloat16)],
    )


def test_sums_of_payloads_of_other_codecs_than_hinted(kernels):
    """The device leaves them to the host, with the same sum."""
    others = [
        RECOMMENDED,
        dr.Codec(dr.TopK(0.05), index=INDEX["bloom_p0"]),
        dr.Codec(dr.TopK(0.05), value=dr.Deflate()),
    ]
    messages, lengths = messages_of(others, members=1, ranks=6)
    for codec in others:
        same_sum(kernels, messages, lengths, codec, initial=tf.constant(gradient(400, key=5)))


@parametrize_product(dtype=DTYPES, case=["empty", "one", "nan", "inf", "zeros"])
def test_sums_of_unusual_gradients(kernels, case, dtype):
    payload = HOST[0](
        tf.cast(tf.constant(CASES[case]), dtype), table_of(RECOMMENDED), [1, 2, 3, 4], [], []
    )
    same_sum(
        kernels,
        tf.concat([payload, payload], 0),
        [payload.shape[0]] * 2,
        RECOMMENDED,
        d=CASES[case].size,
    )


def test_the_shape_of_the_payload(kernels):
    payload = HOST[0](
        tf.constant([1.0, -5.0, 2.0]), table_of(dr.Codec(dr.TopK(0.5))), [0] * 4, [], []
    )
    for hints in (
        [],
        [tf.constant([payload.shape[0]], tf.int64), table_of(dr.Codec(dr.TopK(0.5)))],
    ):
        total = kernels.decode(payload, np.float64(1), [-1], 1, [], [], [], hints, T=tf.float32)
        np.testing.assert_array_equal(total.numpy(), [0, -5, 0])


@pytest.mark.parametrize(("messages", "ranks"), [(0, 1), (2, 1), (1, 2), (3, 2), (4, 2)])
def test_the_number_of_messages_must_be_that_of_the_ranks(kernels, messages, ranks):
    payload = HOST[0](tf.constant(gradient(400)), table_of(RECOMMENDED), [0] * 4, [], [])
    gathered = tf.concat([payload] * messages, 0) if messages else tf.zeros([0], tf.uint8)
    answer = same_sum(kernels, gathered, [payload.shape[0]] * messages, RECOMMENDED, ranks=ranks)
    assert answer == (
        "DataLossError",
        f"parameter kernel: expected 1 messages of each of {ranks} ranks, got {messages} in all",
    )


def test_corrupt_messages_are_refused_as_on_the_host(kernels):
    from deepreduce_hvd import container

    messages, lengths = messages_of([RECOMMENDED], members=1, ranks=1)
    random, refused = np.random.default_rng(4), 0
    for number in range(60):
        flipped = messages.numpy().copy()
        bit = int(random.integers(8 * flipped.size))
        flipped[bit // 8] ^= 1 << bit % 8
        if number % 2:
            flipped[32:40] = np.frombuffer(
                container.checksum(flipped).to_bytes(8, "little"), dtype=np.uint8
            )
        refused += isinstance(same_sum(kernels, tf.constant(flipped), lengths, RECOMMENDED), tuple)
    assert refused >= 30
    same_sum(kernels, messages, lengths, RECOMMENDED, d=401)
    assert (
        same_sum(kernels, tf.constant(messages.numpy()[:-1]), lengths - 1, RECOMMENDED)[0]
        == "DataLossError"
    )


def test_notices_are_every_ranks_failure(kernels):
    wrong = table_of(RECOMMENDED)
    wrong[0, 1] = 2
    payload = HOST[0](tf.constant(gradient(400)), table_of(RECOMMENDED), [0] * 4, [], [])
    notice = HOST[0](tf.constant(gradient(400)), wrong, [0] * 4, [], [], notices=True)
    lengths = [payload.shape[0], notice.shape[0]]
    error, message = same_sum(kernels, tf.concat([payload, notice], 0), lengths, RECOMMENDED)
    assert (
        error == "AbortedError"
        and message.startswith("parameter kernel: rank 1: ")
        and "expected a ratio" in message
    )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([-1, 1], "message 0: expected at most"),
        ([10**6, 1], "message 0: expected at most"),
        ([2**62, 2**62], "message 0: expected at most"),
        ([40, 0], "bytes in total, got"),
        ([[1]], "lengths: expected a vector, got shape"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(kernels, lengths, message):
    messages, _ = messages_of([RECOMMENDED], members=1, ranks=2)
    hints = [tf.constant(lengths, tf.int64), table_of(RECOMMENDED)]
    _, said = outcome(
        lambda: kernels.decode(
            messages, np.float64(1), [400], 2, [], [], [], hints, variable="kernel", T=tf.float32
        )
    )
    assert message in said


def test_hints_that_are_none(kernels):
    messages, lengths = messages_of([RECOMMENDED], members=1, ranks=3)

    def decode(hints, **options):
        return outcome(
            lambda: kernels.decode(
                messages, np.float64(1), [400], 3, [], [], [], hints, T=tf.float32, **options
            )
        )

    assert (
        "expected 2 messages of each of 3 ranks, got 3 in all"
        in decode([tf.constant(lengths), table_of(RECOMMENDED)], members=2)[1]
    )
    assert (
        "codec: expected shape [rows, 20], got [1,19]"
        in decode([tf.constant(lengths), table_of(RECOMMENDED)[:, :19]])[1]
    )
    assert (
        "expected no hints, or lengths (int64) and a codec (double), got int64"
        in decode([tf.constant(lengths)])[1]
    )


def test_lengths_of_messages():
    messages, lengths = messages_of(
        [RECOMMENDED, dr.Codec(dr.NoneSparsifier())], members=2, ranks=3
    )
    np.testing.assert_array_equal(adapter.operators.deepreduce_lengths(messages).numpy(), lengths)
    with pytest.raises(tf.errors.DataLossError, match="parameter kernel: message 5: payload"):
        adapter.operators.deepreduce_lengths(messages[:-1], variable="kernel")


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize("collectives", ["host", "nccl"])
def test_two_ranks_train_as_on_the_host(collectives, tmp_path):
    """All scenarios of TensorFlow on stock Horovod, with variables on a pretended GPU."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parallel"))
    from launch import report_of

    directory = tmp_path / collectives  # whose name tells the script
    directory.mkdir()
    reports = report_of(
        2, pathlib.Path(__file__).parent / "pretend_tensorflow" / "ranks.py", directory
    )
    failed = [
        f"{scenario}, rank {rank}: {outcome}"
        for scenario, ranks in reports.items()
        for rank, outcome in ranks.items()
        if outcome is not None
    ]
    assert not failed, "\n".join(failed)
    assert "compressed_on_the_gpu" in reports
