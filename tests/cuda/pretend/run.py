"""Run a script in a process with the simulated CUDA device.

Usage: ``run.py FOLDER SCRIPT ARGUMENTS...``. device.py describes FOLDER.
"""

import runpy
import sys

folder, script, *arguments = sys.argv[1:]
sys.path.insert(0, folder)

from device import install  # noqa: E402

install(folder)

import deepreduce_hvd.torch.ops  # noqa: E402

assert deepreduce_hvd.torch.ops.HAS_CUDA_OPERATORS and deepreduce_hvd.__file__.startswith(folder)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
