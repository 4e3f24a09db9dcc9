"""Start a worker script with horovodrun and collect the reports of its ranks."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import zlib

import pytest
import sampling
from rank_servers import python_command

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
#: {name of a launcher: its command}
LAUNCHERS = {
    "horovodrun": [sys.executable, HERE / "horovodrun.py"],
    "torchrun": [pathlib.Path(sys.executable).with_name("torchrun")],
}
#: workers with the scenarios of TensorFlow; the first one runs those of all
TENSORFLOW_SCENARIOS = (
    "tensorflow_scenarios.py", "tensorflow_several.py", "tensorflow_states.py",
    "tensorflow_variables.py", "tensorflow_refusals.py", "tensorflow_keras.py",
    "tensorflow_saved_models.py",
    "tensorflow_tables.py", "tensorflow_version_1.py",
    "tensorflow_table_gradients.py", "tensorflow_misuse.py",
)  # fmt: skip
#: seconds that a launcher has to end its ranks; torchrun kills the remaining ones after 30
_END_SECONDS = 45
#: line with which a rank starts a scenario (scenario_runner.py)
_NEXT_SCENARIO = re.compile(r"\d\d:\d\d:\d\d scenario_\w+$")


class _Job:
    """A running launcher, what it has printed, and when it last started a scenario."""

    def __init__(self, command, environment):
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines = []
        self._progress = time.monotonic()
        # the ranks must not wait because nobody reads
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                if _NEXT_SCENARIO.search(line):
                    self._progress = time.monotonic()

    def ends(self, timeout):
        """Return whether the job ends before ``timeout`` seconds pass without a new scenario."""
        # a job has ended when nothing that it started can print any more
        while self._reader.is_alive():
            left = self._progress + timeout - time.monotonic()
            if left <= 0:
                return False
            self._reader.join(left)
        self.process.wait()
        return True


def run_ranks(launcher, *words, folders=(), timeout, **variables):
    """Run a program that starts ranks, with a time limit.

    Args:
        launcher: name of the program, one of :data:`LAUNCHERS`.
        words: the rest of the command.
        folders: folders of modules that the ranks import, before the common ones.
        timeout: maximum time in seconds. In a job with scenarios, it begins again with each, so
            that a slow machine can run any number of them. After it, the launcher is asked to end
            its ranks.
        variables: environment variables, in addition to those of this process.

    Returns:
        The finished process, output as text.
    """
    paths = *folders, ROOT, HERE.parent / "support", ROOT / "benchmarks" / "accuracy"
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)), OMP_NUM_THREADS="1", **variables
    )
    command = list(map(str, [*LAUNCHERS[launcher], *words]))
    job = _Job(command, environment)
    if not job.ends(timeout):
        job.process.terminate()
        if not job.ends(timeout + _END_SECONDS):
            job.lines.append("and it did not end its ranks")
            job.process.kill()
            job.process.wait()
        raise AssertionError(
            f"{launcher}: expected its end or its next scenario within {timeout} s; it said:\n"
            f"{shown(''.join(job.lines))}"
        )
    return subprocess.CompletedProcess(command, job.process.returncode, "".join(job.lines))


def horovodrun(processes, script, *arguments, folders=(), timeout=600):
    """Run ``script`` on ``processes`` ranks of this machine; see :func:`run_ranks`.

    Returns:
        The finished process, output as text.
    """
    return run_ranks(
        "horovodrun", "-np", processes, *python_command(HERE / script), *arguments,
        folders=folders, timeout=timeout, TF_CPP_MIN_LOG_LEVEL="3", HOROVOD_DYNAMIC_PROCESS_SETS="1",
    )  # fmt: skip


#: lines of a job's output that show the cause
_CAUSES = re.compile(
    r"ERROR|FATAL|terminate called|what\(\)|uncaught|deepreduce_hvd: |exit status|rank \d+, seed"
)


def shown(output, most=8000):
    """Return the lines of a job's output that show why it failed, then its end."""
    causes = [line[:400] for line in output.splitlines() if _CAUSES.search(line)]
    return "\n".join([*causes[:30], "...", output[-most:]])


def scenarios(module):
    """Return the names of a worker's scenarios without importing its frameworks.

    Scenarios are top-level functions called scenario_*.
    """
    source = (HERE / module).read_text()
    return [
        line.split("(")[0][len("def scenario_") :]
        for line in source.splitlines()
        if line.startswith("def scenario_")
    ]


def report_of(processes, script, directory, scenarios=(), run=horovodrun):
    """Run a worker and return {scenario: {rank: None or traceback}}.

    Without ``scenarios``, the worker runs all of them.
    """
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
    """The results of a worker's scenarios, by number of ranks.

    Each result is {scenario: {rank: None or traceback}}. A job runs when its result is first
    requested.

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
    """Check that ``script failure`` on two ranks ends with ``message``, a regex, on each rank."""
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
    on_every_number=(),
    run=horovodrun,
):
    """Return a fixture and a test: ``reports, test_scenario = scenario_tests(...)``.

    The test runs all scenarios of a worker. One job per number of ranks runs those that pytest has
    selected. The jobs share a directory, so that each finds the states that another one saved.

    Args:
        script: the worker that is started.
        others: modules with more scenarios that the worker runs.
        ranks: numbers of ranks of the default run.
        slow_ranks: numbers of ranks of the slow tests.
        slow_scenarios: names of scenarios that only the slow tests run.
        on_more_ranks: names of scenarios that run on every number of ranks. The others run only on
            the smallest one, because they do not depend on it. By default all run on every number.
        on_every_number: names of scenarios that run on every number of ranks even when only one in
            so many slow cases runs, or ``"all"``. The others then run on one number each, most of
            them on the smallest one.
        run: function that starts the job, with the arguments of :func:`horovodrun`.
    """
    names = [name for module in (script, *others) for name in scenarios(module)]
    on_every_number = names if on_every_number == "all" else on_every_number
    for listed in (slow_scenarios, on_more_ranks or (), on_every_number):
        if set(listed) - set(names):
            raise ValueError(f"expected names of scenarios, some of {names}, got {listed}")
    numbers = sorted((*ranks, *slow_ranks))
    cases = [
        (number, name)
        for number in numbers
        for name in names
        if number == numbers[0] or on_more_ranks is None or name in on_more_ranks
    ]
    if sampling.with_slow_cases and sampling.one_in > 1:
        cases = _one_number_each(cases, on_every_number)

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


def _one_number_each(cases, on_every_number):
    """Return one of the cases of each scenario, or all cases of those in ``on_every_number``."""
    chosen = []
    for name in dict.fromkeys(name for _, name in cases):
        numbers = [number for number, other in cases if other == name]
        if name not in on_every_number:
            # more ranks take more time: one in three scenarios runs on more
            draw = zlib.crc32(name.encode())
            more = numbers[1:] if draw % 3 == 0 else []
            numbers = [more[draw // 3 % len(more)] if more else numbers[0]]
        chosen += [(number, name) for number in numbers]
    return sorted(chosen)


def failure_test(script, quick, slow=None):
    """Return a test that ``script FAILURE`` on two ranks ends with a message on each.

    Each failure is a separate job. A failure after which Horovod still works is a scenario instead,
    with :func:`refused`.

    Args:
        quick: {failure: regular expression of the message} of the default run.
        slow: the same for the slow tests.
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
