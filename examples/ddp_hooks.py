"""PyTorch's own communication hooks of DDP, to compare with, and the bytes that they send."""

import functools

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


class Hook:
    """A communication hook, and the bytes that it passes to ``torch.distributed.all_reduce``.

    Args:
        hook: function of (state, bucket).
        state: state of the hook.
        options: options of DistributedDataParallel for this hook.
    """

    def __init__(self, hook, state=None, options=None):
        self.options = options or {}
        self._hook = hook
        self._state = state
        self._bytes = 0
        self._steps = 0

    def register(self, model):
        """Register the hook with a DDP model; one hook of a process counts at a time."""
        _count_in(self)
        model.register_comm_hook(self._state, self._run)

    def _run(self, state, bucket):
        self._steps += bucket.is_last()
        return self._hook(state, bucket)

    def count(self, tensor):
        self._bytes += tensor.nbytes

    def bytes_per_step(self):
        """Return the mean bytes per step since the last call."""
        mean = self._bytes / max(self._steps, 1)
        self._bytes = self._steps = 0
        return mean


def _count_in(hook):
    """Replace ``torch.distributed.all_reduce``, which the hooks call, by one that counts."""
    all_reduce = getattr(dist.all_reduce, "uncounted", dist.all_reduce)

    @functools.wraps(all_reduce)
    def counted(tensor, *arguments, **options):
        hook.count(tensor)
        return all_reduce(tensor, *arguments, **options)

    counted.uncounted = all_reduce
    dist.all_reduce = counted


def power_sgd(rank, start=140):
    """Return the hook of PowerSGD (Vogels et al., 2019) in one bucket.

    PyTorch's hook starts its second and third sum in callbacks, in threads of Gloo. With several
    buckets their order differs between ranks, and Gloo, which matches sums by their order, aborts.

    Args:
        rank: rank of the approximation.
        start: number of first steps that are not compressed; PyTorch's documentation recommends
            10 % of all steps.
    """
    state = powerSGD_hook.PowerSGDState(
        None, rank, start_powerSGD_iter=start, orthogonalization_epsilon=1e-8
    )
    return Hook(powerSGD_hook.powerSGD_hook, state, {"bucket_cap_mb": 1 << 14})


#: name of a row -> function that returns its hook, or None for DDP without a hook
HOOKS = {
    "none": lambda: None,
    "fp16": lambda: Hook(default_hooks.fp16_compress_hook),
    "PowerSGD rank 1": lambda: power_sgd(1),
    "PowerSGD rank 2": lambda: power_sgd(2),
    "PowerSGD rank 4": lambda: power_sgd(4),
}
