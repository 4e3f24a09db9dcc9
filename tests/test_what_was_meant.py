"""Test that messages for refused arguments say what was meant, where that can be guessed."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import deepreduce_hvd as dr


@pytest.fixture(autouse=True)
def initialized_horovod():
    hvd.init()


def named():
    return torch.nn.Linear(40, 50).named_parameters()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dr.Compressor(named()), r"expected a Codec, .*write Compressor\(parameters="),
        (
            lambda: dr.Compressor(list(named())),
            r"expected a Codec, .*write Compressor\(parameters=",
        ),
        (
            lambda: dr.Compressor(dr.TopK(0.01), parameters=named()),
            r"write Compressor\(Codec\(TopK\(",
        ),
        (
            lambda: dr.Compressor(dr.Rice(), parameters=named()),
            r"Codec\(TopK\(0.01\), index=Rice\(",
        ),
        (
            lambda: dr.Compressor(dr.QSGD(), parameters=named()),
            r"Codec\(TopK\(0.01\), value=QSGD\(",
        ),
        (
            lambda: dr.Compressor(dr.Residual(), parameters=named()),
            "write Compressor.memory=Residual",
        ),
        (
            lambda: dr.Compressor(dr.GTopK(), parameters=named()),
            "write Compressor.communicator=GTopK",
        ),
        (
            lambda: dr.Compressor(memory=dr.Residual, parameters=named()),
            r"write Residual\(\) to pass an instance",
        ),
        (
            lambda: dr.Compressor(memory=dr.recommended_codec(), parameters=named()),
            "with the codec first",
        ),
        (
            lambda: dr.Compressor({"w*": "topk"}, parameters=named()),
            r"of 'w\*': expected a Codec, 'dense', 'fp16' or 'rows', got 'topk'; write dr\.Codec\(",
        ),
        (
            lambda: dr.Compressor([("w*", "dense"), ("b*", "fp16")], parameters=named()),
            r"; write a dictionary, as in {'w\*': 'dense'}$",
        ),
        (
            lambda: dr.Compressor(memory=[("w*", dr.NoMemory())], parameters=named()),
            r"; write a dictionary, as in {'w\*': NoMemory\(\)}$",
        ),
        (
            lambda: dr.Compressor(parameters=named(), writer="runs"),
            "expected an object with add_scalar",
        ),
        (
            lambda: dr.Compressor(parameters=named(), writer_interval=0),
            "writer_interval: expected an integer of at",
        ),
        (
            lambda: dr.Compressor(parameters=named(), process_set=[0, 1]),
            "process_set: expected a horovod ProcessSet",
        ),
        (lambda: dr.Compressor(parameters=[("a", 1)]), "parameters of torch, .*got int for 'a'"),
        (
            lambda: dr.Compressor(parameters=[*named(), ("a", 1)]),
            "parameters of torch, .*got int for 'a'",
        ),
        (
            lambda: dr.Compressor(parameters=torch.nn.Linear(2, 2).named_modules()),
            "parameters of known shape, got Linear for ''",
        ),
        (
            lambda: dr.Compressor(parameters=torch.nn.LazyLinear(2).named_parameters()),
            "parameters of known shape, got UninitializedParameter for 'weight'",
        ),
        (
            lambda: dr.Compressor.compress(torch.zeros(3)),
            "got the class Compressor; write compression=",
        ),
    ],
)
def test_a_message_says_what_was_meant(make, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize("method", ["compress", "decompress"])
def test_a_codec_in_place_of_a_compressor(method):
    codec = dr.recommended_codec()
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"expected a dr.Compressor, got a Codec; write dr.Compressor\(",
    ):
        getattr(codec, method)
    assert not hasattr(codec, method) and getattr(codec, method, None) is None
    with pytest.raises(AttributeError, match="'Codec' object has no attribute 'other'"):
        _ = codec.other


MODEL = torch.nn.Linear(40, 50)


class TestParameters:
    @pytest.mark.parametrize(
        ("given", "got"),
        [
            (MODEL, "Linear"),
            (torch.nn.Sequential(MODEL), "Sequential"),
            (MODEL.named_parameters, "method"),
            (MODEL.parameters(), "Parameter"),
            (dict(MODEL.named_parameters()), "dict"),
            (MODEL.state_dict(), "OrderedDict"),
            ("weight", "str"),
            (5, "int"),
        ],
    )
    def test_a_model_and_what_has_no_names(self, given, got):
        line = r"; write parameters=model\.named_parameters\(\)"
        with pytest.raises(dr.InvalidArgumentError, match=f"parameters: .*, got {got}{line}"):
            dr.Compressor(parameters=given)

    def test_a_model_of_keras(self):
        tf = pytest.importorskip("tensorflow")
        model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
        model.build((None, 40))
        line = r"; write parameters=model\.trainable_variables$"
        with pytest.raises(dr.InvalidArgumentError, match=f"got Sequential{line}"):
            dr.Compressor(parameters=model)
        for given, message in (
            (model.layers, "parameters of known shape, got Dense for '.*dense"),
            ([tf.Variable(tf.zeros(3), shape=[None])], "parameters of known shape, got"),
            ([tf.Variable(tf.zeros(3), shape=tf.TensorShape(None))], "of known shape, got"),
            ([*MODEL.named_parameters(), *model.trainable_variables], "of one framework, got"),
        ):
            with pytest.raises(dr.InvalidArgumentError, match=message):
                dr.Compressor(parameters=given)
        tracked = tf.train.Checkpoint(kept=[tf.Variable(tf.zeros(3), name="kept")]).kept
        assert hasattr(tracked, "trainable_variables")
        dr.Compressor(parameters=tracked)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("topk", "dr.Codec(dr.TopK(0.01), index=dr.Rice())"),
        ("random_k", "dr.Codec(dr.RandomK(0.01), index=dr.Rice())"),
        ("elias_fano", "dr.Codec(dr.TopK(0.01), index=dr.EliasFano())"),
        ("qsgd", "dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.QSGD())"),
        ("gzip", "dr.Codec(dr.TopK(0.01), index=dr.Rice())"),
        (0.05, "dr.recommended_codec(density=0.05)"),
        (1, "dr.recommended_codec(density=1.0)"),
        (5, "dr.recommended_codec(density=0.01)"),
        ("bf16", "'fp16'"),
        ("FP16", "'fp16'"),
        ("none", "'dense'"),
        (hvd.Compression.fp16, "'fp16'"),
        (hvd.Compression.none, "'dense'"),
    ],
)
def test_a_codec_to_write(given, expected):
    line = written(lambda: dr.Compressor(given, parameters=named()))
    assert line == expected
    dr.Compressor(eval(line), parameters=named())


def written(make):
    """Return the expression that the error of a call says to write."""
    with pytest.raises(dr.InvalidArgumentError) as refused:
        make()
    return str(refused.value).rpartition("; write ")[2].removesuffix(" to pass an instance")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: dr.Compressor(dr.Codec, parameters=named()), "Codec(TopK(0.01))"),
        (lambda: dr.Compressor(memory=dr.LowPass, parameters=named()), "LowPass()"),
        (lambda: dr.Compressor(memory="residual", parameters=named()), "Residual()"),
        (lambda: dr.Codec(dr.TopK), "TopK(0.01)"),
        (lambda: dr.Codec(dr.RandomK), "RandomK(0.01)"),
        (lambda: dr.Codec(dr.ChunkTopK), "ChunkTopK(0.01)"),
        (lambda: dr.Codec(dr.Threshold), "Threshold(0.01)"),
        (lambda: dr.Codec("random_k"), "RandomK(0.01)"),
        (lambda: dr.Codec(dr.TopK(0.01), value="qsgd"), "QSGD()"),
        (lambda: dr.Codec(dr.TopK(0.01), index=dr.Rice), "Rice()"),
        (lambda: dr.check_codec(dr.Rice), "dr.Rice()"),
    ],
)
def test_an_instance_to_write_is_one(make, expected):
    line = written(make)
    assert line == expected
    assert not isinstance(eval(line, {"dr": dr, **vars(dr)}), type)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: dr.Compressor(dr.TopK, parameters=named()),
            "Compressor(Codec(TopK(0.01), index=Rice(), value=LloydMax(bits=1)), parameters=...)",
        ),
        (
            lambda: dr.Compressor(dr.Rice, parameters=named()),
            "Compressor(Codec(TopK(0.01), index=Rice()), parameters=...)",
        ),
        (
            lambda: dr.Compressor(dr.Hierarchical, parameters=named()),
            "Compressor(communicator=Hierarchical(Allgather()), parameters=...)",
        ),
        (
            lambda: dr.Compressor(communicator="allgather", parameters=named()),
            "communicator=dr.Allgather()",
        ),
        (
            lambda: dr.Compressor(communicator="split_allgather", parameters=named()),
            "communicator=dr.SplitAllgather()",
        ),
        (
            lambda: dr.Compressor(communicator="nccl", parameters=named()),
            "communicator=dr.Allgather()",
        ),
        (
            lambda: dr.Compressor(communicator=dr.Hierarchical, parameters=named()),
            "Hierarchical(Allgather())",
        ),
    ],
)
def test_arguments_to_write(make, expected):
    line = written(make)
    assert line == expected
    call = line if line.startswith("Compressor") else f"Compressor({line}, parameters=...)"
    if line.startswith("Hierarchical"):
        call = f"Compressor(communicator={line}, parameters=...)"
    eval(call.replace("...", "named()"), {"dr": dr, "named": named, **vars(dr)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dr.Codec(dr.TopK(0.01), index=dr.LloydMax()),
            r"Codec index: expected an IndexCodec, got LloydMax\(.*; write Codec\(\.\.\., value=LloydMax",
        ),
        (lambda: dr.Codec(dr.TopK(0.1), index=dr.QSGD()), "expected an IndexCodec, got QSGD"),
        (
            lambda: dr.Codec(dr.Rice()),
            r"Codec sparsifier: expected a Sparsifier, got Rice.*; write Codec\(\.\.\., index=Rice\(\)\)",
        ),
        (
            lambda: dr.Codec(dr.TopK(0.01), dr.Residual()),
            r"write Compressor\(\.\.\., memory=Residual\(\)\)",
        ),
        (
            lambda: dr.Codec(dr.TopK(0.01), value=dr.TopK),
            r"write Codec\(TopK\(0\.01\), \.\.\.\), with the sparsifier first",
        ),
        (lambda: dr.Codec(dr.TopK(0.01), value="gzip"), "expected a ValueCodec, got 'gzip'$"),
        (
            lambda: dr.Compressor(communicator="allgather", parameters=named()),
            "communicator: expected a Communicator or 'auto', got 'allgather'",
        ),
        (
            lambda: dr.Compressor(lambda name: None, parameters=named()),
            r"codec: expected a function of \(name, shape\), got one of \(name\)",
        ),
        (
            lambda: dr.Compressor(memory=lambda: None, parameters=named()),
            r"memory: expected a function of \(name, shape\), got one of \(\)",
        ),
        (
            lambda: dr.Compressor(MODEL),
            r"codec: expected a Codec.* write Compressor\(parameters=model\.named_parameters",
        ),
        (lambda: dr.Compressor(int, parameters=named()), "expected a Codec, .*, got <class 'int'>$"),
    ],
)  # fmt: skip
def test_a_stage_in_the_wrong_place(make, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        make()


class NoExchange(dr.Communicator):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: dr.Compressor(communicator=NoExchange(), parameters=named()),
        lambda: dr.Hierarchical(NoExchange()),
        lambda: dr.sparse_allreduce(
            np.arange(3), np.ones(3, np.float32), 5, communicator=NoExchange()
        ),
    ],
)
def test_a_communicator_that_cannot_exchange(make):
    message = r"with a method exchange\(bucket, channel\), got NoExchange without it"
    with pytest.raises(dr.InvalidArgumentError, match=message):
        make()


def test_no_choice_and_functions_of_c():
    """An empty mapping gives all parameters the default; a signature may be unknown."""
    assert set(dr.Compressor({}, {}, parameters=named()).policies) == {"weight", "bias"}
    dr.Compressor({"weight": "dense", "bias": "fp16"}.pop, parameters=named())
