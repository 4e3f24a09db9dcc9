"""PyTorch tensors: operators over the native core, and the backend for the neutral layers.

``torch.ops.deepreduce`` has encode, decode, decode_sum_ and decode_sparse, with fake kernels for
tracing. A build with CUDA also works on tensors of a CUDA device. It adds the classes
BucketEncodings and BucketSums, which do not wait for the device, and cuda_supports and
raise_failure (docs/gpu.md).

If the installation has no operators for the installed PyTorch, the core's NumPy binding is used
instead. Payloads and results are the same, bit for bit, and tensors on a GPU are encoded on the
host. Only graphs that call ``torch.ops.deepreduce`` need the operators.
"""

import pathlib
import re

import numpy as np
import torch

from deepreduce_hvd import backends, container, errors, numpy_backend as neutral
from deepreduce_hvd.arrays import expect_finite


def _load_operators():
    """Load the operators for this PyTorch; return None, or the reason why there are none."""
    directory = pathlib.Path(__file__).parent.parent
    try:
        library = backends.operator_library(directory, "_torch_ops", "PyTorch", torch.__version__)
    except errors.NativeMissingError as error:
        return str(error)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return (
            f"deepreduce_hvd: expected {library.name} to load into PyTorch, got: {error}; run"
            " `python -m deepreduce_hvd --build`"
        )
    return None


#: why this installation has no operators for this PyTorch; None if it has them
WHY_NO_OPERATORS = _load_operators()
#: whether this installation has the operators for CUDA devices
HAS_CUDA_OPERATORS = WHY_NO_OPERATORS is None and hasattr(torch.ops.deepreduce, "cuda_supports")

#: PyTorch's types of gradients -> their codes in docs/format.md
DTYPES = {getattr(torch, name): code for name, code in container.DTYPES.items()}
_STATUS_BYTES = 4  # the first field of a dr_cuda_result, 0 unless it is a failure
_STATUS = re.compile(r"deepreduce status (\d+): (.*)")


def _fake_of(name):
    """Register a function as the fake kernel of an operator, if there are operators."""
    if WHY_NO_OPERATORS is None:
        return torch.library.register_fake(f"deepreduce::{name}")
    return lambda function: function


@_fake_of("encode")
def _encode_fake(gradient, residual, velocity, threshold, codec, seed, step, tensor, rank):
    size = torch.library.get_ctx().new_dynamic_size(min=container.HEADER.size)
    return gradient.new_empty([size], dtype=torch.uint8)


@_fake_of("decode_sum_")
def _decode_sum_fake(out, payloads, scale, codec=None):
    return None


@_fake_of("decode")
def _decode_fake(payload, d):
    return payload.new_empty([d], dtype=torch.float32)


@_fake_of("decode_sparse")
def _decode_sparse_fake(payloads, d, scale):
    size = torch.library.get_ctx().new_dynamic_size(min=0)
    values = torch.empty(
        [size], dtype=torch.float32, device="cpu" if not payloads else payloads[0].device
    )
    return values.new_empty([size], dtype=torch.int64), values


def checked(operator, *arguments):
    """Call an operator; raise its failure as one of the package's own errors."""
    try:
        return operator(*arguments)
    except RuntimeError as error:
        found = _STATUS.search(str(error))
        if found is None:
            raise
        # a status that only CUDA has: a launch or a copy failed
        raise errors.OF_STATUS.get(int(found[1]), RuntimeError)(found[2]) from None


def raise_failures(results, names):
    """Raise the first failure in the results of several operators.

    Args:
        results: (n, m) uint8 on the host, a dr_cuda_result for each operator.
        names: names of the parameters whose sums they are.
    """
    if any_failed(results):
        for name, result in zip(names, results):
            checked(torch.ops.deepreduce.raise_failure, result, name)


def any_failed(results):
    """Return whether one of (n, m) uint8 on the host, dr_cuda_results, is a failure."""
    return bool(results.numpy()[:, :_STATUS_BYTES].any())


def encode_flat(codec, memory, gradient, state, threshold, seed, step, tensor, rank):
    """Encode one contiguous (d,) gradient; return the payload, (n,) uint8.

    ``state`` (arrays of (d,) float32) and ``threshold`` (1,) are updated in place. All tensors are
    on the host. With CUDA operators and a codec that is :meth:`Codec.is_native`, they may all be on
    one CUDA device instead.
    """
    if WHY_NO_OPERATORS is None and codec.is_native(memory):
        return checked(
            torch.ops.deepreduce.encode,
            gradient,
            *neutral.residual_and_velocity(state),
            threshold,
            codec.fields(memory, step),
            seed,
            step,
            tensor,
            rank,
        )
    dtype = DTYPES.get(gradient.dtype)
    if dtype is None:
        raise errors.InvalidArgumentError(
            f"gradient: expected {', '.join(map(str, DTYPES))}, got {gradient.dtype}"
        )
    array = (gradient.view(torch.int16) if gradient.dtype == torch.bfloat16 else gradient).numpy()
    arrays = tuple(part.detach().numpy() for part in state)
    hint = 0.0 if threshold is None else float(threshold)
    data, hint = neutral.encode_numpy(
        codec, memory, array, arrays, hint, seed, step, tensor, rank, dtype=dtype
    )
    if threshold is not None:
        threshold.fill_(hint)
    return torch.from_numpy(data)


def decode_sum_flat(payloads, out, scale):
    """Add ``scale`` * each payload to ``out``, a contiguous (d,) float32 CPU tensor; return it."""
    if WHY_NO_OPERATORS is None and neutral.all_native([data.numpy() for data in payloads]):
        checked(torch.ops.deepreduce.decode_sum_, out, payloads, scale)
    else:
        neutral.decode_sum_numpy([data.numpy() for data in payloads], out.numpy(), scale)
    return out


def on_device(tensor):
    """Return whether the operators process a tensor on its own CUDA device."""
    return HAS_CUDA_OPERATORS and tensor.device.type == "cuda"


class _Torch:
    """The backend behind Codec.encode, decode, decode_sum and inspect for torch tensors."""

    def encode(self, codec, memory, gradient, state, threshold, seed, step, tensor, rank):
        for name, part in (("gradient", gradient), *zip(memory.state, state)):
            if not isinstance(part, torch.Tensor) or part.dim() != 1 or not _has_dense_data(part):
                raise errors.InvalidArgumentError(
                    f"{name}: expected a dense 1-D torch tensor, got {_describe(part)}"
                )
            if part.is_neg() or part.is_conj():
                raise errors.InvalidArgumentError(
                    f"{name}: expected a tensor without the negative or conjugate bit, got a view"
                    " with one; use resolve_neg()"
                )
        if any(part.device != gradient.device for part in state):
            raise errors.InvalidArgumentError(
                f"residual: expected device {gradient.device}, the device of the gradient, got"
                f" {state[0].device}"
            )
        _expect_apart(gradient=gradient, **dict(zip(memory.state, state)))
        for name, part in zip(memory.state, state):
            expect_finite(name, bool(torch.isfinite(part).all()))
        _note_change(*state)
        if on_device(gradient) and codec.is_native(memory):
            return encode_flat(
                codec, memory, gradient.detach().contiguous(), state, None, seed, step, tensor, rank
            ), 0.0
        on_host = tuple(part.cpu() for part in state)
        payload = encode_flat(
            codec,
            memory,
            gradient.detach().cpu().contiguous(),
            on_host,
            None,
            seed,
            step,
            tensor,
            rank,
        )
        for part, host in zip(state, on_host):
            if part.device.type != "cpu":
                part.copy_(host)
        return payload.to(gradient.device), 0.0

    def decode(self, payload, max_elements):
        d = neutral.elements_of(self.to_numpy_bytes(payload), max_elements)
        return self.decode_sum(
            [payload], torch.zeros(d, dtype=torch.float32, device=payload.device), 1.0
        )

    def decode_sum(self, payloads, out, scale):
        if (
            out.dim() != 1
            or out.dtype != torch.float32
            or not _has_dense_data(out)
            or not out.is_contiguous()
        ):
            raise errors.InvalidArgumentError(
                f"out: expected a contiguous 1-D float32 tensor, got {_describe(out)}"
            )
        for payload in payloads:
            _expect_bytes(payload)
        _note_change(out)
        if on_device(out) and neutral.all_native(
            [payload[: container.HEADER.size].cpu().numpy() for payload in payloads]
        ):
            checked(torch.ops.deepreduce.decode_sum_, out, payloads, scale)
            return out
        host = decode_sum_flat(
            [payload.cpu().contiguous() for payload in payloads], out.cpu(), scale
        )
        return out if host is out or host.data_ptr() == out.data_ptr() else out.copy_(host)

    def to_numpy_bytes(self, payload):
        _expect_bytes(payload)
        return np.ascontiguousarray(payload.cpu().numpy())


def _has_dense_data(tensor):
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _expect_bytes(payload):
    if (
        not isinstance(payload, torch.Tensor)
        or payload.dtype != torch.uint8
        or payload.dim() != 1
        or not _has_dense_data(payload)
    ):
        raise errors.InvalidArgumentError(
            f"payload: expected a 1-D uint8 tensor, got {_describe(payload)}"
        )


def _expect_apart(**tensors):
    """Raise InvalidArgumentError if tensors share memory: writing to one would change another."""
    spans: dict[str, tuple[torch.device, int, int]] = {}
    for name, tensor in tensors.items():
        # a gradient that is copied; other tensors with strides are refused
        if not tensor.is_contiguous():
            continue
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for other, (device, first, end) in spans.items():
            if device == tensor.device and size and start < end and first < start + size:
                raise errors.InvalidArgumentError(
                    f"{name}: expected separate memory, got memory shared with {other}"
                )
        spans[name] = tensor.device, start, start + size


def _note_change(*tensors):
    """Tell autograd that the core writes to tensors.

    Backward then refuses to use the old values of one that it has saved.
    """
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def _describe(value):
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)}, {value.layout}, on {value.device}"


backend = _Torch()
