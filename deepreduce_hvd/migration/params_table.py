"""The settings of GRACE and DeepReduce: their names, equivalents and defaults.

The names and defaults are those of the helpers and scripts of github.com/sands-lab/grace,
github.com/sands-lab/grace-benchmarks and github.com/hangxu0304/DeepReduce. docs/migration.md shows
this table.
"""

from collections.abc import Callable
from typing import NamedTuple

from deepreduce_hvd import communicators
from deepreduce_hvd.argument_checks import is_integer, is_number
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages import (
    index_codecs as index,
    memories as memory,
    sparsifiers,
    value_codecs as value,
)

#: {setting: value if the dictionary does not contain it}
DEFAULTS = {
    # as in the code of GRACE and DeepReduce
    "compressor": "none", "memory": "none", "communicator": "allreduce",
    "deepreduce": None, "index": "bloom", "value": "polyfit",
    "compress_ratio": 0.3, "threshold": 0.01, "quantum_num": 127, "quantiles": 64,
    "momentum": 0.9, "gradient_clipping": False,
    "fpr": None, "policy": "leftmost", "poly_degree": 5, "sort": False, "bucket_size": 512,
    # settings that only this package has
    "beta": 0.1, "dense": "auto", "form": "butterfly", "buckets": 256, "bits": 2, "warmup_steps": 0,
}  # fmt: skip

#: settings without a default
WITHOUT_DEFAULT = ("quantum_bits", "sparsifier", "num_quantiles", "layers")

#: Bucket size of the compressor "qsgd", as in grace_dl.dist. This is the only one of GRACE's three
#: packages that has buckets.
COMPRESSOR_BUCKET_SIZE = 128

POLICIES = {
    "naive": "naive", "p0": "p0", "p1": "p1", "random": "p1", "leftmost": "leftmost", "p2": "p2",
    "policy_zero": "p0", "randomK": "p1", "leftmostK": "leftmost", "conflict_sets": "p2",
}  # fmt: skip

#: {setting that changes no result here: text of a warning, or ""}
WITHOUT_EFFECT = {
    "world_size": "",
    "kernel": "",
    "hash_table": "",
    "micro-benchmark": "nothing is printed; Compressor.stats() has bytes and seconds",
    "buckets_num": (
        "neither project reads it; bucket_size is the number of values that share a norm"
    ),
}

#: {a setting that is unknown here: what to write instead}. These settings are in DeepReduce's
#: TensorFlow code, but in no published script.
OTHER_NAMES = {
    "bloom_fpr": "'fpr'",
    "bloom_on": "'compressor'",
    "bloom_policy": "'policy'",
    "polynomial_degree": (
        "'poly_degree' with a value one lower, because polynomial_degree is the number of"
        " coefficients"
    ),
    "threshold_val": "'threshold'",
    "use_memory": "'memory': 'residual' or 'none'",
}


class Choice(NamedTuple):
    """The equivalent of one value of a setting in this package."""

    #: A function that makes it from the settings; None if there is no equivalent.
    make: Callable | None
    #: How it differs from GRACE and DeepReduce, for a warning.
    differs: str = ""
    #: If there is no equivalent: the reason, and what to write instead.
    instead: str = ""
    #: The stages of the codec that this communicator does not use.
    unused_stages: tuple = ()


def refused(instead):
    """Return a :class:`Choice` for a value that has no equivalent here."""
    return Choice(None, instead=instead)


def _ratio(settings):
    ratio = settings("compress_ratio")
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise InvalidArgumentError(f"compress_ratio: expected a number in (0, 1], got {ratio!r}")
    return float(ratio)


def _policy(settings):
    name = settings("policy")
    if not isinstance(name, str) or name not in POLICIES:
        raise InvalidArgumentError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]


def _polynomials(settings):
    if settings("sort"):
        raise InvalidArgumentError(
            "sort: expected False, got True; FitPoly always sorts the values, remove the setting"
        )
    return value.FitPoly(degree=settings("poly_degree"))


def _qsgd(settings, bucket_size):
    bucket = settings("bucket_size", bucket_size)
    if settings.has("quantum_bits"):
        return value.QSGD(bits=settings("quantum_bits"), bucket=bucket)
    levels = settings("quantum_num")
    if not is_integer(levels) or not 1 <= levels <= 127:
        raise InvalidArgumentError(
            "quantum_num: expected an integer of 1 to 127, the range of 8 bits per value, got"
            f" {levels!r}; write 127, or 'value': 'none' for exact values"
        )
    bits = int(levels).bit_length() + 1
    if levels != 2 ** (bits - 1) - 1:
        settings.differ(
            f"quantum_num: {levels} levels become {2 ** (bits - 1) - 1}, the number that {bits}"
            " bits per value can hold"
        )
    return value.QSGD(bits=bits, bucket=bucket, norm="l2")


def _momentum(settings):
    if settings("gradient_clipping"):
        raise InvalidArgumentError(
            "gradient_clipping: expected False, got True; clip gradients in the training loop,"
            " before the optimizer's step"
        )
    return memory.MomentumCorrection(settings("momentum"))


def _sketch(settings):
    """Return the stages of SKCompress.

    There are no published defaults for its sparsifier and number of quantiles.
    """
    for name, example in (("sparsifier", "'threshold'"), ("num_quantiles", "128")):
        if not settings.has(name):
            raise InvalidArgumentError(
                f"{name}: expected a value for this compressor, got none; write '{name}': {example}"
            )
    name = settings("sparsifier")
    if not isinstance(name, str) or name not in SPARSIFIERS:
        raise InvalidArgumentError(
            f"sparsifier: expected one of {', '.join(SPARSIFIERS)}, got {name!r}"
        )
    return {
        "sparsifier": SPARSIFIERS[name](settings),
        "index": index.Huffman(delta=True),
        "value": value.Quantile(buckets=settings("num_quantiles")),
    }


SPARSIFIERS = {
    "topk": lambda settings: sparsifiers.TopK(
        _ratio(settings), warmup_steps=settings("warmup_steps")
    ),
    "randomk": lambda settings: sparsifiers.RandomK(_ratio(settings)),
    "chunktopk": lambda settings: sparsifiers.ChunkTopK(_ratio(settings)),
    "threshold": lambda settings: sparsifiers.Threshold(settings("threshold")),
    "none": lambda settings: sparsifiers.NoneSparsifier(),
}

_TOPK = (
    "write 'compressor': 'topk', 'compress_ratio': 0.01, 'memory': 'residual', 'communicator':"
    " 'allgather'"
)
_ONE_BIT = (
    "it sends one bit per element, and no codec here does this without a larger error; for fewer"
    f" bytes {_TOPK}"
)
_POWERS = (
    "there is no codec that rounds to powers of two; write 'compressor': 'qsgd' for 8 bits per"
    " element, or 'fp16'"
)
_MANY_LEVELS = (
    "there is no such 8-bit codec; write 'compressor': 'qsgd', which also has 8 bits per element"
)
_QSGD_DIFFERS = (
    "one L2 norm for each bucket_size values, as in grace_dl.dist; GRACE's packages for Horovod use"
    " one norm for the whole tensor, which is coarser"
)
_POLYNOMIALS_DIFFER = (
    "the values determine where segments begin, as in the paper; DeepReduce's code uses segments"
    " with fixed shares of the values"
)
_SKETCH_DIFFERS = (
    "has the quantile buckets, delta keys and Huffman codes of SKCompress, but not its MinMaxSketch"
)

#: {setting: {value: Choice}}; a compressor becomes the keyword arguments of a Codec.
CHOICES = {
    "compressor": {
        **{
            name: Choice(lambda settings, make=make: {"sparsifier": make(settings)})
            for name, make in SPARSIFIERS.items()
        },
        "dgc": Choice(
            lambda settings: {"sparsifier": sparsifiers.TopK(_ratio(settings))},
            differs=(
                "sends exactly the largest compress_ratio of the elements; GRACE estimates a"
                " threshold from a random sample and sends 0.7 to 1.3 times as many"
            ),
        ),
        "fp16": Choice(
            lambda settings: {"sparsifier": sparsifiers.NoneSparsifier(), "value": value.Float16()}
        ),
        **dict.fromkeys(
            ("qsgd", "qsgd_cuda"),
            Choice(
                lambda settings: {
                    "sparsifier": sparsifiers.NoneSparsifier(),
                    "value": _qsgd(settings, COMPRESSOR_BUCKET_SIZE),
                },
                differs=_QSGD_DIFFERS,
            ),
        ),
        "sketch": Choice(
            lambda settings: {
                "sparsifier": sparsifiers.NoneSparsifier(),
                "value": value.Quantile(buckets=settings("quantiles")),
            },
            differs="negative values and other values have separate quantiles, so no sign changes",
        ),
        **dict.fromkeys(
            ("SKCompressCPU", "SKCompressGPU"), Choice(_sketch, differs=_SKETCH_DIFFERS)
        ),
        "adaq": refused(
            "it sends the mean of the largest elements of each sign; the nearest setting is"
            " 'compressor': 'topk' with 'deepreduce': 'value', 'value': 'quantile', 'buckets': 2,"
            " 'communicator': 'allgather'"
        ),
        "efsignsgd": refused(_ONE_BIT),
        "inceptionn": refused(_MANY_LEVELS),
        "natural": refused(_POWERS),
        "natural_cuda": refused(_POWERS),
        "onebit": refused(_ONE_BIT),
        "powersgd": refused(f"there is no low-rank codec here; for similarly few bytes {_TOPK}"),
        "signsgd": refused(_ONE_BIT),
        "signum": refused(_ONE_BIT),
        "terngrad": refused(
            "it has three levels, one maximum per tensor, and clipping; the nearest setting is"
            " 'compressor': 'none' with 'deepreduce': 'value', 'value': 'qsgd', 'quantum_bits': 2,"
            " 'memory': 'none', 'communicator': 'allgather'"
        ),
        "u8bit": refused(_MANY_LEVELS),
    },
    "memory": {
        "residual": Choice(lambda settings: memory.Residual()),
        "none": Choice(lambda settings: memory.NoMemory()),
        "low_pass": Choice(lambda settings: memory.LowPass(settings("beta"))),
        "dgc": Choice(_momentum),
        "efsignsgd": refused(
            "it is error feedback for efsignsgd, on the gradient times the learning rate; write"
            " 'memory': 'residual'"
        ),
        "powersgd": refused("it stores the factors of PowerSGD; write 'memory': 'residual'"),
    },
    "communicator": {
        "allgather": Choice(lambda settings: communicators.Allgather()),
        "broadcast": Choice(lambda settings: communicators.Allgather()),
        "allreduce": Choice(
            lambda settings: communicators.SharedRandomK(), unused_stages=("index", "value")
        ),
        "alltoall": refused(
            "it would compress the sum again without error feedback; write 'communicator':"
            " 'allgather' or 'split_allgather'"
        ),
        "split_allgather": Choice(lambda settings: communicators.SplitAllgather(settings("dense"))),
        "recursive_doubling": Choice(lambda settings: communicators.RecursiveDoubling()),
        "gtopk": Choice(lambda settings: communicators.GTopK(settings("form"))),
        "cltk": Choice(lambda settings: communicators.CLTK(), unused_stages=("value",)),
        "shared_random_k": Choice(
            lambda settings: communicators.SharedRandomK(), unused_stages=("index", "value")
        ),
        "auto": Choice(lambda settings: communicators.Auto()),
    },
    "index": {
        "bloom": Choice(
            lambda settings: index.Bloom(fpr=settings("fpr"), policy=_policy(settings))
        ),
        "bloom_cpu": Choice(lambda settings: index.Bloom(policy="leftmost")),
        "rle": Choice(lambda settings: index.RLE()),
        "huffman": Choice(lambda settings: index.Huffman()),
        "huffman_delta": Choice(lambda settings: index.Huffman(delta=True)),
        "bitmap": Choice(lambda settings: index.Bitmap()),
        "rice": Choice(lambda settings: index.Rice()),
        "elias_fano": Choice(lambda settings: index.EliasFano()),
        "none": Choice(lambda settings: index.RawIndex()),
    },
    "value": {
        "polyfit": Choice(_polynomials, differs=_POLYNOMIALS_DIFFER),
        "polyfit_cpu": Choice(
            lambda settings: value.FitPoly(degree=5), differs=_POLYNOMIALS_DIFFER
        ),
        "doubleexp": Choice(lambda settings: value.FitDExp()),
        "qsgd": Choice(lambda settings: _qsgd(settings, DEFAULTS["bucket_size"])),
        "gzip": Choice(lambda settings: value.Deflate()),
        "deflate": Choice(lambda settings: value.Deflate()),
        "lloyd_max": Choice(lambda settings: value.LloydMax(bits=settings("bits"))),
        "fp16": Choice(lambda settings: value.Float16()),
        "bf16": Choice(lambda settings: value.BFloat16()),
        "quantile": Choice(lambda settings: value.Quantile(buckets=settings("buckets"))),
        "none": Choice(lambda settings: value.RawValue()),
    },
}
