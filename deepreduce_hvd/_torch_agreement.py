"""What ranks must agree on: how their compressors are configured, and that all of them take part in every step."""

import time

import numpy as np
from horovod.common.exceptions import HorovodInternalError

from deepreduce_hvd import handshake, state as saved_state
from deepreduce_hvd.errors import InvalidArgument

_MOST_SECONDS = 10.0
_PAUSE_SECONDS = 1e-3
#: in Horovod's message when a rank has joined and others want to gather
_JOINED = "not supported with Join"


def agree(session):
    """The handshake, before the first step."""
    try:
        handshake.agree(session)
    except HorovodInternalError as error:
        if _JOINED in str(error):
            expect_all_ranks(session)
        raise


def describe(session, with_steps):
    """What the handshake compares."""
    compressed = [slot for slot in session.slots.values() if not slot.dense]
    frozen = [f"{slot.name} {'trained' if slot.parameter.requires_grad else 'frozen'}" for slot in compressed]
    steps = saved_state.steps_to_compare(session.slots, with_steps)
    settings = session.compressor.settings(session.transport)
    return [*settings, handshake.Setting("frozen parameters", frozen), *steps]


def expect_all_ranks(session):
    """Raises InvalidArgument when ranks have joined; called when something is wrong, by all that can see it.

    A rank that has called ``hvd.join()``, because its data has ended, gives zeros to every allreduce of Horovod. In a probe
    that shows as a reduction over other ranks, and neither the cause nor the ranks are told. An allreduce with a place for
    each rank tells them.

    It returns when all ranks are there, or after ten seconds, in case that not all of them ask. A rank that ends shuts Horovod
    down for all others, so it also gives them the time to come to the same error.
    """
    transport = session.transport
    session.roll_calls += 1
    places = np.zeros(transport.size, dtype=np.float32)
    places[transport.rank] = 1
    name = f"deepreduce.roll_call.{session.compressor.number}.{session.roll_calls}"
    handle = transport.allreduce(places, name)
    deadline = time.monotonic() + _MOST_SECONDS
    while not transport.test(handle):
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_SECONDS)
    missing = [rank for rank, place in zip(transport.ranks, transport.wait(handle)) if place == 0]
    if missing:
        raise InvalidArgument(
            f"expected all {transport.size} ranks of the compressor's process set in every step, got nothing from "
            f"{handshake.listed(missing)}, as after hvd.join(), which a compressor cannot make up for; give all ranks the "
            "same number of batches instead: with DistributedSampler or drop_last=True, or start again with the first "
            "batch where the data ends"
        )
