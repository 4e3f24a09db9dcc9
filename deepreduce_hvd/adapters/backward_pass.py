"""A backward pass that synchronizes, with DDP and fully_shard."""

import time


class BackwardPass:
    """One backward pass that synchronizes.

    Args:
        task: id of the pass in the autograd engine, or None if it is not needed.

    Attributes:
        loss_scale: loss scale of this step, or None.
        slots: slots whose gradients have come.
        jobs: the :class:`~deepreduce_hvd.torch.ddp.buckets.BucketJob` of each bucket so far.
        buckets: names of the parameters in each of them.
        device_sums: the :class:`~deepreduce_hvd.torch.cuda.device.DeviceSums` of the pass, or None.
        verdicts: for each bucket on a GPU, its slots, a tensor on the host that tells which of
            their results are finite, and the handle of its copy.
        failure: an error at its beginning, or None.
        ended: whether all gradients so far have been waited for.
    """

    def __init__(self, task=None):
        self.task = task
        self.loss_scale = None
        self.slots = []
        self.jobs = []
        self.buckets = []
        self.device_sums = None
        self.verdicts = []
        self.failure = None
        self.ended = True

    def end(self):
        """Wait for all buckets and release them.

        Returns:
            The error of the first bucket that failed, or None.
        """
        for job in self.jobs:
            job.ended.wait()
        error = next((job.error for job in self.jobs if job.error is not None), None)
        self.jobs.clear()
        return error

    def settle(self, seconds):
        """Wait until no bucket is exchanged, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        for job in self.jobs:
            job.ended.wait(max(deadline - time.monotonic(), 0))

    def note_void(self):
        """Wait for the results on GPUs, and mark the slots whose gradients have NaN or Inf."""
        if self.device_sums is not None:
            self.device_sums.check()
        for slots, finite, copies in self.verdicts:
            copies.result()
            for slot, is_finite in zip(slots, finite.tolist()):
                slot.void = slot.void or not is_finite
