"""Measure speed on a GPU, relative to the copy bandwidth or PyTorch's operators of the same run.

    python benchmarks/gpu.py [--device cuda:0] [--output results/gpu.json]

Run it with PYTHONPATH=. in a Python without the package. Writes results/gpu.json and gpu.png. Times
are medians between CUDA events around whole operator calls, including their work on the host.
``--device cpu --elements 100000`` rehearses the script.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time

import resnet50
import torch
from measure import RESNET50, row, write

import deepreduce_hvd as dr
from deepreduce_hvd.torch import ops as operators

ROOT = pathlib.Path(__file__).resolve().parent.parent
LARGE = 350_000_000
VALUES = 3_500_000
SECTOR = 32  # minimum number of bytes of a GPU memory access
SUMMED = 8
WARMED_UP = 1000  # a step in which the density of the default has fallen
COMPRESS = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.RawValue())


class Bench:
    """The device, the clock and the rows that measurements share."""

    def __init__(self, device, repeats):
        self.device = torch.device(device)
        self.repeats = repeats
        self.cuda = self.device.type == "cuda"
        self.rows = []
        self.bandwidths = {}
        self.name = torch.cuda.get_device_name(self.device) if self.cuda else "host"

    def seconds(self, work):
        """Return the median time of ``work()`` in seconds, after two calls that do not count."""
        for _ in range(2):
            work()
        taken = []
        for _ in range(self.repeats):
            if self.cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize(self.device)
                start.record()
                work()
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) / 1e3)
            else:
                started = time.perf_counter()
                work()
                taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def report(self, what, value, target=None, unit="ratio", at_most=True, **details):
        self.rows.append(row(what, value, target, unit, at_most, device=self.name, **details))
        last = self.rows[-1]
        verdict = (
            "rehearsed"
            if not self.cuda
            else ""
            if last["met"] is None
            else "met"
            if last["met"]
            else "MISSED"
        )
        bound = "" if target is None else f"{'≤' if at_most else '≥'} {target:g}"
        print(f"{what:<76}{value:>12.4f}  {bound:<8}{unit:<20}{verdict}", flush=True)

    def gradient(self, d, seed):
        """Return (d,) float32 like a network's gradient: normal times log-normal."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(d, generator=generator, device=self.device)
        return values.mul_(torch.randn(d, generator=generator, device=self.device).exp_()).mul_(
            1e-3
        )

    def copy_bandwidth(self, d):
        """Return the bytes per second of a copy of d float32 elements, reads and writes counted."""
        if d not in self.bandwidths:
            source, target = self.gradient(d, 0), torch.empty(d, device=self.device)
            self.bandwidths[d] = 8 * d / self.seconds(lambda: target.copy_(source))
            self.report(f"copy bandwidth, d = {d / 1e6:g} M", self.bandwidths[d] / 1e9, unit="GB/s")
        return self.bandwidths[d]


def encode(codec, memory, gradient, state, step=0):
    return operators.encode_flat(codec, memory, gradient, state, None, 0, step, 0, 0)


def compress(bench, d, small):
    """Measure residual += gradient, exact top-k 1 %, Rice and raw values; and torch.topk.

    Steps alternate between two gradients. torch.topk runs on the same GPU.
    """
    bandwidth = bench.copy_bandwidth(d)
    gradients, residual, step = (
        [bench.gradient(d, seed) for seed in (1, 2)],
        torch.zeros(d, device=bench.device),
        0,
    )

    def one_step():
        nonlocal step
        step += 1
        encode(COMPRESS, dr.Residual(), gradients[step % 2], (residual,), step)

    for _ in range(5):
        one_step()
    spent = bench.seconds(one_step)
    share = 12 * d / spent / bandwidth
    name = f"residual += g, top-k 1 %, Rice, raw, d = {d / 1e6:g} M"
    if small:
        bench.report(f"{name}: time", 1e3 * spent, 0.4, "ms", bandwidth_share=share)
    else:
        bench.report(
            f"{name}: bytes that must move / time / copy bandwidth",
            share,
            0.5,
            at_most=False,
            milliseconds=1e3 * spent,
        )
    total = torch.empty_like(residual)

    def topk():
        torch.add(residual, gradients[0], out=total)
        _, indices = torch.topk(total.abs(), d // 100)
        return indices.int(), total[indices]

    plain = bench.seconds(topk)
    bench.report(
        f"torch.topk + index/value cast / that, d = {d / 1e6:g} M",
        plain / spent,
        10,
        at_most=False,
        topk_milliseconds=1e3 * plain,
    )


def bloom(bench, d):
    """Measure the insertion of 1 % and policy P0's scan of all indices.

    This is the time of a Bloom payload minus that of one with raw indices.
    """
    gradient = bench.gradient(d, 3)
    times = []
    for index in (dr.Bloom(fpr=1e-3, policy="p0"), dr.RawIndex()):
        codec = dr.Codec(dr.TopK(0.01), index=index)
        times.append(bench.seconds(lambda: encode(codec, dr.NoMemory(), gradient, ())))
    scan = times[0] - times[1]
    details = {"bloom_milliseconds": 1e3 * times[0], "raw_index_milliseconds": 1e3 * times[1]}
    bench.report(
        f"Bloom insertion + scan, epsilon 1e-3, 1 %, d = {d / 1e6:g} M",
        d / max(scan, 1e-9) / 1e9,
        50,
        "G elements/s",
        at_most=False,
        **details,
    )


def fit_poly(bench, count):
    """Measure FitPoly on values that are all sent, minus the same with raw values.

    Sorting and the order section are included.
    """
    values = bench.gradient(count, 4)
    times = []
    for value in (dr.FitPoly(), dr.RawValue()):
        codec = dr.Codec(dr.NoneSparsifier(), value=value)
        times.append(bench.seconds(lambda: encode(codec, dr.NoMemory(), values, ())))
    details = {"whole_milliseconds": 1e3 * times[0], "raw_value_milliseconds": 1e3 * times[1]}
    bench.report(
        f"FitPoly of {count / 1e6:g} M values", 1e3 * (times[0] - times[1]), 3, "ms", **details
    )


def decode_sum(bench, d):
    """Measure adding eight ranks' payloads to one tensor.

    Bytes touched: the payloads, and every 32-byte sector of the sum that a payload touches, read
    and written.
    """
    bandwidth = bench.copy_bandwidth(d)
    payloads, sectors, useful = [], 0, 0
    for rank in range(SUMMED):
        gradient = bench.gradient(d, 10 + rank)
        payloads.append(encode(COMPRESS, dr.NoMemory(), gradient, ()))
        sent = torch.zeros(d, device=bench.device)
        operators.checked(torch.ops.deepreduce.decode_sum_, sent, [payloads[-1]], 1.0)
        places = sent.nonzero().flatten()
        useful += 8 * places.numel()
        sectors += 2 * SECTOR * torch.unique_consecutive(places // (SECTOR // 4)).numel()
        del gradient, sent, places
    payload_bytes = sum(payload.numel() for payload in payloads)
    out, fields = torch.zeros(d, device=bench.device), COMPRESS.fields(dr.NoMemory())
    spent = bench.seconds(
        lambda: operators.checked(torch.ops.deepreduce.decode_sum_, out, payloads, 0.125, fields)
    )
    share = (payload_bytes + sectors) / spent / bandwidth
    details = {
        "milliseconds": 1e3 * spent,
        "payload_bytes": payload_bytes,
        "share_of_useful_bytes": (payload_bytes + useful) / spent / bandwidth,
    }
    bench.report(
        (
            f"decode-and-sum of {SUMMED} payloads, d = {d / 1e6:g} M: bytes touched / time / "
            "copy bandwidth"
        ),
        share,
        0.3,
        at_most=False,
        **details,
    )


def bucket(bench):
    """Measure all gradients of ResNet-50 with the default codecs, and the sums of eight ranks.

    After two calls that do not count, both are CUDA graphs. They are compared with calls of the
    operators for single gradients, which launch each kernel and wait for each payload.
    """
    gradients = [bench.gradient(math.prod(shape), 30) for _, shape in resnet50.shapes()]
    codecs = [dr.recommended_codec(tuple(gradient.shape)) for gradient in gradients]
    memory = dr.Residual()
    residuals = [torch.zeros_like(gradient) for gradient in gradients]
    fields = [codec.fields(memory, WARMED_UP) for codec in codecs]
    count = len(gradients)
    calls = torch.classes.deepreduce.BucketEncodings([str(number) for number in range(count)])

    def together():
        return calls.start(
            gradients, residuals, [None] * count, [one for row in fields for one in row],
            0, [WARMED_UP] * count, list(range(count)), 0,
        )  # fmt: skip

    def each():
        return [
            encode(codec, memory, gradient, (residual,), WARMED_UP)
            for codec, gradient, residual in zip(codecs, gradients, residuals)
        ]

    spent, alone = bench.seconds(together), bench.seconds(each)
    what = f"ResNet-50's {count} gradients, default"
    bench.report(f"{what}: encoding", 1e3 * spent, unit="ms", one_by_one=1e3 * alone)
    bench.report(f"{what}: encoding one by one / together", alone / spent)
    payloads = each()
    outs = [torch.zeros_like(gradient) for gradient in gradients]
    # payloads of one codec are summed together, as in a bucket
    spent = alone = 0.0
    for codec in dict.fromkeys(codecs):
        mine = [number for number in range(count) if codecs[number] == codec]
        sizes = [payloads[number].numel() for number in mine for _ in range(SUMMED)]
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        joined = torch.cat([payloads[number] for number in mine for _ in range(SUMMED)])
        sums, row = torch.classes.deepreduce.BucketSums(), codec.fields(memory, WARMED_UP)
        some = [outs[number] for number in mine]
        spent += bench.seconds(lambda: sums.start(some, joined, starts, sizes, 1 / SUMMED, row))

        def one_by_one():
            for number in mine:
                operators.checked(
                    torch.ops.deepreduce.decode_sum_, outs[number], [payloads[number]] * SUMMED,
                    1 / SUMMED, row,
                )  # fmt: skip

        alone += bench.seconds(one_by_one)
    bench.report(f"{what}: sums of {SUMMED} ranks", 1e3 * spent, unit="ms", one_by_one=1e3 * alone)
    bench.report(f"{what}: sums one by one / together", alone / spent)


def draw(rows, path):
    """Plot value / target of every row that has a target; better is to the right.

    Returns:
        Why there is no plot, or None.
    """
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    rows = [one for one in rows if one["target"] is not None]
    ratios = [
        one["target"] / one["value"] if one["at_most"] else one["value"] / one["target"]
        for one in rows
    ]
    figure, axes = plot.subplots(figsize=(10, 0.6 * len(rows) + 1.5))
    axes.barh(
        [one["what"] for one in rows],
        ratios,
        color=["tab:green" if one["met"] else "tab:red" for one in rows],
    )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    axes.set_xlabel(f"times better than the target, {rows[0]['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return None


def measure(bench, elements, large, values):
    parts = [
        ("compress", lambda: compress(bench, elements, True)),
        ("compress", lambda: compress(bench, large, False)), ("Bloom", lambda: bloom(bench, large)),
        ("FitPoly", lambda: fit_poly(bench, values)),
        ("decode-and-sum", lambda: decode_sum(bench, large)),
    ]  # fmt: skip
    if bench.cuda:
        parts.append(("bucket", lambda: bucket(bench)))
    missing = []
    for name, part in parts:
        try:
            part()
        except torch.cuda.OutOfMemoryError as error:
            missing.append(f"{name}: {str(error).splitlines()[0]}")
        if bench.cuda:
            torch.cuda.empty_cache()
    return missing


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--elements", type=int, help="use this size for all measurements, for a trial run"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results" / "gpu.json")
    arguments = parser.parse_args()
    sizes = (RESNET50, LARGE, VALUES) if arguments.elements is None else (arguments.elements,) * 3
    bench = Bench(arguments.device, arguments.repeats)
    missing = measure(bench, *sizes)
    arguments.output.parent.mkdir(exist_ok=True)
    write(arguments.output, bench.rows)
    reason = draw(bench.rows, arguments.output.with_suffix(".png"))
    if reason is not None:
        print(f"no plot: {reason}")
    if bench.cuda:
        missed = sum(one["met"] is False for one in bench.rows)
        print(
            f"{missed} of {sum(one['met'] is not None for one in bench.rows)} targets "
            f"missed; {arguments.output}"
        )
    for one in missing:
        print(f"NOT MEASURED  {one}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
