"""Run a script in a process with the simulated CUDA device.

Usage: ``run.py FOLDER SCRIPT ARGUMENTS...`` with FOLDER, which device.py describes, first in
PYTHONPATH.
"""

import runpy
import sys

from device import install

folder, script, *arguments = sys.argv[1:]
install(folder)

import deepreduce_hvd.torch.ops  # noqa: E402

assert deepreduce_hvd.torch.ops.HAS_CUDA_OPERATORS and deepreduce_hvd.__file__.startswith(folder)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
