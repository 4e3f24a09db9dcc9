"""Gradient compression for stock Horovod, and for PyTorch's DDP and fully_shard.

A sparsifier selects elements of a gradient. Index and value codecs encode their indices and values
separately. Both end up in one payload.

Pass a :class:`Compressor` to ``hvd.DistributedOptimizer(..., compression=)`` or
``hvd.DistributedGradientTape(..., compression=)``. Without Horovod, call its ``register`` with a
model of ``DistributedDataParallel`` or ``fully_shard``. Use a :class:`Codec` to encode single
tensors: (d,) arrays of float32, float16, bfloat16 or float64. A payload is an (n,) uint8 array
(docs/format.md). Every error that this package raises on purpose is a :class:`DeepReduceError`.
"""

from deepreduce_hvd import schedule
from deepreduce_hvd.check_codec import check_codec
from deepreduce_hvd.codec import Codec, decode, decode_sum, inspect
from deepreduce_hvd.communicators import *  # noqa: F403
from deepreduce_hvd.communicators import __all__ as _communicators
from deepreduce_hvd.compressor import Compressor
from deepreduce_hvd.errors import (
    CorruptPayloadError,
    DeepReduceError,
    InvalidArgumentError,
    NativeMissingError,
    PeerFailedError,
    UnknownCodecError,
)
from deepreduce_hvd.migration.params import from_params
from deepreduce_hvd.numpy_backend import decode_sum_sparse
from deepreduce_hvd.planning.policies import recommended_codec
from deepreduce_hvd.prepare_optimizer import prepare
from deepreduce_hvd.sparse_vectors import (
    SparseHandle,
    SparseVectors,
    sparse_allreduce,
    sparse_allreduce_async,
)
from deepreduce_hvd.stages.base import IndexCodec, Memory, Sparsifier, ValueCodec
from deepreduce_hvd.stages.index_codecs import *  # noqa: F403
from deepreduce_hvd.stages.index_codecs import __all__ as _index
from deepreduce_hvd.stages.memories import *  # noqa: F403
from deepreduce_hvd.stages.memories import __all__ as _memory
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sparsifiers import *  # noqa: F403
from deepreduce_hvd.stages.sparsifiers import __all__ as _sparsifiers
from deepreduce_hvd.stages.value_codecs import *  # noqa: F403
from deepreduce_hvd.stages.value_codecs import __all__ as _value

__version__ = "0.1.0"

__all__ = [
    "Codec", "check_codec", "decode", "decode_sum", "decode_sum_sparse", "inspect",
    "Compressor", "from_params", "prepare", "recommended_codec", "schedule",
    "SparseHandle", "SparseVectors", "sparse_allreduce", "sparse_allreduce_async",
    "CorruptPayloadError", "DeepReduceError", "InvalidArgumentError", "NativeMissingError",
    "PeerFailedError", "UnknownCodecError",
    "IndexCodec", "Memory", "Sparsifier", "ValueCodec", "register",
    *_communicators, *_index, *_memory, *_sparsifiers, *_value,
]  # fmt: skip
