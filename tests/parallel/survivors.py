"""Start a job like horovodrun, which would end the surviving ranks, but do not end them."""

import contextlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from rank_servers import python_command

HERE = pathlib.Path(__file__).parent


def run(ranks, script, *arguments, limit=120, **environment):
    """Run ``script`` on some ranks. All but the last must end within ``limit`` seconds.

    Args:
        environment: variables for the ranks.

    Returns:
        (the output of each rank, the exit statuses of all but the last, seconds).
    """
    plan = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    with contextlib.redirect_stdout(io.StringIO()):
        server = RendezvousServer(0)
        shared = create_run_env_vars("127.0.0.1", ["lo"], server.start())
        server.init(plan)
    root = str(HERE.parent.parent)
    paths = os.pathsep.join([root, str(HERE.parent / "support"), str(HERE)])
    common = dict(
        os.environ, PYTHONPATH=paths, TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1", **environment
    )
    started = time.monotonic()
    processes = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as files:
        try:
            for slot in plan:
                own = {
                    name: str(value)
                    for name, value in {**shared, **create_slot_env_vars(slot)}.items()
                }
                said = files.enter_context(open(os.path.join(directory, str(slot.rank)), "w"))
                command = [*python_command(HERE / script, **environment), *arguments]
                processes.append(
                    subprocess.Popen(
                        list(map(str, command)),
                        env={**common, **own},
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
            deadline = started + limit
            statuses = [
                process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes[:-1]
            ]
            seconds = time.monotonic() - started
        except subprocess.TimeoutExpired:
            statuses, seconds = [process.poll() for process in processes[:-1]], limit
        finally:
            for process in processes:
                process.kill()
                process.wait()
            server.stop()
        texts = [pathlib.Path(directory, str(rank)).read_text() for rank in range(ranks)]
    return texts, statuses, seconds


if __name__ == "__main__":
    said, statuses, seconds = run(int(sys.argv[1]), *sys.argv[2:])
    for rank, text in enumerate(said):
        print("\n".join(f"[{rank}] {line}" for line in text.splitlines()))
    print(statuses, round(seconds, 1))
