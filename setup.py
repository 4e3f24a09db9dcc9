"""Build the native core once, as a static library, and link it into the bindings.

The NumPy binding (``deepreduce_hvd._native``) is always built. The operator libraries of PyTorch
and TensorFlow are optional. Switches have the form of Horovod's: with ``DEEPREDUCE_WITH_PYTORCH=1``
a missing torch is an error, ``DEEPREDUCE_WITHOUT_PYTORCH=1`` leaves out its operators. With
neither, the operators are built if torch is found, else skipped with a message. The same two
switches exist for TENSORFLOW. ``CXX``, ``CXXFLAGS``, ``LDFLAGS`` and ``MAX_JOBS`` are respected.

With a CUDA build of PyTorch or TensorFlow and an nvcc of the same major version of CUDA, the
operators of that framework also work on GPUs. With ``DEEPREDUCE_WITH_CUDA=1`` it is an error if there is no such
pair; ``DEEPREDUCE_WITHOUT_CUDA=1`` leaves this out. ``DEEPREDUCE_CUDA_ARCHITECTURES="8.0 9.0+PTX"``
selects the architectures of the kernels. nvcc is taken from ``CUDACXX``, ``CUDA_HOME``,
``CUDA_PATH``, ``PATH`` or /usr/local/cuda, in this order.

The package contains the sources that this file needs. With them, ``python -m deepreduce_hvd
--build`` builds the operators for a framework that is installed or upgraded later.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import incremental_build  # noqa: E402
import nvcc  # noqa: E402
from find_frameworks import ASK_TENSORFLOW, ASK_TORCH, BuildError, find_cuda, find_framework, say  # noqa: E402

#: folder of what is compiled
NATIVE = Path("build/native")
CORE = Path("deepreduce_hvd/csrc")
BINDING = CORE / "api" / "python.cc"
TORCH_OPS = Path("torch_ops")
TENSORFLOW_OPS = Path("tf_ops")
CUDA_CORE = CORE / "cuda"
CUDA_TORCH_OPS = TORCH_OPS / "cuda"
CUDA_TENSORFLOW_OPS = TENSORFLOW_OPS / "cuda"
#: folder in the package for the sources, which ``python -m deepreduce_hvd --build`` uses
SHIPPED = Path("deepreduce_hvd/_sources")
#: what it contains; the Python files of the package are beside it
SHIPPED_FILES = (
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
    *("scripts/find_frameworks.py", "scripts/incremental_build.py", "scripts/nvcc.py"),
)
SHIPPED_FOLDERS = (CORE, TORCH_OPS, TENSORFLOW_OPS)

COMMON_FLAGS = ["-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# With contraction or fast-math, the bytes of a payload would depend on the compiler and the
# processor. So these are the last flags, after CXXFLAGS. For the same reason there is no
# -march=native: the core selects its SIMD level at run time.
EXACT_FLAGS = ["-ffp-contract=off", "-fno-fast-math"]
# The same rules on the device. -lineinfo lets tools show the source line of a kernel at no cost in
# speed.
CUDA_FLAGS = [
    "-O3",
    "-std=c++17",
    *nvcc.EXACT,
    "-lineinfo",
    f"-Xcompiler={','.join(['-fPIC', *EXACT_FLAGS, '-fvisibility=hidden'])}",
]

TORCH_EXTENSION, TENSORFLOW_EXTENSION = "deepreduce_hvd._torch_ops", "deepreduce_hvd._tf_ops"
FRAMEWORKS = (
    (TORCH_EXTENSION, "PyTorch", ASK_TORCH, TORCH_OPS),
    (TENSORFLOW_EXTENSION, "TensorFlow", ASK_TENSORFLOW, TENSORFLOW_OPS),
)


def compiler():
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"expected a C++ compiler, got no {command[0]} on PATH; Debian package: g++"
        )
    return command


def jobs():
    asked = os.environ.get("MAX_JOBS", "")
    if asked and not (asked.isdigit() and int(asked) > 0):
        raise BuildError(f"MAX_JOBS: expected a positive number, got {asked!r}")
    return int(asked) if asked else incremental_build.cores()


def host_command(flags):
    return [*compiler(), *flags, *shlex.split(os.environ.get("CXXFLAGS", "")), *EXACT_FLAGS]


def compile_host(sources, folder, flags):
    return incremental_build.compile_all(sources, folder, host_command(flags), jobs(), report=say)


def compile_operators(sources, folder, flags):
    """Compile the operators of a framework, whose headers take most of the time."""
    return incremental_build.compile_together(
        sources, folder, host_command(flags), jobs(), report=say
    )


def built_for(name, framework):
    """Return the option that names the framework's version.

    The command is then another one for another version, so all objects are compiled again. The
    times of the headers do not show this: some installers keep the times of the archive.
    """
    return f'-DDEEPREDUCE_BUILT_FOR="{name} {framework["version"]}"'


def core_library(folder):
    sources = sorted(path for path in CORE.rglob("*.cc") if path != BINDING)
    objects = compile_host(sources, folder / "core", [*COMMON_FLAGS, "-std=c++17", f"-I{CORE}"])
    library = folder / "libdeepreduce_core.a"
    # "s" writes the symbol index for linkers; the archive is always made anew, so that no removed
    # file stays in it
    command = ["ar", "rcs", str(library), *map(str, objects)]
    incremental_build.link(library, command, objects)
    return library


def cuda_objects(folder, cuda):
    """Compile the device core and return its objects."""
    command = [cuda["nvcc"], *CUDA_FLAGS, *cuda["code"], f"-ccbin={compiler()[0]}", f"-I{CORE}"]
    sources = sorted(CUDA_CORE.rglob("*.cu"))
    return incremental_build.compile_all(sources, folder / "cuda", command, jobs(), report=say)


class BuildModules(build_py):
    """Copy the Python files, and the sources of the libraries."""

    def run(self):
        if not self.editable_mode:
            # a module that was removed since an earlier build must not be installed
            for stale in Path(self.build_lib, "deepreduce_hvd").rglob("*.py"):
                stale.unlink()
            self.copy_sources(Path(self.build_lib) / SHIPPED)
        super().run()

    def copy_sources(self, target):
        shutil.rmtree(target, ignore_errors=True)
        for name in SHIPPED_FILES:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, target / name)
        for folder in SHIPPED_FOLDERS:
            shutil.copytree(folder, target / folder)


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
            answers = self.distribution.deepreduce_frameworks
            self.distribution.deepreduce_cuda = find_cuda(
                {
                    name: answers[extension]
                    for extension, name, _, _ in FRAMEWORKS
                    if extension in answers
                },
                has_kernels=any(CUDA_CORE.rglob("*.cu")),
            )
        # with CUDA, a framework alone has several sources to compile at a time
        if self.parallel is None and self.distribution.deepreduce_cuda is None:
            self.parallel = jobs()
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
        super().run()
        # A library of an earlier build must not be installed. The libraries in the source tree are
        # those of an installation in place, which another build leaves alone.
        current = {
            Path(self.get_ext_filename(name)).name
            for name in self.distribution.deepreduce_frameworks
        }
        in_place = self.inplace or self.editable_mode
        folder = Path("" if in_place else self.build_lib, "deepreduce_hvd")
        for stale in (*folder.glob("_torch_ops*.so"), *folder.glob("_tf_ops*.so")):
            if stale.name not in current:
                stale.unlink()

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

    def cuda_of(self, framework):
        """Return what the framework's CUDA operators need, or None if there are none."""
        cuda = self.distribution.deepreduce_cuda
        return cuda if cuda is not None and framework in cuda["frameworks"] else None

    def tensorflow_objects(self, extension, folder):
        """Compile the operators of TensorFlow; return the objects and the linker's options."""
        tensorflow = self.distribution.deepreduce_frameworks[extension.name]
        includes = incremental_build.with_system_headers(tensorflow["compile"])
        flags = [*COMMON_FLAGS, built_for("TensorFlow", tensorflow), f"-I{CORE}", *includes]
        links = list(tensorflow["link"])
        objects, sources = [], list(map(Path, extension.sources))
        cuda = self.cuda_of("TensorFlow")
        if cuda is not None:
            objects += cuda_objects(folder, cuda)
            sources += sorted(CUDA_TENSORFLOW_OPS.glob("*.cc"))
            flags += [
                "-DGOOGLE_CUDA=1",
                f"-I{CUDA_TENSORFLOW_OPS / 'gpu'}",
                *(word for path in cuda["include"] for word in ("-isystem", path)),
            ]
            # Link a separate CUDA runtime: TensorFlow loads its own when it first needs it, which
            # without a GPU is never. Both runtimes use the driver's primary context of a device,
            # so they share streams and memory.
            links += [f"-L{path}" for path in cuda["libraries"]]
            links += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return objects + compile_operators(sources, folder, flags), links

    def torch_objects(self, extension, folder):
        """Compile the operators of PyTorch; return the objects and the linker's options."""
        torch = self.distribution.deepreduce_frameworks[extension.name]
        include, libraries = f"{torch['root']}/include", f"{torch['root']}/lib"
        flags = [*COMMON_FLAGS, "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={torch['cxx11_abi']}",
                 built_for("PyTorch", torch), f"-I{CORE}", "-isystem", include, "-isystem",
                 f"{include}/torch/csrc/api/include"]  # fmt: skip
        # no run path: torch and its CUDA runtime are loaded in the process before this library
        links = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
        objects, sources = [], list(map(Path, extension.sources))
        cuda = self.cuda_of("PyTorch")
        if cuda is not None:
            objects += cuda_objects(folder, cuda)
            sources += sorted(CUDA_TORCH_OPS.glob("*.cc"))
            flags += [*(word for path in cuda["include"] for word in ("-isystem", path))]
            links += ["-lc10_cuda", *(f"-L{path}" for path in cuda["libraries"]), "-lcudart"]
        return objects + compile_operators(sources, folder, flags), links

    def python_objects(self, extension, folder):
        """Compile the NumPy binding; return the object and the linker's options."""
        flags = [*COMMON_FLAGS, "-std=c++17", f"-I{CORE}", "-isystem", self.pybind11_include(),
                 "-isystem", sysconfig.get_path("include")]  # fmt: skip
        place = folder / f"python-{sysconfig.get_config_var('SOABI')}"
        return compile_host([BINDING], place, flags), []

    def build_extensions(self):
        try:
            self.core = core_library(NATIVE)  # the bindings, which are built side by side, need it
        except incremental_build.CommandError as error:
            raise BuildError(error) from None
        super().build_extensions()

    def build_extension(self, extension):
        compile_binding = {
            TENSORFLOW_EXTENSION: self.tensorflow_objects,
            TORCH_EXTENSION: self.torch_objects,
        }.get(extension.name, self.python_objects)
        try:
            objects, links = compile_binding(extension, NATIVE)
            target = Path(self.get_ext_fullpath(extension.name))
            # each binding has its own copy of the core; if it exported the symbols, one binding
            # could use those of another at run time
            command = [*compiler(), "-shared", *map(str, objects), str(self.core),
                       "-Wl,--exclude-libs,ALL", *links, "-lz",
                       *shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(target)]  # fmt: skip
            # a file beside the library would be installed too
            record = NATIVE / f"{target.name}.linked.command"
            if incremental_build.link(target, command, [*objects, self.core], record):
                say(f"linked {extension.name}")
        except incremental_build.CommandError as error:
            raise BuildError(error) from None


os.chdir(ROOT)
setup(
    ext_modules=[Extension("deepreduce_hvd._native", [str(BINDING)])],
    cmdclass={"build_ext": BuildBindings, "build_py": BuildModules},
)
