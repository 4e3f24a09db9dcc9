"""Test the PyTorch operators: schemas, fake kernels, errors, and the same bytes as NumPy."""

import math

import numpy as np
import pytest
import torch
from codecs_table import INDEX, VALUE, gradient
from sampling import parametrize_product

import deepreduce_hvd as dr
import deepreduce_hvd.torch.ops
from deepreduce_hvd.numpy_backend import encode_numpy
from deepreduce_hvd.torch import results

FIELDS = dr.Codec(dr.TopK(0.1)).fields(dr.Residual())
NO_MEMORY = dr.Codec(dr.TopK(0.1)).fields(dr.NoMemory())
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def arguments(fields, residual):
    values = torch.from_numpy(gradient(500))
    return (
        values,
        torch.zeros(500) if residual else None,
        None,
        torch.zeros(1) if residual else None,
        fields,
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("residual", [True, False])
def test_opcheck_encode(residual):
    torch.library.opcheck(
        torch.ops.deepreduce.encode.default,
        arguments(FIELDS if residual else NO_MEMORY, residual),
        test_utils=CHECKS,
    )


def test_opcheck_decoders():
    payload = torch.ops.deepreduce.encode(*arguments(NO_MEMORY, False))
    torch.library.opcheck(torch.ops.deepreduce.decode.default, (payload, 500), test_utils=CHECKS)
    torch.library.opcheck(
        torch.ops.deepreduce.decode_sum_.default,
        (torch.zeros(500), [payload, payload], 0.5),
        test_utils=CHECKS,
    )
    torch.library.opcheck(
        torch.ops.deepreduce.decode_sparse.default, ([payload], 500, 1.0), test_utils=CHECKS
    )


@parametrize_product(
    index=INDEX, value=VALUE, dtype=[torch.float32, torch.float16, torch.bfloat16, torch.float64]
)
def test_same_bytes_as_numpy(index, value, dtype):
    codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
    values = torch.from_numpy(gradient(2000)).to(dtype)
    residual = torch.from_numpy(gradient(2000, key=3))
    expected_residual = residual.numpy().copy()
    payload = codec.encode(values, residual, step=2, seed=1, tensor=5, rank=6)
    assert payload.dtype == torch.uint8
    code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}[dtype]
    array = values.float().numpy() if dtype == torch.bfloat16 else values.numpy()
    expected, _ = encode_numpy(
        codec, dr.Residual(), array, (expected_residual,), 0.0, 1, 2, 5, 6, native=False, dtype=code
    )
    assert payload.numpy().tobytes() == expected.tobytes()
    np.testing.assert_array_equal(residual.numpy(), expected_residual)
    assert torch.equal(dr.decode(payload), torch.from_numpy(dr.decode(expected)))
    out = torch.ones(2000)
    assert dr.decode_sum([payload, payload], out, scale=0.5) is out
    np.testing.assert_array_equal(
        out.numpy(), dr.decode_sum([expected, expected], np.ones(2000, dtype=np.float32), scale=0.5)
    )
    assert dr.inspect(payload)["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            torch.zeros(3, 3),
            r"expected a dense 1-D torch tensor, got torch.float32 of shape \(3, 3\)",
        ),
        (
            torch.zeros(3, dtype=torch.int32),
            "expected contiguous 1-D Float, Half, BFloat16 or Double, got Int",
        ),
        (torch.zeros(3, dtype=torch.complex64), "got ComplexFloat"),
        (torch.zeros(3).to_sparse(), "expected a dense 1-D torch tensor"),
        (torch.zeros(3, device="meta"), "expected a dense 1-D torch tensor, got .* on meta"),
    ],
)
def test_bad_gradients(values, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.Codec(dr.TopK(0.5)).encode(values)


def test_bad_residual_and_payloads():
    codec = dr.Codec(dr.TopK(0.5))
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"residual: expected contiguous Float of shape \[10\], got Double of shape \[10\]",
    ):
        codec.encode(torch.zeros(10), torch.zeros(10, dtype=torch.float64))
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"residual: expected contiguous Float of shape \[10\], got Float of shape \[11\]",
    ):
        codec.encode(torch.zeros(10), torch.zeros(11))
    payload = codec.encode(torch.ones(10))
    with pytest.raises(dr.CorruptPayloadError, match="payload length: expected"):
        dr.decode_sum([payload[:-1]], torch.zeros(10))
    with pytest.raises(dr.InvalidArgumentError, match="expected d = 11 elements, got 10"):
        dr.decode_sum([payload], torch.zeros(11))
    for data in (torch.zeros(50), payload.to_sparse(), payload.to("meta")):
        with pytest.raises(
            dr.InvalidArgumentError, match=r"expected a 1-D uint8 tensor, got torch"
        ):
            dr.decode(data)
    for out in (torch.zeros(10).to_sparse(), torch.zeros(10, device="meta")):
        with pytest.raises(dr.InvalidArgumentError, match="out: expected a contiguous 1-D float32"):
            dr.decode_sum([payload], out)
    with pytest.raises(dr.InvalidArgumentError, match="at most max_elements = 5 elements, got 10"):
        dr.decode(payload, max_elements=5)


@pytest.mark.parametrize(
    "memory", [dr.NoMemory(), dr.Residual(), dr.LowPass(0.5), dr.MomentumCorrection()]
)
def test_an_empty_tensor_has_an_empty_memory(memory):
    codec, state = dr.Codec(dr.TopK(0.5)), tuple(torch.zeros(0) for _ in memory.state)
    payload = deepreduce_hvd.torch.ops.encode_flat(
        codec, memory, torch.zeros(0), state, torch.zeros(1), 0, 0, 0, 0
    )
    assert dr.decode(payload).shape == (0,)


@pytest.mark.parametrize("native", [True, False])
def test_backward_does_not_use_values_that_the_core_has_overwritten(native, monkeypatch):
    if not native:
        monkeypatch.setattr(deepreduce_hvd.torch.ops, "WHY_NO_OPERATORS", "none")
    codec = dr.Codec(dr.TopK(0.1))
    weight, written = torch.ones(50, requires_grad=True), torch.ones(50)

    def add():
        dr.decode_sum([codec.encode(torch.ones(50))], written)

    for change in (add, lambda: codec.encode(torch.ones(50), residual=written)):
        product = (weight * written).sum()  # saves what is written next
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_operators_trace():
    """With the fake kernels, a graph is captured although the size of the payload is unknown."""

    def there_and_back(values, residual):
        payload = torch.ops.deepreduce.encode(values, residual, None, None, FIELDS, 0, 0, 0, 0)
        return torch.ops.deepreduce.decode(payload, values.numel())

    values = torch.from_numpy(gradient(500))
    residual = torch.zeros(500)
    eager = there_and_back(values, torch.zeros(500))
    traced = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(values, residual), eager)
    assert torch.equal(residual + eager, values)


def test_operators_of_another_pytorch_are_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(deepreduce_hvd.torch.ops, "__file__", str(tmp_path / "torch" / "ops.py"))
    assert "PyTorch operators for version" in deepreduce_hvd.torch.ops._load_operators()
    assert "got operators for no version" in deepreduce_hvd.torch.ops._load_operators()
    for built_for in ("2.12.0+cu130", "2.9.1"):
        (tmp_path / f"_torch_ops-{built_for}.so").touch()
    (tmp_path / "_torch_ops.so").touch()  # of an older package, without versions in names
    assert deepreduce_hvd.torch.ops._load_operators() == (
        f"deepreduce_hvd: expected the PyTorch operators for version {torch.__version__}, "
        "got operators for 2.12.0+cu130, 2.9.1; run `python -m deepreduce_hvd --build`"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_number_that_is_not_finite_is_found(dtype):
    assert results.is_finite(torch.zeros(0, dtype=dtype))
    for d in (1, 2, 7, 16, 33, 1000):
        for place in {0, d // 2, d - 1}:
            for bad in (math.nan, math.inf, -math.inf):
                whole = torch.randn(d, 3, generator=torch.Generator().manual_seed(d)).to(dtype)
                for part in (whole.view(-1), whole[:, 1]):
                    assert results.is_finite(part)
                whole[place, 1] = bad
                for part in (whole.view(-1), whole[:, 1]):
                    assert not results.is_finite(part)
