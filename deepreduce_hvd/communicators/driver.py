"""A thread that runs the exchanges of one compressor one after another.

Some transports match collectives by their order, as torch.distributed does, and not by their names.
The exchanges of a step start in the same order on all ranks, but their progress depends on timing.
If they advanced together, ranks could start collectives in different orders. So one thread runs
each exchange to its end before it starts the next one.
"""

import logging
import queue
import threading

from deepreduce_hvd.errors import PeerFailedError

#: maximum time in seconds to wait for the thread's end
_JOIN_SECONDS = 2.0

log = logging.getLogger("deepreduce_hvd")


class Driver:
    """Run jobs one after another in a thread, until one fails.

    After a failure, all later jobs fail with the same error.

    Args:
        transport: a transport whose ``announce(error)`` tells the other ranks about a failure.
    """

    def __init__(self, transport):
        self._transport = transport
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.failure = None
        self._thread = threading.Thread(target=self._run, name="deepreduce-driver", daemon=True)
        self._thread.start()

    def put(self, job):
        """Run a job after all earlier ones.

        Args:
            job: an object with ``run()``, which may raise, and ``end(error)``, which is called with
                the exception or None.
        """
        self._jobs.put(job)

    def stop(self):
        """Finish the queued jobs, then end the thread.

        Wait for it, unless it hangs: a thread that is in a collective while the interpreter ends
        may crash the process.
        """
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _announce(self, error):
        """Tell the other ranks about an error of this rank."""
        if isinstance(error, PeerFailedError):
            return
        try:
            self._transport.announce(error)
        # Any error: the thread must go on, or backward would wait for its job without limit. The
        # others then learn of the failure when this rank ends.
        except Exception:
            log.debug("deepreduce_hvd: a failure could not be announced", exc_info=True)

    def _run(self):
        while (job := self._jobs.get()) is not None:
            if self.failure is None:
                try:
                    job.run()
                # any error: the other ranks must not wait for this one
                except Exception as error:
                    self.failure = error
                    self._announce(error)
            job.end(self.failure)
            del job
