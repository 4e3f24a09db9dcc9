"""Embedding tables among the variables, see ``adapters/embedding_tables.py``.

In a graph, only gradients that are made from slices are looked at, so that other gradients cost
almost nothing. Horovod makes them dense. No other layer has such gradients. If Horovod adds up the
gradients of several backward passes, it is not known which ones are made from slices, so all sums
are looked at.
"""

import weakref

import numpy as np
import tensorflow as tf

from deepreduce_hvd.adapters import embedding_tables
from deepreduce_hvd.adapters.embedding_tables import has_changed, uses_few, uses_most
from deepreduce_hvd.planning.policies import rows_codec
from deepreduce_hvd.stages.memories import NoMemory, Residual
from deepreduce_hvd.tensorflow.codec_numbers import CodecNumbers
from deepreduce_hvd.tensorflow.graph import is_exported, is_from_slices
from deepreduce_hvd.tensorflow.local_variables import local_variable, read, write
from deepreduce_hvd.tensorflow.variables import is_accumulated
from deepreduce_hvd.user_warnings import warn

#: What is known about a variable: nothing yet; its first gradient, which does not tell; that it is
#: another layer; that it is a table, whose residual may have to be sent; and that has been sent.
_UNKNOWN, _WAITING, _OTHER, _TABLE_WITH_RESIDUAL, _TABLE = range(5)

#: The last gradient cannot be sent as that of a table; it can; and a graph has looked at its rows.
_NOT_SEEN, _SEEN, _SEEN_IN_GRAPH = range(3)


class TableState:
    """What is known about one variable that may be an embedding table.

    Traced graphs read and write it, so that the codec can change after tracing. The numbers of the
    codec are an input of the operator that encodes.

    Args:
        name: name of the variable.
        rows: number of its rows.
        on_host: whether its gradients are compressed on the host. On a GPU, tables keep the default
            codec.
        on_delay: function of a name that warns about a table that keeps the default codec.
    """

    def __init__(self, name, rows, on_host, on_delay):
        self._name = name
        self._on_host = on_host
        self._on_delay = on_delay
        self._state = local_variable(np.int64(_UNKNOWN))
        #: the rows that the first gradient has used
        self.used_before = local_variable(np.zeros(rows, bool))
        # whether gradients of the same variable are also sent in another way, with the residual
        self._is_shared = local_variable(False)
        self._known_as_shared = False
        self._numbers = CodecNumbers(rows_codec(), NoMemory()).last
        self._numbers_of_slices = CodecNumbers(rows_codec(), Residual()).last
        self._sends_slices = False
        #: whether the gradient that was traced or given last is made from slices in a graph; None
        #: before the first
        self.from_slices = None
        self._looks = self._has_looked = False  # whether it is looked at, and any was
        self._last_seen = local_variable(np.int64(_NOT_SEEN))  # of the last gradient
        #: whether the last probe had two numbers more
        self.probes = False
        # what the last look has found, for the probe of the next step
        self._last_look = local_variable(np.zeros(2, np.int64))

    @property
    def is_table(self):
        """Whether it is a table; None if that is not known."""
        state = int(read(self._state))
        return None if state <= _WAITING else state != _OTHER

    @is_table.setter
    def is_table(self, known):
        if self._on_host:
            write(self._state, {None: _UNKNOWN, False: _OTHER, True: _TABLE_WITH_RESIDUAL}[known])
            write(self._last_look, np.zeros(2, np.int64))

    def residual_changes(self):
        """Note that the residual was written outside of graphs and may be nonzero."""
        if self.is_table:
            self.is_table = True

    def after_undo(self, undo):
        """Note in a graph that the residual may be nonzero again if the last step is undone.

        Args:
            undo: () bool tensor.

        Returns:
            The update of the state.
        """
        state = self._state.read_value()
        return self._state.assign(
            tf.where(undo & (state == _TABLE), _constant(_TABLE_WITH_RESIDUAL), state)
        )

    def begin(self, from_slices, looks):
        """Begin to trace, or to reduce, a gradient.

        Args:
            from_slices: what :func:`~deepreduce_hvd.tensorflow.graph.is_from_slices` returned.
            looks: whether the gradient is to be looked at in a graph.
        """
        self.from_slices, self._looks = from_slices, looks
        self._has_looked = self._has_looked or looks
        seen = _SEEN_IN_GRAPH if looks else _SEEN
        if not self._is_open():
            self.share()
            seen = _NOT_SEEN
        with tf.device("CPU:0"):
            self._last_seen.assign(seen)

    def share(self):
        """Note that gradients are also sent in a way that leaves something in the residual."""
        if not self._known_as_shared:
            self._known_as_shared = True
            with tf.init_scope():
                self._is_shared.assign(True)

    def send_slices(self):
        """Note that slices of its gradients are sent, which only tables have.

        Returns:
            The numbers of the codec "rows" with error feedback: what rounding leaves of a row is
            sent when the row is used again.
        """
        self.share()
        self.probes = False
        self._sends_slices = True
        with tf.init_scope():
            if not self.is_table:
                self.is_table = True
        return self._numbers_of_slices

    def _is_open(self):
        """Return whether the gradient that is traced now, or given, may be that of a table."""
        return self._on_host and (tf.executing_eagerly() or self._looks)

    def with_look(self, probe, gradient):
        """Return a probe with two more numbers, which tell the other ranks about a gradient.

        They are 1 if it looks like that of a table, and if it looks like that of another layer.
        They are 0 if it looks like neither, and once the ranks have decided.

        Args:
            probe: the probe.
            gradient: the gradient, before it is encoded.
        """
        return self._with(probe, self._look(gradient))

    def with_last_look(self, probe):
        """Return a probe that tells the other ranks about the gradient of the step before.

        It does not wait for the gradient of this step. :meth:`look_for_next_probe` must follow.

        Args:
            probe: as for :meth:`with_look`.
        """
        return self._with(probe, self._last_look.read_value())

    def look_for_next_probe(self, gradient):
        """Look at a gradient, for :meth:`with_last_look` of the next step.

        Args:
            gradient: as for :meth:`with_look`.
        """
        self._last_look.assign(self._look(gradient))

    def _with(self, probe, seen):
        self.probes = True
        return tf.concat([probe, tf.cast(seen, probe.dtype)], axis=0)

    def _look(self, gradient):
        """Return what a gradient looks like: (as a table, as another layer), of 0 and 1."""
        nothing = tf.zeros([2], tf.int64)
        if not self._is_open():
            return nothing
        state = self._state.read_value()
        return tf.cond(
            state <= _WAITING, lambda: self._look_like(gradient, state == _WAITING), lambda: nothing
        )

    def _look_like(self, gradient, is_waiting):
        """See :func:`deepreduce_hvd.adapters.embedding_tables.looks_like_table`.

        If it is not known whether a gradient is made from slices, the first gradient decides.
        """
        used = _used_rows(gradient)
        count, rows = tf.math.count_nonzero(used), tf.size(used, tf.int64)
        few, most = uses_few(count, rows), uses_most(count, rows)
        if not self.from_slices:
            most = ~few
        new = tf.math.count_nonzero(used & ~self.used_before.read_value())
        changed = has_changed(new, count)
        as_table = few | (~most & is_waiting & changed)
        as_other = most | (~few & is_waiting & ~changed)
        # a step with NaN or Inf may be repeated with another loss scale
        tells = (count > 0) & tf.reduce_all(tf.math.is_finite(gradient))

        def wait():
            self.used_before.assign(used)
            self._state.assign(_WAITING)
            return True

        tf.cond(tells & ~as_table & ~as_other, wait, lambda: False)
        return tf.cast(tells & tf.stack([as_table, as_other]), tf.int64)

    def decide(self, seen, scale):
        """Decide as all ranks do.

        Args:
            seen: the sums or means of the two numbers over the ranks.
            scale: tensor that is there if the ranks have the same configuration.
        """
        if not self._is_open():
            return
        as_table, as_other = tf.unstack(tf.not_equal(seen, 0))

        def warn():
            self._on_delay(self._name)
            return True

        def note():
            self._state.assign(tf.where(as_other, _constant(_OTHER), _TABLE_WITH_RESIDUAL))
            return tf.cond(
                as_table & as_other,
                lambda: tf.ensure_shape(tf.numpy_function(warn, [], tf.bool), []),
                lambda: True,
            )

        with tf.control_dependencies([scale]):
            is_undecided = self._state.read_value() <= _WAITING
            tf.cond(is_undecided & (as_table | as_other), note, lambda: False)

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

        def whole():
            # float16 has no room for the sum
            wide = tf.cast(gradient, tf.float64 if gradient.dtype == tf.float64 else tf.float32)
            kept = tf.cast(tf.reshape(residual.read_value(), tf.shape(gradient)), wide.dtype)
            with tf.control_dependencies([kept]):
                residual.assign(tf.zeros_like(residual))
                self._state.assign(_TABLE)
            return encode(wide + kept, self._numbers, [])

        def rows():
            # NaN would take the residual with it
            remembers = (state == _TABLE_WITH_RESIDUAL) | self._is_shared.read_value()
            sends_it = tf.cond(
                remembers,
                lambda: tf.reduce_all(tf.math.is_finite(gradient)),
                lambda: tf.constant(False),
            )
            return tf.cond(sends_it, whole, lambda: encode(gradient, self._numbers, []))

        return tf.cond(
            state >= _TABLE_WITH_RESIDUAL, rows, lambda: encode(gradient, numbers, [residual])
        )

    def is_known_table(self):
        """Return whether its gradients are sent by their rows now, as a tensor."""
        if not self._is_open():
            return tf.constant(False)
        return self._state.read_value() >= _TABLE_WITH_RESIDUAL

    @property
    def may_suit_momentum(self):
        """Whether momentum may suit the variable, as far as tracing tells."""
        return self._on_host and self.from_slices in (None, True)

    def keeps_momentum(self):
        """Return whether momentum suits the variable in this step, as a bool or a tensor.

        It does if the last gradient was sent as that of a table, or if the next one may show that
        it is a table. The graph that sends notes it, as Horovod does not trace it with the update.
        """
        if is_exported():
            return False
        if self._sends_slices:
            return True
        if not (self._on_host and (tf.executing_eagerly() or self._has_looked)):
            return False
        state, seen = self._state.read_value(), self._last_seen.read_value()
        may_be_table = (seen == _SEEN_IN_GRAPH) & (state <= _WAITING)
        return may_be_table | ((seen != _NOT_SEEN) & (state >= _TABLE_WITH_RESIDUAL))


class EmbeddingTables:
    """The embedding tables among the variables of one compressor.

    Those with the default codec have a :class:`TableState`. A warning names the others: one warning
    for those of a graph; eagerly, for the first one.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
    """

    def __init__(self, compressor):
        self._compressor = weakref.ref(compressor)  # graphs refer to this object
        self._candidates = compressor.table_candidates
        self._looks = False  # whether the gradient that has begun is looked at in a graph
        self._looked_at = set()  # names of variables whose first gradient is known
        self._expected = set()  # names of variables in graphs whose first gradient is not
        self._found = []
        self._warned = False

    def state_of(self, slot):
        """Return a new :class:`TableState` for a slot; None if its codec does not change."""
        in_graphs = tf.compat.v1.executing_eagerly_outside_functions()
        if slot.label not in self._candidates or not in_graphs:
            return None
        return TableState(slot.label, slot.shape[0], slot.home is None, self._warn_of)

    def begin(self, slot, gradient):
        """Note where a gradient comes from.

        Args:
            slot: slot of the variable.
            gradient: its gradient, as Horovod passes it.
        """
        from_slices = is_from_slices(gradient)
        self._looks = from_slices or is_accumulated()
        if slot.table is not None:
            slot.table.begin(from_slices, self._looks)

    def look_at(self, slot, gradient):
        """Look at the first gradient of a variable whose codec stays; in a graph, when it runs.

        Args:
            slot: slot of the variable, which has begun.
            gradient: its gradient, before it is encoded. Slices need no look: their rows are all
                sent in each step.
        """
        may_be = slot.table is None and embedding_tables.may_be(slot.shape, slot.policy)
        if may_be and slot.home is None and not self._warned:
            with tf.device("CPU:0"):
                self._look_at(slot, gradient)

    def _look_at(self, slot, gradient):
        name, rows = slot.label, slot.shape[0]
        if tf.executing_eagerly():
            if name not in self._looked_at:
                self._note(name, int(tf.math.count_nonzero(_used_rows(gradient))), rows)
        elif tf.compat.v1.executing_eagerly_outside_functions() and self._looks:
            self._expected.add(name)

            def note(used):
                self._note(name, int(used), rows)
                return used

            tf.cond(
                tf.equal(slot.steps_taken.read_value(), 0),
                lambda: tf.numpy_function(
                    note, [tf.math.count_nonzero(_used_rows(gradient))], tf.int64
                ),
                lambda: tf.constant(0, tf.int64),
            )

    def _note(self, name, used, rows):
        self._looked_at.add(name)
        self._expected.discard(name)
        if used and embedding_tables.uses_few(used, rows):
            self._found.append(name)
        if self._found and not self._expected:
            self._warn()

    def _warn_of(self, name):
        """Warn of a table that ranks have seen in different ways."""
        self._found.append(name)
        self._warn()

    def _warn(self):
        if not self._warned:
            self._warned = True
            message = embedding_tables.warning(sorted(self._found), self._compressor())
            warn(message)


def _used_rows(gradient):
    """Return which rows of a gradient are not zero, (rows,) bool."""
    return tf.reduce_any(tf.not_equal(gradient, 0), axis=1)


def _constant(state):
    return tf.constant(state, tf.int64)
