"""How the tests share a machine: with ``-n 2`` all jobs of several ranks run on one worker."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent
#: folders and files whose tests start horovodrun, builds or other jobs that use all cores
SEVERAL_PROCESSES = (
    "parallel", "hosts", "random_walk", "test_build.py", "test_build_cuda.py", "test_data.py",
    "test_docs.py", "test_examples.py", "test_gpu_check.py", "test_set_up.py", "test_preflight.py",
    "cuda/test_pretend.py", "cuda/test_nvcc.py", "cuda/test_tensorflow_link.py",
    "cuda/test_tensorflow_kernels.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        place = pathlib.Path(item.path).relative_to(HERE).as_posix()
        if place.startswith(SEVERAL_PROCESSES):
            item.add_marker(pytest.mark.several_processes)
            item.add_marker(pytest.mark.xdist_group("several-processes"))
        elif place.startswith("cuda"):
            item.add_marker(pytest.mark.device)
