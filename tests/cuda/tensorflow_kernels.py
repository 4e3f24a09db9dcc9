"""Run TensorFlow's host kernels, and its GPU kernels under the emulator, on the same input."""

import numpy as np
import pytest
from codecs_table import gradient

import deepreduce_hvd as dr

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
adapter = pytest.importorskip("deepreduce_hvd.tensorflow.ops")


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


HOST = (adapter.operators.deepreduce_encode, adapter.operators.deepreduce_decode_sum)


def table_of(codec, memory=None, rows=1):
    return np.array([codec.fields(memory or dr.NoMemory(), step) for step in range(rows)])


def outcome(work):
    """Return the result of a kernel as bytes, or its error."""
    try:
        return work().numpy().tobytes()
    except tf.errors.OpError as error:
        # in a graph the message follows the position where the operator was created
        message = error.message.split("\n\t [[")[0].rpartition("\n")[2]
        return type(error).__name__, adapter._DECORATION.sub("", message)


def messages_of(codecs, members, ranks, d=400, dtype="float32"):
    """Return (the concatenated messages of the ranks, their lengths).

    Every member and every rank has another codec and another gradient.
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
