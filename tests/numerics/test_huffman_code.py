"""Test that the lengths of Huffman codes are optimal, and limited."""

import heapq

import numpy as np
from hypothesis import assume, given, settings, strategies

from deepreduce_hvd.numerics import huffman_code


def heap_cost(frequencies):
    """Return (bits, longest code) of an unlimited Huffman code, by the textbook algorithm."""
    heap = [(int(weight), 0) for weight in frequencies if weight]
    if len(heap) == 1:
        return heap[0][0], 1
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        (first, first_depth), (second, second_depth) = heapq.heappop(heap), heapq.heappop(heap)
        cost += first + second
        heapq.heappush(heap, (first + second, max(first_depth, second_depth) + 1))
    return cost, heap[0][1] if heap else 0


@settings(max_examples=100, deadline=None)
@given(
    strategies.dictionaries(
        strategies.integers(0, 255),
        strategies.integers(1, 10**6) | strategies.integers(1, 3),
        min_size=1,
    )
)
def test_huffman_lengths_are_optimal(weights):
    frequencies = np.zeros(256, dtype=np.int64)
    frequencies[list(weights)] = list(weights.values())
    lengths = huffman_code.code_lengths(frequencies).astype(np.int64)
    assert ((lengths > 0) == (frequencies > 0)).all()
    if len(weights) > 1:
        assert sum(2.0**-length for length in lengths if length) == 1
    cost, longest = heap_cost(frequencies)
    assume(longest <= huffman_code.LONGEST)
    assert int((lengths * frequencies).sum()) == cost


def test_huffman_lengths_are_limited():
    """With Fibonacci weights the unlimited code has the maximum length."""
    frequencies = np.zeros(256, dtype=np.int64)
    frequencies[:2] = 1
    for symbol in range(2, 30):
        frequencies[symbol] = frequencies[symbol - 1] + frequencies[symbol - 2]
    lengths = huffman_code.code_lengths(frequencies).astype(np.int64)
    cost, longest = heap_cost(frequencies)
    assert longest == 29 and lengths.max() == huffman_code.LONGEST
    assert sum(2.0**-length for length in lengths if length) == 1
    assert cost < (lengths * frequencies).sum() < 1.01 * cost
