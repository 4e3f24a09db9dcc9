"""Build the library of the emulated device codecs, and the objects that other libraries share.

The same .cu files that nvcc compiles are compiled by g++ with tests/cuda/emulator on the include
path.
"""

import fcntl
import os
import pathlib
import shlex

import incremental_build

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORE = ROOT / "deepreduce_hvd" / "csrc"
EMULATOR = HERE / "emulator"
SCHEDULER = EMULATOR / "scheduler.cc"
INCLUDES = tuple(path.relative_to(ROOT) for path in (CORE, EMULATOR))
#: DEEPREDUCE_CUDA_SANITIZE -> compiler flags of the library; the process must preload the sanitizer
SANITIZERS = {"": None, "1": "address,undefined", "thread": "thread"}


def sources():
    """Return the sources of the library except the scheduler.

    From the CPU core, they include only what raises errors.
    """
    return [
        *sorted((CORE / "cuda").rglob("*.cu")), CORE / "base.cc", CORE / "api" / "arguments.cc",
        *sorted(HERE.glob("*.cc")),
    ]  # fmt: skip


def _folder(sanitizer=None):
    suffix = "" if sanitizer is None else f"_{sanitizer.replace(',', '_')}"
    return ROOT / "build" / f"cuda_emulation{suffix}"


def compiler():
    return shlex.split(os.environ.get("CXX", "g++"))


def compile_sources(sources, folder, options, together=False):
    """Compile the sources that have changed into build/, perhaps as one; return the objects."""
    names = [path.relative_to(ROOT) for path in sources]
    command = [*compiler(), "-g1", "-fPIC", "-ffp-contract=off", *options]
    build = incremental_build.compile_together if together else incremental_build.compile_all
    return build(names, ROOT / "build" / folder, command, root=ROOT)


def link(library, objects, options):
    """Link a library of these objects, unless it is up to date; return its path."""
    command = [*compiler(), "-shared", *map(str, objects), *options, "-o", str(library)]
    incremental_build.link(library, command, objects)
    return library


def build(sanitizer=None):
    """Compile what has changed, and return the path of the library."""
    folder = _folder(sanitizer)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of one test run may build it
        return _build(folder, sanitizer)


def _build(folder, sanitizer):
    checked = [] if sanitizer is None else [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    # the scheduler itself tells ThreadSanitizer which thread of a block runs
    of_scheduler = ["-DDR_EMULATION_RACES"] if sanitizer == "thread" else checked
    options = [
        "-std=c++17", "-O2" if sanitizer is None else "-O1", "-Wall", "-Wextra", "-Werror",
        *(f"-I{path}" for path in INCLUDES), "-x", "c++",
    ]  # fmt: skip
    objects = compile_sources(sources(), folder, [*options, *checked])
    objects += compile_sources([SCHEDULER], folder, [*options, *of_scheduler])
    return link(folder / "library.so", objects, [*checked, "-Wl,-Bsymbolic,-z,defs"])


def core():
    """Return the package's core for the host, as objects or a library.

    An in-place build has left it. Without one, it is compiled.
    """
    library = ROOT / "build" / "native" / "libdeepreduce_core.a"
    return [library] if library.exists() else compile_core("pretend_cuda/core")


def compile_core(folder, *options):
    """Compile the package's core for the host into a folder of build/; return the objects."""
    sources = [
        path
        for path in sorted(CORE.rglob("*.cc"))
        if path.name != "python.cc" and "cuda" not in path.parts
    ]
    return compile_sources(sources, folder, ["-O1", "-std=c++17", f"-I{CORE}", *options])


def kernels_and_core():
    """Return what the GPU operators are linked with.

    These are the objects of the emulated kernels and of the emulator, and the package's core.
    """
    build()
    emulated = [*sorted((CORE / "cuda").rglob("*.cu")), SCHEDULER]
    return [*(_folder() / f"{path.relative_to(ROOT)}.o" for path in emulated), *core()]
