"""Prepare a clone: .venv with the pinned packages, Horovod, this package, the data.

    python3.11 scripts/set_up.py           everything (make setup)
    python3.11 scripts/set_up.py --data    the data only (make data)

A step is skipped if nothing that it depends on has changed, so running this again takes seconds.
"""

import sys

import preflight

if __name__ == "__main__":  # before the imports below, which an older Python cannot parse
    preflight.stop_on(preflight.python_problems())

import hashlib
import json
import os
import subprocess
import time
import venv

import build_horovod
import fetch_data
from console import LOGS, ROOT, SetUpError, cache_directory, clean_environment, locked, run, say

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "set-up.json"
PINS = ROOT / "requirements.txt"
#: where PyTorch publishes its builds without CUDA
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: installed without its dependencies, because they include the full tensorflow, which overwrites
#: the files of tensorflow-cpu
WITHOUT_DEPENDENCIES = "tf_keras"


def stamp(step, value=None):
    """Return what is recorded for a step, or None; record ``value`` first, if given."""
    try:
        notes = json.loads(STAMPS.read_text())
    except (FileNotFoundError, ValueError):  # none yet, or written in part by an older version
        notes = {}
    if value is not None:
        notes[step] = value
        # a set-up that is interrupted must not leave a part of the file
        written = STAMPS.with_suffix(".new")
        written.write_text(json.dumps(notes, indent=1))
        written.replace(STAMPS)
    return notes.get(step)


def digest(*paths):
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def make_venv():
    """Create .venv if it is missing.

    Raises:
        SetUpError: .venv is of another Python, or was moved.
    """
    if not VENV.exists():
        say(f"making .venv with Python {sys.version.split()[0]}: usually 5 s")
        venv.create(VENV, with_pip=True, symlinks=True)
    ask = "import sys; print(sys.version_info[:2], sys.prefix)"
    answer = (
        subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, env=clean_environment())
        if PYTHON.exists()
        else None
    )
    expected = f"{sys.version_info[:2]} {VENV}"
    if answer is None or answer.stdout.strip() != expected:
        got = "no interpreter" if answer is None else answer.stdout.strip() or answer.stderr.strip()
        raise SetUpError(
            f".venv: expected an environment of {expected}, got {got}; remove it (make "
            "distclean) and run make setup again"
        )
    if not _runs("-c", "import pip"):  # a set-up was interrupted here
        say(".venv has no pip: installing it; usually 3 s")
        if not _runs("-m", "ensurepip"):
            raise SetUpError(
                ".venv: expected pip, got none, and python -m ensurepip failed; remove it (make "
                "distclean) and run make setup again"
            )


def _runs(*arguments):
    """Return whether the Python of .venv ends without an error."""
    command = [PYTHON, *arguments]
    done = subprocess.run(command, capture_output=True, env=clean_environment())
    return done.returncode == 0


def install_torch(pip, line):
    """Install the build of PyTorch without CUDA, which PyPI does not have.

    The other one brings twenty more packages, of several gigabytes, and Horovod would build its
    CUDA part for it.

    Args:
        pip: command that installs.
        line: the line of the requirements.
    """
    for where, options in (("the configured index", []), (_CPU_INDEX, ["--index-url", _CPU_INDEX])):
        try:
            run(
                [*pip, "--no-deps", *options, f"{line}+cpu"],
                f"PyTorch without CUDA, from {where}",
                "10 s to 1 min, 0.2 GB of downloads",
                log_name="pytorch",
            )
        except SetUpError:
            say(f"PyTorch without CUDA: not found in {where}")
        else:
            return
    say("PyTorch: going on with the build with CUDA, several GB of downloads")


def install_pins():
    wanted = digest(PINS)
    if stamp("pins") == wanted:
        say("pinned packages: installed")
        return
    lines = [
        line.strip()
        for line in PINS.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    alone = [line for line in lines if line.startswith(f"{WITHOUT_DEPENDENCIES}==")]
    LOGS.mkdir(parents=True, exist_ok=True)
    rest = LOGS / "requirements-with-dependencies.txt"
    rest.write_text("\n".join(line for line in lines if line not in alone) + "\n")
    pip = [PYTHON, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    install_torch(pip, next(line for line in lines if line.startswith("torch==")))
    run(
        [*pip, "-r", rest],
        f"pinned packages: installing {len(lines)}",
        "1 to 3 min, 0.7 GB of downloads",
        log_name="packages",
    )
    run(
        [*pip, "--no-deps", *alone],
        f"pinned packages: {alone[0]}",
        "3 s",
        log_name="packages-alone",
    )
    stamp("pins", wanted)


def install_package():
    """Build the native sources that changed, and install this package in editable mode.

    The installation is repeated only when setup.py or pyproject.toml has changed.
    """
    environment = clean_environment(
        DEEPREDUCE_WITH_PYTORCH="1",
        DEEPREDUCE_WITH_TENSORFLOW="1",
        PATH=f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}",
    )
    say("this package: building what changed; usually 1 to 2 min the first time, 2 s after")
    built = subprocess.run(
        [PYTHON, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=environment
    )
    if built.returncode != 0:
        raise SetUpError(
            "this package: expected exit status 0 from setup.py build_ext, got "
            f"{built.returncode}; the messages of the compiler are above"
        )
    wanted = digest(ROOT / "setup.py", ROOT / "pyproject.toml")
    if stamp("package") != wanted:
        run([PYTHON, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--progress-bar", "off", "-e", "."],
            "this package: installing, editable", "10 s", environment=environment,
            log_name="package")  # fmt: skip
        stamp("package", wanted)


def places():
    """Return where disk space is needed, for what is not there yet."""
    needs = []
    if not STAMPS.exists():
        needs.append((".venv", str(ROOT), preflight.FREE_BYTES_CLONE))
    if not list(cache_directory().glob("horovod-*/*.whl")):
        needs.append(("the cache", str(cache_directory()), preflight.FREE_BYTES_CACHE))
    return needs


def main(arguments):
    if arguments not in ([], ["--data"]):
        sys.exit(f"set_up.py: expected nothing or --data, got {' '.join(arguments)}")
    start = time.monotonic()
    data_only = arguments == ["--data"]
    preflight.stop_on(
        fetch_data.fashion_mnist_problems() + ([] if data_only else preflight.problems(places()))
    )
    try:
        with locked(ROOT / "build" / "set-up.lock", "at work in this clone"):
            make_venv()
            fetch_data.fetch(PYTHON)
            if not data_only:
                install_pins()
                build_horovod.install(PYTHON, stamp)
                install_package()
    except SetUpError as error:
        sys.exit(f"[set-up] {error}")
    say(f"ready in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
