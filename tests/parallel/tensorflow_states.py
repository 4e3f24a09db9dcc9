"""Test state that is kept between steps, saved and loaded, on TensorFlow.

Run by tensorflow_scenarios.py.
"""

import gc
import weakref

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from codecs_table import MEMORIES, VALUE
from own_stages import OwnResidual
from scenario_runner import expect_statistics_that_add_up, sample
from tensorflow_tools import (
    ALL_COMPRESSED,
    assert_close,
    assert_equal_everywhere,
    assert_same,
    batch,
    compressor_of,
    make_step,
    model,
    sum_over_ranks,
    train,
    variables,
)

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.stages.registry import registered


def scenario_resumed_equals_uninterrupted(directory):
    """Resumed training equals uninterrupted training.

    A checkpoint or state_dict() is loaded into a new compressor, and into the old one after it has
    trained further.
    """
    for number, memory in enumerate(sample(hvd.size(), MEMORIES.values())):
        codec = dr.Codec(dr.TopK(0.05, warmup_steps=4), value=VALUE["qsgd_4"])
        whole = _Trained(codec, memory)
        whole.go_on(0)
        prefix = str(directory / f"checkpoint.{hvd.size()}.{hvd.rank()}.{number}")
        whole.checkpoint(with_compressor=True).write(prefix)
        state = whole.compressor.state_dict()
        whole.go_on(3)
        expected = [variable.numpy() for variable in variables(whole.named)]
        after = whole.compressor.state_dict()["parameters"]

        # the memories alternate: for half of them, the new compressor reads the checkpoint
        for resumed in (_Trained(codec, memory, seed=9), whole):
            if (resumed is whole) == number % 2:
                resumed.checkpoint(with_compressor=True).read(prefix).assert_consumed()
            else:
                resumed.checkpoint(with_compressor=False).read(prefix).expect_partial()
                resumed.compressor.load_state_dict(state)
            resumed.go_on(3)
            for variable, value in zip(variables(resumed.named), expected):
                np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.name)
            other = resumed.compressor.state_dict()["parameters"]
            for name in after:
                assert after[name]["steps"] == other[name]["steps"], name
                for kind in after[name]["memory"]:
                    np.testing.assert_array_equal(
                        after[name]["memory"][kind], other[name]["memory"][kind]
                    )


class _Trained:
    """A model, its compressor and its step, which is traced once."""

    def __init__(self, codec, memory, seed=0):
        self.named = model(seed)
        self.compressor = compressor_of(self.named, codec, memory, **ALL_COMPRESSED)
        self._step = tf.function(make_step(self.named, self.compressor), autograph=False)

    def go_on(self, start):
        for number in range(start, start + 3):
            self._step(batch(number))
            assert_equal_everywhere(variables(self.named), f"step {number}")

    def checkpoint(self, with_compressor):
        parts = {"compressor": self.compressor.trackable} if with_compressor else {}
        made = tf.train.Checkpoint(model=tf.Module(), **parts)
        made.model.parameters = variables(self.named)
        return made


def scenario_retracing_keeps_the_residuals(directory):
    named, other = model(), model()
    compressor, kept = (
        compressor_of(named, **ALL_COMPRESSED),
        compressor_of(other, **ALL_COMPRESSED),
    )
    for number in range(3):
        tf.function(make_step(named, compressor))(batch(number))  # traced again each time
    step = tf.function(make_step(other, kept))
    for number in range(3):
        step(batch(number))
    assert_same(named, other)
    assert compressor.stats()["kernel0"]["steps"] == 3


def scenario_states_of_another_world_size(directory):
    """The mean of residuals over all ranks survives a change of the number of ranks.

    It is the update that waits in them, because gradients are averaged.
    """
    _, compressor = train(2)
    np.save(
        directory / f"tensorflow.{hvd.size()}.{hvd.rank()}.npy",
        compressor.state_dict(),
        allow_pickle=True,
    )
    hvd.allreduce(tf.zeros([1]), name="written")
    for size in (2, 3):
        paths = [directory / f"tensorflow.{size}.{rank}.npy" for rank in range(size)]
        if not all(path.exists() for path in paths):
            continue
        states = [np.load(path, allow_pickle=True).item() for path in paths]
        compressor.load_state_dict(states)
        for name, state in compressor.state_dict()["parameters"].items():
            for kind, part in state["memory"].items():
                saved = sum(
                    one["parameters"][name]["memory"][kind].astype(np.float64) for one in states
                ) * (hvd.size() / size)
                np.testing.assert_allclose(
                    sum_over_ranks(part), saved, rtol=0, atol=1e-6 * np.abs(saved).max()
                )


def scenario_the_reduction_is_known_after_loading(directory):
    """It is noted while a step is traced, and a state from before the first step has none."""
    for op, expected in ((hvd.Average, "average"), (hvd.Sum, "sum")):
        named = model()
        compressor = compressor_of(named)
        step = tf.function(make_step(named, compressor, op=op), autograph=False)

        def reductions(compressor=compressor):
            parameters = compressor.state_dict()["parameters"].values()
            return {one["reduction"] for one in parameters if one["memory"]}

        first = compressor.state_dict()
        step(batch(0))
        assert reductions() == {expected}
        path = tf.train.Checkpoint(compressor=compressor.trackable).write(
            str(directory / f"reduction.{expected}.{hvd.size()}.{hvd.rank()}")
        )
        compressor.load_state_dict(first)
        step(batch(1))
        assert reductions() == {expected}
        compressor.close()
        other = compressor_of(named)
        tf.train.Checkpoint(compressor=other.trackable).read(path)
        assert reductions(other) == {expected}
        other.close()


def scenario_the_update_in_memories_does_not_depend_on_the_number_of_ranks(directory):
    """The states of any number of ranks apply their sum with Sum, and their mean with Average."""
    for op in (hvd.Average, hvd.Sum):
        named = model()
        compressor = compressor_of(named, dr.Codec(dr.TopK(1.0)), **ALL_COMPRESSED)

        @tf.function
        def reduced(named=named, compressor=compressor, op=op):
            return [
                hvd.allreduce(
                    tf.fill(variable.shape, 1e-20), op=op, name=name,
                    compression=compressor.bound_to([variable]),
                )
                for name, variable in named
            ]  # fmt: skip

        for size in (1, 2, 3, 5):
            reduced()  # shows the operation
            own, states, totals = compressor.state_dict(), [], {}
            random = np.random.default_rng(size)
            for rank in range(size):
                states.append({**own, "rank": rank, "size": size, "parameters": {}})
                for name, one in own["parameters"].items():
                    shape = one["memory"]["residual"].shape
                    residual = random.standard_normal(shape).astype(np.float32)
                    states[-1]["parameters"][name] = {**one, "memory": {"residual": residual}}
                    totals[name] = totals.get(name, 0) + residual.astype(np.float64)
            compressor.load_state_dict(states)
            for (name, _), found in zip(named, reduced()):
                expected = totals[name] / (size if op == hvd.Average else 1)
                found = found.numpy().reshape(-1)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def scenario_a_non_finite_gradient_reaches_every_rank(directory):
    named, compressor = train(2)
    before = compressor.state_dict()["parameters"]["kernel0"]["memory"]["residual"]
    images = batch(9).numpy()
    if hvd.rank() == hvd.size() - 1:
        images[0, 0] = np.inf
    gradients = make_step(named, compressor)(tf.constant(images))
    assert not np.isfinite(gradients[0].numpy()).any()
    after = compressor.state_dict()["parameters"]["kernel0"]["memory"]["residual"]
    assert hvd.rank() != hvd.size() - 1 or np.array_equal(before, after)


def scenario_a_codec_of_the_users_own(directory):
    """A custom codec, registered in Python and run by NumPy in the graph, trains like RawValue.

    The results differ only by the rounding of the custom codec.
    """

    class Tenths(dr.ValueCodec):
        stage_id = 200

        def encode(self, values, key):
            tenths = np.round(values * 1e4).clip(-32767, 32767).astype("<i2")
            return tenths.tobytes(), (tenths / np.float32(1e4)).astype(np.float32), None

        @classmethod
        def decode(cls, section, count):
            return (np.frombuffer(section, "<i2") / np.float32(1e4)).astype(np.float32)

    if 200 not in registered(dr.ValueCodec):
        dr.register(Tenths)
    # RandomK's choices do not depend on rounding
    named, compressor = train(3, dr.Codec(dr.RandomK(0.1), value=Tenths()))
    row = compressor.stats()["kernel0"]
    assert (
        row["steps"] == 3
        and row["value_bytes"] == 2 * row["sent_values"]
        and 0 < row["relative_error"] < 1
    )
    plain, _ = train(3, dr.Codec(dr.RandomK(0.1)))
    assert_close(plain, named, rtol=1e-3, atol=1e-3)
    # eager and without a memory, so that NumPy returns only the payload
    weight = tf.Variable(tf.zeros([48, 40]))
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(1.0), value=Tenths()), dr.NoMemory(), parameters=[("weight", weight)]
    )
    gradient = tf.fill([48, 40], 0.25 + hvd.rank())
    mean = hvd.allreduce(gradient, compression=compressor)
    np.testing.assert_allclose(mean.numpy(), 0.25 + (hvd.size() - 1) / 2, rtol=1e-3)


def scenario_a_memory_of_the_users_own(directory):
    """A custom memory, run by NumPy in the graph, trains bit for bit like the equal built-in one.

    Slices are refused together with a custom memory.
    """
    codec = dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=dr.QSGD(bits=4))
    for communicator in (dr.Allgather(), dr.GTopK()):
        trained = []
        for memory in (dr.Residual(), OwnResidual()):
            named = model()
            compressor = compressor_of(
                named, codec, memory, communicator=communicator, **ALL_COMPRESSED
            )
            train(2, compressor=compressor, named=named, groups=1)
            trained.append((named, compressor.state_dict()["parameters"]))
        (one, built_in), (other, own) = trained
        assert_same(one, other)
        for name, state in own.items():
            np.testing.assert_array_equal(
                state["memory"]["kept"],
                built_in[name]["memory"]["residual"],
                err_msg=f"{communicator} {name}",
            )
    table = tf.Variable(tf.ones([1000, 16]))
    compressor = dr.Compressor(codec, OwnResidual(), parameters=[("table", table)])
    slices = tf.IndexedSlices(
        tf.ones([1, 16]), tf.constant([3], tf.int64), tf.constant([1000, 16], tf.int64)
    )
    try:
        dr.tensorflow.allreduce_gradients([slices], [table], compression=compressor)
    except dr.InvalidArgumentError as error:
        assert "expected a built-in codec and NoMemory or Residual for slices" in str(error)
    else:
        raise AssertionError("slices were taken with a memory of the user's own")


def scenario_statistics_add_up(directory):
    _, compressor = train(2)
    expect_statistics_that_add_up(compressor)


def scenario_a_compressor_that_is_not_used_may_be_deleted(directory):
    """Ranks compare its steps while the function of another one is traced, which refers to it."""
    named, others = model(), model()
    compressor, unused = compressor_of(named), compressor_of(others)
    train_step = make_step(named, compressor)

    @tf.function
    def step(images):  # returns nothing that a tape could derive
        train_step(images)

    step(batch(0))
    kept = weakref.ref(unused)
    del unused, others
    gc.collect()
    assert kept() is None
    with tf.GradientTape():  # then TensorFlow looks at all variables of a function
        step(batch(1))
    assert_equal_everywhere(variables(named), "after a deletion")
