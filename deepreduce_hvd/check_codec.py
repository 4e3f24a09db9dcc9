"""check_codec: test whether a custom codec keeps the contract of its base class."""

import numpy as np

from deepreduce_hvd.codec import Codec, decode
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError, UnknownCodecError
from deepreduce_hvd.stages.base import IndexCodec, ValueCodec
from deepreduce_hvd.stages.index_codecs import RawIndex
from deepreduce_hvd.stages.registry import find
from deepreduce_hvd.stages.sections import expect_encoded
from deepreduce_hvd.stages.sparsifiers import TopK
from deepreduce_hvd.stages.suggestions import makes, written
from deepreduce_hvd.stages.usable import expect_usable
from deepreduce_hvd.stages.value_codecs import RawValue

_COUNTS = (0, 1, 2, 7, 64, 1000)
_KEY = 12345


def check_codec(codec: IndexCodec | ValueCodec) -> None:
    """Test whether a custom index or value codec keeps the contract of its base class.

    The codec encodes and decodes arrays of several lengths and distributions. Each result is
    compared with what ``encode`` returned. Each section is also decoded with its last byte removed
    and with one byte added.

    Args:
        codec: an instance of a registered subclass of :class:`IndexCodec` or :class:`ValueCodec`.

    Raises:
        InvalidArgumentError: the codec breaks the contract. The message names the method, the
            input, the expected result and the actual result.

    >>> import deepreduce_hvd as dr
    >>> dr.check_codec(dr.Rice())
    >>> dr.check_codec(dr.QSGD(bits=4))
    """
    for kind, check in ((IndexCodec, _check_index), (ValueCodec, _check_value)):
        if isinstance(codec, kind):
            _check_registration(codec, kind)
            expect_usable(codec)
            before = dict(vars(type(codec)))
            check(codec)
            _check_in_a_payload(codec, kind)
            _check_class(codec, before)
            return
    hint = f"; write dr.{written(codec)}" if makes(codec, (IndexCodec, ValueCodec)) else ""
    raise InvalidArgumentError(
        f"check_codec: expected an IndexCodec or a ValueCodec, got {codec!r}{hint}"
    )


def _check_class(codec, before):
    """Check that the codec keeps nothing in its class, which other ranks do not have."""
    after = vars(type(codec))
    changed = sorted(name for name in after if after[name] is not before.get(name))
    if changed:
        raise InvalidArgumentError(
            f"{type(codec).__name__}: expected decode to use only its arguments, and the class to"
            f" stay as it is, got a change of {', '.join(changed)}; write what decode needs into"
            " the section"
        )


def _expect(good, codec, method, case, expected, got):
    if not good:
        raise InvalidArgumentError(
            f"{type(codec).__name__}.{method} of {case}: expected {expected}, got {got}"
        )


def _check_registration(codec, kind):
    try:
        registered = find(kind, codec.stage_id)
    except UnknownCodecError:
        registered = None
    if registered is not type(codec):
        raise InvalidArgumentError(
            f"{type(codec).__name__}: expected a class registered with dr.register under its "
            f"stage_id, got stage_id = {codec.stage_id!r}"
        )


def _inputs(count):
    """Return the inputs to try, as {description: (count,) float32 values}."""
    normal = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    return {
        f"{count} normal values": normal,
        f"{count} positive values": np.abs(normal),
        f"{count} equal values": np.full(count, 0.25, dtype=np.float32),
        f"{count} zeros": np.zeros(count, dtype=np.float32),
        f"{count} values of 1e38": np.where(normal < 0, np.float32(-1e38), np.float32(1e38)),
    }


def _call(codec, method, case, function, *arguments):
    """Return the result of ``function``, which calls a method of the codec."""
    try:
        return function(*arguments)
    except Exception as error:  # any error is a failure of the codec
        got = f"{type(error).__name__}: {error}"
        raise InvalidArgumentError(
            f"{type(codec).__name__}.{method} of {case}: expected no error, got {got}"
        ) from error


def _encode(codec, case, *arguments):
    """Return (section, ...) as ``encode`` of the codec returns it."""
    result = _call(codec, "encode", case, codec.encode, *arguments)
    return expect_encoded(f"{type(codec).__name__}.encode of {case}", result)


def _array(codec, method, case, array, dtype, count):
    good = isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == (count,)
    got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
    _expect(good, codec, method, case, f"a {np.dtype(dtype).name} array ({count},)", got)
    return array


def _check_value(codec):
    for count in _COUNTS:
        for case, values in _inputs(count).items():
            before = values.copy()
            section, decoded, order = _encode(codec, case, values, _KEY)
            unchanged = np.array_equal(values, before)
            _expect(unchanged, codec, "encode", case, "an unchanged input", "a changed one")
            _array(codec, "encode", case, decoded, np.float32, count)
            finite = bool(np.isfinite(decoded).all())
            _expect(finite, codec, "encode", case, "finite decoded values", "NaN or Inf")
            _expect((order is not None) == bool(codec.sorts), codec, "encode", case,
                    f"{'an array' if codec.sorts else 'None'} as the order, because sorts ="
                    f" {codec.sorts}",
                    type(order).__name__)  # fmt: skip
            sent = decoded
            if order is not None:
                _array(codec, "encode", case, order, np.uint32, count)
                permutation = np.array_equal(np.sort(order), np.arange(count))
                _expect(
                    permutation,
                    codec,
                    "encode",
                    case,
                    "an order that is a permutation of the positions",
                    order,
                )
                sent = decoded[order]
            _check_decoder(codec, case, section, (count,), sent, np.float32)
            again = _encode(codec, case, values, _KEY)[0]
            _expect(
                again == section,
                codec,
                "encode",
                case,
                "the same bytes in a second call",
                "other bytes",
            )


def _check_index(codec):
    for count in _COUNTS:
        for d in {max(count, 1), 3 * count + 1, 100_000}:
            case = f"{count} of {d} indices"
            random = np.random.default_rng(count + d)
            indices = np.sort(random.permutation(d)[:count]).astype(np.uint32)
            before = indices.copy()
            section, decoded, stay = _encode(codec, case, indices, d, _KEY)
            unchanged = np.array_equal(indices, before)
            _expect(unchanged, codec, "encode", case, "unchanged indices", "changed ones")
            size = decoded.size if isinstance(decoded, np.ndarray) else count
            _array(codec, "encode", case, decoded, np.uint32, size)
            good = size == 0 or (bool((decoded[1:] > decoded[:-1]).all()) and int(decoded[-1]) < d)
            _expect(good, codec, "encode", case, f"ascending indices below {d}", decoded)
            good = isinstance(stay, (bool, np.bool_))
            _expect(good, codec, "encode", case, "True or False as values_stay", repr(stay))
            _check_decoder(codec, case, section, (d, size), decoded, np.uint32)
            again = _encode(codec, case, indices, d, _KEY)[0] == section
            _expect(again, codec, "encode", case, "the same bytes in a second call", "other bytes")
    if codec.any_order:
        _check_any_order(codec)


def _check_any_order(codec):
    """Check an index codec with ``any_order``: it keeps the order in which indices come."""
    for count in _COUNTS:
        case = f"{count} indices in another order"
        random = np.random.default_rng(count)
        indices = random.permutation(3 * count + 1)[:count].astype(np.uint32)
        section, decoded, _ = _encode(codec, case, indices, 3 * count + 1, _KEY)
        _array(codec, "encode", case, decoded, np.uint32, count)
        same = np.array_equal(decoded, indices)
        _expect(same, codec, "encode", case, "these indices, because any_order = True", "others")
        _check_decoder(codec, case, section, (3 * count + 1, count), indices, np.uint32)


def _check_decoder(codec, case, section, arguments, expected, dtype):
    """Check that ``decode`` returns what ``encode`` promised, and refuses damaged sections."""
    read = _call(codec, "decode", case, type(codec).decode, section, *arguments)
    _array(codec, "decode", case, read, dtype, expected.size)
    same = np.array_equal(read, expected)
    _expect(same, codec, "decode", case, "the decoded array that encode returned", "other numbers")
    for damaged, what in ((section[:-1], "cut short"), (section + b"\0", "with one byte too many")):
        if damaged == section:
            continue
        try:
            type(codec).decode(damaged, *arguments)
            got = "no error"
        except CorruptPayloadError:
            continue
        except Exception as error:  # any other error is a failure of the codec
            got = f"{type(error).__name__}: {error}"
        _expect(False, codec, "decode", f"{case}, {what}", "CorruptPayloadError", got)


def _check_in_a_payload(codec, kind):
    """Check that in a whole payload, decoded values and residual add up to the gradient."""
    index, value = (codec, RawValue()) if kind is IndexCodec else (RawIndex(), codec)
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    residual = np.zeros_like(gradient)
    whole, case = Codec(TopK(0.05), index=index, value=value), "a gradient"
    payload = _call(codec, "encode", case, whole.encode, gradient, residual)
    decoded = _call(codec, "decode", case, decode, payload)
    error = float(np.abs(decoded + residual - gradient).max())
    _expect(
        error < 1e-5,
        codec,
        "encode",
        case,
        "decoded values and residual that add up to the gradient",
        f"a difference of {error:g}",
    )
