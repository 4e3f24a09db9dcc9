"""Names of collectives: unique in a process and its process set, and equal on all ranks."""

import re

#: ranks of a process set -> number of the next compressor on it. Counted for each process set,
#: because a rank outside of a set may have no compressor for it.
_next_numbers: dict[tuple[int, ...], int] = {}


def take_number(ranks, at_least=0):
    """Return a number that no other compressor of this process set has in this process.

    Args:
        ranks: a key of :func:`process_set_key`.
        at_least: smallest number to return. Ranks that pass the largest :func:`next_number` of all
            ranks get the same number.
    """
    number = max(next_number(ranks), at_least)
    _next_numbers[ranks] = number + 1
    return number


def next_number(ranks):
    """Return the number that :func:`take_number` returns next."""
    return _next_numbers.get(ranks, 0)


def process_set_key(process_set):
    """Return the tuple of the ranks in a process set; empty for all ranks.

    Horovod keeps the collective names of different process sets apart.
    """
    return (
        () if process_set is None or process_set.process_set_id == 0 else tuple(process_set.ranks)
    )


def collective_name(number, label):
    """Return the name of a collective of one compressor, the same in every framework.

    Args:
        number: number of the compressor; must be equal on all ranks.
        label: name of a parameter, or any other text.

    Returns:
        ``deepreduce.NUMBER.LABEL``. ASCII letters and digits of the label stay, ``_`` is doubled,
        and every other character becomes ``_x`` and two hexadecimal digits per UTF-8 byte.
        Different labels stay different where Horovod replaces ``.`` by ``_``, as on TensorFlow.
    """
    escaped = re.sub(
        "[^a-zA-Z0-9]",
        lambda found: (
            "__" if found[0] == "_" else "".join(f"_x{byte:02x}" for byte in found[0].encode())
        ),
        label,
    )
    return f"deepreduce.{number}.{escaped}"
