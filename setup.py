"""Build the native core once, as a static library, and link it into the bindings.

The NumPy binding (``deepreduce_hvd._native``) is always built. The operator libraries of PyTorch
and TensorFlow are optional. Switches have the form of Horovod's: with ``DEEPREDUCE_WITH_PYTORCH=1``
a missing torch is an error, ``DEEPREDUCE_WITHOUT_PYTORCH=1`` leaves out its operators. With
neither, the operators are built if torch is found, else skipped with a message. The same two
switches exist for TENSORFLOW. ``CXX``, ``CXXFLAGS``, ``LDFLAGS`` and ``MAX_JOBS`` are respected.

With a CUDA build of PyTorch or TensorFlow and an nvcc of the same CUDA version, the operators of
that framework also work on GPUs. With ``DEEPREDUCE_WITH_CUDA=1`` it is an error if there is no such
pair; ``DEEPREDUCE_WITHOUT_CUDA=1`` leaves this out. ``DEEPREDUCE_CUDA_ARCHITECTURES="8.0 9.0+PTX"``
selects the architectures of the kernels. nvcc is taken from ``CUDACXX``, ``CUDA_HOME``, ``PATH`` or
/usr/local/cuda, in this order.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import nvcc  # noqa: E402

CORE = Path("deepreduce_hvd/csrc")
BINDING = CORE / "api" / "python.cc"
TORCH_OPS = Path("torch_ops")
TENSORFLOW_OPS = Path("tf_ops")
CUDA_CORE = CORE / "cuda"
CUDA_TORCH_OPS = TORCH_OPS / "cuda"
CUDA_TENSORFLOW_OPS = TENSORFLOW_OPS / "cuda"

# With contraction or fast-math, the bytes of a payload would depend on the compiler and the
# processor. For the same reason there is no -march=native: the core selects its SIMD level at run
# time.
COMMON_FLAGS = [
    "-O3",
    "-g1",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
# The same rules on the device. -lineinfo lets tools show the source line of a kernel at no cost in
# speed.
CUDA_FLAGS = [
    "-O3",
    "-std=c++17",
    *nvcc.EXACT,
    "-lineinfo",
    "-Xcompiler=-fPIC,-ffp-contract=off,-fno-fast-math,-fvisibility=hidden",
]

# Prints what a torch operator library needs. It does not import torch.utils.cpp_extension, which
# needs setuptools.
ASK_TORCH = """
import importlib.util, json, os
if importlib.util.find_spec("torch") is None: raise SystemExit("No module named 'torch'")
import torch
root = os.path.dirname(torch.__file__)
print(json.dumps({"version": torch.__version__, "root": root, "cxx11_abi": int(torch.compiled_with_cxx11_abi()), "cuda": torch.version.cuda}))
"""
ASK_TENSORFLOW = """
import importlib.util, json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
if importlib.util.find_spec("tensorflow") is None: raise SystemExit("No module named 'tensorflow'")
import tensorflow
cuda = tensorflow.sysconfig.get_build_info().get("cuda_version") if tensorflow.test.is_built_with_cuda() else None
print(json.dumps({"version": tensorflow.__version__, "compile": tensorflow.sysconfig.get_compile_flags(), "link": tensorflow.sysconfig.get_link_flags(), "cuda": cuda}))
"""


TORCH_EXTENSION, TENSORFLOW_EXTENSION = "deepreduce_hvd._torch_ops", "deepreduce_hvd._tf_ops"
FRAMEWORKS = (
    (TORCH_EXTENSION, "PyTorch", ASK_TORCH, TORCH_OPS),
    (TENSORFLOW_EXTENSION, "TensorFlow", ASK_TENSORFLOW, TENSORFLOW_OPS),
)


class BuildError(SystemExit):
    """An error that ends the build with one readable message instead of a traceback."""

    def __init__(self, message):
        super().__init__(f"deepreduce_hvd: {message}")


def say(message):
    print(f"deepreduce_hvd: {message}", flush=True)


def switch(name):
    """Return whether an environment variable is set to 1."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{name}: expected 1, 0 or nothing, got {value!r}")
    return value == "1"


def ask(question):
    """Ask the target interpreter a question in a separate process.

    Under pip's build isolation this process cannot see the packages of the environment that it
    builds for: pip hides them through PYTHONPATH and PYTHONNOUSERSITE. So the same interpreter is
    asked first without these two variables, then with them, because the user may have put a
    framework on PYTHONPATH.

    Returns:
        The answer or None, and the reason why there is no answer.
    """
    hidden_by_pip = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    clean = {name: value for name, value in os.environ.items() if name not in hidden_by_pip}
    reasons = []
    for environment in (clean, dict(os.environ)):
        # a neutral directory, because -c puts the current one first on the module path
        answer = subprocess.run(
            [sys.executable, "-c", question],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
        )
        if answer.returncode == 0:
            return json.loads(answer.stdout.splitlines()[-1]), None
        reasons.append(
            (answer.stderr.strip() or f"exit status {answer.returncode}").splitlines()[-1]
        )
    return None, reasons[0]


def find_framework(name, question, sources):
    """Return the framework's answer, or None with a message if its operators are not built."""
    wanted, unwanted = (
        switch(f"DEEPREDUCE_WITH_{name.upper()}"),
        switch(f"DEEPREDUCE_WITHOUT_{name.upper()}"),
    )
    if wanted and unwanted:
        raise BuildError(
            f"DEEPREDUCE_WITH_{name.upper()} and DEEPREDUCE_WITHOUT_{name.upper()}: expected one of them, got both"
        )
    if unwanted:
        say(f"skipping the {name} ops: DEEPREDUCE_WITHOUT_{name.upper()}=1")
        return None
    if not sources:
        if wanted:
            raise BuildError(f"DEEPREDUCE_WITH_{name.upper()}=1: no {name} ops in this version")
        say(f"skipping the {name} ops: no {name} ops in this version")
        return None
    answer, reason = ask(question)
    if answer is None and wanted:
        raise BuildError(
            f"DEEPREDUCE_WITH_{name.upper()}=1: expected {name} in {sys.executable}, got: {reason}"
        )
    if answer is None:
        say(f"skipping the {name} ops: {sys.executable} has no usable {name} ({reason})")
        return None
    say(f"building the {name} ops for {name} {answer['version']}")
    return answer


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(
            f"expected exit status 0, got {done.returncode} from: {shlex.join(command)}\n{done.stderr}"
        )
    return done.stdout + done.stderr


def code_options(path, version):
    """Return nvcc's options for the architectures to compile for.

    They include PTX of the newest one, which later devices compile when they load it.
    """
    known = nvcc.known_architectures(path)
    asked = re.split(r"[\s,;]+", os.environ.get("DEEPREDUCE_CUDA_ARCHITECTURES", "").strip())
    if asked == [""]:
        left_out = [name for name in nvcc.ARCHITECTURES if name not in known]
        if left_out:
            say(f"nvcc {version} does not compile for {' '.join(left_out)}: left out")
        asked = [name for name in nvcc.ARCHITECTURES if name in known]
        asked[-1:] = [f"{name}+PTX" for name in asked[-1:]]
    options = []
    for name in asked:
        form = re.fullmatch(r"(\d+\.\d)([af]?)(\+PTX)?", name)
        if form is None or form[1] not in known:
            choices = " ".join(sorted(known, key=float))
            raise BuildError(
                f"DEEPREDUCE_CUDA_ARCHITECTURES: expected some of {choices}, each with +PTX or without, got {name!r}"
            )
        options += nvcc.code_options(form[1] + form[2], ptx=bool(form[3]))
    say(f"compiling CUDA kernels for {' '.join(asked)}")
    return options


def why_no_cuda(name, framework, path, nvcc_version):
    """Return why a framework's operators cannot have CUDA kernels, or None."""
    if framework["cuda"] is None:
        return (
            f"expected {name} with CUDA, got {name} {framework['version']}, which is built without"
        )
    major = framework["cuda"].partition(".")[0]
    # a driver that supports the framework's CUDA also supports kernels of that CUDA
    if path is not None and major != nvcc_version.partition(".")[0]:
        return f"expected nvcc of CUDA {major} as {name} {framework['version']} has, got {path} of CUDA {nvcc_version}"
    return None


def find_cuda(frameworks):
    """Return what the CUDA build needs, or None with a message if there are no CUDA operators.

    Args:
        frameworks: {extension: answer} of the frameworks that are found.
    """
    wanted, unwanted = switch("DEEPREDUCE_WITH_CUDA"), switch("DEEPREDUCE_WITHOUT_CUDA")
    if wanted and unwanted:
        raise BuildError(
            "DEEPREDUCE_WITH_CUDA and DEEPREDUCE_WITHOUT_CUDA: expected one of them, got both"
        )
    if unwanted:
        say("skipping the CUDA operators: DEEPREDUCE_WITHOUT_CUDA=1")
        return None
    path, nowhere = nvcc.look()
    version = re.search(r"release (\d+\.\d+)", output_of(path, "--version"))[1] if path else None
    present = [(extension, name) for extension, name, _, _ in FRAMEWORKS if extension in frameworks]
    reasons = {
        extension: why_no_cuda(name, frameworks[extension], path, version)
        for extension, name in present
    }
    problems = list(reasons.values()) if None not in reasons.values() else []
    if not frameworks:
        problems.append("expected PyTorch or TensorFlow with CUDA, got the operators of neither")
    if path is None:
        problems.append(f"expected nvcc, got {nowhere}")
    if not list(CUDA_CORE.rglob("*.cu")):
        problems = ["no CUDA kernels in this version"]
    if problems and wanted:
        raise BuildError(f"DEEPREDUCE_WITH_CUDA=1: {'; '.join(problems)}")
    if problems:
        say(f"skipping the CUDA operators: {'; '.join(problems)}")
        return None
    for extension, name in present:
        if reasons[extension] is None:
            say(f"building the CUDA operators for {name} with {path} of CUDA {version}")
        else:
            say(f"skipping the CUDA operators for {name}: {reasons[extension]}")
    # lists its include and library directories
    plan = output_of(path, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null")
    return {
        "extensions": {extension for extension, reason in reasons.items() if reason is None},
        "nvcc": path,
        "code": code_options(path, version),
        "include": re.findall(r'"-I([^"]+)"', plan),
        "libraries": re.findall(r'"-L([^"]+)"', plan),
    }


def compiler():
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"expected a C++ compiler, got no {command[0]} on PATH; Debian package: g++"
        )
    return command


def jobs():
    asked = os.environ.get("MAX_JOBS", "")
    if asked and not (asked.isdigit() and int(asked) > 0):
        raise BuildError(f"MAX_JOBS: expected a positive number, got {asked!r}")
    return int(asked) if asked else len(os.sched_getaffinity(0))


def is_current(output, command, inputs):
    """Return whether output is newer than all inputs and was made by the same command.

    The command is in a file beside the output.
    """
    record = Path(f"{output}.command")
    if not output.exists() or not record.exists() or record.read_text() != shlex.join(command):
        return False
    made = output.stat().st_mtime_ns
    return all(Path(name).exists() and Path(name).stat().st_mtime_ns <= made for name in inputs)


def run(command, output):
    """Run a compiler or linker that makes output.

    The output is moved into place when it is complete, and its record is written after it.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    record = Path(f"{output}.command")
    record.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        made = Path(scratch) / output.name
        done = subprocess.run(
            [str(made) if word == str(output) else word for word in command],
            capture_output=True,
            text=True,
        )
        if done.stdout or done.stderr:
            print(done.stdout + done.stderr, file=sys.stderr, flush=True)
        if done.returncode != 0:
            raise BuildError(
                f"expected exit status 0, got {done.returncode} from: {shlex.join(command)}"
            )
        made.replace(output)
    record.write_text(shlex.join(command))


def headers_of(dependencies):
    """Return the files in a compiler's -MD output, or none if there is no such output yet.

    System headers are included, so that another torch or Python is noticed.
    """
    if not dependencies.exists():
        return []
    text = dependencies.read_text().replace("\\\n", " ").replace("\\ ", "\0")
    return [word.replace("\0", " ") for word in text.partition(": ")[2].split()]


def compile_all(sources, folder, flags, command=None):
    """Compile what changed, on all cores; return the objects, in the order of the sources.

    Args:
        sources: source files.
        folder: folder for the objects.
        flags: options of the compiler.
        command: compiler command to use instead of the C++ compiler.
    """
    begin = command or [*compiler(), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    objects, pending = [], []
    for source in sources:
        target = folder / f"{source}.o"
        dependencies = target.with_suffix(".d")
        command = [
            begin[0],
            *flags,
            *begin[1:],
            "-MD",
            "-MF",
            str(dependencies),
            "-c",
            str(source),
            "-o",
            str(target),
        ]
        objects.append(target)
        if not dependencies.exists() or not is_current(
            target, command, [source, *headers_of(dependencies)]
        ):
            pending.append((command, target))
    if pending:
        say(f"compiling {len(pending)} of {len(sources)} files of {folder.name} on {jobs()} cores")
    with ThreadPoolExecutor(jobs()) as pool:
        for result in [pool.submit(run, command, target) for command, target in pending]:
            result.result()
    return objects


def core_library(folder):
    sources = sorted(path for path in CORE.rglob("*.cc") if path != BINDING)
    objects = compile_all(sources, folder / "core", [*COMMON_FLAGS, "-std=c++17", f"-I{CORE}"])
    library = folder / "libdeepreduce_core.a"
    # "s" writes the symbol index for linkers; the archive is always made anew, so that no removed
    # file stays in it
    command = ["ar", "rcs", str(library), *map(str, objects)]
    if not is_current(library, command, objects):
        run(command, library)
    return library


def cuda_objects(folder, cuda):
    """Compile the device core and return its objects."""
    flags = [*CUDA_FLAGS, *cuda["code"], f"-ccbin={compiler()[0]}", f"-I{CORE}"]
    return compile_all(sorted(CUDA_CORE.rglob("*.cu")), folder / "cuda", flags, [cuda["nvcc"]])


class BuildBindings(build_ext):
    """Compile and link by the rules above.

    The rules of setuptools would rebuild everything or nothing.
    """

    def finalize_options(self):
        if not hasattr(self.distribution, "deepreduce_frameworks"):
            self.distribution.deepreduce_frameworks = {}
            for extension, name, question, folder in FRAMEWORKS:
                sources = sorted(map(str, folder.glob("*.cc")))
                answer = find_framework(name, question, sources)
                if answer is not None:
                    self.distribution.deepreduce_frameworks[extension] = answer
                    self.distribution.ext_modules.append(Extension(extension, sources))
            self.distribution.deepreduce_cuda = find_cuda(self.distribution.deepreduce_frameworks)
        super().finalize_options()

    def get_ext_filename(self, fullname):
        # The frameworks load these libraries, not Python's import. So their names contain the
        # version of the framework, whose ABI they depend on, instead of Python's. setuptools also
        # asks for the last part of a module name alone.
        for name, answer in self.distribution.deepreduce_frameworks.items():
            if fullname in (name, name.rpartition(".")[2]):
                return f"{os.path.join(*fullname.split('.'))}-{answer['version']}.so"
        return super().get_ext_filename(fullname)

    def run(self):
        # a library of an earlier build must not be installed
        current = {
            Path(self.get_ext_filename(name)).name
            for name in self.distribution.deepreduce_frameworks
        }
        for folder in (Path(self.build_lib, "deepreduce_hvd"), Path("deepreduce_hvd")):
            for stale in (*folder.glob("_torch_ops*.so"), *folder.glob("_tf_ops*.so")):
                if stale.name not in current:
                    stale.unlink()
        super().run()

    def pybind11_include(self):
        try:
            import pybind11

            return pybind11.get_include()
        except ImportError:  # PyTorch has its headers
            torch = self.distribution.deepreduce_frameworks.get(TORCH_EXTENSION)
            if torch is None:
                raise BuildError(
                    f"expected the module pybind11 in {sys.executable}, got none"
                ) from None
            return f"{torch['root']}/include"

    def build_extension(self, extension):
        folder = Path("build/native")
        core = core_library(folder)
        cuda = self.distribution.deepreduce_cuda
        if cuda is not None and extension.name not in cuda["extensions"]:
            cuda = None
        if extension.name == TENSORFLOW_EXTENSION:
            tensorflow = self.distribution.deepreduce_frameworks[extension.name]
            # system headers: hides warnings about them
            includes = [
                word
                for flag in tensorflow["compile"]
                for word in (("-isystem", flag[2:]) if flag.startswith("-I") else (flag,))
            ]
            flags = [*COMMON_FLAGS, f"-I{CORE}", *includes]
            objects, sources, links = (
                [],
                list(map(Path, extension.sources)),
                list(tensorflow["link"]),
            )
            if cuda is not None:
                objects += cuda_objects(folder, cuda)
                sources += sorted(CUDA_TENSORFLOW_OPS.glob("*.cc"))
                flags += [
                    "-DGOOGLE_CUDA=1",
                    f"-I{CUDA_TENSORFLOW_OPS / 'gpu'}",
                    *(word for path in cuda["include"] for word in ("-isystem", path)),
                ]
                # Link a separate CUDA runtime: TensorFlow loads its own when it first needs it,
                # which without a GPU is never. Both runtimes use the driver's primary context of a
                # device, so they share streams and memory.
                links += [
                    *(f"-L{path}" for path in cuda["libraries"]),
                    "-lcudart_static",
                    "-ldl",
                    "-lrt",
                    "-lpthread",
                ]
            objects += compile_all(sources, folder / "tf_ops", flags)
        elif extension.name == TORCH_EXTENSION:
            torch = self.distribution.deepreduce_frameworks[extension.name]
            include, libraries = f"{torch['root']}/include", f"{torch['root']}/lib"
            flags = [*COMMON_FLAGS, "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={torch['cxx11_abi']}", f"-I{CORE}",
                     "-isystem", include, "-isystem", f"{include}/torch/csrc/api/include"]  # fmt: skip
            # no run path: torch and its CUDA runtime are loaded in the process before this library
            links = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
            objects, sources = [], list(map(Path, extension.sources))
            if cuda is not None:
                objects += cuda_objects(folder, cuda)
                sources += sorted(CUDA_TORCH_OPS.glob("*.cc"))
                flags += [*(word for path in cuda["include"] for word in ("-isystem", path))]
                links += ["-lc10_cuda", *(f"-L{path}" for path in cuda["libraries"]), "-lcudart"]
            objects += compile_all(sources, folder / "torch_ops", flags)
        else:
            flags = [*COMMON_FLAGS, "-std=c++17", f"-I{CORE}", "-isystem", self.pybind11_include(),
                     "-isystem", sysconfig.get_path("include")]  # fmt: skip
            objects = compile_all(
                [BINDING], folder / f"python-{sysconfig.get_config_var('SOABI')}", flags
            )
            links = []
        target = Path(self.get_ext_fullpath(extension.name))
        # each binding has its own copy of the core; if it exported the symbols, one binding could
        # use those of another at run time
        command = [*compiler(), "-shared", *map(str, objects), str(core), "-Wl,--exclude-libs,ALL", *links, "-lz",
                   *shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(target)]  # fmt: skip
        record = folder / f"{target.name}.linked"
        if not is_current(record, command, [*objects, core]) or not target.exists():
            run(command, target)
            Path(f"{target}.command").unlink()  # a file beside the library would be installed too
            record.touch()
            Path(f"{record}.command").write_text(shlex.join(command))
            say(f"linked {extension.name}")


os.chdir(ROOT)
setup(
    ext_modules=[Extension("deepreduce_hvd._native", [str(BINDING)])],
    cmdclass={"build_ext": BuildBindings},
)
