"""from_params: the dictionary of settings that users of GRACE and DeepReduce already have."""

from deepreduce_hvd import communicators, index, memory, sparsifiers, value
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.compressor import Compressor
from deepreduce_hvd.errors import InvalidArgument

_POLICIES = {
    "naive": "naive", "p0": "p0", "p1": "p1", "random": "p1", "leftmost": "leftmost", "p2": "p2", "conflict_sets": "p2",
}  # fmt: skip

#: setting -> (choice -> how it is made from the dictionary); choices are what the published configurations call them
_CHOICES = {
    "compressor": {
        "topk": lambda get: sparsifiers.TopK(get("compress_ratio", 0.01)),
        "randomk": lambda get: sparsifiers.RandomK(get("compress_ratio", 0.01)),
        "chunktopk": lambda get: sparsifiers.ChunkTopK(get("compress_ratio", 0.01)),
        "threshold": lambda get: sparsifiers.Threshold(get("threshold", 0.0)),
        "none": lambda get: sparsifiers.NoneSparsifier(),
    },
    "memory": {
        "residual": lambda get: memory.Residual(),
        "none": lambda get: memory.NoMemory(),
        "low_pass": lambda get: memory.LowPass(get("beta", 0.1)),
        "dgc": lambda get: memory.MomentumCorrection(get("momentum", 0.9)),
    },
    "communicator": {
        "allgather": lambda get: communicators.Allgather(),
        "split_allgather": lambda get: communicators.SplitAllgather(get("dense", "auto")),
        "recursive_doubling": lambda get: communicators.RecursiveDoubling(),
        "gtopk": lambda get: communicators.GTopK(get("form", "butterfly")),
        "cltk": lambda get: communicators.CLTK(),
        "shared_random_k": lambda get: communicators.SharedRandomK(),
        "auto": lambda get: communicators.Auto(),
    },
    "index": {
        "bloom": lambda get: index.Bloom(fpr=get("fpr", None), policy=_policy(get("policy", "p2"))),
        "rle": lambda get: index.RLE(),
        "huffman": lambda get: index.Huffman(),
        "huffman_delta": lambda get: index.Huffman(delta=True),
        "bitmap": lambda get: index.Bitmap(),
        "rice": lambda get: index.Rice(),
        "elias_fano": lambda get: index.EliasFano(),
        "none": lambda get: index.RawIndex(),
    },
    "value": {
        "polyfit": lambda get: value.FitPoly(degree=get("poly_degree", 5)),
        "doubleexp": lambda get: value.FitDExp(),
        "qsgd": lambda get: value.QSGD(bits=get("quantum_bits", 4), bucket=get("bucket_size", 512)),
        "gzip": lambda get: value.Deflate(),
        "deflate": lambda get: value.Deflate(),
        "fp16": lambda get: value.Float16(),
        "bf16": lambda get: value.BFloat16(),
        "quantile": lambda get: value.Quantile(buckets=get("buckets", 256)),
        "none": lambda get: value.RawValue(),
    },
}
_DEFAULTS = {"compressor": "topk", "memory": "residual", "communicator": "allgather", "index": "bloom", "value": "polyfit"}
_PARTS = ("index", "value", "both", None)


def _policy(name):
    if name not in _POLICIES:
        raise InvalidArgument(f"policy: expected one of {', '.join(_POLICIES)}, got {name!r}")
    return _POLICIES[name]


def from_params(params, parameters, **options):
    """A :class:`Compressor` from a dictionary in the manner of GRACE and DeepReduce.

    Args:
        params: settings by name. "compressor" (topk, randomk, chunktopk, threshold, none) with "compress_ratio" or "threshold";
            "memory" (residual, none, low_pass with "beta", dgc with "momentum"); "communicator" (allgather, split_allgather with "dense",
            recursive_doubling, gtopk with "form", cltk, shared_random_k, auto); "deepreduce": "index", "value", "both" or None says
            which of the following apply; "index" (bloom with "fpr" and "policy", rle, huffman, huffman_delta, bitmap, rice,
            elias_fano, none); "value" (polyfit with "poly_degree", doubleexp, qsgd with "quantum_bits" and "bucket_size", gzip or
            deflate, fp16, bf16, quantile with "buckets", none).
        parameters: (name, parameter) pairs or TensorFlow variables, as for :class:`Compressor`.
        options: further keyword arguments of :class:`Compressor`.

    Raises:
        InvalidArgument: an unknown setting or choice, or one that does not apply to the others; nothing is ignored.

    What is not said: topk with "compress_ratio" 0.01, residual, allgather; ⟨index, value⟩ pairs without "deepreduce", and with it bloom with
    the policy "p2" for indices, polyfit for values. "policy" is naive, p0, p1 or random, leftmost, p2 or conflict_sets.
    """
    used = set()

    def get(name, default):
        used.add(name)
        return params.get(name, default)

    def make(setting):
        choice = get(setting, _DEFAULTS[setting])
        choice = "none" if choice is None else choice
        if choice not in _CHOICES[setting]:
            raise InvalidArgument(f"{setting}: expected one of {', '.join(_CHOICES[setting])}, got {choice!r}")
        return _CHOICES[setting][choice](get)

    part = get("deepreduce", None)
    if part not in _PARTS:
        raise InvalidArgument(f"deepreduce: expected index, value, both or None, got {part!r}")
    codec = Codec(
        make("compressor"),
        index=make("index") if part in ("index", "both") else None,
        value=make("value") if part in ("value", "both") else None,
    )
    stages = {"memory": make("memory"), "communicator": make("communicator")}
    unused = sorted(set(params) - used)
    if unused:
        raise InvalidArgument(f"params: expected settings that apply to this choice ({', '.join(sorted(used))}), got also {', '.join(unused)}")
    return Compressor(codec, parameters=parameters, **stages, **options)
