"""Builds the native core once, as a static library, and links it into the bindings of this machine.

The NumPy binding (``deepreduce_hvd._native``) is always built. The frameworks' op libraries are
optional, with the switches that Horovod's own build taught its users: ``DEEPREDUCE_WITH_PYTORCH=1``
makes a missing torch an error, ``DEEPREDUCE_WITHOUT_PYTORCH=1`` leaves its ops out, and with
neither, torch is looked for and a missing one is a printed skip. The same two for TENSORFLOW.
``CXX``, ``CXXFLAGS``, ``LDFLAGS`` and ``MAX_JOBS`` are honoured.

With a CUDA build of PyTorch or TensorFlow and an nvcc of the same CUDA, that framework's operators
work on GPUs too; ``DEEPREDUCE_WITH_CUDA=1`` makes it an error when there is no such pair,
``DEEPREDUCE_WITHOUT_CUDA=1`` leaves it out. ``DEEPREDUCE_CUDA_ARCHITECTURES="8.0 9.0+PTX"`` is what
the kernels are compiled for. nvcc is that of ``CUDACXX``, ``CUDA_HOME``, ``PATH`` or
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
BINDING = CORE / "python.cc"
TORCH_OPS = Path("torch_ops")
TENSORFLOW_OPS = Path("tf_ops")
CUDA_CORE = CORE / "cuda"
CUDA_TORCH_OPS = TORCH_OPS / "cuda"
CUDA_TENSORFLOW_OPS = TENSORFLOW_OPS / "cuda"

# Contraction and fast-math would let the bytes of a payload depend on the compiler and the
# processor, which is also
# why nothing here asks for -march=native: the core chooses its SIMD level when it runs.
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
# The same rules on the device. -lineinfo lets tools name the line of a kernel; it costs no speed.
CUDA_FLAGS = [
    "-O3",
    "-std=c++17",
    *nvcc.EXACT,
    "-lineinfo",
    "-Xcompiler=-fPIC,-ffp-contract=off,-fno-fast-math,-fvisibility=hidden",
]

# Prints what a torch op library needs; does not import torch.utils.cpp_extension, which needs
# setuptools to be there.
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
    """Ends the build with one readable message in place of a traceback."""

    def __init__(self, message):
        super().__init__(f"deepreduce_hvd: {message}")


def say(message):
    print(f"deepreduce_hvd: {message}", flush=True)


def switch(name):
    """Whether an environment variable is set to 1."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{name}: expected 1, 0 or nothing, got {value!r}")
    return value == "1"


def ask(question):
    """What the target interpreter answers to a question asked in a process of its own, and why when
    it does not.

    Under pip's build isolation this process cannot see the packages of the environment that it
    builds for: pip hides them through PYTHONPATH and PYTHONNOUSERSITE. So the same interpreter is
    asked without those two first, and as it is second (a framework may have been put on PYTHONPATH
    by the user).
    """
    hidden_by_pip = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    clean = {name: value for name, value in os.environ.items() if name not in hidden_by_pip}
    reasons = []
    for environment in (clean, dict(os.environ)):
        # a neutral directory: -c puts the current one first on the module path
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
    """The framework's answer, or None when its ops are not to be built; says why not."""
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
    """nvcc's options for what it shall compile for, PTX of the newest included, which later devices
    compile when they load it.
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
    """What keeps a framework's operators from having kernels for CUDA, or None."""
    if framework["cuda"] is None:
        return (
            f"expected {name} with CUDA, got {name} {framework['version']}, which is built without"
        )
    major = framework["cuda"].partition(".")[0]
    # the driver that serves the framework's CUDA serves kernels of that CUDA too
    if path is not None and major != nvcc_version.partition(".")[0]:
        return f"expected nvcc of CUDA {major} as {name} {framework['version']} has, got {path} of CUDA {nvcc_version}"
    return None


def find_cuda(frameworks):
    """What compiling for CUDA takes, or None when there will be no CUDA operators; says why not.
    ``frameworks``: the answers of those that are there.
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
    # names its directories
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
    """Whether output is newer than all inputs and was made by this very command (kept beside it)."""
    record = Path(f"{output}.command")
    if not output.exists() or not record.exists() or record.read_text() != shlex.join(command):
        return False
    made = output.stat().st_mtime_ns
    return all(Path(name).exists() and Path(name).stat().st_mtime_ns <= made for name in inputs)


def run(command, output):
    """Runs a compiler or linker that makes output.

    The output appears whole or not at all, its record after it.
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
    """The files named in a compiler's -MD output (system headers too, so that another torch or
    Python is noticed), or none when there is no such output yet.
    """
    if not dependencies.exists():
        return []
    text = dependencies.read_text().replace("\\\n", " ").replace("\\ ", "\0")
    return [word.replace("\0", " ") for word in text.partition(": ")[2].split()]


def compile_all(sources, folder, flags, command=None):
    """Compiles what changed, on all cores; returns the objects, in the order of the sources.
    ``command``: in place of the C++ compiler's.
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
    # "s" writes the index that linkers look symbols up in; a fresh archive each time, so that no
    # removed file lingers
    command = ["ar", "rcs", str(library), *map(str, objects)]
    if not is_current(library, command, objects):
        run(command, library)
    return library


def cuda_objects(folder, cuda):
    """The device core."""
    flags = [*CUDA_FLAGS, *cuda["code"], f"-ccbin={compiler()[0]}", f"-I{CORE}", f"-I{CUDA_CORE}"]
    return compile_all(sorted(CUDA_CORE.rglob("*.cu")), folder / "cuda", flags, [cuda["nvcc"]])


class BuildBindings(build_ext):
    """Compiles and links by the rules above in place of setuptools' own, which rebuild everything
    or nothing.
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
        # the frameworks open these, not Python's import: their names carry no Python version but
        # the framework's, whose ABI they are bound to
        # (setuptools asks for a module's last name alone, too)
        for name, answer in self.distribution.deepreduce_frameworks.items():
            if fullname in (name, name.rpartition(".")[2]):
                return f"{os.path.join(*fullname.split('.'))}-{answer['version']}.so"
        return super().get_ext_filename(fullname)

    def run(self):
        # a library of an earlier build must not ride along in what is installed now
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
        except ImportError:  # PyTorch carries its headers
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
            # its headers are the system's here: their warnings are not ours
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
                    f"-I{CUDA_CORE}",
                    f"-I{CUDA_TENSORFLOW_OPS / 'gpu'}",
                    *(word for path in cuda["include"] for word in ("-isystem", path)),
                ]
                # a CUDA runtime of its own: TensorFlow loads its one when it first needs it, which
                # without a GPU is never. Both use the driver's
                # one context of a device, so that streams and memory are the same to both.
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
            # no run path: torch is in the process already when this is loaded, wherever it lives
            # there, and so is its CUDA runtime
            links = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
            objects, sources = [], list(map(Path, extension.sources))
            if cuda is not None:
                objects += cuda_objects(folder, cuda)
                sources += sorted(CUDA_TORCH_OPS.glob("*.cc"))
                flags += [
                    f"-I{CUDA_CORE}",
                    *(word for path in cuda["include"] for word in ("-isystem", path)),
                ]
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
        # each binding has a copy of the core of its own; exporting it would let one bind to
        # another's at run time
        command = [*compiler(), "-shared", *map(str, objects), str(core), "-Wl,--exclude-libs,ALL", *links, "-lz",
                   *shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(target)]  # fmt: skip
        record = folder / f"{target.name}.linked"
        if not is_current(record, command, [*objects, core]) or not target.exists():
            run(command, target)
            Path(f"{target}.command").unlink()  # beside the library it would be installed with it
            record.touch()
            Path(f"{record}.command").write_text(shlex.join(command))
            say(f"linked {extension.name}")


os.chdir(ROOT)
setup(
    ext_modules=[Extension("deepreduce_hvd._native", [str(BINDING)])],
    cmdclass={"build_ext": BuildBindings},
)
