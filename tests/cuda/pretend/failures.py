"""Test arguments that the operators refuse on a device, and the errors that the caller sees."""

import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.torch import ops as operators

codec = dr.Codec(dr.TopK(0.5))
values = torch.randn(10)
there = values.to("cuda")
payload = codec.encode(there)
assert payload.is_cuda and torch.equal(payload.cpu(), codec.encode(values))
assert dr.decode(payload).is_cuda and torch.equal(
    dr.decode(payload).cpu(), dr.decode(payload.cpu())
)
assert dr.inspect(payload)["k"] == 5

with pytest.raises(dr.CorruptPayloadError, match="payload length: expected"):
    dr.decode_sum([payload[:-1]], torch.zeros(10).to("cuda"))
with pytest.raises(
    dr.InvalidArgumentError,
    match="gradient: expected contiguous 1-D Float, Half, BFloat16 or Double, got Int",
):
    codec.encode(there.int())
with pytest.raises(
    dr.InvalidArgumentError, match="residual: expected contiguous Float of shape .10., got Double"
):
    codec.encode(there, there.double())
with pytest.raises(
    dr.InvalidArgumentError,
    match="residual: expected a tensor on cuda:0, got Float of shape .10. on cpu",
):
    operators.encode_flat(codec, dr.Residual(), there, (values,), None, 0, 0, 0, 0)
with pytest.raises(dr.InvalidArgumentError, match="out: expected a CUDA tensor like the payloads"):
    operators.checked(torch.ops.deepreduce.decode_sum_, torch.zeros(10), [payload], 1.0)

encodings = torch.classes.deepreduce.BucketEncodings(["one", "two"])
with pytest.raises(
    dr.InvalidArgumentError,
    match="bucket: expected 2 gradients, .* codecs of 20 numbers, got 2, 2, 2, 1, 2 and 40 numbers",
):
    fields = codec.fields(dr.NoMemory())
    operators.checked(
        encodings.start, [there, there], [None] * 2, [None] * 2, fields * 2, 0, [0], [0, 1], 0
    )

# payloads of codecs without CUDA kernels among others: both sides sum them in order
payloads = [
    payload,
    dr.Codec(dr.TopK(0.5), value=dr.Deflate()).encode(there),
    dr.Codec(dr.NoneSparsifier()).encode(there),
    payload,
]
out, expected = torch.ones(10), torch.ones(10)
assert torch.equal(
    dr.decode_sum(payloads, out.to("cuda"), 0.3).cpu(),
    dr.decode_sum([one.cpu() for one in payloads], expected, 0.3),
)
indices, sparse = torch.ops.deepreduce.decode_sparse(payloads, 10, 0.3)
assert indices.is_cuda and torch.equal(
    sparse.cpu(), torch.ops.deepreduce.decode_sparse([one.cpu() for one in payloads], 10, 0.3)[1]
)

# the error of a sum that does not wait is raised later
broken = payload.clone()
broken[30:].zero_()
sums, fields = torch.classes.deepreduce.BucketSums(), codec.fields(dr.NoMemory())
result = sums.start(
    [torch.zeros(10).to("cuda")], broken.contiguous(), [0], [broken.numel()], 1.0, fields
)[0]
with pytest.raises(dr.CorruptPayloadError):
    operators.checked(torch.ops.deepreduce.raise_failure, result.cpu())
with pytest.raises(dr.InvalidArgumentError, match="expected one with CUDA kernels"):
    fields = dr.Codec(dr.TopK(0.5), value=dr.Deflate()).fields(dr.NoMemory())
    operators.checked(
        sums.start, [torch.zeros(10).to("cuda")], payload, [0], [payload.numel()], 1.0, fields
    )
