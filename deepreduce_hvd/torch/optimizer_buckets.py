"""The buckets of optimizers' gradients, and what is in flight for each of them."""

import functools
import zlib
from typing import Any

from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.encoding_threads import Encodings
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.planning.layout import assign_to_buckets
from deepreduce_hvd.torch.cuda.copies import CopiesToHost
from deepreduce_hvd.torch.slot import Slot


class OptimizerBuckets:
    """The buckets of one optimizer's gradients.

    Gradients are assigned to buckets in the order in which backward makes them ready, from the last
    parameter to the first. Parameters with another codec or memory have separate buckets.
    Frozen parameters also have their own buckets: Horovod passes their zeros only after backward
    has ended, and no other gradient should wait for them.
    """

    def __init__(self, slots, bucket_bytes, layout):
        self.slots = slots
        self.training = self.trains(slots)
        self.layout = layout
        self._bucket_of: dict[Slot, tuple[int, list[Slot]]] = {}
        policies = layout.policies
        compressed = [
            (slot, trains)
            for slot, trains in zip(slots, self.training)
            if not policies[slot.name].dense
        ][::-1]
        #: number of slots that are trained and compressed
        self.gradients = sum(trains for _, trains in compressed)
        buckets = self._messages({slot.name: slot for slot, trains in compressed if trains})
        grouped = {slot for bucket in buckets for slot in bucket}
        kinds: dict[
            Any, list[Slot]
        ] = {}  # (trains, policy) -> slots, in the order in which backward makes gradients
        for slot, trains in compressed:
            if slot not in grouped:
                kinds.setdefault((trains, policies[slot.name]), []).append(slot)
        for _, ready in sorted(kinds.items(), key=lambda kind: not kind[0][0]):
            for positions in assign_to_buckets(
                [slot.parameter.numel() for slot in ready], bucket_bytes
            ):
                buckets.append([ready[position] for position in positions])
        for number, bucket in enumerate(buckets):
            self._bucket_of.update((slot, (number, bucket)) for slot in bucket)
        names = [[slot.name for slot in bucket] for bucket in buckets]
        #: CRC-32 of the compressor's configuration, the layout and the buckets; ranks compare it
        self.fingerprint = zlib.crc32(repr(names).encode(), layout.fingerprint)

    def _messages(self, slots):
        """Return the buckets that the layout prescribes for ``slots``, by name."""
        buckets: list[list[Slot]] = []
        for names in self.layout.messages:
            kinds: dict[Any, list[Slot]] = {}
            for name in names:
                if name in slots:
                    kinds.setdefault(self.layout.policies[name], []).append(slots[name])
            buckets += kinds.values()
        return buckets

    def communicator_of(self, slot):
        """Return the communicator that the layout prescribes for the slot's bucket, or None."""
        return self.layout.communicators.get(slot.name)

    @staticmethod
    def trains(slots):
        return [slot.parameter.requires_grad for slot in slots]

    def bucket_of(self, slot):
        """Return the number of the slot's bucket, and the list of all slots in it."""
        return self._bucket_of[slot]

    def called_for(self, slot):
        """Return the label of a bucket's roll call, the same for all: there is one per step."""
        return self.slots[0].name


class SeparateBuckets:
    """The buckets of gradients without an optimizer: one bucket per gradient."""

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def bucket_of(self, slot):
        return slot, [slot]

    def communicator_of(self, slot):
        return None

    def called_for(self, slot):
        return slot.name


class Flight:
    """One bucket in one step: compress fills it, decompress empties it."""

    def __init__(self, slots, communicator=None):
        self.slots = slots  # all slots of the bucket, in the order of their parts in messages
        self.communicator = communicator  # None: the compressor's
        self.members = {}  # slot -> BucketMember
        self.encodings = []  # of members that threads encode
        self.copies = CopiesToHost()  # of gradients that are encoded on the host
        self.roll_call: Any = None  # the RollCall that the exchange waits for
        # the slot of this bucket whose gradient started the roll call, if any
        self.called_by = None
        self.exchange = None
        self.numbers = {}  # slot -> number of its member, set when the exchange starts
        self._left = 0

    @property
    def full(self):
        return len(self.members) == len(self.slots)

    @functools.cached_property
    def on_host(self):
        """Whether all parameters are on the host."""
        return all(slot.parameter.device.type == "cpu" for slot in self.slots)

    def start(self, compressor, transport, communicator, rank):
        """Start the exchange of the gradients that have come.

        These are all gradients of the bucket, unless some parameters have none in this step.
        """
        order = [slot for slot in self.slots if slot in self.members]
        self.numbers = {slot: number for number, slot in enumerate(order)}
        self._left = len(order)
        members = [self.members[slot] for slot in order]
        policy = order[0].policy  # all have the same
        bucket = Bucket(
            policy.codec, policy.memory, members, compressor.seed, order[0].steps - 1, rank
        )
        name = collective_name(compressor.number, order[0].name)
        encodings = Encodings(self.encodings)
        self.exchange = Exchange(communicator, bucket, transport, name, self._before(encodings))
        encodings.when_done(lambda: self.exchange.proceed_from(encodings))

    def _before(self, encodings):
        """Yield the handles that must be done before the exchange starts."""
        yield from self.roll_call.expect_all()
        if self.copies:
            yield self.copies
        if encodings:
            yield encodings

    def hand_over(self):
        """Count one result; return whether it was the last."""
        self._left -= 1
        return self._left == 0
