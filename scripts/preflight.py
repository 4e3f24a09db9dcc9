"""Check what the machine must have before a build; name the Debian package of each missing part.

This file also runs on old Pythons (3.6 and later), because it must report that the Python is too
old. It uses only the standard library.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

PYTHON = (3, 11)  # the version that the pinned TensorFlow and Horovod support
OLDEST_COMPILER = 11  # torch's headers need C++20
FREE_BYTES_CLONE = 4 * 1024**3  # .venv needs about 2.5 GiB, and pip needs more to unpack
FREE_BYTES_CACHE = 1024**3  # Horovod's build and wheel, and the data

#: what several hosts on one machine need (make bench-hosts); nothing else needs it
HOST_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}

HEADERS = {
    "Python.h": ("libpython{}.{}-dev".format(*PYTHON), "the Python headers"),
    "zlib.h": ("zlib1g-dev", "zlib"),
}


def python_problems():
    """Return problems of this Python: a wrong version, or no support for virtual environments."""
    have = sys.version_info[:2]
    if have != PYTHON:
        return [
            "Python: the pinned versions of TensorFlow and Horovod expect {}.{}, got "
            "{}.{} ({}); Debian packages: "
            "python{v} python{v}-venv libpython{v}-dev, or name another with make "
            "PYTHON=/path/to/python{v}".format(
                PYTHON[0], PYTHON[1], have[0], have[1], sys.executable, v="{}.{}".format(*PYTHON)
            )
        ]
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            return [
                (
                    "Python: expected the module {}, got none in {}; Debian package: "
                    "python{}.{}-venv"
                ).format(module, sys.executable, *PYTHON)
            ]
    return []


def platform_problems():
    found = (platform.system(), platform.machine())
    if found != ("Linux", "x86_64"):
        return ["platform: the pinned wheels expect Linux on x86_64, got {} on {}".format(*found)]
    return []


def tool_problems():
    """Return problems of make and the compiler: missing or too old."""
    problems = []
    if shutil.which("make") is None:
        problems.append("make: expected on PATH, got none; Debian package: make")
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        return [
            *problems,
            f"C++ compiler: expected {command[0]} on PATH, got none; Debian package: g++",
        ]
    answer = subprocess.run(
        [*command, "-dumpfullversion", "-dumpversion"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    text = answer.stdout.decode(errors="replace").strip()
    version = re.match(r"(\d+)[.\d]*$", text)
    if answer.returncode != 0 or version is None:
        problems.append(f"C++ compiler: expected a version from {command[0]}, got: {text}")
    elif int(version.group(1)) < OLDEST_COMPILER and "clang" not in command[0]:
        problems.append(
            f"C++ compiler: expected g++ {OLDEST_COMPILER} or newer, got {text}; Debian "
            "package: g++"
        )
    return problems


def header_problems(with_python=True):
    """Return missing headers and libraries, found by compiling and linking as the build does."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        return []
    problems = []
    for header, (package, what) in sorted(HEADERS.items()):
        if header == "Python.h" and not with_python:
            continue
        include = sysconfig.get_path("include") if header == "Python.h" else None
        with tempfile.TemporaryDirectory() as scratch:
            source = os.path.join(scratch, "trial.cc")
            with open(source, "w") as file:
                if header == "zlib.h":
                    file.write(
                        "#include <zlib.h>\nint main() { return zlibVersion() == nullptr; }\n"
                    )
                else:
                    file.write(f"#include <{header}>\nint main() {{ return 0; }}\n")
            trial = [*command, "-I" + include] if include else command[:]
            trial += [source, "-o", os.path.join(scratch, "trial")] + (
                ["-lz"] if header == "zlib.h" else []
            )
            done = subprocess.run(trial, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                errors = [
                    line
                    for line in done.stdout.decode(errors="replace").splitlines()
                    if "error" in line or "cannot find" in line
                ]
                where = " in " + include if include else ""
                problems.append(
                    "{}: expected {}{} to compile and link, got: {}; Debian package: {}".format(
                        what,
                        header,
                        where,
                        errors[0] if errors else f"exit status {done.returncode}",
                        package,
                    )
                )
    return problems


def host_problems():
    """Return missing tools for several hosts on one machine.

    They are tools for root, which may not be on a user's PATH.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [
        f"hosts: expected {tool} on PATH, got none; Debian package: {package}"
        for tool, package in sorted(HOST_TOOLS.items())
        if shutil.which(tool, path=path) is None
    ]


def disk_problems(places):
    """Return places with too little free space.

    ``places`` are (what, path, bytes). Places on one file system need the sum of their bytes.
    """
    problems = []
    needs = {}
    for what, path, size in places:
        while not os.path.exists(path):
            path = os.path.dirname(path)
        device = os.stat(path).st_dev
        names, _, total = needs.get(device, ([], path, 0))
        needs[device] = ([*names, what], path, total + size)
    for names, path, total in needs.values():
        free = shutil.disk_usage(path).free
        if free < total:
            problems.append(
                "disk: expected {:.1f} GB free at {} for {}, got {:.1f} GB".format(
                    total / 1e9, path, " and ".join(names), free / 1e9
                )
            )
    return problems


def problems(places=()):
    """Return all problems, one sentence each."""
    python = python_problems()
    # header problems of a wrong Python would only confuse
    return (
        python
        + platform_problems()
        + tool_problems()
        + header_problems(with_python=not python)
        + disk_problems(places)
    )


def stop_on(found):
    """Exit with a list of all problems, if there are any."""
    if found:
        lines = ["set-up stops before building anything:"] + ["  - " + problem for problem in found]
        packages = sorted(
            {
                name
                for problem in found
                for name in problem.partition("Debian package")[2]
                .partition(":")[2]
                .partition(",")[0]
                .split()
            }
        )
        if packages:
            lines.append("On Debian or Ubuntu: apt-get install " + " ".join(packages))
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    stop_on(problems() + (host_problems() if sys.argv[1:] == ["--hosts"] else []))
    print("nothing is missing")
