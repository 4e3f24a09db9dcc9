"""PyTorch with a simulated CUDA device, and the package with the CUDA operators of setup.py.

The operators run under the emulator. :func:`package` creates a separate copy of the package.
:func:`install` then makes ``torch.device("cuda")`` work, in a process that has this copy first on
its path. It must be called before torch is imported, unless the module :data:`SERVED` did that.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).resolve().parent
CORE = pathlib.Path("deepreduce_hvd/csrc")
#: A module of :func:`package`. It loads the device and torch, so that processes with the device can
#: be forked from one that has imported it.
SERVED = "pretended_torch"


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
    made = emulation_build.compile_sources(operators, "pretend_cuda/torch", options, together=True)
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
    (pathlib.Path(folder) / f"{SERVED}.py").write_text(
        "import ctypes, pathlib\n"
        "library = pathlib.Path(__file__).with_name('pretended_device.so')\n"
        "ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)\n"
        "import torch, torch._dynamo\n"
    )
    return folder


def install(folder):
    """Add a device "cuda" to torch in this process.

    ``folder`` is the result of :func:`package`.
    """
    # before torch looks for CUDA
    pretended = ctypes.CDLL(
        str(pathlib.Path(folder) / "pretended_device.so"), mode=ctypes.RTLD_GLOBAL
    )
    number = ctypes.c_int64
    for name, result, *arguments in (
        ("new_stream", number),
        ("stream", number),
        ("use", None, number),
        ("now", number, number),
        ("reached", ctypes.c_int, number, number),
        ("wait", None, number, number),
    ):
        function = getattr(pretended, f"pretended_{name}")
        function.restype, function.argtypes = result, arguments
    import torch

    class Stream:
        """A stream; only copies take time, and a stream that waits for another gets them at once."""

        def __init__(self, device=None, number=None):
            self.number = pretended.pretended_new_stream() if number is None else number

        def wait_stream(self, other):
            pretended.pretended_wait(other.number, pretended.pretended_now(other.number))

        def wait_event(self, event):
            event.synchronize()

    class Event:
        """An event that is done at the second query, so that both answers occur."""

        def __init__(self, blocking=False):
            pass

        def record(self, stream=None):
            self._stream = pretended.pretended_stream() if stream is None else stream.number
            self._moment, self._asked = pretended.pretended_now(self._stream), 0

        def query(self):
            self._asked += 1
            if self._asked > 1:
                self.synchronize()
            return bool(pretended.pretended_reached(self._stream, self._moment))

        def synchronize(self):
            pretended.pretended_wait(self._stream, self._moment)

    @contextlib.contextmanager
    def stream(used):
        before = pretended.pretended_stream()
        pretended.pretended_use(used.number)
        try:
            yield
        finally:
            pretended.pretended_use(before)

    torch.cuda._lazy_init = lambda: None
    torch.cuda.Event, torch.cuda.Stream, torch.cuda.stream = Event, Stream, stream
    torch.cuda.current_stream = lambda device=None: Stream(number=pretended.pretended_stream())
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda._sleep = lambda cycles: None
    torch._C._cuda_getCurrentRawStream = lambda index: pretended.pretended_stream()
    return torch
