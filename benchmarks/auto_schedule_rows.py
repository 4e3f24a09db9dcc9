"""The rows of benchmarks/auto_schedule.py, by launcher."""

DDP = "DDP: "  # prefix of the names of DDP rows
ROWS = {
    "horovodrun": ("none", "fp16", "64 MiB buckets", "one message per gradient", "auto"),
    "torchrun": (f"{DDP}none", f"{DDP}fp16", f"{DDP}DDP's buckets", f"{DDP}auto"),
}
#: the rows whose settings are chosen in the job
AUTO = ("auto", f"{DDP}auto")
