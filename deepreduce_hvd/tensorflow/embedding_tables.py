"""Embedding tables among the variables, see ``adapters/embedding_tables.py``.

In a graph, only gradients that are made from slices are looked at, so that no other gradient costs
anything in later steps. Such a gradient is surely that of a table.
"""

import warnings
import weakref

import numpy as np
import tensorflow as tf

from deepreduce_hvd.adapters import embedding_tables
from deepreduce_hvd.planning.policies import rows_codec
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.tensorflow.local_variables import local_variable, read, write
from deepreduce_hvd.tensorflow.schedule import CodecNumbers

#: operators that may stand between slices and the gradient that Horovod reduces
_ELEMENT_WISE = "Cast", "Identity", "Mul", "RealDiv", "Reshape"

#: What is known about a variable: nothing yet; its first gradient, which does not tell; that it is
#: another layer; that it is a table whose residual has to be sent; that it is a table.
_UNKNOWN, _WAITING, _OTHER, _FOUND, _TABLE = range(5)


class TableState:
    """What is known about one variable that may be an embedding table.

    Traced graphs read and write it, so that the codec can change after tracing. The numbers of the
    codec are an input of the operator that encodes.

    Args:
        rows: number of rows of the variable.
        on_host: whether its gradients are compressed on the host. On a GPU, tables keep the default
            codec.
    """

    def __init__(self, rows, on_host):
        self._on_host = on_host
        self._state = local_variable(np.int64(_UNKNOWN))
        self._used_before = local_variable(np.zeros(rows, bool))
        self._numbers = CodecNumbers(rows_codec(), NoMemory()).last
        #: whether a graph makes its gradient from slices, as traced last
        self.from_slices = False
        #: whether a gradient has passed, with two more numbers in its probe
        self.probes = False

    @property
    def is_table(self):
        """Whether it is a table; None if that is not known."""
        state = int(read(self._state))
        return None if state <= _WAITING else state != _OTHER

    @is_table.setter
    def is_table(self, known):
        write(self._state, {None: _UNKNOWN, False: _OTHER, True: _FOUND}[known])

    def residual_changes(self):
        """Note that the residual was written outside of graphs and may be nonzero."""
        if self.is_table:
            self.is_table = True

    def _is_open(self):
        """Return whether the gradient that is traced now, or given, may be that of a table."""
        return self._on_host and (tf.executing_eagerly() or self.from_slices)

    def after_undo(self, undo):
        """Note in a graph that the residual may be nonzero again if the last step is undone.

        Args:
            undo: () bool tensor.

        Returns:
            The update of the state.
        """
        state = self._state.read_value()
        return self._state.assign(
            tf.where(undo & (state == _TABLE), tf.constant(_FOUND, tf.int64), state)
        )

    def with_look(self, probe, gradient, from_slices):
        """Return a probe with two more numbers, which tell the other ranks about a gradient.

        They are 1 if it looks like that of a table, and if it looks like that of another layer.

        Args:
            probe: the probe.
            gradient: the gradient, before it is encoded.
            from_slices: what :func:`is_from_slices` returned.
        """
        seen = self._look(gradient, from_slices)
        return tf.concat([probe, tf.cast(seen, probe.dtype)], axis=0)

    def _look(self, gradient, from_slices):
        """Return the two numbers, (2,) int64: zeros once the ranks have decided."""
        self.probes, self.from_slices = True, from_slices
        if not self._is_open():
            return tf.constant([0, 1], tf.int64)
        state = self._state.read_value()
        return tf.cond(
            state <= _WAITING,
            lambda: self._look_at_rows(gradient, state == _WAITING, from_slices),
            lambda: tf.zeros([2], tf.int64),
        )

    def _look_at_rows(self, gradient, is_waiting, from_slices):
        """See :func:`deepreduce_hvd.adapters.embedding_tables.looks_like_table`."""
        used = tf.reduce_any(tf.not_equal(gradient, 0), axis=1)
        count, rows = _count(used), tf.size(used, tf.int64)
        few, many = 4 * count < rows, 4 * count >= 3 * rows
        if not from_slices:
            many = tf.logical_not(few)
        changes = 3 * _count(used & ~self._used_before.read_value()) >= count
        as_table = few | (~many & is_waiting & changes)
        as_other = many | (~few & is_waiting & ~changes)
        any_used = count > 0

        def wait():
            self._used_before.assign(used)
            self._state.assign(_WAITING)
            return True

        tf.cond(any_used & ~as_table & ~as_other, wait, lambda: False)
        return tf.cast(any_used & tf.stack([as_table, as_other]), tf.int64)

    def decide(self, seen, scale):
        """Decide as all ranks do.

        Args:
            seen: the sums or means of the two numbers over the ranks.
            scale: tensor that is there if the ranks have the same configuration.
        """
        if not self._is_open():
            return
        as_table, as_other = tf.unstack(tf.not_equal(seen, 0))

        def note():
            self._state.assign(tf.where(as_other, tf.constant(_OTHER, tf.int64), _FOUND))
            return True

        with tf.control_dependencies([scale]):
            is_open = self._state.read_value() <= _WAITING
            tf.cond(is_open & (as_table | as_other), note, lambda: False)

    def encode(self, gradient, residual, encode, numbers):
        """Return the payload of a gradient, with the codec "rows" if it is that of a table.

        Args:
            gradient: the gradient.
            residual: the variable of its memory.
            encode: function of (gradient, numbers of the codec, variables of the memory) that
                returns the payload.
            numbers: the numbers of the codec of other layers.
        """
        if not self._is_open():
            return encode(gradient, numbers, [residual])
        state = self._state.read_value()

        def with_residual():
            kept = tf.cast(tf.reshape(residual.read_value(), tf.shape(gradient)), gradient.dtype)
            with tf.control_dependencies([kept]):
                residual.assign(tf.zeros_like(residual))
                self._state.assign(_TABLE)
            return gradient + kept

        def rows():
            complete = tf.cond(state == _FOUND, with_residual, lambda: tf.identity(gradient))
            return encode(complete, self._numbers, [])

        return tf.cond(state >= _FOUND, rows, lambda: encode(gradient, numbers, [residual]))

    def momentum(self, momentum, dtype):
        """Return the momentum of a variable in this step: 0 unless it is or may be a table."""
        if not self.from_slices:
            return 0.0
        keeps = tf.not_equal(self._state.read_value(), _OTHER)
        return tf.cast(keeps, dtype) * tf.cast(momentum, dtype)


def state_of(slot, compressor):
    """Return the :class:`TableState` of a slot; None if its codec does not change."""
    in_graphs = tf.compat.v1.executing_eagerly_outside_functions()
    if slot.label not in compressor.table_candidates or not in_graphs:
        return None
    return TableState(slot.shape[0], slot.home is None)


class TableWarnings:
    """The warnings about tables that keep their codec, as their first gradients show.

    One warning names those of a graph. Eagerly, it names the first one.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
    """

    def __init__(self, compressor):
        self._compressor = weakref.ref(compressor)  # graphs refer to this object
        self._looked_at = set()  # names of variables whose first gradient is known
        self._expected = set()  # names of variables in graphs whose first gradient is not
        self._found = []
        self._warned = False

    def look_at(self, slot, gradient, from_slices):
        """Look at a gradient, if it is the variable's first one; in a graph, when the graph runs.

        Args:
            slot: slot of the variable.
            gradient: its gradient, before it is encoded. Slices need no look: their rows are all
                sent in each step.
            from_slices: what :func:`is_from_slices` returned.
        """
        if self._warned or slot.home is not None or slot.table is not None:
            return
        if embedding_tables.may_be(slot.shape, slot.policy):
            with tf.device("CPU:0"):
                self._look_at(slot, gradient, from_slices)

    def _look_at(self, slot, gradient, from_slices):
        name, rows = slot.label, slot.shape[0]
        if tf.executing_eagerly():
            if name not in self._looked_at:
                self._note(name, int(_used_rows(gradient)), rows)
        elif tf.compat.v1.executing_eagerly_outside_functions() and from_slices:
            self._expected.add(name)

            def note(used):
                self._note(name, int(used), rows)
                return used

            tf.cond(
                tf.equal(slot.steps_taken.read_value(), 0),
                lambda: tf.numpy_function(note, [_used_rows(gradient)], tf.int64),
                lambda: tf.constant(0, tf.int64),
            )

    def _note(self, name, used, rows):
        self._looked_at.add(name)
        self._expected.discard(name)
        if embedding_tables.is_table(used, rows):
            self._found.append(name)
        if self._found and not self._expected and not self._warned:
            self._warned = True
            message = embedding_tables.warning(sorted(self._found), self._compressor())
            warnings.warn(f"deepreduce_hvd: {message}", stacklevel=2)


def _used_rows(gradient):
    """Return the number of rows of a gradient that are not zero, () int64."""
    return _count(tf.reduce_any(tf.not_equal(gradient, 0), axis=1))


def _count(used):
    return tf.math.count_nonzero(used)


def is_from_slices(gradient):
    """Return whether a gradient, as Horovod passes it, is a tensor that a graph made from slices.

    The graph that made it is looked at. A branch in which it is used has a placeholder for it, and
    reading what placeholders stand for would keep tensors and graphs alive.
    """
    while hasattr(gradient, "op"):  # an eager tensor has none
        made_by = gradient.op
        if made_by.type not in _ELEMENT_WISE:
            return made_by.type == "UnsortedSegmentSum"
        gradient = made_by.inputs[0]
    return False
