"""The thread that communicates for one compressor in PyTorch's DDP.

torch.distributed matches collectives by their order. DDP calls its hook for the buckets in the same
order on all ranks, but how far each exchange has come at that moment depends on timing. So one
thread runs the exchanges, one bucket after another, each to its end.
"""

import queue
import threading

from deepreduce_hvd.errors import PeerFailedError


class Driver:
    """Run jobs one after another in a thread, until one fails.

    After a failure, all later jobs fail with the same error.

    Args:
        transport: the :class:`~deepreduce_hvd.torch.ddp.transport.DistributedTransport`, which
            tells the other ranks about a failure.
    """

    def __init__(self, transport):
        self._transport = transport
        self._jobs = queue.SimpleQueue()
        self.failure = None
        thread = threading.Thread(target=self._run, name="deepreduce-ddp", daemon=True)
        thread.start()

    def put(self, job):
        """Run a job after all earlier ones.

        Args:
            job: an object with ``run()``, which may raise, and ``end(error)``, which is called with
                the exception or None.
        """
        self._jobs.put(job)

    def stop(self):
        """End the thread after the jobs that it has."""
        self._jobs.put(None)

    def _run(self):
        while (job := self._jobs.get()) is not None:
            if self.failure is None:
                try:
                    job.run()
                # any error: the other ranks must not wait for this one
                except Exception as error:
                    self.failure = error
                    if not isinstance(error, PeerFailedError):
                        self._transport.announce(error)
            job.end(self.failure)
            del job
