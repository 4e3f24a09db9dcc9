"""``python -m deepreduce_hvd --check`` prints what is installed, what is missing and what to do.

``python -m deepreduce_hvd --build`` builds the operators for the frameworks that are installed now.
``python -m deepreduce_hvd --version`` prints the version.
"""

import argparse
import ctypes
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import stat
import subprocess
import sys
import tempfile

import numpy as np

from deepreduce_hvd.terminal import reader_may_end, show

_SIMD_LEVELS = ("scalar", "AVX2", "AVX-512")
_PACKAGE = pathlib.Path(__file__).resolve().parent
_BUILD = "python -m deepreduce_hvd --build"


class _Framework:
    """One framework, and how its operators are found, built and tried.

    Args:
        name: its name in messages and in the switches of the build.
        module: the name of its module.
        distributions: the names of distributions that contain the module.
        library: the first part of the name of the library of operators.
        trial: function (codec, gradient) that encodes a gradient with the framework's operators and
            returns the payload, (n,) uint8 on the host.
        cuda_of: function (framework's module, module of its operators) that returns the CUDA
            version the framework is built for, or None, and whether its operators work on GPUs.
    """

    def __init__(self, name, module, distributions, library, trial, cuda_of):
        self.name, self.module, self.distributions = name, module, distributions
        self.library, self.trial, self.cuda_of = library, trial, cuda_of
        self.operators = f"deepreduce_hvd.{module}.ops"
        self.switch = f"DEEPREDUCE_WITH_{name.upper()}"
        self.switch_off = f"DEEPREDUCE_WITHOUT_{name.upper()}"

    def version(self):
        return _version(*self.distributions) or "without a version"

    def installed(self):
        spec = importlib.util.find_spec(self.module)
        # a folder of this name in the current folder has no origin
        return spec is not None and spec.origin is not None

    def left_out(self):
        """Return whether the user has switched off the operators of this framework."""
        return os.environ.get(self.switch_off, "") not in ("", "0")

    def why_not_imported(self):
        """Return why the framework cannot be imported, or None if it can be."""
        command = [sys.executable, "-c", f"import {self.module}"]
        folder = pathlib.Path(sys.executable).parent  # without a folder of the module's name
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode == 0:
            return None
        return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]

    def built_for(self):
        """Return the versions of the framework that there are operators for."""
        paths = sorted(_PACKAGE.glob(f"{self.library}-*.so"))
        return [path.stem.removeprefix(f"{self.library}-") for path in paths]


def _encode_torch(codec, gradient):
    import torch

    residual = torch.zeros(gradient.size)
    return codec.encode(torch.from_numpy(gradient), residual).numpy()


def _encode_tensorflow(codec, gradient):
    import tensorflow as tf

    with tf.device("CPU:0"):
        residual = tf.Variable(tf.zeros(gradient.size))
        return codec.encode(tf.constant(gradient), residual).numpy()


def _cuda_of_torch(torch, operators):
    return torch.version.cuda, operators.HAS_CUDA_OPERATORS


def _cuda_of_tensorflow(tensorflow, operators):
    version = tensorflow.sysconfig.get_build_info().get("cuda_version")
    return version, operators.cuda_supports is not None


_FRAMEWORKS = (
    _Framework("PyTorch", "torch", ("torch",), "_torch_ops", _encode_torch, _cuda_of_torch),
    _Framework(
        "TensorFlow",
        "tensorflow",
        ("tensorflow", "tensorflow-cpu"),
        "_tf_ops",
        _encode_tensorflow,
        _cuda_of_tensorflow,
    ),
)


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
        show(f"  ok       {what:<24}{text}")

    def absent(self, what, text):
        show(f"  -        {what:<24}{text}")

    def problem(self, what, text, remedy):
        self.problems += 1
        show(f"  PROBLEM  {what:<24}{text}")
        show(f"           {'':<24}{remedy}")


def _zlib_version(library):
    """Return the version of the zlib that a library is linked with, None if it has no symbol."""
    function = getattr(ctypes.CDLL(library), "zlibVersion", None)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    return function().decode()


def _example():
    return np.random.default_rng(0).standard_normal(10_000).astype(np.float32)


def _check_core(report):
    import deepreduce_hvd as dr
    from deepreduce_hvd import _native

    report.good(
        "deepreduce_hvd",
        f"{dr.__version__}, Python {platform.python_version()}, NumPy {np.__version__}",
    )
    report.good("", str(_PACKAGE))
    report.good("native core", f"{_SIMD_LEVELS[_native.simd_level()]} on {platform.machine()}")
    gradient = _example()
    lossless = dr.Codec(dr.TopK(1.0), index=dr.Rice(), value=dr.Deflate()).encode(gradient)
    if (dr.decode(lossless) == gradient).all():
        version = _zlib_version(_native.__file__)
        report.good("Deflate", f"zlib {version}" if version else "zlib, inside the core")
    else:
        report.problem(
            "Deflate",
            f"expected the same values, got others, with zlib {_zlib_version(_native.__file__)}",
            "please report this with the lines above",
        )
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


def _without_remedy(message):
    """Return what was expected and what was there, without the advice at the end."""
    return message.removeprefix("deepreduce_hvd: ").partition("; install")[0].partition("; run")[0]


def _check_framework(report, framework):
    """Check the operators of one framework; return whether the package works with it."""
    name, built_for = framework.name, framework.built_for()
    if not framework.installed():
        built = f"operators for {', '.join(built_for)}" if built_for else "no operators"
        report.absent(name, f"not installed; {built} in this installation")
        return False
    version = framework.version()
    try:
        operators = importlib.import_module(framework.operators)
    except Exception as error:
        remedy = f"run: {framework.switch}=1 {_BUILD}"
        if framework.why_not_imported() is not None:
            remedy = f"repair or remove {name}: `python -c 'import {framework.module}'` fails"
        report.problem(
            name,
            f"{version}: does not work: {type(error).__name__}: {_without_remedy(str(error))}",
            remedy,
        )
        return False
    reason = getattr(operators, "WHY_NO_OPERATORS", None)
    if reason is not None and framework.left_out():
        report.absent(
            name, f"{version}: works on the host, without operators: {framework.switch_off}=1"
        )
        return True
    if reason is not None:
        report.problem(
            name,
            f"{version}: works on the host, without operators: {_without_remedy(reason)}",
            f"for operators run: {framework.switch}=1 {_BUILD}",
        )
        return True
    import deepreduce_hvd as dr

    codec, gradient = dr.recommended_codec(), _example()
    expected = codec.encode(gradient, np.zeros_like(gradient))
    if not np.array_equal(framework.trial(codec, gradient), expected):
        report.problem(
            name,
            f"{version}: expected the bytes of the native core from the operators, got others",
            f"run: {framework.switch}=1 {_BUILD}; if this does not help, please report it",
        )
        return False
    report.good(name, f"{version}, operators loaded; they give the bytes of the native core")
    cuda, on_gpus = framework.cuda_of(importlib.import_module(framework.module), operators)
    if on_gpus:
        report.good(f"{name} on GPUs", f"CUDA {cuda}, operators with CUDA kernels")
    elif cuda is not None:
        report.absent(
            f"{name} on GPUs",
            f"CUDA {cuda}, operators for the host only: gradients on a GPU are compressed on the"
            " host",
        )
        report.absent(
            "", f"for GPUs install nvcc of this CUDA, then run: DEEPREDUCE_WITH_CUDA=1 {_BUILD}"
        )
    else:
        report.good(f"{name} on GPUs", "not in this build of the framework; operators without CUDA")
    return True


def _check_horovod(report, frameworks):
    version = _version("horovod")
    if version is None:
        report.absent(
            "Horovod",
            "not installed; Compressor works without it in PyTorch's DDP and fully_shard only",
        )
        return
    for framework in frameworks:
        name = framework.name
        try:
            horovod = importlib.import_module(f"horovod.{framework.module}")
        except Exception as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
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


def _check():
    """Print what is installed; return the exit status, 1 if something needs attention."""
    # hide TensorFlow's log lines, which would mix with the output of this command
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    report = _Report()
    print("deepreduce_hvd --check")
    _check_core(report)
    works = [framework for framework in _FRAMEWORKS if _check_framework(report, framework)]
    _check_horovod(report, works)
    print(f"{report.problems} problem(s)" if report.problems else "all is well")
    return 1 if report.problems else 0


def _copy_of_sources(folder):
    """Copy the source tree that this package was built from to ``folder``."""
    left_out = shutil.ignore_patterns("_sources", "*.so", "__pycache__")
    for source, target in ((_PACKAGE / "_sources", folder), (_PACKAGE, folder / _PACKAGE.name)):
        shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)
        # the installation may be read-only, but its copy is built in
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def _build(pip_options):
    """Install the package again, with operators for the frameworks that are installed now.

    The installation in place stays if the build fails.

    Returns:
        The exit status.
    """
    environment, built = dict(os.environ), []
    for framework in filter(_Framework.installed, _FRAMEWORKS):
        if framework.left_out():
            print(f"deepreduce_hvd: without {framework.name}: {framework.switch_off}=1")
            continue
        reason = framework.why_not_imported()
        if reason is not None:
            print(
                f"deepreduce_hvd: without {framework.name}, which cannot be imported here: {reason}"
            )
            continue
        built.append(f"{framework.name} {framework.version()}")
        environment.setdefault(framework.switch, "1")
    if not built:
        print("deepreduce_hvd: expected PyTorch or TensorFlow, got neither; install one first")
        return 1
    if importlib.util.find_spec("pip") is None:
        print(
            f"deepreduce_hvd: expected pip in {sys.executable}, got none; run `python -m ensurepip`"
        )
        return 1
    # without the cache: pip would install a wheel that it has built for another framework
    command = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps"]
    command += ["--no-cache-dir", *pip_options]
    print(f"deepreduce_hvd: building for {' and '.join(built)}; usually 1 to 2 min", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        if (_PACKAGE / "_sources").is_dir():
            tree = pathlib.Path(scratch, "tree")
            _copy_of_sources(tree)
            command.append(str(tree))
        else:
            command += ["--editable", str(_PACKAGE.parent)]
        done = subprocess.run(command, cwd=scratch, env=environment)
        if done.returncode != 0:
            print("deepreduce_hvd: the installation was not changed; the reason is above")
            return done.returncode
        # A new process, because this one has imported the package that was replaced. It must not
        # find a package in its current folder.
        return subprocess.run(
            [sys.executable, "-m", "deepreduce_hvd", "--check"], cwd=scratch
        ).returncode


def main(arguments=None):
    """Run a command and return the exit status, 0 if nothing needs attention."""
    import deepreduce_hvd as dr

    parser = argparse.ArgumentParser(
        prog="python -m deepreduce_hvd", description="Gradient compression for Horovod."
    )
    commands = parser.add_mutually_exclusive_group()
    commands.add_argument(
        "--check", action="store_true", help="print what is installed and what is missing"
    )
    commands.add_argument(
        "--build",
        action="store_true",
        help=(
            "build the operators for the PyTorch and TensorFlow that are installed now, with pip;"
            " other options are passed to pip install"
        ),
    )
    commands.add_argument("--version", action="version", version=f"deepreduce_hvd {dr.__version__}")
    chosen, others = parser.parse_known_args(arguments)
    if chosen.build:
        return _build(others)
    if others:
        similar = difflib.get_close_matches(others[0], ("--check", "--build", "--version"), n=1)
        hint = f"; did you mean {similar[0]}?" if similar and not chosen.check else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    if not chosen.check:
        parser.error("expected one of --check, --build and --version, got none")
    with reader_may_end():
        return _check()


if __name__ == "__main__":
    sys.exit(main())
