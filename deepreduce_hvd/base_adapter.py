"""What the adapters of all frameworks share: statistics and state of their slots."""

from deepreduce_hvd import checkpoint


class BaseAdapter:
    """The side of a compressor that works on one framework's tensors.

    Attributes:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        transport: transport over the ranks of its process set.
        slots: name of a parameter -> its slot, which has the state.
    """

    def close_round(self):
        """Settle all complete steps, before anything reads or changes state after a step."""
        raise NotImplementedError

    def stats(self):
        """Return one row of statistics per parameter."""
        return {name: slot.statistics(self.compressor.memory) for name, slot in self.slots.items()}

    def keeper_of(self, rank):
        """Return the rank whose memory stores the residuals of ``rank``."""
        return self.compressor.communicator.keeper_of(rank, self.transport)

    def state_dict(self):
        """Return the state of this rank."""
        self.close_round()
        return checkpoint.dump(
            self.slots, self.compressor.fingerprint, self.transport.rank, self.transport.size
        )

    def load_state_dict(self, state):
        """Check a state, or the list of all ranks' states, and take it over."""
        self.close_round()
        checkpoint.load(
            self.slots,
            state,
            self.compressor.fingerprint,
            self.transport.rank,
            self.transport.size,
            self.keeper_of,
        )
