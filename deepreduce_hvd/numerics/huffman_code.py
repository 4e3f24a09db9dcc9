"""Canonical, length-limited Huffman codes of bytes.

The tests compare csrc/support/huffman_code.cc with this file, bit for bit.
"""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics.bits import pack_fields, unpack_fields

SYMBOLS = 256
LONGEST = 15


def code_lengths(frequencies):
    """Return the code lengths of an optimal code of at most LONGEST bits.

    The algorithm is package-merge (Larmore and Hirschberg 1990). Of two symbols with equal
    frequency, the one with the smaller number counts as rarer. A symbol precedes a package of equal
    weight.

    Args:
        frequencies: (256,) integers. Symbols of frequency 0 get length 0. If there is only one
            symbol, it gets length 1.

    Returns:
        (256,) uint8.
    """
    lengths = np.zeros(SYMBOLS, dtype=np.uint8)
    symbols = sorted((int(weight), symbol) for symbol, weight in enumerate(frequencies) if weight)
    if len(symbols) < 2:
        for _, symbol in symbols:
            lengths[symbol] = 1
        return lengths
    weights = [weight for weight, _ in symbols]
    packages: list[int] = []
    is_symbol = []
    for _ in range(LONGEST):
        merged, flags = [], []
        at_symbol = at_package = 0
        while at_symbol < len(weights) or at_package < len(packages):
            take = at_package == len(packages) or (
                at_symbol < len(weights) and weights[at_symbol] <= packages[at_package]
            )
            merged.append(weights[at_symbol] if take else packages[at_package])
            flags.append(take)
            at_symbol += take
            at_package += not take
        is_symbol.append(flags)
        packages = [merged[i] + merged[i + 1] for i in range(0, len(merged) - 1, 2)]
    taken = 2 * len(symbols) - 2
    for flags in reversed(is_symbol):
        in_level = sum(flags[:taken])
        for _, symbol in symbols[:in_level]:
            lengths[symbol] += 1
        taken = 2 * (taken - in_level)
    return lengths


def codes(lengths):
    """Return the canonical codes for (256,) code lengths.

    Codes of the same length count up in the order of their symbols. Shorter codes come first.

    Returns:
        (256,) uint32. The first bit of a code is its least significant bit.

    Raises:
        CorruptPayloadError: the code is not complete, so some bit strings cannot be decoded. A code
            with one symbol of length 1 is accepted.
    """
    used = int((lengths > 0).sum())
    kraft = sum(1 << (LONGEST - int(length)) for length in lengths if 0 < length <= LONGEST)
    if int(lengths.max(initial=0)) > LONGEST or not (
        kraft == 1 << LONGEST or (used == 1 and int(lengths.max()) == 1)
    ):
        raise CorruptPayloadError(
            f"Huffman code: expected lengths of a complete code of at most {LONGEST} bits, got"
            f" {used} codes of up to {int(lengths.max(initial=0))} bits with Kraft sum"
            f" {kraft / (1 << LONGEST):g}"
        )
    table = np.zeros(SYMBOLS, dtype=np.uint32)
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol in np.flatnonzero(lengths == length):
            table[symbol] = int(f"{code:0{length}b}"[::-1], 2)
            code += 1
        code <<= 1
    return table


def encode(symbols, lengths):
    """Encode uint8 symbols (n,) as bytes, zero-padded. Every symbol must have a code."""
    table = codes(lengths)
    widths = lengths[symbols].astype(np.int64)
    total = int(widths.sum())
    starts = np.cumsum(widths) - widths
    out = np.zeros(total, dtype=np.uint8)
    for bit in range(LONGEST):
        longer = widths > bit
        out[starts[longer] + bit] = (table[symbols[longer]] >> np.uint32(bit)) & np.uint32(1)
    return np.packbits(out, bitorder="little").tobytes()


def decode(data, lengths, count, section="section", last_of_number=None):
    """Decode bytes to uint8 symbols.

    The last symbol must end in the last byte, followed only by zero padding.

    Args:
        data: the encoded bytes.
        lengths: (256,) code lengths.
        count: the number of symbols, or of numbers if ``last_of_number`` is given.
        section: the name of the data, for error messages.
        last_of_number: None, or (256,) bool that marks the symbols that end a number. Symbols are
            then decoded until ``count`` marked ones were found.

    Raises:
        CorruptPayloadError: the data does not have this form.
    """
    by_code = {
        (int(lengths[symbol]), int(code)): symbol
        for symbol, code in enumerate(codes(lengths))
        if lengths[symbol]
    }
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    symbols = []
    missing = count
    value = width = used = 0
    for at, bit in enumerate(bits.tolist()):
        if missing == 0:
            break
        value |= bit << width
        width += 1
        symbol = by_code.get((width, value))
        if symbol is not None:
            symbols.append(symbol)
            missing -= last_of_number is None or bool(last_of_number[symbol])
            value = width = 0
            used = at + 1
    if missing or (used + 7) // 8 != len(data) or bits[used:].any():
        raise CorruptPayloadError(
            f"{section}: expected {count} Huffman coded numbers that end in the last "
            f"byte, got {count - missing}"
        )
    return np.array(symbols, dtype=np.uint8)


def pack_lengths(lengths):
    """Pack (256,) code lengths into 128 bytes, 4 bits each."""
    return pack_fields(lengths, 4)


def unpack_lengths(data):
    """Unpack 128 bytes to (256,) code lengths."""
    return unpack_fields(data, SYMBOLS, 4).astype(np.uint8)
