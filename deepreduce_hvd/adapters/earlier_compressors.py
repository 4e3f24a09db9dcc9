"""Two compressors for the same parameters, of which each has residuals of its own.

A program that creates its compressor in the training step has no error feedback: each compressor is
used once, and what it keeps is never sent.
"""

import weakref

from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.user_warnings import warn

_MESSAGE = (
    "this compressor begins without residuals, but another one has exchanged gradients of the same"
    " parameters ({}), and what it keeps of them is not sent any more; create one compressor before"
    " the training loop, and outside of a tf.function; or call close() on the old one before you"
    " use the new one"
)

#: adapters of the compressors that have been used
_used: weakref.WeakSet = weakref.WeakSet()


def note_first_use(adapter, others=_used):
    """Warn on the first rank if another open compressor has residuals of the same parameters.

    Called before each handshake under Horovod, and in each backward pass of torch.distributed.

    Args:
        adapter: adapter of the compressor that is used now. If a state was loaded into it, its
            residuals are those of the training so far, and there is no warning.
        others: the adapters of compressors whose residuals count.
    """
    first = adapter not in _used
    _used.add(adapter)
    if not first or not adapter.speaks or adapter.progress():
        return
    for other in list(others):
        left = _names_left(adapter, other)
        if left:
            warn(_MESSAGE.format(some_of(left)))
            return


def earlier_than(adapter):
    """Return the adapters that now have residuals of parameters of ``adapter``: a WeakSet."""
    return weakref.WeakSet(other for other in list(_used) if _names_left(adapter, other))


def _names_left(adapter, other):
    """Return the names of the parameters of an adapter of which another one has residuals."""
    known = {} if other is adapter else other.names_by_id()
    names = [known[one] for one in adapter.names_by_id() if one in known]
    return [name for name in names if other.slots[name].state and other.slots[name].steps]
