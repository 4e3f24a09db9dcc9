"""Build Horovod, unmodified, for the frameworks in the virtual environment; cache the wheel.

Horovod 0.28.1 is only available as source. Its CMake files request C++14, which the headers of
current frameworks refuse. So a wrapper around the compiler appends -std=c++17: the last -std on a
command line is the one that counts. It also appends -g0: debug information, which nothing here
reads, takes longer to build and makes the wheel 20 times as large.
"""

import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from console import LOGS, SetUpError, cache_directory, clean_environment, locked, run, say

VERSION = "0.28.1"
# part of the cache key; increase it when this file builds another wheel from the same versions
RECIPE = 2
# memory that one compiler process needs for the frameworks' headers, with a margin
BYTES_PER_COMPILER = 2 * 1024**3
EXPECTED_PARTS = ("[X] TensorFlow", "[X] PyTorch", "[X] Gloo")

ASK_VERSIONS = (
    "from importlib.metadata import version; print(version('torch'), version('tensorflow-cpu'))"
)


def compiler():
    return os.environ.get("CXX") or "g++"


def cache_key(python):
    """Return a key of everything that the wheel's binary depends on."""
    versions = subprocess.run(
        [python, "-c", ASK_VERSIONS],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=True,
    )
    torch, tensorflow = versions.stdout.split()
    gcc = subprocess.run(
        [*shlex.split(compiler()), "-dumpversion"], capture_output=True, text=True, check=True
    ).stdout.strip()
    tag = "cp" + "".join(platform.python_version_tuple()[:2])
    libc = "".join(platform.libc_ver())
    return f"horovod-{VERSION}-{tag}-{platform.machine()}-{libc}-gcc{gcc}-torch{torch}-tensorflow{tensorflow}-recipe{RECIPE}"


def compiler_processes():
    """Return the number of compiler processes: one per core, fewer if free memory is short."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                memory = int(line.split()[1]) * 1024
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_COMPILER))


def build(python, folder):
    """Build the wheel into folder; it is moved there when it is complete."""
    processes = compiler_processes()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        wrapper = scratch / "g++-c++17"
        wrapper.write_text(f'#!/bin/sh\nexec {compiler()} "$@" -std=c++17 -g0\n')
        wrapper.chmod(0o755)
        environment = clean_environment(
            CXX=str(wrapper), MAKEFLAGS=f"-j{processes}",
            PATH=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
            HOROVOD_WITH_GLOO="1", HOROVOD_WITHOUT_MPI="1", HOROVOD_WITH_PYTORCH="1",
            HOROVOD_WITH_TENSORFLOW="1",
            HOROVOD_WITHOUT_MXNET="1",
        )  # fmt: skip
        # pip's own cache does not know for which frameworks a wheel was built, so it is not used
        command = [python, "-m", "pip", "wheel", "-v", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--no-binary", "horovod",
                   "--progress-bar", "off", "-w", scratch, f"horovod=={VERSION}"]  # fmt: skip
        run(command, f"Horovod {VERSION}: building with {processes} compiler processes", "4 min on 2 cores",
            percent_pattern=r"\[ *(\d+)%\]", environment=environment,
            log_name="horovod")  # fmt: skip
        wheels = list(scratch.glob("horovod-*.whl"))
        if len(wheels) != 1:
            raise SetUpError(f"Horovod: expected one wheel from pip, got {len(wheels)}")
        wheels[0].replace(folder / wheels[0].name)


def install(python, stamp):
    """Install Horovod into the virtual environment, from the cached wheel or a new one.

    ``stamp(key)`` reads and records what is installed.
    """
    key = cache_key(python)
    if stamp("horovod") == key:
        say(f"Horovod {VERSION}: installed")
        return
    folder = cache_directory() / key
    with locked(cache_directory() / f"{key}.lock", "building Horovod"):
        if not list(folder.glob("horovod-*.whl")):
            build(python, folder)
        else:
            say(f"Horovod {VERSION}: the wheel is in the cache ({folder})")
    wheel = next(folder.glob("horovod-*.whl"))
    run([python, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--progress-bar", "off", wheel],
        f"Horovod {VERSION}: installing", "3 s", log_name="horovod-install")  # fmt: skip
    check(python)
    stamp("horovod", key)


def check(python):
    """Check that horovodrun --check-build lists both frameworks and Gloo."""
    environment = clean_environment(
        PATH=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}", TF_CPP_MIN_LOG_LEVEL="3"
    )
    command = [Path(python).parent / "horovodrun", "--check-build"]
    run(
        command,
        f"Horovod {VERSION}: checking what it was built with",
        "20 s",
        environment=environment,
        log_name="horovod-check",
    )
    listed = (LOGS / "horovod-check.log").read_text(errors="replace")
    missing = [part for part in EXPECTED_PARTS if part not in listed]
    if missing:
        raise SetUpError(
            f"horovodrun --check-build: expected {', '.join(EXPECTED_PARTS)}, got no "
            f"{', '.join(missing)}:\n{listed[-2000:]}"
        )
