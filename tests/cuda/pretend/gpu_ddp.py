"""Rehearse scripts/gpu_ddp.py on the simulated device, started by torchrun.

With nccl, payloads go to a simulated NCCL.
"""

import contextlib
import pathlib
import runpy
import sys

import torch.distributed as dist
from ddp_training import pretended_nccl

ROOT = pathlib.Path(__file__).resolve().parents[3]

dist.init_process_group = lambda *backends, **options: None  # ddp_training has done it
with pretended_nccl() if "nccl" in sys.argv else contextlib.nullcontext():
    try:
        runpy.run_path(str(ROOT / "scripts" / "gpu_ddp.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
print("as expected")
