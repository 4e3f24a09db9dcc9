"""What the accuracy laboratory compares: codecs, memories, communicators and preparations."""

import dataclasses

import deepreduce_hvd as dr


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train; ``prepared`` says whether deepreduce_hvd.prepare is applied."""

    codec: dr.Codec | None = None
    memory: object = None
    communicator: object = None
    prepared: bool = False


def _codec(density=0.01, value=None):
    return dr.Codec(dr.TopK(density), index=dr.Rice(), value=dr.QSGD(4) if value is None else value)


CANDIDATES = {
    "none": Candidate(),
    "default": Candidate(_codec()),
    "default, prepared": Candidate(_codec(), prepared=True),
    "raw values": Candidate(_codec(value=dr.RawValue())),
    "raw values, prepared": Candidate(_codec(value=dr.RawValue()), prepared=True),
    "float16, prepared": Candidate(_codec(value=dr.Float16()), prepared=True),
    "qsgd 8, prepared": Candidate(_codec(value=dr.QSGD(8)), prepared=True),
    "qsgd 6, prepared": Candidate(_codec(value=dr.QSGD(6)), prepared=True),
    "qsgd 4 of 64, prepared": Candidate(_codec(value=dr.QSGD(4, bucket=64)), prepared=True),
    "2 %, prepared": Candidate(_codec(0.02), prepared=True),
    "momentum correction": Candidate(_codec(), dr.MomentumCorrection(0.9), prepared=True),
}
