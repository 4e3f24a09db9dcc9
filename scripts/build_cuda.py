"""Compile every .cu file of the core with nvcc, as a compile check on machines without a GPU.

    python scripts/build_cuda.py --architectures 7.0 8.0 9.0 --folder build/cuda

setup.py links the same objects where PyTorch has CUDA. This script needs nvcc, but no GPU. It
prints one line per file. The exit status is 1 if a file does not compile, and 2 if there is no
nvcc.
"""

import argparse
import pathlib
import sys

import nvcc
from incremental_build import CommandError, compile_all, cores

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORE = ROOT / "deepreduce_hvd" / "csrc"


def sources():
    return sorted((CORE / "cuda").rglob("*.cu"))


def build(compiler, folder, architectures, jobs=None):
    """Compile the sources that have changed, for all architectures; return all objects.

    Raises:
        CommandError: a source does not compile.
    """
    codes = [
        option
        for name in architectures
        for option in nvcc.code_options(name, ptx=name == architectures[-1])
    ]
    command = [
        compiler, "-std=c++17", "-O3", *nvcc.EXACT, *codes, f"-I{CORE}",
        "-Xcompiler=-fPIC,-Wall,-fvisibility=hidden", "-Werror=all-warnings",
    ]  # fmt: skip
    names = [source.relative_to(ROOT) for source in sources()]
    folder = pathlib.Path(folder).resolve()
    return compile_all(names, folder, command, jobs, root=ROOT, verbose=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--architectures",
        nargs="+",
        default=None,
        help=f"default: those of {' '.join(nvcc.ARCHITECTURES)} that nvcc knows",
    )
    parser.add_argument("--folder", default=str(ROOT / "build" / "cuda"))
    parser.add_argument("--jobs", type=int, default=cores())
    arguments = parser.parse_args()
    compiler, nowhere = nvcc.look()
    if compiler is None:
        print(f"nvcc: expected one, got {nowhere}; no CUDA source was compiled", file=sys.stderr)
        return 2
    known = nvcc.known_architectures(compiler)
    wanted = arguments.architectures or [
        architecture for architecture in nvcc.ARCHITECTURES if architecture in known
    ]
    unknown = sorted(set(wanted) - known)
    if unknown:
        print(
            (
                f"architectures: expected some of {' '.join(sorted(known))} for {compiler}, "
                f"got {' '.join(unknown)}"
            ),
            file=sys.stderr,
        )
        return 1
    try:
        objects = build(compiler, arguments.folder, wanted, arguments.jobs)
    except CommandError as error:
        print(f"nvcc: {error}", file=sys.stderr)
        return 1
    print(f"{len(objects)} objects for {' '.join(wanted)} in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
