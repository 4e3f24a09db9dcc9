"""The networks and the rows of benchmarks/whole_step.py."""

#: {network: its name in tables}
NETWORKS = {"resnet18": "ResNet-18", "transformer": "transformer"}
#: each rank trains alone
LOCAL = "no exchange"
ROWS = (LOCAL, "none", "fp16", "64 MiB buckets", "auto")
