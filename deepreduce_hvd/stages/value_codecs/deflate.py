"""Deflate: the bytes of float32 values, compressed with zlib."""

import zlib

import numpy as np

from deepreduce_hvd.argument_checks import expect_integer
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register

BLOCK = 65536
_STRATEGIES = {"rle": zlib.Z_RLE, "default": zlib.Z_DEFAULT_STRATEGY}


@register
class Deflate(ValueCodec):
    """Lossless value codec that compresses the bytes of values with zlib (Deflate in DeepReduce).

    Each zlib stream contains 65536 values.

    Args:
        level: the zlib compression level, from 1 (fast) to 9. The strategy "rle" ignores it.
        shuffle: store the first bytes of all values, then all second bytes, and so on. Sign and
            exponent bytes are similar to each other, and similar bytes next to each other compress
            well. Without the shuffle, mantissa bytes separate them.
        strategy: the zlib strategy, "rle" or "default". None means "rle" with the shuffle and
            "default" without it. With "rle", zlib uses only runs and frequencies of bytes. With the
            shuffle, each of the four byte planes has its own frequencies. Mantissas contain no
            other repetition, so searching for it costs time and bytes. On the largest 1 % of
            normal, Laplace and Student samples, "rle" takes half the time of level 1 and fewer
            bytes than level 9. For 368 values it saves 2 bits per value.

    Raises:
        InvalidArgumentError: an argument is not one of the values above.

    >>> Deflate().encode(np.ones(1000, dtype=np.float32), key=0)[0].__len__() < 50
    True
    """

    stage_id = 4

    def __init__(self, level: int = 1, shuffle: bool = True, strategy: str | None = None) -> None:
        self.level = expect_integer(
            "Deflate level", level, "an integer of 1 to 9", range(1, 10).__contains__
        )
        if shuffle not in (False, True):
            raise InvalidArgumentError(f"Deflate shuffle: expected True or False, got {shuffle!r}")
        if strategy not in (None, *_STRATEGIES):
            raise InvalidArgumentError(
                f"Deflate strategy: expected one of {', '.join(_STRATEGIES)} or None, got "
                f"{strategy!r}"
            )
        self.shuffle = bool(shuffle)
        self.strategy = strategy or ("rle" if shuffle else "default")

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.level, float(self.shuffle), float(self.strategy == "rle"))

    def bits_per_value(self) -> float:
        return 26.0 if self.shuffle else 28.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        streams = []
        for at in range(0, values.size, BLOCK):
            raw = values[at : at + BLOCK].astype("<f4").view(np.uint8)
            planes = raw.reshape(-1, 4).T if self.shuffle else [raw]
            if self.strategy == "default":
                planes = [np.concatenate(planes)]
            stream = zlib.compressobj(self.level, strategy=_STRATEGIES[self.strategy])
            pieces = [stream.compress(planes[0].tobytes())]
            for plane in planes[1:]:
                # Z_BLOCK ends a zlib block, so the next plane gets its own code
                pieces += [stream.flush(zlib.Z_BLOCK), stream.compress(plane.tobytes())]
            streams.append(b"".join([*pieces, stream.flush()]))
        lengths = np.array([len(stream) for stream in streams[:-1]], dtype="<u4")
        return bytes([self.shuffle]) + lengths.tobytes() + b"".join(streams), values, None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        blocks = -(-count // BLOCK)
        head = 1 + 4 * max(blocks - 1, 0)
        if len(section) < head or section[0] > 1 or (count == 0 and len(section) != 1):
            raise CorruptPayloadError(
                f"value section: expected a shuffle byte of 0 or 1 and {blocks} zlib "
                f"streams, got {section[:1].hex()}"
            )
        shuffle = section[0]
        lengths = np.frombuffer(section[1:head], dtype="<u4").tolist()
        pieces = [np.zeros(0, dtype=np.float32)]
        at = head
        for block in range(blocks):
            n = min(BLOCK, count - block * BLOCK)
            end = at + lengths[block] if block < blocks - 1 else len(section)
            if end > len(section):
                raise CorruptPayloadError(
                    f"value section: expected stream {block} within {len(section)} bytes, "
                    f"got its end at {end}"
                )
            inflate = zlib.decompressobj()
            try:
                data = inflate.decompress(section[at:end], 4 * n + 1)
            except zlib.error as error:
                raise CorruptPayloadError(
                    f"value section: expected a zlib stream, got {error}"
                ) from None
            if len(data) != 4 * n or not inflate.eof or inflate.unused_data:
                raise CorruptPayloadError(
                    f"value section: expected a zlib stream of {4 * n} bytes, got {len(data)}, "
                    f"{'its end' if inflate.eof else 'not its end'}, and "
                    f"{len(inflate.unused_data)} bytes after them"
                )
            raw = np.frombuffer(data, dtype=np.uint8)
            if shuffle:
                raw = np.ascontiguousarray(raw.reshape(4, n).T).ravel()
            pieces.append(raw.view("<f4").astype(np.float32))
            at = end
        return np.concatenate(pieces)
