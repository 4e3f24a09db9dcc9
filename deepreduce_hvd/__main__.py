"""``python -m deepreduce_hvd --check``: print what is installed, what is missing and what to do."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import sys

import numpy as np

_SIMD_LEVELS = ("scalar", "AVX2", "AVX-512")


def _version(*distributions):
    """Return the version of the first of these distributions that is installed, or None."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class _Report:
    """Print one line per check and count the checks that need attention."""

    def __init__(self):
        self.problems = 0

    def good(self, what, text):
        print(f"  ok       {what:<24}{text}")

    def absent(self, what, text):
        print(f"  -        {what:<24}{text}")

    def problem(self, what, text, remedy):
        self.problems += 1
        print(f"  PROBLEM  {what:<24}{text}")
        print(f"           {'':<24}{remedy}")


def _check_core(report):
    import deepreduce_hvd as dr
    from deepreduce_hvd import _native

    report.good(
        "deepreduce_hvd",
        f"{dr.__version__}, Python {platform.python_version()}, NumPy {np.__version__}",
    )
    report.good("native core", f"{_SIMD_LEVELS[_native.simd_level()]} on {platform.machine()}")
    gradient = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    residual = np.zeros_like(gradient)
    payload = dr.recommended_codec().encode(gradient, residual)
    error = float(np.abs(dr.decode(payload) + residual - gradient).max())
    exact = dr.Codec(dr.TopK(1.0), index=dr.Rice()).encode(gradient)
    if error < 1e-6 and (dr.decode(exact) == gradient).all():
        report.good(
            "round trip", f"{4 * gradient.size:,} bytes -> {payload.size:,} bytes, nothing lost"
        )
    else:
        report.problem(
            "round trip",
            f"expected no loss, got an error of {error:g}",
            "please report this with the lines above",
        )


def _check_framework(report, name, module, distributions, adapter, switch):
    version = _version(*distributions)
    if importlib.util.find_spec(module) is None:
        report.absent(name, "not installed")
        return False
    try:
        loaded = importlib.import_module(adapter)
    except Exception as error:
        report.problem(
            name,
            f"{version}: {type(error).__name__}: {error}",
            f"install deepreduce_hvd again with {switch}=1",
        )
        return False
    if getattr(loaded, "WHY_NO_OPERATORS", None) is not None:
        report.problem(
            name,
            f"{version}: works on the host, without operators: {loaded.WHY_NO_OPERATORS}",
            (
                f"for operators: {switch}=1 pip install --force-reinstall --no-deps "
                "PATH_TO_THE_SOURCES"
            ),
        )
        return True
    report.good(name, f"{version}, operators loaded")
    return True


def _check_horovod(report, frameworks):
    version = _version("horovod")
    if version is None:
        report.absent("Horovod", "not installed; Compressor works without it in PyTorch's DDP only")
        return
    for name, module in frameworks:
        try:
            horovod = importlib.import_module(f"horovod.{module}")
        except Exception as error:
            first_line = str(error).strip().splitlines()[0]
            report.problem(
                f"Horovod for {name}",
                f"{version}: {first_line}",
                f"build Horovod with HOROVOD_WITH_{name.upper()}=1",
            )
            continue
        controllers = [
            label
            for label, built in (("Gloo", horovod.gloo_built), ("MPI", horovod.mpi_built))
            if built()
        ]
        report.good(
            f"Horovod for {name}", f"{version}, {' and '.join(controllers) or 'no controller'}"
        )


def main(arguments=None):
    """Run the checks and return the exit status, 1 if something needs attention."""
    parser = argparse.ArgumentParser(
        prog="python -m deepreduce_hvd", description="Gradient compression for Horovod."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        required=True,
        help="print what is installed and what is missing",
    )
    parser.parse_args(arguments)
    report = _Report()
    print("deepreduce_hvd --check")
    _check_core(report)
    frameworks = []
    for name, module, distributions, adapter in (
        ("PyTorch", "torch", ("torch",), "deepreduce_hvd.torch.ops"),
        (
            "TensorFlow",
            "tensorflow",
            ("tensorflow", "tensorflow-cpu"),
            "deepreduce_hvd.tensorflow.ops",
        ),
    ):
        if _check_framework(
            report, name, module, distributions, adapter, f"DEEPREDUCE_WITH_{name.upper()}"
        ):
            frameworks.append((name, module))
    _check_horovod(report, frameworks)
    print(f"{report.problems} problem(s)" if report.problems else "all is well")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
