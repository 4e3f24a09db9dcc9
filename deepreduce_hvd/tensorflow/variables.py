"""Map gradients to variables: ``compress`` gets only a tensor from Horovod.

Two ways are tried in this order. A gradient that neither identifies is refused, with an error that
names it:

1. The pairs in Horovod's function ``allreduce_grads(grads, vars)``. Its tapes and optimizers reduce
gradients in this function, which calls ``compress`` and has each gradient beside its variable. The
gradient is found there by object identity, not by shape or order.
2. For ``hvd.allreduce`` alone, a shape that only one variable has. Candidates are all variables of
the compressor, or those that a view of it is bound to.

Horovod traces ``allreduce_grads`` once for all eager tapes of equal shapes. So a graph checks that
it runs on the variable that it was traced for.
"""

import sys
import weakref

import horovod.tensorflow as hvd
import tensorflow as tf

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.coordination.frames import frames_of
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.ops import checked, operators
from deepreduce_hvd.validation import refuse_reducescatter

#: names of Horovod's function that pairs gradients with variables: its original name, and the name
#: that AutoGraph gives it
_REDUCING = ("allreduce_grads", "tf__allreduce_grads")
#: functions that call compress for several gradients, and for one
_GROUPED = ("grouped_allreduce", "tf__grouped_allreduce")
_CALLING = ("allreduce", "tf__allreduce", *_GROUPED)
_SCATTERING = ("reducescatter", "grouped_reducescatter")
#: modules of its functions that add up the gradients of several backward passes
_ACCUMULATING = (
    "horovod.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager",
)


def tensorflow_variable(parameter):
    """Return the tf.Variable of a parameter; a Keras 3 variable wraps one."""
    inner = getattr(parameter, "value", None)
    return inner if isinstance(inner, tf.Variable) else parameter


def _handle(parameter):
    """Return the object that all objects for one variable share."""
    variable = tensorflow_variable(parameter)
    return getattr(variable, "handle", variable)


class Variables:
    """The slots of a compressor by variable; does not keep the variables alive."""

    def __init__(self):
        self._entries = {}  # id of the handle -> (weak reference to the variable, slot)

    def add(self, parameter, slot):
        variable = tensorflow_variable(parameter)
        self._entries[id(_handle(variable))] = weakref.ref(variable), slot
        finalizer = weakref.finalize(variable, _release, weakref.ref(slot))
        finalizer.atexit = False  # type: ignore[misc]  # a property that typeshed lists as a slot
        slot.handle_name = _name_of(_handle(variable))

    def slot_of(self, parameter):
        """Return the slot of a variable, or None if the compressor was not given it."""
        variable, slot = self._entries.get(id(_handle(parameter)), (None, None))
        known = variable() if variable is not None else None
        return slot if known is not None and _handle(known) is _handle(parameter) else None

    def names_by_id(self):
        """Return {id of a variable's handle: name} of the variables that still exist."""
        entries = self._entries.items()
        return {key: slot.label for key, (variable, slot) in entries if variable() is not None}

    def by_name(self):
        """Return {name: variable} of the variables that still exist, by the names of the slots."""
        known = ((slot.label, variable()) for variable, slot in self._entries.values())
        return {name: variable for name, variable in known if variable is not None}

    def find(self, tensor, slots):
        """Return the slot that a gradient belongs to, and its variable.

        Args:
            tensor: the gradient.
            slots: tuple of the slots that it can belong to.

        Returns:
            One of ``slots``; and the variable that Horovod pairs with the gradient, or None if
            there is none.

        Raises:
            InvalidArgumentError: it belongs to none of them, or could belong to several.
        """
        variable = _variable_beside(tensor)
        if variable is not None:
            slot = self.slot_of(variable)
            if slot not in slots:
                known = isinstance(tensorflow_variable(variable), tf.Variable)
                raise InvalidArgumentError(
                    f"{_expected(slots)}, got the gradient of {_label(variable, slot)}, of shape"
                    f" {tensor.shape}; {_GIVE_ALL if known else _GIVE_LIST}"
                )
            return slot, variable
        alike = [slot for slot in slots if slot.shape == tensor.shape] or [
            slot for slot in slots if _fits(slot, tensor)
        ]
        if not alike:
            raise InvalidArgumentError(
                f"{_expected(slots)}, got a tensor of shape {tensor.shape}; {_GIVE_ALL}"
            )
        if len(alike) > 1:
            raise InvalidArgumentError(
                "compress: expected a gradient whose shape only one variable has, got one of shape"
                f" {tensor.shape}, which could be that of"
                f" {', '.join(slot.label for slot in alike)}; name the variable:"
                " deepreduce_hvd.tensorflow.allreduce_gradients(gradients, variables, compressor),"
                " or compression=compressor.bound_to([variable])"
            )
        return alike[0], None


def _release(slot):
    if slot() is not None:
        slot().release()


_GIVE_ALL = (
    "give Compressor, or bound_to, all variables whose gradients Horovod reduces; a model that is"
    " built or loaded again has other variables, and needs a Compressor of its own"
)

#: Horovod's tape iterates over its sources, and a single variable yields its rows
_GIVE_LIST = "give Horovod's tape variables in a list, as in tape.gradient(loss, [variable])"


def _expected(slots):
    if len(slots) == 1:
        return f"compress: expected the gradient of {slots[0].label}, of shape {slots[0].shape}"
    return f"compress: expected the gradient of one of the {len(slots)} named parameters"


def _label(variable, slot):
    return getattr(variable, "name", repr(variable)) if slot is None else slot.label


def _fits(slot, tensor):
    return tensor.shape.is_compatible_with(slot.shape)


# --- the pairs in Horovod's function ---


class _Met:
    """Counts for tensors that are the gradient of several variables at once.

    A count is the number of those variables that Horovod has processed.
    """

    def __init__(self):
        self._passed = {}  # id of a tensor -> (weak reference to it, number of times)

    def number(self, tensor, total):
        """Return how many of the ``total`` occurrences of ``tensor`` came before this one."""
        reference, passed = self._passed.pop(id(tensor), (None, 0))
        if reference is None or reference() is not tensor:
            passed = 0
        if passed + 1 < total:
            self._passed[id(tensor)] = weakref.ref(tensor), passed + 1
        return passed


_met = _Met()


def reducing_frame():
    """Find, among the callers, Horovod's function that pairs gradients with variables.

    Returns:
        Its frame, and with ``groups=`` the positions of the gradients that it reduces now; None for
        what is not found.
    """
    group = None
    for frame in frames_of(sys._getframe(1)):
        if group is None and _names(frame.f_code, "index_group"):
            group = frame.f_locals.get("index_group")
        if (
            frame.f_code.co_name in _REDUCING
            and frame.f_globals.get("__name__") == "horovod.tensorflow"
        ):
            return frame, group
    return None, None


def _variable_beside(tensor):
    """Return the variable that Horovod pairs with the gradient it reduces now, or None."""
    frame, group = reducing_frame()
    if frame is None:
        return None
    gradients, variables = frame.f_locals["grads"], frame.f_locals["vars"]
    places = group if isinstance(group, list) else range(len(gradients))
    places = [place for place in places if gradients[place] is tensor]
    if not places or variables is None:
        return None
    variable = variables[places[_met.number(tensor, len(places))]]
    _expect_once(variable, gradients, variables)
    return variable


def _expect_once(variable, gradients, variables):
    """Raise InvalidArgumentError for a variable with several gradients in Horovod's function.

    Horovod keeps the result of the last one only, so what the others send would be lost.
    """
    pairs = zip(gradients, variables)
    times = sum(
        gradient is not None and _handle(one) is _handle(variable) for gradient, one in pairs
    )
    if times > 1:
        raise InvalidArgumentError(
            f"compress: expected the gradient of each variable once, got that of"
            f" {getattr(variable, 'name', repr(variable))} {times} times; remove repeated variables"
            " from the sources of tape.gradient, or from the variables of the optimizer"
        )


def _calling_frame():
    """Return the frame of Horovod's function that calls compress, or None."""
    for frame in frames_of(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "horovod.tensorflow":
            name = frame.f_code.co_name
            if name in _CALLING:
                return frame
            if name.removeprefix("tf__") in _SCATTERING:
                refuse_reducescatter()
    return None


def reducing_process_set():
    """Return the process set of Horovod's current reduction, or None if unknown."""
    frame = _calling_frame()
    return None if frame is None else frame.f_locals.get("process_set")


def arguments_of_reduction():
    """Return the operation and the factors of Horovod's current reduction, as it takes them."""
    frame = _calling_frame()
    if frame is None:
        raise InvalidArgumentError(
            "compress: expected a call by Horovod's allreduce with schedule='auto', got another one"
        )
    return {name: frame.f_locals[name] for name in ("op", "prescale_factor", "postscale_factor")}


def current_reduction(size):
    """Return whether Horovod's current reduction averages or sums, one of ``wire.REDUCTIONS``.

    Args:
        size: the number of ranks.
    """
    frame = _calling_frame()
    if frame is None:
        return None
    if frame.f_locals["op"] == hvd.Average:
        return wire.AVERAGE
    factor = frame.f_locals["prescale_factor"] * frame.f_locals["postscale_factor"]
    return wire.reduction_of(factor, size) or wire.SUM


def reduces_several():
    """Return whether Horovod reduces several gradients in one call, as with ``groups=``."""
    frame = _calling_frame()
    if frame is None or frame.f_code.co_name not in _GROUPED:
        return False
    return len(frame.f_locals["tensors"]) > 1


def is_accumulated():
    """Return whether Horovod reduces sums of several passes (``backward_passes_per_step``)."""
    callers = frames_of(sys._getframe(1))
    return any(frame.f_globals.get("__name__") in _ACCUMULATING for frame in callers)


def begins_call(tensor):
    """Return whether a gradient is the first that Horovod's current call reduces."""
    frame = _calling_frame()
    if frame is None or frame.f_code.co_name not in _GROUPED:
        return frame is not None
    # Horovod gathers slices without the compressor
    dense = (one for one in frame.f_locals["tensors"] if not isinstance(one, tf.IndexedSlices))
    return next(dense) is tensor


def _names(code, name):
    return name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars


# --- the variable that a graph runs on ---


def _name_of(handle):
    """Return TensorFlow's name of the variable behind a handle, unique in the process.

    Return None in a tf.compat.v1 graph.
    """
    if (
        not isinstance(handle, tf.Tensor)
        or handle.dtype != tf.resource
        or not tf.executing_eagerly()
    ):
        return None
    with tf.device(handle.device):
        return checked(operators.deepreduce_variable_name, handle).numpy().decode()


def expect_variable(tensor, slot, variable):
    """Return ``tensor``, after a check that the graph runs on the variable it was traced for."""
    if tf.executing_eagerly() or slot.handle_name is None:
        return tensor
    handle = _handle(variable)
    with tf.device(getattr(tensorflow_variable(variable), "device", None)):
        check = checked(
            operators.deepreduce_expect_variable,
            handle,
            expected=slot.handle_name,
            variable=slot.label,
        )
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


class View:
    """A view of a compressor for gradients of some of its variables; returned by ``bound_to``."""

    def __init__(self, compressor, slots):
        self._compressor = compressor
        self._slots = slots

    @property
    def adapter(self):
        """The compressor's adapter, which ``close`` replaces."""
        return self._compressor.adapter

    def compress(self, tensor):
        return self.adapter.compress(tensor, self._slots)

    def decompress(self, tensor, context):
        return self.adapter.decompress(tensor, context)
