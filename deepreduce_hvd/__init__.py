"""Gradient compression for stock Horovod: sparsify, compress indices and values apart, send one
payload.

:class:`Compressor` is what ``hvd.DistributedOptimizer(..., compression=)`` takes. :class:`Codec`
encodes single tensors, which are (d,) and of float32, float16, bfloat16 or float64; payloads are
(n,) uint8 (docs/format.md). Every error raised on purpose is a :class:`DeepReduceError`.
"""

from deepreduce_hvd.check_codec import check_codec
from deepreduce_hvd.codec import Codec, decode, decode_sum, inspect
from deepreduce_hvd.communicators import *  # noqa: F403
from deepreduce_hvd.communicators import __all__ as _communicators
from deepreduce_hvd.compressor import Compressor, recommended_codec
from deepreduce_hvd.errors import (
    CorruptPayloadError,
    DeepReduceError,
    InvalidArgumentError,
    NativeMissingError,
    PeerFailedError,
    UnknownCodecError,
)
from deepreduce_hvd.numpy_backend import decode_sum_sparse
from deepreduce_hvd.params import from_params
from deepreduce_hvd.stages.base import IndexCodec, Memory, Sparsifier, ValueCodec, register
from deepreduce_hvd.stages.index_codecs import *  # noqa: F403
from deepreduce_hvd.stages.index_codecs import __all__ as _index
from deepreduce_hvd.stages.memories import *  # noqa: F403
from deepreduce_hvd.stages.memories import __all__ as _memory
from deepreduce_hvd.stages.sparsifiers import *  # noqa: F403
from deepreduce_hvd.stages.sparsifiers import __all__ as _sparsifiers
from deepreduce_hvd.stages.value_codecs import *  # noqa: F403
from deepreduce_hvd.stages.value_codecs import __all__ as _value

__version__ = "0.1.0"

__all__ = [
    "Codec", "check_codec", "decode", "decode_sum", "decode_sum_sparse", "inspect",
    "Compressor", "from_params", "recommended_codec",
    "CorruptPayloadError", "DeepReduceError", "InvalidArgumentError", "NativeMissingError", "PeerFailedError", "UnknownCodecError",
    "IndexCodec", "Memory", "Sparsifier", "ValueCodec", "register",
    *_communicators, *_index, *_memory, *_sparsifiers, *_value,
]  # fmt: skip
