"""Compare the operators on a GPU with the native core on the host, byte by byte.

    export PYTHONPATH=.:tests/support
    python scripts/gpu_equality.py [--small] [--seed N] [--device cuda:0]

The inputs are new in each run. The comparison covers every index codec × value codec, sparsifier ×
memory and dtype that the device supports; sizes around every block and word size; misaligned
addresses; memory that is poisoned before it is written; zeros, ties and NaN. ``--device cpu``
tries the comparison on a machine without a GPU.
"""

import argparse
import contextlib
import json
import pathlib
import secrets
import sys
import time

import numpy as np
import torch
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE
from gpu_differences import Differences, heavy_tailed, inputs

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy, residual_and_velocity
from deepreduce_hvd.torch import ops as operators

SIZES = (1, 2, 3, 7, 8, 9, 31, 33, 63, 64, 65, 255, 257, 1000, 4095, 4097, 20011)
LARGE_SIZES = (100_003, 1_000_003)
#: codecs of buckets
TOGETHER = (
    dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1)),
    dr.Codec(dr.Threshold(0), index=dr.Rice(), value=dr.LloydMax(bits=4)),
    dr.Codec(dr.TopK(0.1), index=dr.EliasFano(), value=dr.Float16()),
    dr.Codec(dr.Threshold(1.0), index=dr.Bitmap(), value=dr.QSGD(bits=4)),
    dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.02), value=dr.FitPoly()),
    dr.Codec(dr.ChunkTopK(0.15)),
)
STEPS_TOGETHER = 4  # from the third one on, a bucket is a CUDA graph
RANKS = 2  # whose payloads are summed


def more_inputs(random, sizes):
    """Return {name: (d,) float32}."""
    cases = inputs(random, sizes)
    cases["all_equal"] = np.full(int(random.integers(1, 3000)), 0.25, dtype=np.float32)
    cases["all_positive"] = np.abs(heavy_tailed(random, 500))
    cases["all_negative"] = -np.abs(heavy_tailed(random, 500))
    cases["denormal"] = heavy_tailed(random, 256) * np.float32(1e-41)
    cases["sparse"] = np.where(
        random.random(3000) < 0.03, heavy_tailed(random, 3000), np.float32(0)
    ).astype(np.float32)
    return cases


def placed(array, device, offset):
    """Return the numbers on the device, ``offset`` elements into an allocation."""
    room = torch.empty(array.numel() + offset + 3, dtype=array.dtype, device=device)
    return room[offset : offset + array.numel()].copy_(array)


class Comparison(Differences):
    """Compare PyTorch's operators on the device with the native core on the host."""

    def __init__(self, device, random):
        super().__init__(device, random)
        self.step = 0

    def codec(self, codec, memory, values, dtype, what):
        """Encode on both sides, decode, and decode invalid bytes.

        Encoding runs twice, the second time with the memory of the first.
        """
        self.step += 1
        with self.caught(what):
            gradient = torch.from_numpy(values).to(dtype)
            state = [
                torch.from_numpy(heavy_tailed(self.random, values.size) * np.float32(0.1))
                for _ in memory.state
            ]
            offset = self.step % 4
            mine = tuple(placed(part, self.device, offset) for part in state)
            theirs = tuple(part.numpy().copy() for part in state)
            payloads = []
            for step in (self.step, self.step + 1):
                keys = (7, step, 3, 5)
                made = operators.encode_flat(
                    codec,
                    memory,
                    placed(gradient, self.device, (offset + 1) % 4),
                    mine,
                    None,
                    *keys,
                )
                host = gradient.float().numpy() if dtype == torch.bfloat16 else gradient.numpy()
                expected, _ = encode_numpy(
                    codec, memory, host, theirs, 0.0, *keys, dtype=operators.DTYPES[dtype]
                )
                self.same(made.cpu().numpy(), expected, f"{what}: payload of step {step}")
                for name, one, other in zip(memory.state, mine, theirs):
                    self.same(one.cpu().numpy(), other, f"{what}: {name} after step {step}")
                payloads.append(expected)
            self.decoded(payloads, values.size, what)
            if values.size < 5000:
                self.refused(payloads[0], values.size, what)

    @contextlib.contextmanager
    def caught(self, what):
        """Store an error of a comparison as a failure."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            self.expect_usable()

    def expect_usable(self):
        """End the comparison after a fault of the device, which every later call would report."""
        if torch.device(self.device).type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                self.show()
                raise SystemExit(f"the GPU cannot be used after this: {error}") from None

    def same(self, mine, expected, what):
        self.made += 1
        if mine.shape != expected.shape:
            self.failures.append(f"{what}: expected shape {expected.shape}, got {mine.shape}")
        elif mine.tobytes() != expected.tobytes():
            at = int(np.flatnonzero(mine.view(np.uint8) != expected.view(np.uint8))[0])
            self.failures.append(
                f"{what}: expected {expected.view(np.uint8)[at]:#04x} at byte {at}, got "
                f"{mine.view(np.uint8)[at]:#04x}"
            )

    def decoded(self, payloads, d, what):
        start = heavy_tailed(self.random, d)
        expected = decode_sum_numpy(payloads, start.copy(), 0.5)
        out = placed(torch.from_numpy(start), self.device, self.step % 3)
        there = [
            placed(torch.from_numpy(payload), self.device, (self.step + number) % 8)
            for number, payload in enumerate(payloads)
        ]
        operators.checked(torch.ops.deepreduce.decode_sum_, out, there, 0.5)
        mine = out.cpu().numpy()
        # the bits of a NaN sum depend on the processor
        self.same(
            np.where(np.isnan(mine), np.float32(np.nan), mine),
            np.where(np.isnan(expected), np.float32(np.nan), expected),
            f"{what}: sum",
        )

    def together(self, codec, memory, sizes, what):
        """Encode and sum the gradients of a bucket, in several steps.

        Tensors of similar size share launches, and later steps are CUDA graphs.
        """
        random, count = self.random, len(sizes)
        encodings = torch.classes.deepreduce.BucketEncodings([str(one) for one in range(count)])
        sums = torch.classes.deepreduce.BucketSums()
        theirs = [tuple(np.zeros(d, np.float32) for _ in memory.state) for d in sizes]
        mine = [
            tuple(placed(torch.from_numpy(part), self.device, 1) for part in one) for one in theirs
        ]
        residuals, velocities = zip(*map(residual_and_velocity, mine))
        outs = [torch.empty(d, device=self.device) for d in sizes]
        for step in range(STEPS_TOGETHER):
            where = f"{what}, step {step}"
            gradients = [heavy_tailed(random, d) for d in sizes]
            if random.random() < 0.3:
                gradients[random.integers(count)][0] = np.nan
            rooms, reports = operators.checked(
                encodings.start,
                [placed(torch.from_numpy(one), self.device, step) for one in gradients],
                list(residuals), list(velocities), count * codec.fields(memory, step),
                7, count * [step], list(range(count)), 5,
            )  # fmt: skip
            reports = reports.cpu()
            operators.raise_failures(
                reports[:, : -container.HEADER.size], list(map(str, range(count)))
            )
            headers = reports[:, -container.HEADER.size :].numpy()
            payloads = []
            for number, size in enumerate(container.read_headers(headers)[0].tolist()):
                expected, _ = encode_numpy(
                    codec, memory, gradients[number], theirs[number], 0.0, 7, step, number, 5
                )
                self.same(
                    rooms[number][:size].cpu().numpy(), expected, f"{where}: payload {number}"
                )
                for one, other in zip(mine[number], theirs[number]):
                    self.same(one.cpu().numpy(), other, f"{where}: memory {number}")
                payloads.append(expected)
            lengths = np.repeat([payload.size for payload in payloads], RANKS)
            results = operators.checked(
                sums.start,
                [out.zero_() for out in outs],
                torch.from_numpy(np.concatenate([one for one in payloads for _ in range(RANKS)])).to(self.device),
                (np.cumsum(lengths) - lengths).tolist(), lengths.tolist(), 0.5,
                codec.fields(memory),
            )  # fmt: skip
            operators.raise_failures(results.cpu(), list(map(str, range(count))))
            for number, payload in enumerate(payloads):
                summed = decode_sum_numpy(
                    RANKS * [payload], np.zeros(sizes[number], np.float32), 0.5
                )
                # the bits of a NaN sum depend on the processor
                one, other = (
                    np.where(np.isnan(out), np.float32(np.nan), out)
                    for out in (outs[number].cpu().numpy(), summed)
                )
                self.same(one, other, f"{where}: sum {number}")

    def refused(self, payload, d, what):
        """Check that both sides treat payloads with flipped bits alike.

        The checksums are corrected, so that decoding goes on. Both sides must accept or refuse the
        same payloads, and give equal results for those accepted.
        """
        for _ in range(3):
            flipped = payload.copy()
            bit = int(self.random.integers(8 * payload.size))
            flipped[bit // 8] ^= 1 << bit % 8
            self.agree(flipped, d, f"{what}: bit {bit} flipped")
            flipped[32:40] = np.frombuffer(
                container.checksum(flipped).to_bytes(8, "little"), dtype=np.uint8
            )
            self.agree(flipped, d, f"{what}: bit {bit} flipped, resealed")
        self.agree(payload[: int(self.random.integers(payload.size))], d, f"{what}: cut short")

    def agree(self, payload, d, what):
        def outcome(work):
            try:
                return work()
            except dr.DeepReduceError as error:
                return type(error)

        def on_device():
            out = torch.zeros(d, device=self.device)
            operators.checked(
                torch.ops.deepreduce.decode_sum_,
                out,
                [torch.from_numpy(payload).to(self.device)],
                1.0,
            )
            return out.cpu().numpy()

        mine, expected = (
            outcome(on_device),
            outcome(lambda: decode_sum_numpy([payload], np.zeros(d, dtype=np.float32), 1.0)),
        )
        self.made += 1
        if isinstance(mine, type) or isinstance(expected, type):
            if mine is not expected:
                words = [
                    one.__name__ if isinstance(one, type) else "a result"
                    for one in (expected, mine)
                ]
                self.failures.append(f"{what}: expected {words[0]}, got {words[1]}")
        elif not np.array_equal(mine, expected, equal_nan=True):
            self.failures.append(f"{what}: expected the same sum, got another")


def supported(codec, device):
    return torch.device(device).type == "cpu" or torch.ops.deepreduce.cuda_supports(
        codec.fields(dr.NoMemory())
    )


def compare(device, seed, small):
    random = np.random.default_rng(seed)
    comparison = Comparison(device, random)
    sizes = (1, 9, 300) if small else (*SIZES, *random.integers(1, 50_000, 4).tolist())
    cases, on_host = more_inputs(random, sizes), set()
    few = (
        [f"d{sizes[-1]}", "ties", "nan"]
        if small
        else [f"d{d}" for d in sizes[-6:]]
        + ["empty", "zeros", "all_equal", "ties", "huge", "nan", "inf"]
    )
    if small:
        cases = {name: cases[name] for name in (*few, "d1", "d9", "empty", "zeros")}
    for index in INDEX:
        for value in VALUE:
            codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
            if not supported(codec, device):
                on_host |= {
                    name
                    for name, stage in (
                        (index, dr.Codec(dr.TopK(0.05), index=INDEX[index])),
                        (value, dr.Codec(dr.TopK(0.05), value=VALUE[value])),
                    )
                    if not supported(stage, device)
                }
                continue
            plain = index == "raw_index" or value == "raw_value"
            if small and not plain:
                continue
            for case in cases if plain or small else few:
                comparison.codec(
                    codec, dr.Residual(), cases[case], torch.float32, f"{index} {value} {case}"
                )
            for dtype in operators.DTYPES if plain and not small else ():
                for case in few:
                    comparison.codec(
                        codec, dr.Residual(), cases[case], dtype, f"{index} {value} {case} {dtype}"
                    )
    for sparsifier in SPARSIFIERS:
        for memory in ("residual", "momentum_correction") if small else MEMORIES:
            for dtype in operators.DTYPES if not small else (torch.float32,):
                for case in few[:1] if small else cases if dtype == torch.float32 else few:
                    codec = dr.Codec(SPARSIFIERS[sparsifier])
                    comparison.codec(
                        codec,
                        MEMORIES[memory],
                        cases[case],
                        dtype,
                        f"{sparsifier} {memory} {case} {dtype}",
                    )
    for d in () if small else LARGE_SIZES:
        values = heavy_tailed(random, d)
        for index, value in (
            ("rice", "qsgd_4"),
            ("elias_fano", "float16"),
            ("bloom_p2", "fit_poly"),
            ("bitmap", "raw_value"),
            ("bloom_p0", "fit_dexp"),
        ):
            codec = dr.Codec(dr.TopK(0.01), index=INDEX[index], value=VALUE[value])
            if supported(codec, device):
                comparison.codec(
                    codec, dr.Residual(), values, torch.float32, f"{index} {value} d{d}"
                )
    # the operators of buckets exist only for CUDA
    for number in range(0 if torch.device(device).type == "cpu" else 2 if small else 40):
        around = random.choice([5, 700] if small else [1, 5, 64, 700, 3001, 40_000], 12)
        bucket = [int(random.integers(d, d + d // 2 + 1)) for d in around]
        codec, memory = TOGETHER[number % len(TOGETHER)], MEMORIES[random.choice(list(MEMORIES))]
        what = f"bucket {number} of {bucket}, {codec}, {memory}"
        with comparison.caught(what):
            comparison.together(codec, memory, bucket, what)
    return comparison, on_host


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="few and small inputs, for a sanitizer"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="repeats a run")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file of what was compared")
    arguments = parser.parse_args()
    # makes torch.empty fill its result with NaN or the maximum, so that elements a kernel does not
    # write show
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    started = time.perf_counter()
    comparison, on_host = compare(arguments.device, arguments.seed, arguments.small)
    comparison.show()
    print(
        f"{comparison.made} comparisons on {arguments.device}, {len(comparison.failures)} "
        f"differ; seed {arguments.seed}; "
        f"codecs that stay on the host: {', '.join(sorted(on_host)) or 'none'}; "
        f"{time.perf_counter() - started:.0f} s"
    )
    if arguments.output is not None:
        report = {
            "comparisons": comparison.made,
            "failures": comparison.failures,
            "seed": arguments.seed,
            "on_host": sorted(on_host),
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
