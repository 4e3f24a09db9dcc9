"""Test TensorFlow's GPU kernel that decodes and sums payloads, under the emulator.

Its sums equal those of the host kernel bit for bit.
"""

import numpy as np
import pytest
from codecs_table import INDEX, gradient
from sampling import parametrize_product
from tensorflow_kernels import (
    CASES,
    DTYPES,
    HOST,
    RECOMMENDED,
    adapter,
    messages_of,
    outcome,
    table_of,
    tf,
)

import deepreduce_hvd as dr

# the emulator's kernels and TensorFlow's headers take minutes to compile
pytestmark = pytest.mark.slow


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
    """Compare both kernels, the GPU's with and without hints; return the result of the host.

    By default, the number of ranks is the number of lengths per member.
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
    """Replace every NaN by the same one, because the bits of a NaN sum depend on the processor."""
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
    for more in (
        {"initial": tf.constant(gradient(400, key=5))},
        {"spent": [tf.constant(gradient(400, key=6))]},
        {"spent": [tf.cast(gradient(400), tf.bfloat16)]},
    ):
        same_sum(kernels, messages, lengths, codec, member=1, members=3, **more)


def test_sums_of_payloads_of_other_codecs_than_hinted(kernels):
    """The device leaves these payloads to the host, and the sum is the same."""
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
