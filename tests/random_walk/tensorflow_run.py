"""Run the reductions of a random program for TensorFlow on this rank."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from tensorflow_oracle import NUMPY

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow

_OPS = {"Average": hvd.Average, "Sum": hvd.Sum}
#: Keras' optimizers, with settings under which no value exceeds float16
_OPTIMIZERS = {
    "SGD": lambda: (tf.keras.optimizers.SGD, {"learning_rate": 0.125}),
    "Momentum": lambda: (tf.keras.optimizers.SGD, {"learning_rate": 0.125, "momentum": 0.5}),
    "Adam": lambda: (tf.keras.optimizers.Adam, {"learning_rate": 0.01}),
    "Adagrad": lambda: (tf.keras.optimizers.Adagrad, {"learning_rate": 0.01}),
    "RMSprop": lambda: (tf.keras.optimizers.RMSprop, {"learning_rate": 0.01}),
}


class Compressors:
    """The compressors of a program on this rank; None where it is not in the process set."""

    def __init__(self, program, variables, sets):
        self._program = program
        self._variables = variables
        self._sets = sets
        self.made = [None] * len(program.compressors)

    def has(self, number):
        return hvd.rank() in self._program.ranks(number)

    def renew(self, number):
        """Create a compressor with an empty memory, if this rank has it."""
        if self.has(number):
            self.made[number] = self._make(self._program.compressors[number])

    def _make(self, compressor):
        named = [
            (self._program.variables[one].name, self._variables[one])
            for one in compressor.variables
        ]
        return dr.Compressor(
            compressor.codec, compressor.memory, compressor.communicator, parameters=named,
            dense_below=compressor.dense_below, seed=compressor.seed,
            process_set=self._sets[compressor.ranks],
        )  # fmt: skip

    def process_set(self, number):
        return self._sets[self._program.compressors[number].ranks]

    def view(self, part, sources=None):
        """Return what a part passes to Horovod as ``compression``."""
        made = self.made[part.compressor]
        sources = part.sources if sources is None else sources
        return made.bound_to([self._variables[one] for one in sources]) if part.bound else made

    def groups(self, part):
        if not isinstance(part.groups, tuple):
            return part.groups
        return [[self._variables[one] for one in group] for group in part.groups]


class Runner:
    """Runs the functions of a program."""

    def __init__(self, program, variables, compressors):
        self._program = program
        self._variables = variables
        self._compressors = compressors
        self._traced = {}

    def forget(self, number=None):
        """Make the next call of a function, or of all functions, trace it again."""
        for one in list(self._traced) if number is None else [number]:
            self._traced.pop(one, None)

    def run(self, number, gradients):
        """Return the results of each turn and part, {variable: array}.

        They are None where this rank does not have the part.

        Args:
            gradients: for each turn and part, {rank: {variable: array or (rows, slices)}}.
        """
        function = self._program.functions[number]
        own = [
            place
            for place, part in enumerate(function.parts)
            if self._compressors.has(part.compressor)
        ]
        parts = [function.parts[place] for place in own]
        inputs = [
            [self._tensors(parts[n], turn[place][hvd.rank()]) for n, place in enumerate(own)]
            for turn in gradients
        ]
        if function.mode == "loop":
            inputs = tf.nest.map_structure(lambda *turns: tf.stack(turns), *inputs)
        outcome = [[None] * len(function.parts) for _ in gradients]
        if not parts:
            return outcome
        if number not in self._traced:
            call = self._looped if function.mode == "loop" else self._in_turn
            plain = lambda given: call(parts, given)  # noqa: E731
            if function.mode != "eager":  # the number of slices may vary
                plain = tf.function(
                    plain, reduce_retracing=True, jit_compile=function.mode == "xla"
                )
            self._traced[number] = plain
        results = self._traced[number](inputs)
        if function.mode == "loop":
            results = [
                tf.nest.map_structure(lambda one, turn=turn: one[turn], results)
                for turn in range(len(gradients))
            ]
        for turn, of_turn in enumerate(results):
            for place, part, found in zip(own, parts, of_turn):
                outcome[turn][place] = {
                    one: self._array(one, found[str(one)]) for one in part.present
                }
        return outcome

    @staticmethod
    def _tensors(part, gradients):
        def tensor(one):
            return (
                (tf.constant(one[0], tf.int64), tf.constant(one[1]))
                if isinstance(one, tuple)
                else tf.constant(one)
            )

        return {str(variable): tensor(gradients[variable]) for variable in part.present}

    def _in_turn(self, parts, inputs):
        return [[self.reduce(part, given) for part, given in zip(parts, turn)] for turn in inputs]

    def _looped(self, parts, inputs):
        turns = tf.nest.flatten(inputs)[0].shape[0]
        empty = tf.nest.map_structure(
            lambda one: tf.TensorArray(one.dtype, turns, element_shape=one.shape[1:]), inputs
        )

        def turn(number, arrays):
            now = tf.nest.map_structure(lambda one: one[number], inputs)
            results = [self.reduce(part, given) for part, given in zip(parts, now)]
            written = [
                {key: array.write(number, result[key]) for key, array in kept.items()}
                for kept, result in zip(arrays, results)
            ]
            return number + 1, written

        # Horovod gives uncompressed tensors the same name in all turns, so turns must not overlap
        at_once = 1 if self._any_dense(parts) else 10
        _, arrays = tf.while_loop(
            lambda number, arrays: number < turns, turn, [0, empty], parallel_iterations=at_once
        )
        return [{key: array.stack() for key, array in kept.items()} for kept in arrays]

    def _any_dense(self, parts):
        return any(
            self._program.is_dense(part.compressor, one) for part in parts for one in part.present
        )

    def reduce(self, part, inputs):
        """Run one reduction, eagerly or in a graph.

        Returns:
            {str(variable): a tensor or tf.IndexedSlices}.
        """
        return getattr(self, f"_{part.way}")(part, inputs)

    def _tape(self, part, inputs):
        with tf.GradientTape() as tape:
            targets = [self._loss(one, inputs[str(one)]) for one in part.present]
        tape = hvd.DistributedGradientTape(
            tape, compression=self._compressors.view(part), op=_OPS[part.op],
            groups=self._compressors.groups(part), sparse_as_dense=bool(part.sliced),
            process_set=self._compressors.process_set(part.compressor),
        )  # fmt: skip
        gradients = tape.gradient(targets, [self._variables[one] for one in part.sources])
        assert all(gradients[part.sources.index(one)] is None for one in part.absent)
        return {str(one): gradients[part.sources.index(one)] for one in part.present}

    def _loss(self, number, given):
        if isinstance(given, tuple):
            return tf.reduce_sum(tf.gather(self._variables[number], given[0]) * given[1])
        return tf.reduce_sum(self._variables[number] * given)

    def _allreduce_gradients(self, part, inputs):
        def gradient(one):
            if one in part.absent:
                return None
            given = inputs[str(one)]
            if isinstance(given, tuple):
                return tf.IndexedSlices(
                    given[1], given[0], tf.constant(self._variables[one].shape.as_list(), tf.int64)
                )
            return given

        results = dr.tensorflow.allreduce_gradients(
            [gradient(one) for one in part.sources], [self._variables[one] for one in part.sources],
            compression=self._compressors.made[part.compressor], op=_OPS[part.op],
        )  # fmt: skip
        assert all(results[part.sources.index(one)] is None for one in part.absent)
        return {str(one): results[part.sources.index(one)] for one in part.present}

    def _allreduce(self, part, inputs):
        chosen = self._compressors.process_set(part.compressor)
        return {
            str(one): hvd.allreduce(
                inputs[str(one)],
                op=_OPS[part.op],
                compression=self._compressors.view(part, [one]),
                process_set=chosen,
            )
            for one in part.present
        }

    def _array(self, number, result):
        """Return a result as an array; check that dtype and shape are those of the variable."""
        spec = self._program.variables[number]
        if not isinstance(result, tf.IndexedSlices):
            array = result.numpy()
            assert array.dtype == NUMPY[spec.dtype] and array.shape == spec.shape, (
                spec,
                array.dtype,
                array.shape,
            )
            return array
        rows, values = result.indices.numpy(), result.values.numpy()
        assert values.dtype == NUMPY[spec.dtype] and values.shape == (rows.size, *spec.shape[1:]), (
            spec,
            values.dtype,
            values.shape,
        )
        assert (rows[1:] > rows[:-1]).all() and (rows < spec.shape[0]).all(), rows
        array = np.zeros(spec.shape, NUMPY[spec.dtype])
        array[rows] = values
        return array


class _Model(tf.keras.Model):
    """A model whose loss is linear in its variables. The inputs are their gradients."""

    def __init__(self, variables):
        super().__init__(dtype="float64")
        self.own = variables

    def call(self, inputs):
        total, start = tf.zeros([], tf.float64), 0
        for variable in self.own:
            end = start + variable.shape.num_elements()
            factor = tf.cast(tf.reshape(inputs[0, start:end], variable.shape), variable.dtype)
            total += tf.cast(tf.reduce_sum(variable * factor), tf.float64)
            start = end
        return total[None]


class Fitted:
    """A Keras model in training that records what its optimizer gets."""

    MOST = 4  # maximum number of reductions in one call of fit

    def __init__(self, program, fit, variables, compressors):
        self._program = program
        self._fit = fit
        self._variables = [variables[one] for one in fit.part.sources]
        part = fit.part
        self._received = [
            tf.Variable(tf.zeros([self.MOST, *one.shape], one.dtype), trainable=False)
            for one in self._variables
        ]
        self._counts = [tf.Variable(0, trainable=False) for _ in self._variables]
        self._model = _Model(self._variables)
        optimizer = hvd_keras.DistributedOptimizer(
            self._recording(), compression=compressors.view(part), op=_OPS[part.op],
            groups=compressors.groups(part),
            backward_passes_per_step=fit.passes, average_aggregated_gradients=fit.average,
            process_set=compressors.process_set(part.compressor),
        )  # fmt: skip
        self._model.compile(
            optimizer, loss=lambda truth, output: tf.reduce_sum(output), run_eagerly=fit.eagerly,
            steps_per_execution=fit.executions,
        )  # fmt: skip

    def _recording(self):
        """Return the optimizer, which records each gradient that it applies."""
        kind, settings = _OPTIMIZERS[self._fit.optimizer]()
        places = {id(variable): place for place, variable in enumerate(self._variables)}
        received, counts = self._received, self._counts

        class Recording(kind):
            def update_step(self, gradient, variable):
                place = places[id(variable)]
                if received[place].shape.num_elements():
                    received[place].scatter_nd_update([[counts[place]]], gradient[None])
                counts[place].assign_add(1)
                return super().update_step(gradient, variable)

        return Recording(jit_compile=False, **settings)

    def run(self, gradients):
        """Return the results of each reduction, {variable: array}.

        Args:
            gradients: for each batch, {variable: array}.
        """
        for count in self._counts:
            count.assign(0)
        sources = self._fit.part.sources
        rows = [
            np.concatenate([batch[one].astype(np.float64).reshape(-1) for one in sources])
            for batch in gradients
        ]
        # a tensor, because Keras converts arrays to float32
        self._model.fit(
            tf.constant(np.stack(rows)),
            np.zeros(len(rows)),
            batch_size=1,
            epochs=1,
            shuffle=False,
            verbose=0,
        )
        counts = {int(count.numpy()) for count in self._counts}
        assert len(counts) == 1, (
            f"the optimizer applied some gradients more often than others: {counts}"
        )
        received = [one.numpy() for one in self._received]
        return [
            {one: received[place][number] for place, one in enumerate(sources)}
            for number in range(counts.pop())
        ]
