"""Test the TensorFlow operators: the same bytes as elsewhere, errors, and state across traces."""

import functools
import os

import numpy as np
import pytest
from codecs_table import INDEX, VALUE, gradient
from sampling import parametrize_product

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.numpy_backend import encode_numpy

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
tensorflow_adapter = pytest.importorskip("deepreduce_hvd.tensorflow.ops")

CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}


@parametrize_product(index=INDEX, value=VALUE, dtype=CODES)
def test_same_bytes_as_numpy_and_torch(index, value, dtype):
    torch = pytest.importorskip("torch")
    codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
    values = tf.cast(gradient(2000), dtype)
    residual = tf.Variable(gradient(2000, key=3))
    expected_residual = residual.numpy().copy()
    torch_residual = torch.from_numpy(residual.numpy().copy())
    payload = codec.encode(values, residual, step=2, seed=1, tensor=5, rank=6)
    assert payload.dtype == tf.uint8
    array = tf.cast(values, tf.float32).numpy() if dtype == "bfloat16" else values.numpy()
    expected, _ = encode_numpy(
        codec, dr.Residual(), array, (expected_residual,), 0.0, 1, 2, 5, 6, native=False,
        dtype=CODES[dtype],
    )  # fmt: skip
    assert payload.numpy().tobytes() == expected.tobytes()
    np.testing.assert_array_equal(residual.numpy(), expected_residual)
    from_torch = codec.encode(
        torch.from_numpy(array).to(getattr(torch, dtype)),
        torch_residual,
        step=2,
        seed=1,
        tensor=5,
        rank=6,
    )
    assert payload.numpy().tobytes() == from_torch.numpy().tobytes()
    np.testing.assert_array_equal(residual.numpy(), torch_residual.numpy())
    np.testing.assert_array_equal(dr.decode(payload).numpy(), dr.decode(expected))
    out = tf.Variable(tf.ones(2000))
    assert dr.decode_sum([payload, payload], out, scale=0.5) is out
    np.testing.assert_array_equal(
        out.numpy(), dr.decode_sum([expected, expected], np.ones(2000, dtype=np.float32), scale=0.5)
    )
    assert dr.inspect(payload)["dtype"] == dtype


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            lambda: tf.zeros([3, 3]),
            r"expected a dense 1-D TensorFlow tensor of .*, got float32 of shape \(3, 3\)",
        ),
        (lambda: tf.zeros([3], tf.int32), r"got int32 of shape \(3,\)"),
        (lambda: tf.IndexedSlices(tf.zeros([1]), tf.constant([0])), "got IndexedSlices"),
        (lambda: tf.sparse.from_dense(tf.ones([3])), "got SparseTensor"),
    ],
)
def test_bad_gradients(values, message):
    codec = dr.Codec(dr.TopK(0.5))
    with pytest.raises(dr.InvalidArgumentError, match=message):
        codec.encode(values())
    with pytest.raises(dr.InvalidArgumentError, match=message):
        tf.function(lambda: codec.encode(values()))()


def test_bad_residuals_and_payloads():
    codec = dr.Codec(dr.TopK(0.5))
    for residual in (
        tf.zeros([10]),
        tf.Variable(tf.zeros([11])),
        tf.Variable(tf.zeros([10], tf.float64)),
    ):
        with pytest.raises(
            dr.InvalidArgumentError,
            match=r"residual: expected a float32 tf.Variable of shape \(10,\), got float",
        ):
            codec.encode(tf.zeros([10]), residual)
    payload = codec.encode(tf.ones([10]))
    with pytest.raises(dr.CorruptPayloadError, match="payload length: expected"):
        dr.decode_sum([payload[:-1]], tf.Variable(tf.zeros([10])))
    with pytest.raises(dr.CorruptPayloadError, match="payload length: expected"):
        dr.decode_sum([tf.concat([payload, payload], 0)], tf.Variable(tf.zeros([10])))
    with pytest.raises(dr.InvalidArgumentError, match="expected d = 11 elements, got 10"):
        dr.decode_sum([payload], tf.Variable(tf.zeros([11])))
    with pytest.raises(
        dr.InvalidArgumentError, match="expected a 1-D float32 tf.Variable, got float32"
    ):
        dr.decode_sum([payload], tf.zeros([10]))
    for data, got in ((tf.zeros([50]), "float32"), (tf.sparse.from_dense(payload), "SparseTensor")):
        message = f"expected a 1-D uint8 tensor, got {got}"
        with pytest.raises(dr.InvalidArgumentError, match=message):
            dr.decode(data)
    with pytest.raises(dr.InvalidArgumentError, match="at most max_elements = 5 elements, got 10"):
        dr.decode(payload, max_elements=5)


def test_operators_validate_what_a_graph_can_hand_them():
    operators = tensorflow_adapter.operators
    table = np.array([dr.Codec(dr.TopK(0.5)).fields(dr.NoMemory())])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"codec: expected shape \[rows, 20\], got \[1,19\]"
    ):
        operators.deepreduce_encode(tf.ones([4]), table[:, :19], [0, 0, 0, 0], [], [])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"position: expected shape \[4\], got \[3\]"
    ):
        operators.deepreduce_encode(tf.ones([4]), table, [0, 0, 0], [], [])
    with pytest.raises(ValueError, match="Dimension must be 20 but is 19"):
        tf.function(
            lambda: operators.deepreduce_encode(tf.ones([4]), table[:, :19], [0, 0, 0, 0], [], [])
        ).get_concrete_function()
    payload = operators.deepreduce_encode(tf.ones([4]), table, [0, 0, 0, 0], [], [])
    with pytest.raises(
        tf.errors.DataLossError,
        match="parameter kernel: expected 2 messages of each of 1 ranks, got 1 in all",
    ):
        operators.deepreduce_decode_sum(
            payload,
            np.float64(1),
            [4],
            1,
            [],
            [],
            [],
            [],
            member=0,
            members=2,
            variable="kernel",
            T=tf.float32,
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="and a member of 2, got"):
        operators.deepreduce_decode_sum(
            payload, np.float64(1), [4], 1, [], [], [], [], member=2, members=2, T=tf.float32
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices of 0 to 9, got 10"):
        operators.deepreduce_encode_slices(
            tf.ones([1, 2]), tf.constant([10], tf.int64), table, [0, 0, 0, 0], [], [], rows=10
        )
    for corrupt in range(0, payload.shape[0], 7):
        bytes_of = payload.numpy().copy()
        bytes_of[corrupt] ^= 0x10
        with pytest.raises((tf.errors.DataLossError, tf.errors.UnimplementedError)):
            operators.deepreduce_decode_sum(
                tf.constant(bytes_of), np.float64(1), [4], 1, [], [], [], [], T=tf.float32
            )


def test_a_graph_takes_the_shape_from_the_payload():
    codec = dr.Codec(dr.TopK(0.5))
    payload = codec.encode(tf.constant([1.0, -5.0, 2.0]))
    decode = tf.function(
        lambda data: tensorflow_adapter.operators.deepreduce_decode_sum(
            data, tf.constant(1.0, tf.float64), [-1], 1, [], [], [], [], T=tf.float32
        )
    )
    np.testing.assert_array_equal(decode(payload).numpy(), [0, -5, 0])


def test_readers_of_a_residual_see_no_later_step():
    """A value read before a step is not changed by the step's update in place."""
    codec = dr.Codec(dr.TopK(0.1))
    residual = tf.Variable(tf.zeros([100]))
    before = residual.read_value()
    codec.encode(tf.constant(gradient(100)), residual)
    assert not before.numpy().any() and residual.numpy().any()


def test_operators_of_another_tensorflow_are_refused_by_version(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorflow_adapter, "__file__", str(tmp_path / "tensorflow" / "ops.py"))
    with pytest.raises(
        dr.NativeMissingError,
        match="TensorFlow operators for version .*, got operators for no version",
    ):
        tensorflow_adapter._load_operators()
    (tmp_path / "_tf_ops-2.17.0.so").touch()
    with pytest.raises(
        dr.NativeMissingError,
        match=(
            rf"expected the TensorFlow operators for version {tf.__version__}, got operators "
            r"for 2\.17\.0"
        ),
    ):
        tensorflow_adapter._load_operators()


def test_messages_that_are_too_large_become_notices():
    random = np.random.default_rng(5)
    for _ in range(30):
        count, ranks = int(random.integers(1, 5)), int(random.integers(1, 6))
        messages = np.concatenate(
            [
                dr.Codec(dr.TopK(0.5)).encode(gradient(int(random.integers(1, 90))))
                for _ in range(count)
            ]
        )
        most = ranks * messages.size + int(random.integers(-2 * ranks, 2 * ranks))
        sent = tensorflow_adapter.operators.deepreduce_limit_messages(
            messages, ranks, 3, most=most
        ).numpy()
        if ranks * messages.size <= most:
            np.testing.assert_array_equal(sent, messages)
        else:
            expected = wire.size_notice(messages.size, ranks, most, 3)
            np.testing.assert_array_equal(sent, np.tile(expected, count))
            text = f"messages of rank 3: expected at most {most // ranks} bytes, because"
            notice = wire.split(sent).notices[0].decode()
            assert text in notice and f"got {messages.size};" in notice


@pytest.mark.parametrize(("messages", "ranks"), [(0, 1), (2, 1), (1, 2), (3, 2), (4, 2), (2, 4)])
def test_the_number_of_messages_must_be_that_of_the_ranks(messages, ranks):
    """A missing payload does not count as zeros, and no payload is added twice."""
    operators = tensorflow_adapter.operators
    one = dr.Codec(dr.TopK(0.5)).encode(tf.ones([4]))
    gathered = tf.concat([one] * messages, 0) if messages else tf.zeros([0], tf.uint8)
    expected = (
        f"parameter kernel: expected 1 messages of each of {ranks} ranks, got {messages} in all"
    )
    for initial in ([], [tf.ones([4])]):
        with pytest.raises(tf.errors.DataLossError, match=expected):
            operators.deepreduce_decode_sum(
                gathered,
                np.float64(1),
                [4],
                ranks,
                initial,
                [],
                [],
                [],
                variable="kernel",
                T=tf.float32,
            )
    seconds = tf.Variable(np.zeros(2))
    with pytest.raises(tf.errors.DataLossError, match=expected):
        operators.deepreduce_decode_slices(
            gathered,
            np.float64(1),
            ranks,
            seconds.handle,
            T=tf.float32,
            shape=[2, 2],
            variable="kernel",
        )
    for wrong in (0, -1, [1]):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="ranks: expected a number of at least 1"
        ):
            operators.deepreduce_decode_sum(
                one, np.float64(1), [4], wrong, [], [], [], [], T=tf.float32
            )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"plain", "plain"), ("vier Stück, 四 🙂".encode(), "vier Stück, 四 🙂"),
        (b"half \xed\xa0\x80 pair", "half ??? pair"),
        (b"\xff\xfe\xc0\xaf\xf5\x80\x80\x80", "????????"), (b"cut \xe5\x9b", "cut ??"), (b"", ""),
    ],
)  # fmt: skip
def test_a_notice_of_any_bytes_is_read(text, shown):
    from deepreduce_hvd import _native

    notice = tf.constant(_native.write_notice(text))
    for call in (lambda work: work(), lambda work: tf.function(work)()):
        with pytest.raises(tf.errors.AbortedError) as error:
            call(
                lambda: tensorflow_adapter.operators.deepreduce_decode_sum(
                    notice, np.float64(1), [4], 1, [], [], [], [], variable="kernel", T=tf.float32
                )
            )
        assert f"parameter kernel: rank 0: {shown}" in error.value.message


def test_messages_say_which_input_has_the_wrong_shape():
    operators = tensorflow_adapter.operators
    payload = dr.Codec(dr.TopK(0.5)).encode(tf.ones([4]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"shape, got tensors of shapes \[1,\d+\], \[\] and"
    ):
        operators.deepreduce_decode_sum(
            payload[None], np.float64(1), [4], 1, [], [], [], [], T=tf.float32
        )
    scale = functools.partial(operators.deepreduce_scale, fingerprint=1, variable="kernel")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"reduced_probe: expected shape \[4\], got \[3\]"
    ):
        scale(tf.zeros([3]), 2, np.int64(1), np.float64(0))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"size, step and loss_scale: expected scalars, got shapes \[1\], \[\] and \[\]",
    ):
        scale(tf.zeros([4]), [2], np.int64(1), np.float64(0))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"rank, step and loss_scale: expected scalars, got shapes \[\], \[2\] and \[\]",
    ):
        operators.deepreduce_probe(
            1, np.ones(2, np.int64), np.float64(0), T=tf.float32, fingerprint=1
        )
    memories = [tf.Variable(tf.zeros([4])).handle] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 1 memory, a residual, got 2"):
        operators.deepreduce_encode_slices(
            tf.ones([1, 2]),
            tf.constant([0], tf.int64),
            np.array([dr.Codec(dr.TopK(0.5)).fields(dr.MomentumCorrection())]),
            [0, 0, 0, 0],
            memories,
            [],
            rows=2,
        )


def test_a_graph_that_is_shared_runs_on_the_variable_that_it_was_traced_for():
    operators = tensorflow_adapter.operators
    one, other = tf.Variable(1.0, name="one"), tf.Variable(1.0, name="other")
    names = [
        operators.deepreduce_variable_name(variable.handle).numpy().decode()
        for variable in (one, one, other)
    ]
    assert names[0] == names[1] != names[2]

    @tf.function
    def expect_one(variable):
        operators.deepreduce_expect_variable(variable.handle, expected=names[0], variable="one")

    expect_one(one)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="parameter one: expected the gradient of this variable, got the gradient of other",
    ):
        expect_one(other)
    assert expect_one.experimental_get_tracing_count() == 1
