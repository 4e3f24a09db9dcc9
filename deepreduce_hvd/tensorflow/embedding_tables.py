"""Look for embedding tables in the first step, see ``adapters/embedding_tables.py``.

In a graph, only gradients that are made from slices are looked at, so that no other gradient costs
anything in later steps.
"""

import warnings
import weakref

import tensorflow as tf

from deepreduce_hvd.adapters import embedding_tables

#: operators that may stand between slices and the gradient that Horovod reduces
_ELEMENT_WISE = "Cast", "Identity", "Mul", "RealDiv", "Reshape"


class EmbeddingTables:
    """The embedding tables among the variables of one compressor, as their first gradients show.

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
        if self._warned or not embedding_tables.may_be(slot.shape, slot.policy):
            return
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
    return tf.math.count_nonzero(tf.reduce_any(tf.not_equal(gradient, 0), axis=1))


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
