"""The networks and the rows of benchmarks/whole_step.py."""

#: {network: its name in tables}
NETWORKS = {"resnet18": "ResNet-18", "transformer": "transformer"}
#: {network: examples of a batch}
EXAMPLES = {"resnet18": 8, "transformer": 4}
#: each rank trains alone
LOCAL = "no exchange"
#: a Compressor without arguments; the other compressors send small tensors uncompressed
DEFAULT = "default"
ROWS = (LOCAL, "none", "fp16", "64 MiB buckets", DEFAULT, "auto")
