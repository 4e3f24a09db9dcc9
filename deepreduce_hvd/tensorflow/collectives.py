"""The collectives of a compressor as operators of a graph."""

import horovod.tensorflow as hvd

from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.tensorflow.exchange import HorovodTransport
from deepreduce_hvd.tensorflow.graph import rank_of_job, ranks_of, size_of
from deepreduce_hvd.tensorflow.ops import checked, operators


class Collectives:
    """The collectives of one compressor, with their names and probes.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        process_set: the Horovod process set of its ranks.
    """

    def __init__(self, compressor, process_set):
        self._compressor = compressor
        self._process_set = process_set

    @property
    def size(self):
        """The number of ranks, or in elastic training an operator that returns it."""
        return size_of(self._process_set)

    def name_for(self, slot):
        """Return the name of the collective of a slot's message."""
        return collective_name(self._compressor.number, slot.label)

    def probe(self, step, loss_scale, dtype):
        """Return the probe of a step, four numbers of ``dtype``."""
        return checked(
            operators.deepreduce_probe,
            rank_of_job(),
            step,
            loss_scale,
            fingerprint=self._compressor.fingerprint,
            T=dtype,
        )

    def scale_of(self, slot, reduced_probe, step, loss_scale):
        """Return the factor that Horovod's reduction applies to each rank's gradient.

        The operator fails if the ranks have different configurations, steps or loss scales.
        """
        return checked(
            operators.deepreduce_scale, reduced_probe, self.size, step, loss_scale,
            ranks=ranks_of(self._process_set),
            fingerprint=self._compressor.fingerprint, variable=slot.label,
        )  # fmt: skip

    def gather_messages(self, messages, name):
        """Gather the messages of all ranks, (n,) uint8, on the host.

        If they are too large for Horovod, notices take their place, as in a
        :class:`~deepreduce_hvd.communicators.exchange.Channel`.
        """
        messages = checked(
            operators.deepreduce_limit_messages, messages, self.size, rank_of_job(),
            most=HorovodTransport.most_bytes,
        )  # fmt: skip
        return self.allgather(messages, name)

    def allgather(self, message, name):
        """Gather the messages of all ranks, (n,) uint8 or int64."""
        # hvd.elastic.run recognizes a failure of Horovod by the text HorovodAllgather in the error,
        # which comes from the operator's name. Any other error would end training without a
        # message.
        return hvd.allgather(
            message,
            name=f"HorovodAllgather.{name}",
            ignore_name_scope=True,
            process_set=self._process_set,
        )

    def allreduce(self, tensor, op, name, **factors):
        """Reduce a tensor over all ranks; ``factors`` are further arguments of Horovod."""
        return hvd.allreduce(
            tensor, op=op, name=f"HorovodAllreduce.{name}", process_set=self._process_set, **factors
        )
