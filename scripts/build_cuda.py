"""Compiles every .cu file of the core with nvcc into objects: what setup.py links where PyTorch has CUDA, and the compile check where there is no GPU.

    python scripts/build_cuda.py --architectures 7.0 8.0 9.0 --folder build/cuda

Needs nvcc, no GPU. Prints one line a file; exits with 1 when one does not compile and with 2 when there is no nvcc.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORE = ROOT / "deepreduce_hvd" / "csrc"
#: of the devices that the bytes are meant for; the last one is kept as PTX too, for those that come later
ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0")
#: the same float32 and float64 results as the processor's: no fused multiply-add, no flushing of denormals, exact division and square root
EXACT = ("--fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")


def find_nvcc():
    """The path of nvcc, or None: from $CUDACXX, $CUDA_HOME, PATH, or the usual place."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    if os.environ.get("CUDA_HOME"):
        candidates.insert(1, os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc"))
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def known_architectures(nvcc):
    """The architectures that this nvcc compiles for, such as {"7.5", "9.0"}."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    digits = [name.removeprefix("compute_") for name in listed]
    return {f"{number[:-1]}.{number[-1]}" for number in digits if number.isdigit()}


def architecture_options(architectures):
    """nvcc's options for code of each architecture and PTX of the last."""
    numbers = [architecture.replace(".", "") for architecture in architectures]
    options = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return [*options, f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]


def sources():
    return sorted((CORE / "cuda").rglob("*.cu"))


def build(nvcc, folder, architectures, jobs=2, report=print):
    """Objects of all sources, compiled where they or a header are newer; raises CalledProcessError when one does not compile."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        "-std=c++17", "-O3", *EXACT, *architecture_options(architectures), f"-I{CORE}", f"-I{CORE / 'cuda'}", "-Xcompiler=-fPIC,-Wall,-fvisibility=hidden",
        "-Werror=all-warnings",
    ]  # fmt: skip
    newest_header = max(path.stat().st_mtime for pattern in ("*.h", "*.cuh") for path in CORE.rglob(pattern))
    stamp = folder / "options"
    same_options = stamp.exists() and stamp.read_text() == "\n".join([nvcc, *options])

    def compile_one(source):
        made = folder / ("_".join(source.relative_to(CORE).parts) + ".o")
        if same_options and made.exists() and made.stat().st_mtime > max(newest_header, source.stat().st_mtime):
            return made
        start = time.monotonic()
        subprocess.run([nvcc, *options, "-c", str(source), "-o", str(made)], check=True)
        report(f"{source.relative_to(ROOT)}: {time.monotonic() - start:.1f} s")
        return made

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, sources()))
    stamp.write_text("\n".join([nvcc, *options]))
    return objects


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--architectures", nargs="+", default=None, help=f"default: those of {' '.join(ARCHITECTURES)} that nvcc knows")
    parser.add_argument("--folder", default=str(ROOT / "build" / "cuda"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc: expected it in $CUDACXX, $CUDA_HOME/bin, PATH or /usr/local/cuda/bin, got none; no CUDA source was compiled", file=sys.stderr)
        return 2
    known = known_architectures(nvcc)
    wanted = arguments.architectures or [architecture for architecture in ARCHITECTURES if architecture in known]
    unknown = sorted(set(wanted) - known)
    if unknown:
        print(f"architectures: expected some of {' '.join(sorted(known))} for {nvcc}, got {' '.join(unknown)}", file=sys.stderr)
        return 1
    try:
        objects = build(nvcc, arguments.folder, wanted, arguments.jobs)
    except subprocess.CalledProcessError as error:
        print(f"nvcc: {error.cmd[-3]} does not compile", file=sys.stderr)
        return 1
    print(f"{len(objects)} objects for {' '.join(wanted)} in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
