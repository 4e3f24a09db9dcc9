"""Test that a custom memory works wherever a built-in one does.

Invalid memories are refused by name.
"""

import importlib.util

import numpy as np
import pytest
from codecs_table import gradient
from own_stages import OwnResidual, Three, WithoutPutBack
from simulated_ranks import SCHEMES, gradients_of, jobs_of, run, same_bits, sparsifier_of

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.numpy_backend import select_numpy

CODECS = {
    "raw": dr.Codec(dr.TopK(0.05)),
    "rice_qsgd": dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4)),
    "bloom_fit": dr.Codec(dr.RandomK(0.1), index=dr.Bloom(), value=dr.FitPoly()),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_encode_makes_the_bytes_and_state_of_its_built_in_twin(codec, dtype):
    kept, expected = np.zeros(900, np.float32), np.zeros(900, np.float32)
    for step in range(3):
        values = gradient(900, step).astype(dtype)
        payload = codec.encode(values, kept, step=step, memory=OwnResidual())
        assert payload.tobytes() == codec.encode(values, expected, step=step).tobytes()
        same_bits(kept, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_through_torch(dtype):
    torch = pytest.importorskip("torch")
    codec = CODECS["rice_qsgd"]
    kept, expected = torch.zeros(900), torch.zeros(900)
    for step in range(2):
        values = torch.from_numpy(gradient(900, step)).to(getattr(torch, dtype))
        payload = codec.encode(values, kept, step=step, memory=OwnResidual())
        assert torch.equal(payload, codec.encode(values, expected, step=step))
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_through_tensorflow(dtype):
    tf = pytest.importorskip("tensorflow")
    codec = CODECS["rice_qsgd"]
    kept, expected = tf.Variable(tf.zeros(900)), tf.Variable(tf.zeros(900))
    for step in range(2):
        values = tf.cast(gradient(900, step), dtype)
        payload = codec.encode(values, kept, step=step, memory=OwnResidual())
        assert (
            payload.numpy().tobytes() == codec.encode(values, expected, step=step).numpy().tobytes()
        )
        same_bits(kept.numpy(), expected.numpy())


def test_several_arrays_are_given_as_a_tuple():
    state = tuple(np.zeros(900, np.float32) for _ in Three.state)
    for step in range(4):
        payload = CODECS["raw"].encode(gradient(900, step), state, step=step, memory=Three())
    assert (state[1] == 4).all() and state[2].sum() == 4 * dr.inspect(payload)["k"]
    velocity = np.zeros(900, np.float32), np.zeros(900, np.float32)
    CODECS["raw"].encode(gradient(900), velocity, memory=dr.MomentumCorrection())
    assert velocity[1].any()
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"the 3 arrays that Three\(\) keeps \(kept, steps, sent\), got 1",
    ):
        CODECS["raw"].encode(gradient(900), state[0], memory=Three())
    with pytest.raises(dr.InvalidArgumentError, match="memory: expected a Memory, got 'residual'"):
        CODECS["raw"].encode(gradient(900), state[0], memory="residual")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "stages", [(dr.RawIndex(), dr.RawValue()), (dr.Rice(), dr.QSGD(bits=4))], ids=["raw", "lossy"]
)
def test_every_communicator_sums_and_keeps_what_it_does_with_the_twin(scheme, stages):
    codec = dr.Codec(sparsifier_of(scheme), *stages)
    for size in (2, 3, 5):
        gradients = gradients_of(size, 400)
        residuals = [gradient(400, 50 + rank) for rank in range(size)]
        options = {"residuals": residuals, "shapes": [300, 1, 0, 99], "step": 1}
        expected, twins = run(scheme, codec, gradients, memory=dr.Residual(), **options)
        totals, buckets = run(scheme, codec, gradients, memory=OwnResidual(), **options)
        for total in totals:
            same_bits(total, expected[0])
        for bucket, twin in zip(buckets, twins):
            for member, other in zip(bucket.members, twin.members):
                same_bits(member.state[0], other.state[0])


def test_hierarchical_too():
    codec, gradients = CODECS["rice_qsgd"], gradients_of(4, 400)
    communicator = dr.Hierarchical(dr.RecursiveDoubling(), ranks_per_host=2)
    kept = []
    for memory in (dr.Residual(), OwnResidual()):
        buckets = jobs_of(codec, memory, gradients)
        outcomes = Simulator(4).run(communicator, buckets)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        kept.append([bucket.members[0].state[0] for bucket in buckets])
    for one, other in zip(*kept):
        same_bits(one, other)


@pytest.mark.parametrize("kind", [np.uint16, np.int16])
def test_bfloat16_numbers_come_as_their_bits(kind):
    """The adapters pass bfloat16 as bits to communicators that work on the host."""
    values = gradient(500)
    bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(kind)
    rounded = (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    codec, state = dr.Codec(dr.TopK(0.1)), [np.zeros(500, np.float32) for _ in range(3)]
    expected = select_numpy(codec, dr.Residual(), rounded, state[:1])
    for memory, own in ((dr.Residual(), state[1:2]), (OwnResidual(), state[2:])):
        found = select_numpy(codec, memory, bits, own, dtype=2)
        np.testing.assert_array_equal(found[0], expected[0])
        same_bits(found[1], expected[1])
        same_bits(own[0], state[0])
        bucket = Bucket(
            codec, memory, [BucketMember("w", bits, (np.zeros(500, np.float32),), dtype=2)]
        )
        payload = bucket.encode()
        assert bucket.members[0].failure is None
        assert dr.inspect(payload)["dtype"] == "bfloat16"
        np.testing.assert_array_equal(np.flatnonzero(dr.decode(payload)), expected[0])


def test_a_subclass_of_a_built_in_memory_is_not_run_as_that():
    class Doubled(dr.Residual):
        def accumulate(self, gradient, state):
            return super().accumulate(2 * gradient, state)

    kept, plain = np.zeros(900, np.float32), np.zeros(900, np.float32)
    payload = CODECS["raw"].encode(gradient(900), kept, memory=Doubled())
    twin = CODECS["raw"].encode(2 * gradient(900), plain)
    assert payload.tobytes() == twin.tobytes()
    same_bits(kept, plain)


def test_a_subclass_of_a_built_in_codec_is_refused_until_it_has_an_id_of_its_own():
    class Halved(dr.QSGD):
        pass

    with pytest.raises(
        dr.InvalidArgumentError,
        match=(
            "Halved: expected a class with its own stage_id, .*, got stage_id 5, which "
            "belongs to QSGD"
        ),
    ):
        dr.Codec(dr.TopK(0.1), value=Halved())
    Halved.stage_id = 100
    with pytest.raises(
        dr.InvalidArgumentError, match="Halved.stage_id: expected an integer of 128 to 255, got 100"
    ):
        dr.register(Halved)
    Halved.stage_id = 210
    with pytest.raises(dr.InvalidArgumentError, match="got stage_id 210, which is not registered"):
        dr.Codec(dr.TopK(0.1), value=Halved())


def memory_that(**methods):
    return type("Broken", (OwnResidual,), methods)()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            type("Broken", (dr.Memory,), {"state": ("kept",)})(),
            "Broken: expected the methods accumulate and update, got no accumulate and no update",
        ),
        (
            memory_that(state="kept"),
            r"Broken.state: expected a tuple of distinct names, got 'kept'",
        ),
        (memory_that(state=("kept", "kept")), r"Broken.state: expected a tuple of distinct names"),
        (
            memory_that(__repr__=object.__repr__),
            "Broken: expected attributes with a repr that is the same on all ranks",
        ),
        (
            memory_that(accumulate=lambda *_: None),
            r"Broken.accumulate: expected \(what to select from, new state\), got NoneType",
        ),
        (
            memory_that(accumulate=lambda self, g, s: (g, s * 2)),
            r"Broken.accumulate: expected a tuple of 1 arrays \(kept\), got 2",
        ),
        (
            memory_that(accumulate=lambda self, g, s: (g.astype(float), s)),
            r"accumulate: expected float32 arrays of shape \(900,\), got float64",
        ),
        (
            memory_that(accumulate=lambda self, g, s: (g + np.float32(np.inf), s)),
            "accumulate: expected finite numbers .*, got NaN or Inf",
        ),
        (
            memory_that(update=lambda self, g, a, s, i, v: s[0]),
            r"Broken.update: expected a tuple of 1 arrays \(kept\), got ndarray",
        ),
        (
            memory_that(update=lambda self, g, a, s, i, v: (s[0][:1],)),
            r"update: expected float32 arrays of shape \(900,\), got float32 of shape \(1,\)",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(memory, message):
    kept = gradient(900, 5)
    with pytest.raises(dr.InvalidArgumentError, match=message):
        CODECS["raw"].encode(gradient(900), kept, memory=memory)
    same_bits(kept, gradient(900, 5))


def test_the_arrays_that_it_is_given_are_read_only():
    def accumulate(self, values, state):
        state[0][...] = 0
        return values, state

    kept = gradient(900, 5)
    with pytest.raises(ValueError, match="read-only"):
        CODECS["raw"].encode(gradient(900), kept, memory=memory_that(accumulate=accumulate))
    same_bits(kept, gradient(900, 5))


@pytest.mark.parametrize("scheme", ["split", "recursive_doubling", "gtopk", "gtopk_tree"])
def test_a_put_back_that_fails_on_one_rank_is_heard_by_all(scheme):
    def put_back(self, state, indices, values):
        raise ValueError("no room")

    codec = dr.Codec(sparsifier_of(scheme), dr.Rice(), dr.QSGD(bits=2))
    buckets = jobs_of(codec, OwnResidual(), gradients_of(4, 400))
    buckets[2].memory = memory_that(put_back=put_back)
    for outcome in Simulator(4).run(SCHEMES[scheme], buckets):
        assert isinstance(outcome, dr.PeerFailedError) and "rank 2: ValueError: no room" in str(
            outcome
        ), outcome


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
class TestCompressor:
    @pytest.fixture(autouse=True)
    def initialized_horovod(self):
        import horovod.torch as hvd

        hvd.init()

    @staticmethod
    def step(compressor, network):
        import torch

        network.zero_grad()
        network(torch.ones(3, 40)).sum().backward()
        parameters = list(network.parameters())
        pending = [compressor.compress(parameter.grad) for parameter in parameters]
        return [compressor.decompress(reduced, context).clone() for reduced, context in pending]

    @pytest.mark.parametrize(
        "communicator",
        [dr.Allgather(), dr.SplitAllgather(), dr.GTopK(), dr.CLTK(), "auto"],
        ids=str,
    )
    def test_it_trains_and_its_state_is_saved(self, communicator):
        import torch

        results = []
        for memory in (dr.Residual(), OwnResidual()):
            torch.manual_seed(0)
            network = torch.nn.Linear(40, 50)
            compressor = dr.Compressor(
                CODECS["rice_qsgd"], memory, communicator, network.named_parameters()
            )
            results.append(
                [gradient for _ in range(3) for gradient in self.step(compressor, network)]
            )
        assert all(torch.equal(one, other) for one, other in zip(*results))
        saved = compressor.state_dict()
        assert set(saved["parameters"]["weight"]["memory"]) == {"kept"}
        compressor.load_state_dict(saved)
        assert compressor.stats()["weight"]["steps"] == 3

    def test_communicators_that_put_back_need_a_memory_that_takes(self):
        import torch

        named = list(torch.nn.Linear(40, 50).named_parameters())
        dr.Compressor(memory=WithoutPutBack(), parameters=named)
        dr.Compressor(
            memory=WithoutPutBack(), communicator=dr.Hierarchical(dr.Allgather()), parameters=named
        )
        refused = (
            dr.SplitAllgather(),
            dr.GTopK(),
            dr.CLTK(),
            dr.Auto(),
            dr.Hierarchical(dr.RecursiveDoubling()),
        )
        for communicator in refused:
            with pytest.raises(
                dr.InvalidArgumentError,
                match=(
                    r"memory: expected one with a put_back method, which .* needs, got "
                    r"WithoutPutBack\(\)"
                ),
            ):
                dr.Compressor(memory=WithoutPutBack(), communicator=communicator, parameters=named)
        with pytest.raises(dr.InvalidArgumentError, match="Broken.state: expected a tuple"):
            dr.Compressor(memory=memory_that(state=["kept"]), parameters=named)

    def test_operators_for_gpus_leave_it_to_the_host(self, monkeypatch):
        import torch

        from deepreduce_hvd.torch.cuda import device as torch_device

        monkeypatch.setattr(torch_device.operators, "HAS_CUDA_OPERATORS", True)
        compressor = dr.Compressor(
            memory=OwnResidual(), parameters=torch.nn.Linear(40, 50).named_parameters()
        )
        assert "OwnResidual() has a custom stage" in compressor.adapter.device_path.why_not
