"""Compile every .cu file of the core with nvcc, as a compile check on machines without a GPU.

    python scripts/build_cuda.py --architectures 7.0 8.0 9.0 --folder build/cuda

setup.py links the same objects where PyTorch has CUDA. This script needs nvcc, but no GPU. It
prints one line per file. The exit status is 1 if a file does not compile, and 2 if there is no
nvcc.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import nvcc

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORE = ROOT / "deepreduce_hvd" / "csrc"


def sources():
    return sorted((CORE / "cuda").rglob("*.cu"))


def build(compiler, folder, architectures, jobs=2, report=print):
    """Return the objects of all sources; compile those whose source or a header is newer.

    Raises:
        CalledProcessError: a source does not compile.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    codes = [
        option
        for name in architectures
        for option in nvcc.code_options(name, ptx=name == architectures[-1])
    ]
    options = [
        "-std=c++17", "-O3", *nvcc.EXACT, *codes, f"-I{CORE}", "-Xcompiler=-fPIC,-Wall,-fvisibility=hidden",
        "-Werror=all-warnings",
    ]  # fmt: skip
    newest_header = max(
        path.stat().st_mtime
        for pattern in ("*.h", "*.cuh", "*.def")
        for path in CORE.rglob(pattern)
    )
    stamp = folder / "options"
    same_options = stamp.exists() and stamp.read_text() == "\n".join([compiler, *options])

    def compile_one(source):
        made = folder / ("_".join(source.relative_to(CORE).parts) + ".o")
        if (
            same_options
            and made.exists()
            and made.stat().st_mtime > max(newest_header, source.stat().st_mtime)
        ):
            return made
        start = time.monotonic()
        subprocess.run([compiler, *options, "-c", str(source), "-o", str(made)], check=True)
        report(f"{source.relative_to(ROOT)}: {time.monotonic() - start:.1f} s")
        return made

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, sources()))
    stamp.write_text("\n".join([compiler, *options]))
    return objects


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--architectures",
        nargs="+",
        default=None,
        help=f"default: those of {' '.join(nvcc.ARCHITECTURES)} that nvcc knows",
    )
    parser.add_argument("--folder", default=str(ROOT / "build" / "cuda"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
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
            f"architectures: expected some of {' '.join(sorted(known))} for {compiler}, got {' '.join(unknown)}",
            file=sys.stderr,
        )
        return 1
    try:
        objects = build(compiler, arguments.folder, wanted, arguments.jobs)
    except subprocess.CalledProcessError as error:
        print(f"nvcc: {error.cmd[-3]} does not compile", file=sys.stderr)
        return 1
    print(f"{len(objects)} objects for {' '.join(wanted)} in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
