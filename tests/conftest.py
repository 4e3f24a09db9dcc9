"""Mark tests by the resources that they use, and report failures immediately."""

import collections
import gc
import os
import pathlib
import re
import zlib

import pytest
import sampling

HERE = pathlib.Path(__file__).parent
# Gloo ends a job if a rank waits for 30 s. A virtual machine can pause for longer, which looks like
# a hang of all ranks.
os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "120")
#: folders and files whose tests start horovodrun or other jobs that use all cores
SEVERAL_PROCESSES = (
    "parallel", "hosts", "random_walk", "test_docs_scripts.py", "test_examples.py", "test_install.py",
    "cuda/test_pretend.py", "cuda/test_tensorflow_link.py",
    "cuda/test_tensorflow_kernels.py", "cuda/test_tensorflow_sums.py",
)  # fmt: skip
#: the files that take minutes; they run first, so that all workers end together
LONGEST_FIRST = (
    "test_gpu_check.py",
    "test_install.py", "parallel/test_tensorflow_schedule.py",
    "parallel/test_tensorflow_parallel.py", "cuda/test_tensorflow_kernels.py",
    "parallel/test_torch_ddp.py", "parallel/test_torch_parallel.py", "test_examples.py",
    "test_docs_scripts.py", "parallel/test_torch_schedule.py", "hosts/test_auto_schedule.py",
    "hosts/test_changing_link.py", "parallel/test_torch_fsdp.py", "hosts/test_more_ranks.py",
    "parallel/test_hung_peer.py", "parallel/test_tensorflow_elastic.py",
    "parallel/test_tensorflow_overflow.py", "parallel/test_tensorflow_communicators.py",
    "parallel/test_torch_elastic.py", "parallel/test_torch_several.py",
    "random_walk/test_tensorflow_walk.py",
    "random_walk/test_torch_walk.py", "parallel/test_torch_communicators.py",
    "cuda/test_pretend.py", "hosts/test_time_to_accuracy.py",
    "hosts/test_hosts.py", "parallel/test_tensorflow_protocol.py",
    "parallel/test_torch_gradients.py", "parallel/test_rank_failures.py",
)  # fmt: skip
#: files whose tests start builds, scripts, type checkers or trainings of the accuracy laboratory,
#: which use one core each
SUBPROCESSES = (
    "test_accuracy_agreement.py", "test_accuracy_laboratory.py", "test_accuracy_runs.py",
    "test_build.py", "test_build_cuda.py", "test_callers_of_the_core.py", "test_check.py",
    "test_data.py", "test_gpu_check.py", "test_preflight.py", "test_set_up.py", "test_two_frameworks.py", "test_types.py",
)  # fmt: skip

#: {path of a test file: seconds of its tests and their fixtures}
seconds_of_file = collections.Counter()
#: files that the summary shows at most, and the seconds from which it shows one
_MOST_FILES, _LEAST_SECONDS = 25, 5


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of the slow cases of products of settings (default: all)",
    )
    parser.addoption(
        "--at-most",
        type=int,
        metavar="N",
        help="run at most N cases of each parametrized test (default: all)",
    )


def pytest_configure(config):
    # tens of thousands of tests live until the end, and collections need not traverse them
    gc.disable()
    # before the modules of tests are imported
    sampling.with_slow_cases = "not slow" not in config.option.markexpr
    sampling.one_in = config.option.one_in


def pytest_ignore_collect(collection_path, config):
    """Ignore files whose tests ``-m`` would all deselect, because collecting them takes seconds."""
    place = collection_path.relative_to(HERE).as_posix()
    part = re.match(r"(not )?several_processes\b", config.option.markexpr)
    if not place.endswith(".py") or part is None or " or " in config.option.markexpr:
        return None
    return place.startswith(SEVERAL_PROCESSES) == bool(part[1]) or None


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        place = pathlib.Path(item.path).relative_to(HERE).as_posix()
        if place.startswith(SEVERAL_PROCESSES):
            item.add_marker(pytest.mark.several_processes)
        elif place.startswith(SUBPROCESSES):
            item.add_marker(pytest.mark.subprocesses)
        elif place.startswith("cuda"):
            item.add_marker(pytest.mark.device)
    items.sort(key=_rank_of_file)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_keep_some_cases(config, items):
    """Apply ``--at-most`` to what ``-m`` and ``-k`` have left."""
    most = config.option.at_most
    if most is None:
        return
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        item
        for several in cases.values()
        for item in sorted(several, key=lambda item: zlib.crc32(item.nodeid.encode()))[:most]
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _rank_of_file(item):
    place = pathlib.Path(item.path).relative_to(HERE).as_posix()
    return LONGEST_FIRST.index(place) if place in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_terminal_summary(terminalreporter):
    """Print the files that took longest, with the set-up of their tests."""
    lines = [
        f"{seconds:7.0f} s  {file}"
        for file, seconds in seconds_of_file.most_common(_MOST_FILES)
        if seconds > _LEAST_SECONDS
    ]
    if lines:
        terminalreporter.section("slowest files")
        terminalreporter.write_line("\n".join(lines))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Print a failure at once, so that an interrupted run shows what failed."""
    seconds_of_file[report.nodeid.partition("::")[0]] += report.duration
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(
            f"\n{report.nodeid} failed in {report.duration:.0f} s:\n{report.longreprtext[-3000:]}",
            flush=True,
        )
