"""Start a worker script with torchrun."""

import json
import pathlib
import re
import signal

import pytest
from launch import HERE, run_ranks, shown
from rank_servers import python_command

#: what DDP and fully_shard import when they are first used takes as long as PyTorch itself
_IMPORTED = ("torch", "torch._dynamo", "torch.distributed.fsdp")


def torchrun(processes, script, *arguments, timeout=600, **variables):
    """Run ``script`` on ``processes`` ranks of this machine, with environment variables.

    Returns:
        The finished process; each line of its output begins with ``[defaultRANK]:``.
    """
    return run_ranks(
        "torchrun", "--standalone", "--tee=3", f"--nproc-per-node={processes}", "--no-python",
        *python_command(HERE / script, *_IMPORTED), *arguments,
        folders=[HERE], timeout=timeout, **variables,
    )  # fmt: skip


def lines_of(rank, output):
    """Return what one rank has printed."""
    return "\n".join(re.findall(rf"^\[default{rank}\]:(.*)$", output, re.MULTILINE))


def failure_tests(script, processes, quick, slow):
    """Return a fixture and a test: ``said, test_failure = failure_tests(...)``.

    The test runs all failures of a worker. One job runs those that pytest has selected, each in
    separate processes. At most one rank may kill itself; all others must give the message.

    Args:
        script: the worker, which ends with ``forked_failures.main``.
        processes: the number of ranks.
        quick: {failure: regular expression of the message on every rank} of the default run.
        slow: the same for the slow tests.
    """

    @pytest.fixture(scope="session")
    def said(request, tmp_path_factory):
        wanted = [
            item.callspec.params["failure"]
            for item in request.session.items
            if getattr(item, "function", None) is test_failure
        ]
        directory = tmp_path_factory.mktemp(pathlib.Path(script).stem)
        finished = torchrun(processes, script, directory, *wanted)
        assert finished.returncode == 0, shown(finished.stdout)
        return directory

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            *(pytest.param(*case, id=case[0]) for case in quick.items()),
            *(pytest.param(*case, id=case[0], marks=pytest.mark.slow) for case in slow.items()),
        ],
    )
    def test_failure(said, failure, message):
        statuses = [
            json.loads((said / f"statuses.{rank}").read_text())[failure]
            for rank in range(processes)
        ]
        assert statuses.count(-signal.SIGKILL) <= 1, f"{statuses=}"
        for rank, status in enumerate(statuses):
            text = (said / f"{failure}.{rank}").read_text()
            assert status != 0
            assert "went on silently" not in text
            if status != -signal.SIGKILL:  # a killed rank says nothing
                assert re.search(message, text), f"rank {rank} said:\n{text[-3000:]}"

    return said, test_failure
