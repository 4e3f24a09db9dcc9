"""What the accuracy laboratory compares: codecs, memories, communicators and preparations."""

import dataclasses
from collections.abc import Callable

from bucket_topk import BucketTopK
from layerwise import layerwise_codecs, recommended_codecs, sizes, tables
from oracles import LargestOfSelections, LargestOfSum

import deepreduce_hvd as dr


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        codec: codec of the compressed tensors; None averages gradients uncompressed. A function
            of the task returns a dictionary with the codec of each compressed tensor.
        memory: memory of the compressed tensors. A function of the task returns a dictionary with
            the memory of each tensor that has another one than the default.
        communicator, dense_below: as of :class:`~deepreduce_hvd.Compressor`.
        prepared: whether :func:`~deepreduce_hvd.prepare` is applied to the optimizer; without a
            codec, as if large tensors had the default codec.
        estimates: None, or the momentum of EF21-SGDM in place of a memory; 1 is EF21.
        clip_factor: factor of the norm to which a task clips the mean gradient.
        clips_before: whether each rank clips its own gradient before compression, as in Deep
            Gradient Compression (Lin et al. 2018, section 3.2), instead of the mean after it. The
            norm is then larger by the square root of the number of ranks.
        finds_tables: whether embedding tables get the codec "rows" after the first step.
    """

    codec: dr.Codec | Callable[..., dict] | None = None
    memory: dr.Memory | Callable[..., dict] | None = None
    communicator: dr.Communicator | None = None
    prepared: bool = True
    estimates: float | None = None
    clip_factor: float = 1.0
    clips_before: bool = False
    dense_below: int = 1024
    finds_tables: bool = False


def _codec(ratio=0.01, value=None, warmup_steps=50, sparsifier=None, index=None):
    """Return the default codec, with parts of it replaced."""
    return dr.Codec(
        dr.TopK(ratio, warmup_steps=warmup_steps) if sparsifier is None else sparsifier,
        index=dr.Rice() if index is None else index,
        value=dr.LloydMax(bits=1) if value is None else value,
    )


def _embeddings(codec, memory=None):
    """Return the default with another codec, and perhaps another memory, for embedding tables."""

    def codecs(task):
        return recommended_codecs(task) | dict.fromkeys(tables(task), codec)

    def memories(task):
        return dict.fromkeys(tables(task), memory)

    return Candidate(codecs, None if memory is None else memories, dense_below=32)


def _rows(value):
    """Return the default, but with all non-zero elements of the gradients of embedding tables."""
    return _embeddings(dr.Codec(dr.Threshold(0), index=dr.RLE(), value=value), dr.NoMemory())


def _only(names, others=False):
    """Return a function of the task: the default's codecs of some tensors, or of all others."""

    def codecs(task):
        chosen = names(task)
        return {
            name: codec
            for name, codec in recommended_codecs(task).items()
            if (name in chosen) != others
        }

    return codecs


def _large_tensors(codec):
    """Return the default with another codec for large tensors."""

    def codecs(task):
        return {
            name: codec if elements >= 1024 else dr.recommended_codec((elements,))
            for name, elements in sizes(task).items()
        }

    return Candidate(codecs, dense_below=32)


_LARGE = dr.recommended_codec()
_GTOPK, _CLTK = dr.GTopK(), dr.CLTK()
_CHUNKS = dr.ChunkTopK(0.01)

CANDIDATES = {
    "none": Candidate(prepared=False),
    "none, prepared": Candidate(),
    "default": Candidate(recommended_codecs, dense_below=32, finds_tables=True),
    "default, LloydMax 2": _large_tensors(_codec(value=dr.LloydMax(2))),
    # what each part of the default does, with small tensors uncompressed
    "large tensors": Candidate(_LARGE),
    "not prepared": Candidate(_LARGE, prepared=False),
    "no warm-up": Candidate(_codec(warmup_steps=0)),
    "warm-up of 375 steps": Candidate(_codec(warmup_steps=375)),
    "neither": Candidate(_codec(warmup_steps=0), prepared=False),
    # bits per value and density
    "raw values": Candidate(_codec(value=dr.RawValue())),
    "QSGD 4": Candidate(_codec(value=dr.QSGD(4))),
    "QSGD 4, no warm-up": Candidate(_codec(value=dr.QSGD(4), warmup_steps=0)),
    "LloydMax 2": Candidate(_codec(value=dr.LloydMax(2))),
    "LloydMax 3": Candidate(_codec(value=dr.LloydMax(3))),
    "0.1 %": Candidate(_codec(0.001)),
    "2 %": Candidate(_codec(0.02)),
    "5 %": Candidate(_codec(0.05)),
    "25 %": Candidate(_codec(0.25)),
    # tensors of fewer than 1024 elements too, in other ways than the default
    "dense below 128": Candidate(_LARGE, dense_below=128),
    # index and value codecs of DeepReduce
    "Top-r pairs": Candidate(dr.Codec(dr.TopK(0.01))),
    "FitPoly": Candidate(_codec(value=dr.FitPoly())),
    "FitDExp": Candidate(_codec(value=dr.FitDExp())),
    **{
        f"Bloom {policy.upper()}, {name}": Candidate(
            _codec(value=dr.RawValue(), index=dr.Bloom(fpr=rate, policy=policy))
        )
        for policy in ("p0", "p1", "p2")
        for rate, name in ((1e-1, "10 %"), (1e-2, "1 %"), (1e-3, "0.1 %"))
    },
    # where elements are chosen: of each tensor, of each chunk, or layers of different density
    "raw values, no warm-up": Candidate(_codec(value=dr.RawValue(), warmup_steps=0)),
    "chunks": Candidate(_codec(value=dr.RawValue(), sparsifier=_CHUNKS)),
    "buckets": Candidate(_codec(value=dr.RawValue(), sparsifier=BucketTopK(0.01, warmup_steps=50))),
    "buckets, no warm-up": Candidate(_codec(value=dr.RawValue(), sparsifier=BucketTopK(0.01))),
    "LAGS": Candidate(lambda task: layerwise_codecs(task, _codec, 0.01)),
    # embedding tables, whose gradients are zero in the rows that a batch does not use
    "only tables": Candidate(_only(tables)),
    "all but tables": Candidate(_only(tables, others=True), dense_below=32),
    "tables: 1 %, LloydMax 1": _embeddings(_LARGE),
    "tables: 5 %, LloydMax 2": _embeddings(_codec(0.05, value=dr.LloydMax(2))),
    "tables: 10 %, LloydMax 2": _embeddings(_codec(0.1, value=dr.LloydMax(2))),
    "tables: rows, QSGD 4": _rows(dr.QSGD(4)),
    "tables: rows, QSGD 7": _rows(dr.QSGD(7)),
    "tables: rows, LloydMax 1": _rows(dr.LloydMax(1)),
    "tables: rows, LloydMax 2": _rows(dr.LloydMax(2)),
    "tables: rows, LloydMax 3": _rows(dr.LloydMax(3)),
    "tables: rows, LloydMax 4": _rows(dr.LloydMax(4)),
    "tables: rows, raw values": _rows(dr.RawValue()),
    # clipping of gradients that arrive in spikes
    "clip at 4 times the norm": Candidate(_LARGE, clip_factor=4.0),
    "clip before compression": Candidate(_LARGE, clips_before=True),
    # other memories
    "momentum correction": Candidate(_codec(), dr.MomentumCorrection(0.9)),
    "momentum correction 0.5": Candidate(_codec(), dr.MomentumCorrection(0.5)),
    "momentum correction, clip before": Candidate(
        _codec(), dr.MomentumCorrection(0.9), clips_before=True
    ),
    "EF21-SGDM": Candidate(_codec(), estimates=0.1),
    # other communicators; ChunkTopK has no warm-up
    "GTopK": Candidate(_codec(), communicator=_GTOPK),
    "GTopK, LloydMax 2": Candidate(_codec(value=dr.LloydMax(2)), communicator=_GTOPK),
    "GTopK, raw values": Candidate(_codec(value=dr.RawValue()), communicator=_GTOPK),
    "GTopK, raw values, not prepared": Candidate(
        _codec(value=dr.RawValue()), communicator=_GTOPK, prepared=False
    ),
    "GTopK, raw values, no warm-up": Candidate(
        _codec(value=dr.RawValue(), warmup_steps=0), communicator=_GTOPK
    ),
    "GTopK, 16 %": Candidate(_codec(0.16), communicator=_GTOPK),
    "SplitAllgather": Candidate(_codec(), communicator=dr.SplitAllgather()),
    "SplitAllgather, raw values": Candidate(
        _codec(value=dr.RawValue()), communicator=dr.SplitAllgather()
    ),
    "CLTK": Candidate(_codec(value=dr.RawValue(), sparsifier=_CHUNKS), communicator=_CLTK),
    "CLTK, TopK": Candidate(_codec(value=dr.RawValue()), communicator=_CLTK),
    "CLTK, LowPass": Candidate(
        _codec(value=dr.RawValue(), sparsifier=_CHUNKS), dr.LowPass(0.1), _CLTK
    ),
    "CLTK, LowPass 0.3": Candidate(
        _codec(value=dr.RawValue(), sparsifier=_CHUNKS), dr.LowPass(0.3), _CLTK
    ),
    "CLTK, TopK, LowPass": Candidate(_codec(value=dr.RawValue()), dr.LowPass(0.1), _CLTK),
    "CLTK, TopK, LowPass 0.3": Candidate(_codec(value=dr.RawValue()), dr.LowPass(0.3), _CLTK),
    # k elements in total, as with GTopK and CLTK, but a better choice of them
    "1 % in total, of the sum": Candidate(_codec(value=dr.RawValue()), communicator=LargestOfSum()),
    "1 % in total, of all selections": Candidate(
        _codec(value=dr.RawValue()), communicator=LargestOfSelections()
    ),
}
