"""Run the scenarios of tests/parallel on variables of a simulated GPU in host memory.

Usage: ``on_simulated_gpu.py DIRECTORY``. A directory called nccl stands for a Horovod built with
NCCL. PYTHONPATH has the folders that test_tensorflow_kernels.py names.
"""

import os
import pathlib
import runpy
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import emulated
import horovod.tensorflow as hvd
import scenario_runner

from deepreduce_hvd.tensorflow import device as tensorflow_device, ops as adapter

HERE = pathlib.Path(__file__).resolve().parent
nccl = pathlib.Path(sys.argv[1]).name == "nccl"
operators = tensorflow_device.operators = emulated.Operators(adapter.operators)
adapter.cuda_supports = emulated.supports
tensorflow_device.gpu_of = lambda parameter: "/device:CPU:0"
hvd.nccl_built = lambda: nccl
_run_all = scenario_runner.run_all


def scenario_compressed_on_the_gpu(directory):
    assert {"deepreduce_encode", "deepreduce_decode_sum"} <= set(operators.asked_for)


def run_all(namespace, *arguments, **options):
    scenario_runner.WHOLE = None  # the complete products of settings run in tests/parallel
    if nccl:
        # each gather of messages comes with a gather of their lengths
        scenarios = namespace["scenario_groups_change_nothing_but_the_messages"].__globals__
        count = scenarios["count"]
        scenarios["count"] = lambda graph, kind: (
            count(graph, kind) / (2 if kind == "HorovodAllgather" else 1)
        )
    _run_all(
        {**namespace, "scenario_compressed_on_the_gpu": scenario_compressed_on_the_gpu},
        *arguments,
        **options,
    )


scenario_runner.run_all = run_all
runpy.run_path(str(HERE.parents[1] / "parallel" / "tensorflow_scenarios.py"), run_name="__main__")
