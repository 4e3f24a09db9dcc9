"""Test the preflight as on a user's machine, with tools and headers hidden."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import preflight
import pytest

ROOT = Path(__file__).resolve().parent.parent
PREFLIGHT = ROOT / "scripts" / "preflight.py"


def run(path=None, *, python=sys.executable, script=PREFLIGHT, arguments=(), **environment):
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CXX", "CPATH", "CPLUS_INCLUDE_PATH")
    }
    variables.update(environment)
    if path is not None:
        variables["PATH"] = str(path)
    return subprocess.run(
        [str(python), str(script), *arguments], env=variables, capture_output=True, text=True
    )


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def tools(tmp_path):
    """A separate PATH with make and the real compiler, from which tests remove tools."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("make", "g++"):
        # a script, not a link: through a link, a compiler wrapper would look for itself in another
        # folder
        executable(
            folder / name,
            f'#!/bin/sh\nPATH={os.environ["PATH"]!r} exec {shutil.which(name)} "$@"\n',
        )
    return folder


def hide_header(tools, tmp_path, header):
    """Give g++ an include folder with all system headers but one."""
    search = subprocess.run(
        ["g++", "-E", "-x", "c++", "-v", "/dev/null"], capture_output=True, text=True
    ).stderr
    folders = (
        search.partition("#include <...> search starts here:")[2]
        .partition("End of search list")[0]
        .split()
    )
    options = []
    for number, folder in enumerate(folders):
        twin = tmp_path / "include" / str(number)
        twin.mkdir(parents=True)
        for entry in os.scandir(folder):
            if entry.name != header:
                (twin / entry.name).symlink_to(entry.path)
        options += ["-isystem", str(twin)]
    executable(
        tools / "g++",
        (
            f"#!/bin/sh\nPATH={os.environ['PATH']!r} exec {shutil.which('g++')} -nostdinc "
            f'-nostdinc++ {" ".join(options)} "$@"\n'
        ),
    )


def test_nothing_missing(tools):
    done = run(tools)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing is missing"), done.stderr


def test_an_empty_name_of_the_compiler_is_none(tools):
    done = run(tools, CXX="")
    assert (done.returncode, done.stdout.strip()) == (0, "nothing is missing"), done.stderr


@pytest.mark.parametrize(
    "tool, words",
    [("make", "make: expected on PATH, got none"), ("g++", "expected g++ on PATH, got none")],
)
def test_missing_tool_is_named_with_its_package(tools, tool, words):
    (tools / tool).unlink()
    done = run(tools)
    assert (
        done.returncode == 1 and words in done.stderr and f"apt-get install {tool}" in done.stderr
    ), done.stderr


def test_all_missing_things_are_named_at_once(tools):
    (tools / "make").unlink()
    (tools / "g++").unlink()
    done = run(tools)
    assert "apt-get install g++ make" in done.stderr, done.stderr


def test_what_hosts_need_is_named_only_when_asked_for(tools):
    """A replaced shutil.which hides the tools of the machine, because /usr/sbin is searched too."""
    (tools / "sitecustomize.py").write_text(
        "import shutil\nfound = shutil.which\nshutil.which = lambda name, **more: None if "
        "name in ('ip', 'tc', 'sshd') else found(name, **more) or name\n"
    )
    without, with_hosts = (
        run(tools, PYTHONPATH=str(tools)),
        run(tools, arguments=["--hosts"], PYTHONPATH=str(tools)),
    )
    assert without.returncode == 0, without.stderr
    assert (
        with_hosts.returncode == 1
        and "apt-get install iproute2 openssh-server" in with_hosts.stderr
    ), with_hosts.stderr
    assert "hosts: expected sshd on PATH, got none" in with_hosts.stderr, with_hosts.stderr


def test_old_compiler(tools):
    executable(tools / "g++", "#!/bin/sh\necho 9.4.0\n")
    done = run(tools)
    assert (
        done.returncode == 1
        and "expected g++ 11 or newer, got 9.4.0; Debian package: g++" in done.stderr
    ), done.stderr


def test_missing_zlib(tools, tmp_path):
    hide_header(tools, tmp_path, "zlib.h")
    done = run(tools)
    assert (
        done.returncode == 1
        and "zlib.h" in done.stderr
        and "apt-get install zlib1g-dev" in done.stderr
    ), done.stderr
    assert "Python.h" not in done.stderr, done.stderr


def test_hiding_another_header_changes_nothing(tools, tmp_path):
    """The test above fails only because of zlib.h, not because of the replaced folders."""
    hide_header(tools, tmp_path, "aliases.h")
    done = run(tools)
    assert done.returncode == 0, done.stderr


def test_missing_python_headers(tools, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import sysconfig\noriginal = sysconfig.get_path\n"
        f"sysconfig.get_path = lambda name, *rest, **more: {str(empty)!r} if name == "
        "'include' else original(name, *rest, **more)\n"
    )
    done = run(tools, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and f"expected Python.h in {empty}" in done.stderr, done.stderr
    assert "apt-get install libpython3.11-dev" in done.stderr and "zlib" not in done.stderr, (
        done.stderr
    )


def test_missing_venv_module(tools, tmp_path):
    (tmp_path / "ensurepip.py").write_text(
        "raise ImportError('as Debian without python3.11-venv')\n"
    )
    done = run(tools, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "apt-get install python3.11-venv" in done.stderr, done.stderr


@pytest.mark.parametrize("script", ["preflight.py", "set_up.py"])
def test_wrong_python_is_named_before_anything_is_made(tools, tmp_path, script):
    """The expected version is replaced, so that no second Python is needed.

    The scripts create nothing.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.version_info = (3, 13, 0, 'final', 0)\n"
    )
    clone = tmp_path / "clone"
    shutil.copytree(
        ROOT / "scripts", clone / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = run(
        tools,
        script=clone / "scripts" / script,
        PYTHONPATH=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert done.returncode == 1 and "expect 3.11, got 3.13" in done.stderr, done.stderr
    assert "python3.11 python3.11-venv libpython3.11-dev" in done.stderr, done.stderr
    assert [entry.name for entry in clone.iterdir()] == ["scripts"]


def test_too_little_room():
    found = preflight.disk_problems(
        [("a", str(ROOT / "not-there-yet"), 2**61), ("b", str(ROOT), 2**61)]
    )
    assert (
        len(found) == 1
        and "for a and b" in found[0]
        and "expected 4611686018.4 GB free" in found[0]
    ), found
    assert preflight.disk_problems([("a", str(ROOT), 1)]) == []
