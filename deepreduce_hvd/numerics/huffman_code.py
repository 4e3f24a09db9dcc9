"""Canonical Huffman codes of bytes, length-limited: the oracle of csrc/huffman_code.cc, equal to it
bit for bit.
"""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics.bits import pack_fields, unpack_fields

SYMBOLS = 256
LONGEST = 15


def code_lengths(frequencies):
    """The lengths of an optimal code of at most LONGEST bits (package-merge, Larmore and Hirschberg
    1990).

    ``frequencies`` (256,) integers; symbols of frequency 0 get length 0, a lone symbol gets length
    1. Ties: the symbol with the smaller number counts as rarer, a symbol goes before a package of
    equal weight.
    """
    lengths = np.zeros(SYMBOLS, dtype=np.uint8)
    symbols = sorted((int(weight), symbol) for symbol, weight in enumerate(frequencies) if weight)
    if len(symbols) < 2:
        for _, symbol in symbols:
            lengths[symbol] = 1
        return lengths
    weights = [weight for weight, _ in symbols]
    packages, is_symbol = [], []
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
    """(256,) lengths -> (256,) uint32 canonical codes, their first bit in the least significant
    place.

    Codes of a length count up in the order of symbols, shorter ones first. Raises
    CorruptPayloadError unless the code is complete (every bit string decodes), or has one symbol of
    length 1.
    """
    used = int((lengths > 0).sum())
    kraft = sum(1 << (LONGEST - int(length)) for length in lengths if 0 < length <= LONGEST)
    if int(lengths.max(initial=0)) > LONGEST or not (
        kraft == 1 << LONGEST or (used == 1 and int(lengths.max()) == 1)
    ):
        raise CorruptPayloadError(
            f"Huffman code: expected lengths of a complete code of at most {LONGEST} bits"
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
    """uint8 symbols (n,) -> their code as bytes, zero-padded; every symbol must have a code."""
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
    """bytes -> uint8 symbols, which must end in the last byte before zero padding.

    There are ``count`` symbols; or, with ``last_of_number`` (256,) bool, as many as it takes for
    ``count`` of those it marks.
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
            f"{section}: expected {count} Huffman coded numbers that end in the last byte, got {count - missing}"
        )
    return np.array(symbols, dtype=np.uint8)


def pack_lengths(lengths):
    """(256,) code lengths as 128 bytes, 4 bits each."""
    return pack_fields(lengths, 4)


def unpack_lengths(data):
    """128 bytes -> (256,) uint8 code lengths."""
    return unpack_fields(data, SYMBOLS, 4).astype(np.uint8)
