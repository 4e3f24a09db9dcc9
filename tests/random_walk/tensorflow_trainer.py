"""Run a random program on one rank, and compare everything with the oracle."""

import traceback

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_checks import Checks, equal
from tensorflow_oracle import NUMPY, Oracle
from tensorflow_program import Refusals, harmless
from tensorflow_run import Compressors, Fitted, Runner

RATE = 0.125


class Failed(Exception):
    """An error of at least one rank. All ranks raise it, and end the program."""


class Trainer:
    """Runs one program and checks it step by step."""

    def __init__(self, program, sets, directory):
        self.program = program
        self.where = "construction"
        self._oracle = Oracle(program)
        self._checks = Checks(program, self._oracle)
        self._refusals = Refusals(program)
        self._directory = directory
        self._saved = {}
        self._sets = sets
        self._gathers = 0
        random = np.random.default_rng(program.seed)
        self._variables = [
            tf.Variable(tf.cast(random.standard_normal(one.shape), one.dtype), name=one.name)
            for one in program.variables
        ]

    def run(self):
        """Return "ran" or "refused". An exception is a defect."""
        self._compressors = Compressors(self.program, self._variables, self._sets)
        refused = {
            number: self._refusals.of_compressor(compressor)
            for number, compressor in enumerate(self.program.compressors)
        }
        refused = {number: words for number, words in refused.items() if words}
        for number, words in refused.items():
            if self._compressors.has(number):
                _expect_refusal(lambda: self._compressors.renew(number), words)
        if refused:
            return "refused"
        for number in range(len(self.program.compressors)):
            self._compressors.renew(number)
        self._runner = Runner(self.program, self._variables, self._compressors)
        self._fits = {}
        self._moved()
        for number, step in enumerate(self.program.steps):
            self.where = f"step {number}: {step}"
            words = self._refusals.of_step(step)
            if words is None:
                getattr(self, f"_{step.kind}")(number, step)
                continue
            function = self.program.functions[step.what]
            if any(hvd.rank() in self.program.ranks(part.compressor) for part in function.parts):
                self._alone(lambda: _expect_refusal(lambda: self._reduce(number, step), words))
            else:
                self._alone(lambda: None)
            if not harmless(function):
                return "refused"
            self._check([])
        return "ran"

    # --- steps ---

    def _gradients(self, key, part, bad=None):
        """Return {rank: {variable: array or (rows, slices)}} in the dtypes of the variables."""

        def typed(rank, variable):
            kind = NUMPY[self.program.variables[variable].dtype]
            one = self.program.gradient(key, rank, variable, variable in part.sliced, bad)
            return (one[0], one[1].astype(kind)) if isinstance(one, tuple) else one.astype(kind)

        ranks = self.program.ranks(part.compressor)
        return {
            rank: {variable: typed(rank, variable) for variable in part.present} for rank in ranks
        }

    def _reduce(self, number, step):
        """Return (gradients, results) of each turn and part."""
        function = self.program.functions[step.what]
        gradients = [
            [
                self._gradients((number, turn, place), part, None if turn else step.bad)
                for place, part in enumerate(function.parts)
            ]
            for turn in range(function.turns)
        ]
        if step.kind == "trace":
            self._runner.forget(step.what)
        return gradients, self._runner.run(step.what, gradients)

    def _run(self, number, step):
        function = self.program.functions[step.what]
        gradients, results = self._alone(lambda: self._reduce(number, step))
        reductions = []
        for given, found in zip(gradients, results):
            reductions += zip(function.parts, given, found)
        self._check(reductions, step.bad if function.turns == 1 else None)
        for part, _, found in reductions:
            self._descend(part, found)
        self._moved()

    _trace = _run

    def _descend(self, part, results):
        """Apply plain gradient descent with the finite gradients."""
        for variable, gradient in (results or {}).items():
            if np.isfinite(gradient.astype(np.float32)).all():
                kind = self._variables[variable].dtype
                self._variables[variable].assign_sub(tf.cast(RATE, kind) * tf.constant(gradient))

    def _fit(self, number, step):
        fit = self.program.fits[step.what]
        batches = [
            self._gradients((number, turn, 0), fit.part) for turn in range(step.turns * fit.passes)
        ]
        ranks, sources = self.program.ranks(fit.part.compressor), fit.part.sources

        def train():
            if hvd.rank() not in ranks:
                return [None] * step.turns
            if step.what not in self._fits:
                self._fits[step.what] = Fitted(
                    self.program, fit, self._variables, self._compressors
                )
            results = self._fits[step.what].run([batch[hvd.rank()] for batch in batches])
            assert len(results) == step.turns, (
                f"expected {step.turns} steps of the optimizer, got {len(results)}"
            )
            return results

        results = self._alone(train)
        given = []
        for first in range(0, len(batches), fit.passes):
            passes = batches[first : first + fit.passes]
            given.append({
                rank: {one: _accumulated([batch[rank][one] for batch in passes]) for one in sources}
                for rank in ranks
            })  # fmt: skip
        if fit.average and fit.passes > 1:
            results = [
                None
                if one is None
                else {key: value * value.dtype.type(fit.passes) for key, value in one.items()}
                for one in results
            ]
        moving = fit.part.sources if hvd.rank() in ranks else ()
        self._check([(fit.part, one, found) for one, found in zip(given, results)], moving=moving)
        self._moved()

    def _save(self, number, step):
        compressor = self._compressors.made[step.what]
        kept = {variable: one.copy() for variable, one in self._oracle.kept[step.what].items()}
        state = path = None
        if step.way == "state":
            state = self._gathered(compressor and compressor.state_dict())
        elif compressor is not None:
            path = str(self._directory / f"{self.program.seed}.{step.what}.{hvd.rank()}")
            tf.train.Checkpoint(compressor=compressor.trackable).write(path)
        self._saved[step.what] = kept, state, path
        self._check([])

    def _load(self, number, step):
        kept, states, path = self._saved.pop(step.what)
        if step.way in ("fresh", "fresh_checkpoint"):
            self._compressors.renew(step.what)
            self._runner.forget()
            self._fits = {
                number: one
                for number, one in self._fits.items()
                if self.program.fits[number].part.compressor != step.what
            }
        compressor = self._compressors.made[step.what]
        ranks = self.program.ranks(step.what)
        if step.way in ("list", "more_ranks"):
            states = [states[rank] for rank in ranks]
        if step.way == "more_ranks":
            states = [
                {**state, "rank": rank, "size": len(ranks) + 1}
                for rank, state in enumerate([*states, states[-1]])
            ]
            for variable, one in kept.items():  # the first rank takes over from the extra one
                first, last = ranks[0], ranks[-1]
                one.arrays[first] = tuple(
                    own + other for own, other in zip(one.arrays[first], one.arrays[last])
                )
                # a program may reduce a variable in both ways; the last one counts
                name = self.program.variables[variable].name
                if states[0]["parameters"][name]["reduction"] != "sum":
                    ratio = len(ranks) / len(states)
                    for rank in ranks:
                        one.arrays[rank] = tuple(part * ratio for part in one.arrays[rank])

        def load():
            if compressor is None:
                return
            if step.way in ("checkpoint", "fresh_checkpoint"):
                tf.train.Checkpoint(compressor=compressor.trackable).read(path).assert_consumed()
            else:
                compressor.load_state_dict(
                    states if step.way in ("list", "more_ranks") else states[hvd.rank()]
                )

        self._alone(load)
        self._oracle.kept[step.what] = kept
        self._oracle.restart_mass(step.what)
        self._check([])

    def _stats(self, number, step):
        compressor = self._compressors.made[step.what]

        def compare():
            if compressor is None:
                return
            for variable, kept in self._oracle.kept[step.what].items():
                row = compressor.stats()[self.program.variables[variable].name]
                assert row["steps"] == kept.steps[hvd.rank()], (row, kept.steps)
                assert row["elements"] == self.program.variables[variable].elements, row

        self._alone(compare)
        self._check([])

    # --- checks ---

    def _alone(self, call):
        """Return what a call returns, which all ranks make. If it fails on one, all raise."""
        result = error = None
        try:
            result = call()
        except Exception:
            error = traceback.format_exc()
        errors = {rank: one for rank, one in enumerate(self._gathered(error)) if one is not None}
        if errors:
            raise Failed(
                "\n".join(f"rank {rank}: {shortened(one)}" for rank, one in errors.items())
            )
        return result

    def _gathered(self, value):
        self._gathers += 1
        return hvd.allgather_object(value, name=f"walk.{self.program.seed}.{self._gathers}")

    def _moved(self):
        """Record the variables, which must not change from here on."""
        self._values = [one.numpy() for one in self._variables]

    def _check(self, reductions, bad=None, moving=()):
        """Compare everything with the oracle.

        Args:
            reductions: (part, {rank: gradients}, this rank's results), in order.
            bad: (rank, variable, value) of an element that is not finite.
            moving: the variables that may have moved.
        """
        ranks = self._gathered(
            {
                "results": [found for _, _, found in reductions],
                "variables": [one.numpy() for one in self._variables],
                "moved": self._numbers_of_moved(moving),
                "kept": [self._kept(number) for number in range(len(self.program.compressors))],
            }
        )
        self._checks.check(ranks, [one[:2] for one in reductions], bad, moving)

    def _numbers_of_moved(self, moving):
        pairs = enumerate(zip(self._variables, self._values))
        moved = [number for number, (one, value) in pairs if not equal(one.numpy(), value)]
        return [number for number in moved if number not in moving]

    def _kept(self, number):
        """Return {variable: (the memory's arrays, steps)} of a compressor, or None without one."""
        compressor = self._compressors.made[number]
        if compressor is None:
            return None
        state = compressor.state_dict()["parameters"]
        kept = {}
        for variable in self.program.compressors[number].variables:
            own = state[self.program.variables[variable].name]
            kept[variable] = list(own["memory"].values()), own["steps"]
        return kept


def shortened(text, most=3000):
    """Return the end of a long text, which shows the cause."""
    return text if len(text) <= most else f"…{text[-most:]}"


def _expect_refusal(call, words):
    try:
        call()
    except Exception as error:  # AutoGraph and the runtime raise their own errors, which quote ours
        text = f"{type(error).__name__} {error}"
        missing = [word for word in words if word not in text]
        if missing:
            raise AssertionError(f"expected a refusal that says {missing}") from error
    else:
        raise AssertionError(f"went on silently instead of a refusal that says {words}")


def _accumulated(gradients):
    """Return the sum, in the gradients' dtype."""
    total = gradients[0]
    for one in gradients[1:]:
        total = total + one
    return total
