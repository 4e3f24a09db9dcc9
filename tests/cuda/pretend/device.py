"""PyTorch with a simulated CUDA device, and the package with the CUDA operators of setup.py.

The operators run under the emulator. :func:`package` creates a separate copy of the package.
:func:`install` then makes ``torch.device("cuda")`` work. It must be called before torch is
imported, in a process that has this copy first on its path.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).resolve().parent
CORE = pathlib.Path("deepreduce_hvd/csrc")


def _torch():
    return pathlib.Path(importlib.util.find_spec("torch").origin).parent


def package(folder):
    """Fill a folder for PYTHONPATH with the package, its operators and the simulated device."""
    import emulation_build  # late: a process with the device has no need of its folder

    torch = _torch()
    options = ["-O1", "-std=c++20", *(f"-I{path}" for path in (HERE, CORE))]
    for path in (torch / "include", torch / "include/torch/csrc/api/include"):
        options += ["-isystem", str(path)]
    operators = sorted((ROOT / "torch_ops").rglob("*.cc"))
    made = emulation_build.compile_sources(operators, "pretend_cuda/torch", options)
    made += emulation_build.kernels_and_core()
    pretended = emulation_build.compile_sources(
        [HERE / "device.cc"], "pretend_cuda/device", options
    )
    links = [
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-lz",
    ]
    home = pathlib.Path(folder) / "deepreduce_hvd"
    home.mkdir()
    for path in (ROOT / "deepreduce_hvd").iterdir():
        if not path.name.startswith(("_torch_ops", "__pycache__")):
            (home / path.name).symlink_to(path)
    library = home / f"_torch_ops-{importlib.metadata.version('torch')}.so"
    emulation_build.link(library, made, ["-Wl,-Bsymbolic", *links])
    emulation_build.link(pathlib.Path(folder) / "pretended_device.so", pretended, links)
    return folder


class _Stream:
    """A stream. All streams share one order, so there is nothing to wait for."""

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        assert isinstance(other, _Stream)


def install(folder):
    """Add a device "cuda" to torch in this process.

    ``folder`` is the result of :func:`package`.
    """
    # before torch looks for CUDA
    pretended = ctypes.CDLL(
        str(pathlib.Path(folder) / "pretended_device.so"), mode=ctypes.RTLD_GLOBAL
    )
    pretended.pretended_now.restype, pretended.pretended_wait.restype = ctypes.c_int64, None
    pretended.pretended_wait.argtypes = pretended.pretended_reached.argtypes = [ctypes.c_int64]
    import torch

    class Event:
        """An event that is done at the second query, so that both answers occur."""

        def record(self, stream=None):
            self._moment, self._asked = pretended.pretended_now(), 0

        def query(self):
            self._asked += 1
            if self._asked > 1:
                self.synchronize()
            return bool(pretended.pretended_reached(self._moment))

        def synchronize(self):
            pretended.pretended_wait(self._moment)

    first = _Stream()
    torch.cuda._lazy_init = lambda: None
    torch.cuda.Event, torch.cuda.Stream = Event, _Stream
    torch.cuda.current_stream = lambda device=None: first
    torch.cuda.device = torch.cuda.stream = contextlib.nullcontext
    return torch
