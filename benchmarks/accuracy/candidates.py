"""What the accuracy laboratory compares: codecs, memories, communicators and preparations."""

import dataclasses

import deepreduce_hvd as dr


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        codec: codec of the compressed tensors; None averages gradients uncompressed.
        memory, communicator: as of :class:`~deepreduce_hvd.Compressor`.
        prepared: whether :func:`~deepreduce_hvd.prepare` is applied to the optimizer; without a
            codec, as for the default codec.
        estimates: None, or the momentum of EF21-SGDM in place of a memory; 1 is EF21.
        clip_factor: factor of the norm to which a task clips the mean gradient.
    """

    codec: dr.Codec | None = None
    memory: dr.Memory | None = None
    communicator: dr.Communicator | None = None
    prepared: bool = True
    estimates: float | None = None
    clip_factor: float = 1.0


def _codec(ratio=0.01, value=None, warmup_steps=50, sparsifier=None, index=None):
    """Return the default codec, with parts of it replaced."""
    return dr.Codec(
        dr.TopK(ratio, warmup_steps=warmup_steps) if sparsifier is None else sparsifier,
        index=dr.Rice() if index is None else index,
        value=dr.LloydMax(bits=1) if value is None else value,
    )


_GTOPK, _CLTK = dr.GTopK(), dr.CLTK()
_CHUNKS = dr.ChunkTopK(0.01)

CANDIDATES = {
    "none": Candidate(prepared=False),
    "none, prepared": Candidate(),
    "default": Candidate(dr.recommended_codec()),
    # what each part of the default does
    "not prepared": Candidate(dr.recommended_codec(), prepared=False),
    "no warm-up": Candidate(_codec(warmup_steps=0)),
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
    # index and value codecs of DeepReduce
    "Top-r pairs": Candidate(dr.Codec(dr.TopK(0.01))),
    "Bloom P0": Candidate(_codec(value=dr.RawValue(), index=dr.Bloom(fpr=1e-3, policy="p0"))),
    "Bloom P2": Candidate(_codec(value=dr.RawValue(), index=dr.Bloom(fpr=1e-3, policy="p2"))),
    "FitPoly": Candidate(_codec(value=dr.FitPoly())),
    # clipping of gradients that arrive in spikes
    "clip at 4 times the norm": Candidate(dr.recommended_codec(), clip_factor=4.0),
    # other memories
    "momentum correction": Candidate(_codec(), dr.MomentumCorrection(0.9)),
    "EF21-SGDM": Candidate(_codec(), estimates=0.1),
    # other communicators; those of a chosen index set have no warm-up
    "GTopK": Candidate(_codec(), communicator=_GTOPK),
    "GTopK, LloydMax 2": Candidate(_codec(value=dr.LloydMax(2)), communicator=_GTOPK),
    "GTopK, raw values": Candidate(_codec(value=dr.RawValue()), communicator=_GTOPK),
    "SplitAllgather": Candidate(_codec(), communicator=dr.SplitAllgather()),
    "CLTK": Candidate(_codec(value=dr.RawValue(), sparsifier=_CHUNKS), communicator=_CLTK),
    "CLTK, LowPass": Candidate(
        _codec(value=dr.RawValue(), sparsifier=_CHUNKS), dr.LowPass(0.1), _CLTK
    ),
}
