"""Checks of the lengths of index and value sections that several codecs share."""

from deepreduce_hvd.errors import CorruptPayloadError


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
