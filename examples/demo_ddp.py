"""Train a small network on Fashion-MNIST with PyTorch's DDP under ``torchrun --nproc-per-node 2``.

``make demo-ddp`` runs this script: the job of ``make demo``, without Horovod, beside PyTorch's own
communication hooks. It prints a table and writes demo-ddp.json and demo-ddp.png in build/results/.
"""

import os
import sys

from ddp_hooks import HOOKS
from rows import Demo

SHOWN = ("Top-r pairs", "Rice", "FitPoly + Rice", "QSGD + Rice", "default")


def worker(demo):
    """Run the demo on one rank."""
    import torch
    from fashion_ddp import DdpTraining

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    demo.compare(DdpTraining())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    demo = Demo(
        __doc__, __file__, "demo-ddp.json", seconds_per_row=35,
        launcher="torchrun", baselines=tuple(HOOKS), shown=SHOWN,
    )  # fmt: skip
    sys.exit(demo.main(worker))
