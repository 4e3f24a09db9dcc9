"""Test the construction of compressors: accepted arguments, and messages for refused ones."""

import copy
import pickle

import numpy as np
import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.planning.layout import assign_to_buckets


def named():
    return torch.nn.Linear(40, 50).named_parameters()


@pytest.fixture(autouse=True)
def initialized_horovod():
    import horovod.torch as hvd

    hvd.init()


def test_the_recommended_instance():
    compressor = dr.Compressor(parameters=named())
    assert compressor.codec is None
    assert compressor.memory == dr.Residual()
    large = dr.Codec(dr.TopK(0.01, warmup_steps=50), index=dr.Rice(), value=dr.LloydMax(bits=1))
    small = dr.Codec(dr.NoneSparsifier(), index=dr.Rice(), value=dr.LloydMax(bits=4))
    for shape, expected in ((None, large), ((2, 512), large), ((1023,), small), ((), small)):
        assert dr.recommended_codec(shape) == expected


@pytest.mark.parametrize(
    ("shape", "got"),
    [
        (torch.zeros(40, 50), r"Tensor; for a tensor write tensor\.shape$"),
        (torch.nn.Parameter(torch.zeros(())), r"Parameter; for a tensor write tensor\.shape$"),
        (np.zeros(3), r"ndarray; for a tensor write tensor\.shape$"),
        ("abc", "'abc'$"),
        (b"ab", "b'ab'$"),
        (5, "5$"),
        ((64, None), r"\(64, None\)$"),
        ((64, -1), r"\(64, -1\)$"),
        ((2.0, 3), r"\(2\.0, 3\)$"),
    ],
)
def test_a_shape_that_is_none(shape, got):
    with pytest.raises(
        dr.InvalidArgumentError, match=rf"^shape: expected sizes such as \(64, 10\), got {got}"
    ):
        dr.recommended_codec(shape)


def test_auto_by_name():
    assert isinstance(dr.Compressor(communicator="auto", parameters=named()).communicator, dr.Auto)


def test_buckets_close_once_they_hold_enough():
    assert assign_to_buckets([10, 10, 10, 10], 0) == [[0], [1], [2], [3]]
    assert assign_to_buckets([10, 10, 10, 10], 80) == [[0, 1], [2, 3]]
    assert assign_to_buckets([10, 1000, 10], 41) == [[0, 1], [2]]
    assert assign_to_buckets([10, 10], 1 << 30) == [[0, 1]]
    assert assign_to_buckets([], 5) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"parameters: expected model.named_parameters\(\), got None"),
        ({"parameters": []}, r"expected at least one parameter, got none; .* after model\.build"),
        ({"parameters": iter(())}, r"a generator can be read only once, so write model\.named_par"),
        ({"parameters": [torch.zeros(3)]}, r"expected \(name, parameter\) pairs, got Tensor"),
        (
            {"parameters": [("a", torch.zeros(3)), ("a", torch.zeros(3))]},
            "expected unique names, got a more than once",
        ),
        (
            {"parameters": [("a", np.zeros(3))]},
            "expected parameters of torch, tensorflow, keras, got ndarray",
        ),
        (
            {"parameters": [("a", torch.zeros(3))], "codec": dr.Rice()},
            "codec: expected a Codec, 'dense', 'fp16' or 'rows', got Rice",
        ),
        (
            {"parameters": [("a", torch.zeros(3))], "memory": dr.Residual},
            "memory: expected a Memory",
        ),
        (
            {"parameters": [("a", torch.zeros(3))], "dense_below": -1},
            "dense_below: expected None or an integer of at least 0, got -1",
        ),
        (
            {"parameters": [("a", torch.zeros(3))], "loss_scale": 2.0},
            "loss_scale: expected a function",
        ),
    ],
)
def test_construction_that_is_refused(arguments, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.Compressor(**arguments)


@pytest.mark.parametrize(
    ("make", "good"),
    [
        (lambda value: dr.TopK(value), 0.5),
        (lambda value: dr.TopK(k=value), 3),
        (lambda value: dr.TopK(0.1, warmup_steps=value), 3),
        (lambda value: dr.TopK(0.1, warmup_steps=3, warmup_ratio=value), 0.5),
        (lambda value: dr.RandomK(value), 0.5),
        (lambda value: dr.ChunkTopK(value), 0.5),
        (lambda value: dr.ChunkTopK(chunk=value), 3),
        (lambda value: dr.Threshold(value), 0.5),
        (lambda value: dr.LowPass(value), 0.5),
        (lambda value: dr.MomentumCorrection(value), 0.5),
        (lambda value: dr.Bloom(fpr=value), 0.5),
        (lambda value: dr.QSGD(bits=value), 4),
        (lambda value: dr.QSGD(bucket=value), 64),
        (lambda value: dr.Quantile(buckets=value), 16),
        (lambda value: dr.Deflate(level=value), 2),
        (lambda value: dr.FitPoly(degree=value), 3),
        (lambda value: dr.Hierarchical(dr.Allgather(), value), 2),
        (lambda value: dr.Compressor(parameters=[("a", torch.zeros(3))], seed=value), 3),
    ],
)
def test_settings_are_numbers(make, good):
    make(good)
    make(type(np.float32(good))(good) if isinstance(good, float) else np.int32(good))
    for bad in ("3", True, -1, np.nan, 1j, [good]):
        with pytest.raises(dr.InvalidArgumentError, match="expected"):
            make(bad)


@pytest.mark.parametrize("bad", [-1, 2**63, 1.5, "3", None, True])
@pytest.mark.parametrize("key", ["step", "seed", "tensor", "rank"])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_keys_are_integers(kind, key, bad):
    values, codec = np.ones(5, dtype=np.float32), dr.Codec(dr.TopK(0.5, warmup_steps=2))
    codec.encode(kind(values), **{key: 2**63 - 1})
    with pytest.raises(
        dr.InvalidArgumentError, match=rf"{key}: expected an integer in \[0, 2\^63\), got {bad!r}"
    ):
        codec.encode(kind(values), **{key: bad})
    with pytest.raises(dr.InvalidArgumentError, match=f"{key}: expected an integer"):
        codec.encode_sparse(np.zeros(1, dtype=np.uint32), values[:1], 5, **{key: bad})


def test_fingerprint_tells_configurations_apart():
    network = torch.nn.Linear(40, 50)
    base = dr.Compressor(parameters=network.named_parameters())
    # the order decides which gradients share a message
    assert (
        base.fingerprint
        != dr.Compressor(parameters=reversed(list(network.named_parameters()))).fingerprint
    )
    others = [
        dr.Compressor(
            dr.Codec(dr.TopK(0.02), index=dr.Rice(), value=dr.QSGD(bits=4)),
            parameters=network.named_parameters(),
        ),
        dr.Compressor(memory=dr.NoMemory(), parameters=network.named_parameters()),
        dr.Compressor(parameters=network.named_parameters(), seed=1),
        dr.Compressor(parameters=network.named_parameters(), dense_below=10),
        dr.Compressor(parameters=torch.nn.Linear(50, 40).named_parameters()),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_no_more_than_2_to_the_31_minus_1_elements():
    """The error comes before any work. A meta tensor has this size without the memory."""
    big = torch.empty(2**31, device="meta")
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"huge: expected at most 2147483647 elements, got 2147483648; split the tensor",
    ):
        dr.Compressor(parameters=[("huge", big)])


def test_memories_take_no_pages_before_they_are_used():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # 400 MB as one repeated number
    frozen = torch.nn.Parameter(torch.empty(1, 1).expand(10_000, 10_000), requires_grad=False)
    compressor = dr.Compressor(parameters=[("frozen", frozen)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert compressor.adapter.slots["frozen"].state[0].numel() == 10**8


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_loss_scale_that_is_none(scale):
    parameter = torch.nn.Parameter(torch.zeros(40, 50))
    compressor = dr.Compressor(parameters=[("weight", parameter)], loss_scale=lambda: scale)
    parameter.grad = torch.ones(40, 50)
    with pytest.raises(
        dr.InvalidArgumentError, match=f"a finite number above 0, got {str(scale).rstrip('0')}"
    ):
        compressor.compress(parameter.grad)


def test_parameters_do_not_keep_a_dropped_compressor():
    import gc
    import weakref

    network = torch.nn.Linear(40, 50)
    compressor = dr.Compressor(parameters=network.named_parameters())
    session = weakref.ref(compressor.adapter)
    del compressor
    gc.collect()
    assert session() is None
    network(torch.ones(3, 40)).sum().backward()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_compressor_is_not_pickled_or_copied(copied):
    compressor = dr.Compressor(parameters=[("weight", torch.nn.Parameter(torch.ones(5)))])
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"expected state_dict\(\) to be pickled or copied, got the compressor itself",
    ):
        copied(compressor)


def test_a_codec_of_the_users_own_trains():
    """A codec in pure Python with an id of 128 or more runs in NumPy, not in the core."""
    from deepreduce_hvd.stages.base import ValueCodec
    from deepreduce_hvd.stages.registry import _registry

    class Signs(dr.ValueCodec):
        stage_id = 200

        def encode(self, values, key):
            scale = np.float32(np.abs(values).mean()) if values.size else np.float32(0)
            signs = np.signbit(values)
            decoded = np.where(signs, -scale, scale).astype(np.float32)
            return scale.tobytes() + np.packbits(signs).tobytes(), decoded, None

        @classmethod
        def decode(cls, section, count):
            scale = np.frombuffer(section[:4], dtype=np.float32)[0]
            signs = np.unpackbits(np.frombuffer(section[4:], dtype=np.uint8), count=count).astype(
                bool
            )
            return np.where(signs, -scale, scale).astype(np.float32)

    dr.register(Signs)
    try:
        network = torch.nn.Linear(40, 50)
        codec = dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=Signs())
        assert not codec.is_native(dr.Residual()) and not codec.is_native(dr.NoMemory())
        compressor = dr.Compressor(codec, parameters=network.named_parameters())
        network(torch.ones(3, 40)).sum().backward()
        gradient = network.weight.grad.clone()
        reduced, context = compressor.compress(network.weight.grad)
        received = compressor.decompress(reduced, context)
        residual = compressor.state_dict()["parameters"]["weight"]["memory"]["residual"].view(
            50, 40
        )
        assert int((received != 0).sum()) == 200
        assert torch.allclose(received + residual, gradient, rtol=1e-6, atol=1e-6)
    finally:
        del _registry[ValueCodec][200]


def test_a_compressor_shows_its_settings():
    text = repr(dr.Compressor(parameters=named(), bucket_bytes=5, dense_below=6, seed=7))
    assert text.endswith(", seed=7, parameters=2 named)"), "the others have their defaults"
    for part in ("Compressor(recommended_codec(shape), memory=Residual(", "communicator=Allgather()", "bucket_bytes=5",
                 "dense_below=6", "seed=7", "parameters=2 named"):  # fmt: skip
        assert part in text


def test_a_compressor_shows_settings_that_are_not_the_defaults():
    import horovod.torch as hvd

    class Writer:
        def add_scalar(self, *arguments):
            pass

    class Own(dr.Compressor):
        def __init__(self, **options):
            super().__init__(parameters=named(), **options)

    compressor = Own(
        threads=0, process_set=hvd.global_process_set, loss_scale=lambda: 2.0,
        writer=Writer(), writer_interval=7,
    )  # fmt: skip
    assert (
        f", threads=0, process_set={hvd.global_process_set}, loss_scale=<function>,"
        " writer=<Writer>, writer_interval=7, parameters=2 named)"
    ) in repr(compressor)


def test_a_parameter_is_compressed_again_after_a_sparse_gradient():
    from types import SimpleNamespace

    compressor = dr.Compressor(parameters=[("table", torch.nn.Parameter(torch.ones(100, 20)))])
    slot = compressor.adapter.slots["table"]
    slot.count_sparse(
        torch.sparse_coo_tensor([[3]], torch.ones(1, 20), (100, 20), check_invariants=True)
    )
    assert compressor.stats()["table"]["path"] == "sparse"
    channel, bucket = (
        SimpleNamespace(sent_bytes=10, rounds=1),
        SimpleNamespace(d=2000, scheme="Allgather()"),
    )
    slot.count_sent(
        torch.ones(100, 20), SimpleNamespace(channel=channel, bucket=bucket), control_bytes=0
    )
    assert compressor.stats()["table"]["path"] == "compressed"


@pytest.mark.parametrize("codec", [None, "dense", "fp16"])
def test_trained_parameters_of_a_dtype_that_is_not_sent(codec):
    weight = torch.nn.Parameter(torch.zeros(40, 50, dtype=torch.complex64))
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"parameter filter: expected gradients of torch.float32, .*, got torch.complex64; "
        "train its torch.view_as_real",
    ):
        dr.Compressor(codec, parameters=[("filter", weight)])
    dr.Compressor(codec, parameters=[("filter", weight.requires_grad_(False))])


def test_parameters_that_cannot_have_gradients_are_ignored():
    import horovod.torch as hvd

    network = torch.nn.Linear(40, 50)
    network.table = torch.nn.Parameter(torch.arange(3000), requires_grad=False)
    compressor = dr.Compressor(parameters=network.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), 0.1),
        named_parameters=network.named_parameters(),
        compression=compressor,
    )
    network(torch.ones(3, 40)).sum().backward()
    optimizer.step()
    assert compressor.stats()["table"]["path"] == "none"
    assert torch.equal(network.table, torch.arange(3000))
    compressor.load_state_dict(compressor.state_dict())


def test_variables_of_a_dtype_that_is_not_sent():
    tf = pytest.importorskip("tensorflow")
    kernel = [("kernel", tf.Variable(tf.zeros((40, 50), tf.complex64)))]
    with pytest.raises(
        dr.InvalidArgumentError,
        match="parameter kernel: expected gradients of float32, .*, got complex64",
    ):
        dr.Compressor(parameters=kernel)
    # a counter, and the state of a generator, as in model.variables
    ignored = [
        tf.Variable(np.int64(3), name="counter"),
        tf.Variable(tf.zeros((40, 50), tf.complex64), trainable=False, name="constants"),
        tf.Variable(tf.zeros(3), name="bias"),
    ]
    assert set(dr.Compressor(parameters=ignored).policies) == {"counter:0", "constants:0", "bias:0"}


@pytest.mark.parametrize("base", [dr.RandomK, dr.NoneSparsifier])
def test_shared_random_indices_need_the_sparsifier_itself(base):
    class Own(base):
        stage_id = None

        def select(self, accumulated, key, step=0):
            return np.argsort(-np.abs(accumulated))[:3].astype(np.uint32)

    codec = dr.Codec(Own(0.1) if base is dr.RandomK else Own())
    with pytest.raises(dr.InvalidArgumentError, match="expected the sparsifier RandomK or None"):
        dr.Compressor(codec, communicator=dr.SharedRandomK(), parameters=named())
    policy = dr.Compressor(codec, parameters=named()).policies["weight"]
    assert policy.selects and policy.delays


@pytest.mark.parametrize(
    "make", [lambda: dr.LowPass(1e-50), lambda: dr.MomentumCorrection(1 - 1e-12)]
)
def test_settings_that_float32_rounds_out_of_range(make):
    with pytest.raises(dr.InvalidArgumentError, match="expected a float32 number in"):
        make()
