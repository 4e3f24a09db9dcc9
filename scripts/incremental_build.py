"""Compile and link C++ and CUDA sources, and repeat only what has changed.

setup.py, the scripts and the tests that compile share this file. It needs only Python.

An output is up to date if the same command made it and no input is newer. The command is in a
record, by default ``OUTPUT.command``. The inputs of an object are its source and the headers that
the compiler lists with ``-MD``.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class CommandError(RuntimeError):
    """A compiler or linker failed. Its messages are on stderr."""


def cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def with_system_headers(flags):
    """Return a compiler's flags with -isystem for -I: it does not warn about these headers."""
    return [
        word
        for flag in flags
        for word in (("-isystem", flag[2:]) if flag.startswith("-I") else (flag,))
    ]


def headers_of(dependencies):
    """Return the files in a compiler's -MD output, or none if there is no such output yet.

    System headers are included, so that another torch or Python is noticed.
    """
    if not dependencies.exists():
        return []
    text = dependencies.read_text().replace("\\\n", " ").replace("\\ ", "\0")
    return [word.replace("\0", " ") for word in text.partition(": ")[2].split()]


def _record_of(output, record):
    return Path(f"{output}.command") if record is None else record


def _up_to_date(output, command, inputs, record=None):
    record = _record_of(output, record)
    if not output.exists() or not record.exists() or record.read_text() != shlex.join(command):
        return False
    made = record.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= made for path in inputs)


def _run(command, output, root, record=None):
    """Run a command. Its output moves into place when complete; then the record is written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    record = _record_of(output, record)
    record.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        made = Path(scratch).resolve() / output.name
        done = subprocess.run(
            [str(made) if word == str(output) else word for word in command],
            cwd=root,
            capture_output=True,
            text=True,
        )
        if done.stdout or done.stderr:
            print(done.stdout + done.stderr, file=sys.stderr, flush=True)
        if done.returncode != 0:
            raise CommandError(
                f"expected exit status 0, got {done.returncode} from: {shlex.join(command)}"
            )
        made.replace(output)
    record.write_text(shlex.join(command))


def link(output, command, inputs, record=None, root=Path()):
    """Make a library, if it is not up to date; return whether it was made.

    Args:
        output: path of the library.
        command: words of the command, which contain ``str(output)``.
        inputs: paths of the objects and libraries that go into it.
        record: path of the record of the command, if it must not be beside the output.
        root: folder that the command runs in.

    Raises:
        CommandError: the command failed.
    """
    if _up_to_date(output, command, inputs, record):
        return False
    _run(command, output, root, record)
    return True


def compile_all(sources, folder, command, jobs=None, root=Path(), report=print, verbose=False):
    """Compile the sources that have changed; return all objects, in the order of the sources.

    Args:
        sources: paths of the sources, relative to ``root``.
        folder: folder for the objects.
        command: the compiler and its options.
        jobs: number of compilers at a time; by default one per core.
        root: folder that the compiler runs in.
        report: called with one line if something is compiled.
        verbose: report one line per source too, with its time.

    Raises:
        CommandError: a source does not compile.
    """
    jobs = jobs or cores()
    targets = [folder / f"{source}.o" for source in sources]
    pending = _outdated(sources, targets, command, root)
    if pending:
        report(f"compiling {len(pending)} of {len(sources)} files of {folder.name} on {jobs} cores")
    _compile(pending, jobs, root, report if verbose else None)
    return targets


def compile_together(sources, folder, command, jobs=None, root=Path(), report=print):
    """Compile the sources of each folder as one, if any of them has changed.

    Small sources that include the same large headers take less time together, because the headers
    are read once. The arguments are those of :func:`compile_all`.

    Returns:
        A list of objects, one per folder of the sources.

    Raises:
        CommandError: a source does not compile.
    """
    places = {}
    for source in map(Path, sources):
        places.setdefault(source.parent, []).append(source)
    joined, targets = [], []
    for place, some in places.items():
        joined.append(folder / place / f"{place.name}.cc")
        targets.append(joined[-1].with_suffix(".o"))
        join(some, joined[-1], root)
    pending = _outdated(joined, targets, command, root)
    for source, *_ in pending:
        place = source.parent.relative_to(folder)
        report(f"compiling {len(places[place])} files of {place} as one")
    _compile(pending, jobs or cores(), root)
    return targets


def join(sources, path, root=Path()):
    """Write a source that includes all sources, which are relative to ``root``."""
    text = "".join(
        f'#include "{os.path.relpath(root / source, path.parent)}"\n' for source in sources
    )
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _outdated(sources, targets, command, root):
    """Return (source, command, object) of each source that must be compiled."""
    found = []
    for source, target in zip(sources, targets):
        dependencies = target.with_suffix(".d")
        words = [*command, "-MD", "-MF", str(dependencies), "-c", str(source), "-o", str(target)]
        inputs = [root / name for name in (source, *headers_of(dependencies))]
        if not dependencies.exists() or not _up_to_date(target, words, inputs):
            found.append((source, words, target))
    return found


def _compile(pending, jobs, root, report=None):
    """Run the commands of ``_outdated``, and report the time of each source if asked to."""

    def compile_one(source, words, target):
        started = time.monotonic()
        _run(words, target, root)
        if report is not None:
            report(f"{source}: {time.monotonic() - started:.1f} s")

    with ThreadPoolExecutor(jobs) as pool:
        for result in [pool.submit(compile_one, *one) for one in pending]:
            result.result()
