"""Start the servers that fork the ranks of this process's jobs (rank_server.py)."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
#: environment variables that frameworks read while they are imported
_READ_AT_IMPORT = re.compile(
    "TF_|XLA_|KERAS_|LD_|OMP_|MKL_|OPENBLAS_|TORCH_|PYTORCH_|PYTHONHASHSEED"
)
_SEEDS = ("1", "2")
_IMPORTS = re.compile(r"^ *(?:import|from) (tensorflow|torch)\b", re.MULTILINE)

#: replaces a function of the C library in the ranks
_SLEEPING_YIELD = HERE.parent / "native" / "sleeping_yield.cc"

_servers = {}  # (folder, modules) -> the paths of the servers' sockets
_running = []


def python_command(script, *modules, folder=None, **variables):
    """Return the start of a command that runs a script, like ``[sys.executable, script]``.

    If there is something to import, the command asks a server for a process that has imported it.

    Args:
        script: path of the script.
        modules: what the server imports; by default the framework that the script imports itself.
        folder: where the server finds modules of the test's own.
        variables: environment variables of the job. Those that a framework may read while it is
            imported make the command a plain one.
    """
    if not modules:
        imported = _IMPORTS.findall(pathlib.Path(script).read_text())
        modules = ("tensorflow",) if "tensorflow" in imported else tuple(imported[:1])
    if not modules or any(map(_READ_AT_IMPORT.match, variables)):
        return [sys.executable, script]
    return [sys.executable, "-I", "-S", HERE / "served_rank.py", *_sockets(folder, modules), script]


def _sockets(folder, modules):
    key = folder, modules
    if key not in _servers:
        _servers[key] = [_start(folder, modules, seed) for seed in _SEEDS]
    return _servers[key]


def _sleeping_yield():
    """Return the path of the library of sleeping_yield.cc, which is made if it is not there."""
    library = HERE.parent.parent / "build" / "tests" / "sleeping_yield.so"
    if library.exists() and library.stat().st_mtime >= _SLEEPING_YIELD.stat().st_mtime:
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")  # another process may make it at the same time
    compiler = [*os.environ.get("CXX", "g++").split(), "-O1", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-o", made, _SLEEPING_YIELD], check=True)
    made.replace(library)
    return library


def _start(folder, modules, seed):
    """Start a server, which ends with this process; return the path of its socket."""
    if not _running:
        # the path of a socket has at most 107 bytes, so it is not in TMPDIR
        _running.append(tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True))
    place = pathlib.Path(_running[0].name) / str(len(_running))
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONHASHSEED=seed,
        LD_PRELOAD=f"{os.environ.get('LD_PRELOAD', '')} {_sleeping_yield()}".strip(),
    )
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, HERE / "rank_server.py", place, *modules]
    _running.append(
        subprocess.Popen(list(map(str, command)), env=environment, stdin=subprocess.PIPE)
    )
    while not place.exists():
        if _running[-1].poll() is not None:
            raise RuntimeError("the server of ranks ended before its first rank")
    return place
