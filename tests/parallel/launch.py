"""Start a worker script with horovodrun and collect the reports of its ranks."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
#: seconds that a launcher gets to end its ranks; torchrun kills those that are left after 30
_END_SECONDS = 45


def run_ranks(launcher, *words, folders=(), timeout, **variables):
    """Run a program that starts ranks, with a time limit.

    Args:
        launcher: its name; it is installed beside this Python.
        words: the rest of the command.
        folders: folders of modules that the ranks import, in addition to the common ones.
        timeout: maximum time in seconds. Then the launcher is asked to end its ranks.
        variables: of the environment, in addition to those of this process.

    Returns:
        The finished process, output as text.
    """
    paths = ROOT, *folders, HERE.parent / "support", ROOT / "benchmarks" / "accuracy"
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)), OMP_NUM_THREADS="1", **variables
    )
    command = [pathlib.Path(sys.executable).with_name(launcher), *words]
    job = subprocess.Popen(
        list(map(str, command)),
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with job:
        try:
            output = job.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            job.terminate()
            try:
                output = job.communicate(timeout=_END_SECONDS)[0]
            except subprocess.TimeoutExpired:
                output = "nothing, and it did not end its ranks either"
            finally:
                job.kill()
            raise AssertionError(
                f"{launcher}: expected its end within {timeout} s; it said:\n{shown(output)}"
            ) from None
    return subprocess.CompletedProcess(command, job.returncode, output)


def horovodrun(processes, script, *arguments, timeout=600):
    """Runs ``script`` on ``processes`` ranks of this machine; returns the finished process, output
    as text.
    """
    return run_ranks(
        "horovodrun", "-np", processes, sys.executable, HERE / script, *arguments,
        timeout=timeout, TF_CPP_MIN_LOG_LEVEL="3", HOROVOD_DYNAMIC_PROCESS_SETS="1",
    )  # fmt: skip


#: lines of a job's output that tell the cause
_CAUSES = re.compile(
    r"ERROR|FATAL|terminate called|what\(\)|uncaught|deepreduce_hvd: |exit status|rank \d+, seed"
)


def shown(output, most=8000):
    """Return the lines of a job's output that tell why it failed, then its end."""
    causes = [line[:400] for line in output.splitlines() if _CAUSES.search(line)]
    return "\n".join([*causes[:30], "...", output[-most:]])


def scenarios(module):
    """The names of a worker's scenarios without importing its frameworks: top-level functions
    called scenario_*.
    """
    source = (HERE / module).read_text()
    return [
        line.split("(")[0][len("def scenario_") :]
        for line in source.splitlines()
        if line.startswith("def scenario_")
    ]


def report_of(processes, script, directory, scenarios=(), run=horovodrun):
    """{scenario: {rank: None or traceback}} of a worker that runs these scenarios, or all."""
    finished = run(processes, script, directory, *scenarios)
    reports = {}
    for rank in range(processes):
        path = pathlib.Path(directory) / f"report.{processes}.{rank}.json"
        if not path.exists():
            raise AssertionError(
                f"rank {rank} of {processes} left no report; the launcher "
                f"said:\n{shown(finished.stdout)}"
            )
        for name, outcome in json.loads(path.read_text()).items():
            reports.setdefault(name, {})[rank] = outcome
    return reports


class Reports:
    """What a worker's scenarios came to, {scenario: {rank: None or traceback}}, by number of ranks;
    a job runs when it is first asked for.

    Args:
        wanted: {number of ranks: names of the scenarios that its job runs}.
        run: function that starts the job.
    """

    def __init__(self, script, directory, wanted, run=horovodrun):
        self._script = script
        self._run = run
        self._directory = directory
        self._wanted = wanted
        self._known = {}

    def __getitem__(self, processes):
        if processes not in self._known:
            try:
                self._known[processes] = report_of(
                    processes, self._script, self._directory, self._wanted[processes], self._run
                )
            # cached: the next scenario must not run the same job again
            except Exception as error:
                self._known[processes] = error
        known = self._known[processes]
        if isinstance(known, Exception):
            raise AssertionError(f"the job of {processes} ranks failed: {known}") from known
        return known

    def expect_success(self, processes, scenario):
        failed = {
            rank: outcome
            for rank, outcome in self[processes][scenario].items()
            if outcome is not None
        }
        assert not failed, "\n".join(f"rank {rank}: {outcome}" for rank, outcome in failed.items())


def expect_failure_with_a_message_on_every_rank(script, failure, message):
    """Check that ``script failure`` on two ranks ends with ``message``, a regex, from each rank."""
    finished = horovodrun(2, script, failure, timeout=120)
    assert finished.returncode != 0, finished.stdout[-3000:]
    assert "went on silently" not in finished.stdout
    for rank in range(2):
        lines = "\n".join(
            re.findall(rf"^\[{rank}\]<std(?:err|out)>:?(.*)$", finished.stdout, re.MULTILINE)
        )
        assert re.search(message, lines), f"rank {rank} said:\n{lines[-3000:]}"


needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def scenario_tests(
    script,
    *others,
    ranks=(2,),
    slow_ranks=(3,),
    slow_scenarios=(),
    on_more_ranks=None,
    run=horovodrun,
):
    """A fixture and a test of all scenarios: ``reports, test_scenario = scenario_tests(...)``.

    One job for each number of ranks runs those that pytest has selected. The jobs share a
    directory, so that each finds the states that another saved.

    Args:
        script: the worker that is started.
        others: modules whose scenarios it runs too.
        ranks: numbers of ranks of the default run.
        slow_ranks: those of the slow tests.
        slow_scenarios: names of scenarios of the slow tests.
        on_more_ranks: names of scenarios that run on every number of ranks; the others run only on
            the smallest, because nothing in them depends on it. By default all run on every number.
        run: function that starts the job, with the arguments of :func:`horovodrun`.
    """
    names = [name for module in (script, *others) for name in scenarios(module)]
    for listed in (slow_scenarios, on_more_ranks or ()):
        if set(listed) - set(names):
            raise ValueError(f"expected names of scenarios, some of {names}, got {listed}")
    numbers = sorted((*ranks, *slow_ranks))
    cases = [
        (number, name)
        for number in numbers
        for name in names
        if number == numbers[0] or on_more_ranks is None or name in on_more_ranks
    ]

    @pytest.fixture(scope="session")
    def reports(request, tmp_path_factory):
        wanted = {}
        for item in request.session.items:
            if getattr(item, "function", None) is test_scenario:
                values = item.callspec.params
                wanted.setdefault(values["processes"], []).append(values["scenario"])
        return Reports(script, tmp_path_factory.mktemp(pathlib.Path(script).stem), wanted, run)

    @pytest.mark.parametrize(
        ("processes", "scenario"),
        [
            pytest.param(
                number,
                name,
                id=f"{number}-{name}",
                marks=pytest.mark.slow if number in slow_ranks or name in slow_scenarios else (),
            )
            for number, name in cases
        ],
    )
    def test_scenario(reports, processes, scenario):
        reports.expect_success(processes, scenario)

    return reports, test_scenario


def failure_test(script, quick, slow=None):
    """A test that ``script FAILURE`` on two ranks ends with a message from each.

    A job for each: what leaves Horovod sound is a scenario instead, with :func:`refused`.

    Args:
        quick: {failure: regular expression of the message} of the default run.
        slow: those of the slow tests.
    """

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            *(pytest.param(*case, id=case[0]) for case in quick.items()),
            *(
                pytest.param(*case, id=case[0], marks=pytest.mark.slow)
                for case in (slow or {}).items()
            ),
        ],
    )
    def test_failure(failure, message):
        expect_failure_with_a_message_on_every_rank(script, failure, message)

    return test_failure
