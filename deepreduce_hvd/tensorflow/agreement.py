"""The handshake on TensorFlow: in Python before a graph is traced, or as an operator of a graph.

A graph of tf.compat.v1 runs nothing while it is built. So it calls Python when it runs, before
everything that its compressors add to it.
"""

import threading
import weakref

import tensorflow as tf
from horovod.common.elastic import notification_manager
from tensorflow.python.eager.context import eager_mode

from deepreduce_hvd.adapters.earlier_compressors import note_first_use
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.collective_names import process_set_key
from deepreduce_hvd.coordination.elastic import expect_keeper
from deepreduce_hvd.coordination.launchers import is_elastic

#: graph of tf.compat.v1 -> {key of a process set: its _InSession}, in the order in which they run
_in_sessions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
#: a session runs operators in several threads, and a handshake covers several compressors
_lock = threading.Lock()


class Agreement:
    """The handshake of one compressor.

    Args:
        adapter: its :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.

    Attributes:
        eager: whether the compressor was made outside of graphs of tf.compat.v1.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self._expecting: weakref.WeakSet = weakref.WeakSet()  # graphs that look for a keeper
        self.eager = tf.compat.v1.executing_eagerly_outside_functions()
        handshake.register(adapter)

    def require(self):
        """Compare configurations with the other ranks, once, when the first graph is traced.

        All ranks trace it. There is no handshake here in elastic training, where ``sync`` makes it
        on all ranks at once.

        Returns:
            List of tensors that must be computed before all else; empty outside of tf.compat.v1.
        """
        if is_elastic():
            self._expect_keeper()
            return []
        if not self.eager and self._adapter.transport.size > 1:
            # a copy in this graph, which can be that of a branch or a function
            return [tf.identity(_tensor_of_session(self._adapter))]
        if not self._adapter.agreed:
            with tf.init_scope(), tf.device("CPU:0"):
                note_first_use(self._adapter)
                handshake.agree(self._adapter)
        return []

    def _expect_keeper(self):
        """Raise InvalidArgumentError in elastic training without a MemoryKeeper.

        In a graph the check runs with the graph, because the elastic state may be created after
        tracing.
        """
        adapter, graph = self._adapter, tf.compat.v1.get_default_graph()
        if adapter.elastic is not None:
            return
        if tf.executing_eagerly():
            expect_keeper(adapter.elastic, notification_manager)
        elif graph not in self._expecting:
            self._expecting.add(graph)
            tf.numpy_function(lambda: expect_keeper(adapter.elastic, notification_manager), [], [])


def _tensor_of_session(adapter):
    """Return a tensor of a session's graph that is computed once an adapter's handshake is done."""
    with tf.init_scope(), tf.device("CPU:0"):
        graph = tf.compat.v1.get_default_graph()
        in_session = _in_sessions.setdefault(graph, {})
        key = process_set_key(adapter.process_set)
        if key not in in_session:
            # one after another, in the same order on all ranks: each waits for other ranks
            before = [graph.get_tensor_by_name(one.name) for one in in_session.values()]
            with tf.control_dependencies(before[-1:]):
                in_session[key] = _InSession()
        in_session[key].adapters.add(adapter)
        return graph.get_tensor_by_name(in_session[key].name)


class _InSession:
    """The handshakes of one process set in one graph, as an operator.

    One operator covers all compressors: a session ends only when all collectives that it started
    have ended, so a step whose handshake fails must not have started those of another compressor.

    Attributes:
        adapters: adapters of the compressors.
        name: name of the operator's scalar.
    """

    def __init__(self):
        # weak, because the adapters refer to the graph, which refers to this object
        self.adapters: weakref.WeakSet = weakref.WeakSet()
        self.name = tf.ensure_shape(tf.numpy_function(self._run, [], tf.bool), []).name

    def _run(self):
        """Make the handshakes in the first run of the graph; later runs return at once."""
        with _lock, eager_mode(), tf.device("CPU:0"):
            for adapter in sorted(self.adapters, key=lambda one: one.compressor.number):
                if not adapter.agreed:
                    handshake.agree(adapter)
        return True
