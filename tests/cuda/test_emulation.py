"""Test the emulator: barriers and warp operations wait, and invalid kernels are reported.

Sums within blocks are correct in every schedule.
"""

import ctypes
import os
import subprocess
import sys

import emulation
import numpy as np
import pytest


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_block_sums(threads, schedule):
    blocks = 3
    values = np.random.default_rng(threads).integers(0, 1000, (blocks, threads)).astype(np.uint32)
    before, totals = np.zeros_like(values), np.zeros(blocks, dtype=np.uint32)
    emulation.library().dr_test_block_sums(
        pointer(values), blocks, threads, pointer(before), pointer(totals)
    )
    np.testing.assert_array_equal(before, np.cumsum(values, axis=1) - values)
    np.testing.assert_array_equal(totals, values.sum(axis=1))


@pytest.mark.parametrize("threads", [32, 96])
def test_exchange(threads, schedule):
    blocks = 2
    results = [np.zeros((blocks, threads), dtype=np.uint32) for _ in range(5)]
    emulation.library().dr_test_exchange(blocks, threads, *map(pointer, results))
    by_memory, by_xor, by_up, votes, odd_lanes = results
    index = np.arange(blocks * threads, dtype=np.uint32).reshape(blocks, threads)
    np.testing.assert_array_equal(by_memory, index[:, ::-1])
    np.testing.assert_array_equal(by_xor, index ^ 5)
    lane = np.arange(threads) % 32
    np.testing.assert_array_equal(by_up, np.where(lane >= 3, index - 3, index))
    warps = (np.arange(threads) % 3 == 0).reshape(-1, 32)
    expected = (warps << np.arange(32, dtype=np.uint64)).sum(axis=1).repeat(32)
    np.testing.assert_array_equal(votes, np.broadcast_to(expected, votes.shape))
    np.testing.assert_array_equal(odd_lanes[:, 1::2], (index // 32 * 32 + 7)[:, 1::2])


@pytest.mark.parametrize(
    "which, told",
    [
        (0, "3 is not at the barrier"),
        (1, "waits for lane 3"),
        (2, "waits in a kernel launched as one"),
    ],
)
def test_broken_kernels_are_told(which, told):
    message = ctypes.create_string_buffer(512)
    assert emulation.library().dr_test_broken_kernel(which, message) == 1
    assert told in message.value.decode()
    test_block_sums(256, None)  # and the next kernel runs normally


@pytest.mark.skipif(
    os.environ.get("DEEPREDUCE_CUDA_SANITIZE") != "thread", reason="only ThreadSanitizer sees races"
)
@pytest.mark.parametrize("which, told", [(0, False), (1, True), (2, True)])
def test_races_are_told(which, told):
    program = f"import emulation; emulation.library().dr_test_race({which})"
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "exitcode=66",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, "data race" in done.stderr) == ((66, True) if told else (0, False))
