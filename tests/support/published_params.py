"""The dictionaries of settings in the scripts and guides of GRACE and DeepReduce.

Each has the expected compressor. GRACE is github.com/sands-lab/grace with
github.com/sands-lab/grace-benchmarks, DeepReduce is github.com/hangxu0304/DeepReduce. Their scripts
set ``world_size`` to the number of ranks.
"""

from typing import NamedTuple

import deepreduce_hvd as dr

WORLD_SIZE = 8


class Published(NamedTuple):
    source: str
    params: dict
    codec: dr.Codec
    memory: dr.Memory
    communicator: dr.Communicator
    #: words of its warnings, one entry per warning
    warnings: tuple = ()


DENSE = dr.Codec(dr.NoneSparsifier()), dr.NoMemory(), dr.SharedRandomK()
TOPK_03 = dr.Codec(dr.TopK(0.3)), dr.Residual(), dr.Allgather()
ALL_NON_ZERO = {
    "compressor": "threshold",
    "memory": "none",
    "communicator": "allgather",
    "threshold": 0.0,
}
LEFTMOST = dr.Bloom(policy="leftmost")
#: 127 levels, an L2 norm of 512 values
QSGD = dr.QSGD(bits=8, bucket=512, norm="l2")
#: words of warnings
SEGMENTS = "value polyfit: the values determine where segments begin"
BOTH = "deepreduce both: sends the values at the indices that the policy chooses"


def _of_non_zero(more, index=None, value=None, warnings=()):
    codec = dr.Codec(dr.Threshold(0.0), index=index, value=value)
    return Published(
        "DeepReduce run_deepreduce.sh",
        {**ALL_NON_ZERO, **more},
        codec,
        dr.NoMemory(),
        dr.Allgather(),
        warnings,
    )


PUBLISHED = [
    # GRACE
    Published("GRACE TRAINING.md, TensorFlow", {"compressor": "topk", "memory": "residual", "communicator": "allgather"}, *TOPK_03),
    Published("GRACE TRAINING.md, PyTorch", {"compressor": "topk", "memory": "residual", "communicator": "allgather"}, *TOPK_03),
    Published(
        "GRACE TRAINING.md, torch.distributed",
        {"compressor": "topk", "memory": "residual", "communicator": "allgather", "world_size": WORLD_SIZE}, *TOPK_03,
    ),
    Published("GRACE examples/torch/pytorch_mnist.py", {"compressor": "topk", "memory": "residual", "communicator": "allgather"}, *TOPK_03),
    Published(
        "GRACE examples/dist/CIFAR10-dawndist/dawn.py",
        {"compressor": "none", "memory": "none", "communicator": "allreduce", "world_size": WORLD_SIZE}, *DENSE,
    ),
    Published(
        "grace-benchmarks torch/cifar10/trainer_grace.py, default of --grace_config",
        {"compressor": "none", "memory": "none", "communicator": "allreduce", "world_size": WORLD_SIZE}, *DENSE,
    ),
    Published(
        "grace-benchmarks torch/Recommendation/NCF/ncf_grace.py, default of --grace_config",
        {"compressor": "none", "memory": "none", "communicator": "allreduce", "world_size": WORLD_SIZE}, *DENSE,
    ),
    # DeepReduce
    Published(
        "DeepReduce README.md",
        {"compressor": "topk", "memory": "residual", "communicator": "allgather", "compress_ratio": 0.01, "deepreduce": "index", "index": "bloom"},
        dr.Codec(dr.TopK(0.01), index=LEFTMOST), dr.Residual(), dr.Allgather(), ("policy='leftmost'",),
    ),
    Published(
        "DeepReduce run_deepreduce.sh, ResNet-20",
        {
            "compressor": "topk", "memory": "residual", "communicator": "allgather",
            "compress_ratio": 0.01, "deepreduce": "index", "index": "bloom",
            "micro-benchmark": True, "world_size": WORLD_SIZE,
        },
        dr.Codec(dr.TopK(0.01), index=LEFTMOST), dr.Residual(), dr.Allgather(),
        ("micro-benchmark: nothing is printed", "policy='leftmost'"),
    ),
    Published("DeepReduce run_deepreduce.sh", {"compressor": "none", "memory": "none", "communicator": "allreduce"}, *DENSE),
    _of_non_zero({}),
    _of_non_zero({"deepreduce": "index", "index": "bloom"}, index=LEFTMOST),
    _of_non_zero({"deepreduce": "value", "value": "polyfit"}, value=dr.FitPoly(degree=5), warnings=(SEGMENTS,)),
    _of_non_zero(
        {"deepreduce": "value", "value": "qsgd", "buckets_num": 128, "quantum_num": 32},
        value=dr.QSGD(bits=7, bucket=512, norm="l2"),
        warnings=("quantum_num: 32 levels become 63", "buckets_num: neither project reads it"),
    ),
    _of_non_zero({"deepreduce": "both"}, index=LEFTMOST, value=dr.FitPoly(degree=5), warnings=(BOTH, SEGMENTS)),
    _of_non_zero({"deepreduce": "index", "index": "bloom", "policy": "p0", "fpr": 0.01}, index=dr.Bloom(fpr=0.01, policy="p0")),
    _of_non_zero(
        {"deepreduce": "both", "index": "bloom", "policy": "random", "fpr": 0.01, "value": "qsgd"},
        index=dr.Bloom(fpr=0.01, policy="p1"), value=QSGD,
        warnings=(BOTH,),
    ),
    Published(
        "DeepReduce run_deepreduce.sh, SKCompress",
        {"compressor": "SKCompressCPU", "num_quantiles": 128, "sparsifier": "threshold", "threshold": 0.0, "memory": "none", "communicator": "allgather"},
        dr.Codec(dr.Threshold(0.0), index=dr.Huffman(delta=True), value=dr.Quantile(buckets=128)),
        dr.NoMemory(), dr.Allgather(),
        ("SKCompress",),
    ),
    Published(
        "DeepReduce run_deepreduce.sh, time breakdown",
        {"compressor": "topk", "memory": "residual", "communicator": "allgather", "compress_ratio": 0.1, "deepreduce": "index", "index": "bloom"},
        dr.Codec(dr.TopK(0.1), index=LEFTMOST), dr.Residual(), dr.Allgather(), ("policy='leftmost'",),
    ),
]  # fmt: skip

#: names that grace_from_params of grace_dl.torch, grace_dl.tensorflow and grace_dl.dist and the
#: code of DeepReduce compare with
NAMES = {
    "compressor": {
        "adaq", "dgc", "efsignsgd", "fp16", "inceptionn", "natural", "natural_cuda", "none",
        "onebit", "powersgd", "qsgd", "qsgd_cuda", "randomk",
        "signsgd", "signum", "sketch", "terngrad", "threshold", "topk", "u8bit", "SKCompressCPU",
        "SKCompressGPU",
    },
    "memory": {"dgc", "efsignsgd", "none", "powersgd", "residual"},
    "communicator": {"allgather", "allreduce", "alltoall", "broadcast"},
    "index": {"bloom", "bloom_cpu", "huffman", "rle"},
    "value": {"gzip", "polyfit", "polyfit_cpu", "qsgd"},
}  # fmt: skip

#: defaults in the code of both projects
DEFAULTS = {
    "compressor": "none", "memory": "none", "communicator": "allreduce", "compress_ratio": 0.3,
    "threshold": 0.01, "quantum_num": 127,
    "quantiles": 64, "momentum": 0.9, "gradient_clipping": False, "deepreduce": None,
    "index": "bloom", "value": "polyfit", "policy": "leftmost",
    "poly_degree": 5, "sort": False, "bucket_size": 512,
}  # fmt: skip
