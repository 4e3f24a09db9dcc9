"""Rounds: one step of one optimizer, from the first gradient that it hands over to the last result
that it gets back.
"""

import zlib

from deepreduce_hvd.communicators.bucket import Bucket, assign_to_buckets
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.compressor import collective_name
from deepreduce_hvd.torch.cuda.copies import CopiesToHost


class Plan:
    """Which gradients of one optimizer share a message.

    Gradients are cut into buckets in the order in which backward makes them ready, from the last
    parameter to the first. Frozen parameters have buckets of their own: Horovod hands their zeros
    over only when backward has ended, and no other gradient may wait for them.
    """

    def __init__(self, slots, bucket_bytes, fingerprint):
        self.slots = slots
        self.training = self.trains(slots)
        self._bucket_of = {}
        bucket_list = []
        for training in (True, False):
            ready = [
                slot
                for slot, trains in zip(slots, self.training)
                if trains == training and not slot.dense
            ][::-1]
            for positions in assign_to_buckets(
                [slot.parameter.numel() for slot in ready], bucket_bytes
            ):
                bucket_list.append([ready[position] for position in positions])
        for number, bucket in enumerate(bucket_list):
            self._bucket_of.update((slot, (number, bucket)) for slot in bucket)
        names = [[slot.name for slot in bucket] for bucket in bucket_list]
        #: 32 bits of the compressor's configuration and of this plan, which ranks compare
        self.fingerprint = zlib.crc32(repr(names).encode(), fingerprint)

    @staticmethod
    def trains(slots):
        return [slot.parameter.requires_grad for slot in slots]

    def bucket_of(self, slot):
        """(number of the slot's bucket, all slots of it)."""
        return self._bucket_of[slot]

    def called_for(self, slot):
        """The label of the roll call before the slot's bucket is exchanged: one for all buckets of
        a round.
        """
        return self.slots[0].name


class Apart:
    """The plan of gradients that belong to no optimizer: each travels by itself."""

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def bucket_of(self, slot):
        return slot, [slot]

    def called_for(self, slot):
        return slot.name


class Flight:
    """One bucket in one round: filled by compress, exchanged, emptied by decompress."""

    def __init__(self, slots):
        self.slots = slots  # of the whole bucket, in the order of their parts in its messages
        self.members = {}  # slot -> BucketMember
        self.copies = CopiesToHost()  # of gradients that are encoded there
        self.roll_call = None
        # the slot whose gradient started the roll call, if it is one of these
        self.called_by = None
        self.exchange = None
        self.numbers = {}  # slot -> number of its member, once the exchange has started
        self._left = 0

    @property
    def full(self):
        return len(self.members) == len(self.slots)

    def start(self, compressor, transport, communicator, rank):
        """Starts the exchange of what is there: of the whole bucket, unless some gradients did not
        come.
        """
        order = [slot for slot in self.slots if slot in self.members]
        self.numbers = {slot: number for number, slot in enumerate(order)}
        self._left = len(order)
        for slot in order:
            slot.payload = None
        members = [self.members[slot] for slot in order]
        bucket = Bucket(
            compressor.codec, compressor.memory, members, compressor.seed, order[0].steps - 1, rank
        )
        name = collective_name(compressor.number, order[0].name)
        self.exchange = Exchange(communicator, bucket, transport, name, before=self._before())

    def _before(self):
        """What must have come before the exchange starts."""
        yield from self.roll_call.expect_all()
        if self.copies:
            yield self.copies

    def hand_over(self):
        """Counts one result; says whether it was the last."""
        self._left -= 1
        return self._left == 0


class Round:
    """What is in flight of one step, and what must be known of it when it is over.

    Attributes:
        plan: a :class:`Plan`, or :class:`Apart`.
        loss_scale: that of this step, or None.
        slots: those whose gradients have come.
        delivering: whether a result has been asked for, before which all gradients have come.
        void: whether some result has NaN or Inf.
        closed: whether what the step leaves has been settled.
    """

    def __init__(self, plan, loss_scale, device_sums, gradients_made):
        self.plan = plan
        self.loss_scale = loss_scale
        self.device_sums = device_sums
        self.slots = []
        self.delivering = False
        self.void = False
        self.closed = False
        self._flights = {}  # by the bucket's number
        self._roll_calls = {}  # by what the plan calls at once
        self._left = 0
        self._gradients_made = gradients_made

    def ends_before(self, slot, gradients_made):
        """Whether a gradient of ``slot`` belongs to another step.

        One of an optimizer ends with its first result. What belongs to none comes one by one: such
        a step ends with the next backward pass, of which ``gradients_made``, how many gradients
        backward has made so far, tells.
        """
        if self.closed or slot.turn is self:
            return True
        return self.delivering and (
            isinstance(self.plan, Plan) or gradients_made != self._gradients_made
        )

    def add(self, slot):
        slot.turn = self
        self.slots.append(slot)
        self._left += 1

    def flight_for(self, slot, call):
        """The flight that a slot's gradient joins.

        Args:
            slot: of the gradient.
            call: a function of a label that starts a
                :class:`~deepreduce_hvd.coordination.roll_call.RollCall`. The first gradient makes
                it, so that the answer is there when backward has made a bucket's other gradients.
        """
        number, bucket = self.plan.bucket_of(slot)
        flight = self._flights.setdefault(number, Flight(bucket))
        if flight.roll_call is None:
            label = self.plan.called_for(slot)
            if label not in self._roll_calls:
                self._roll_calls[label] = call(label)
                flight.called_by = slot
            flight.roll_call = self._roll_calls[label]
        return flight

    @property
    def flights(self):
        return list(self._flights.values())

    @property
    def complete(self):
        """Whether all results have been handed over."""
        return self.delivering and self._left == 0

    def hand_over(self, slot, flight=None):
        """Counts a result; of a flight whose last it was, nothing is kept, its gradients least of
        all.
        """
        self._left -= 1
        if flight is not None and flight.hand_over():
            del self._flights[self.plan.bucket_of(slot)[0]]
