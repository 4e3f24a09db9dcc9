"""Checks of index and value sections: their lengths, and what a custom codec returns."""

from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError


def expect_encoded(what, result):
    """Return what ``encode`` of a custom codec returned, with the section as bytes.

    Args:
        what: the method, and for which input.
        result: what it returned.

    Raises:
        InvalidArgumentError: not a tuple of three items, or the first one is not bytes.
    """
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} items" if isinstance(result, tuple) else type(result).__name__
        raise InvalidArgumentError(f"{what}: expected a tuple of three items, got {got}")
    section, *others = result
    if not isinstance(section, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(
            f"{what}: expected bytes as the first item, got {type(section).__name__}"
        )
    return bytes(section), *others


def expect_empty(section, kind):
    """Raise CorruptPayloadError if a section for no indices or values has bytes.

    Args:
        section: the bytes.
        kind: "index" or "value".
    """
    if section:
        plural = {"index": "indices", "value": "values"}[kind]
        raise CorruptPayloadError(
            f"{kind} section: expected 0 bytes for no {plural}, got {len(section)}"
        )


def unpack_header(header, section, kind):
    """Return the fields of the header that a section begins with.

    Args:
        header: the header's ``struct.Struct``.
        section: the bytes.
        kind: "index" or "value".

    Raises:
        CorruptPayloadError: the section is shorter than its header.
    """
    if len(section) < header.size:
        raise CorruptPayloadError(
            f"{kind} section: expected at least {header.size} bytes, got {len(section)}"
        )
    return header.unpack_from(section)
