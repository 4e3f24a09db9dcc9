"""Run a random program on one rank, and compare everything with the oracle."""

import math
import random
import traceback
import zlib

import horovod.torch as hvd
import numpy as np
import torch
from torch_balance import Balance
from torch_checkpoints import Checkpoints
from torch_model import Gradients, bits, dense
from torch_oracle import Oracle
from torch_user import User, make_optimizer

import deepreduce_hvd as dr

#: share of the events of a step after which the program uses a collective of its own
_OWN_COLLECTIVES = 0.25


class Trainer:
    """One rank's run of a program.

    Args:
        program: a :class:`~torch_program.Program`.
        known, made: see :class:`~torch_user.User`.

    Attributes:
        number: the number of the step.
        problems: the errors that were found on this rank.
        oracles: {number: Oracle} of the compressors that this rank has.
        sums: {name: the accumulated gradients of all ranks}; None in place of a missing gradient.
    """

    def __init__(self, program, known, made):
        self.program = program
        self.number = 0
        self.problems = []
        self.oracles = {}
        self.sums = {}
        self.user = User(program, known, made)
        self.ranks = {
            one.name: program.ranks_of(part) for part in program.parts for one in part.parameters
        }
        self.parameters = {one.name: one for part in program.parts for one in part.parameters}
        self._part_of = {one.name: part for part in program.parts for one in part.parameters}
        self._gradients = Gradients(program)
        self._balances = {}
        self._checkpoints = Checkpoints(self)
        self._twins, self._twin_weights = {}, {}

    @property
    def label(self):
        """A part of the names of collectives."""
        return f"walk.{self.program.seed}.{self.number}"

    @property
    def _step(self):
        return self.program.steps[self.number]

    def expect(self, condition, *what):
        if not condition:
            self.problems.append(" ".join(map(str, what)))

    def fail_with(self, error):
        """Record an error and print it at once, because the other ranks may wait forever."""
        self.problems.append("".join(traceback.format_exception(error)))
        where = f"rank {hvd.rank()}, seed {self.program.seed}, step {self.number}"
        print(f"{where}: {self.problems[-1]}", flush=True)

    def hashes(self):
        """Return one hash per parameter of the program; 0 if this rank does not train it."""
        weights = self.user.weights
        return [zlib.crc32(bits(weights[name])) if name in weights else 0 for name in self.ranks]

    def build(self):
        user = self.user
        for number in sorted({part.compressor for part in user.parts.values()}):
            user.make_compressor(number)
            parts = self.program.parts_of(number)
            parameters = [
                same for part in parts for one in part.parameters for same in one.under_all_names
            ]  # fmt: skip
            ranks = self.program.ranks_of(parts[0])
            self.oracles[number] = Oracle(self.program.compressors[number], parameters, ranks)
            self._balances[number] = Balance(self, number)
        for part in user.parts.values():
            for one in part.parameters:
                twin = user.weights[one.name].detach().clone()
                self._twin_weights[one.name] = torch.nn.Parameter(twin)
            self._twins[part.name] = make_optimizer(part, self._twin_weights)
            user.make_optimizer(part)

    # --- a step ---

    def step(self, number):
        self.number = number
        step, user = self._step, self.user
        user.begin(step)
        for name, weight in user.weights.items():
            one = self.parameters[name]
            # gradients are added to zeros here, and -0.0 becomes 0.0
            start = None if weight.grad is None else torch.zeros(one.shape, dtype=one.dtype)
            self.sums[name] = [start] * len(self.ranks[name])
        # a separate generator, so that the programs of seeds stay the same
        draw = random.Random(f"{self.program.seed} {number}")
        for place, (kind, what) in enumerate(step.events):
            if kind == "backward":
                self._backward([turn for turn in what if turn[0] in user.parts])
            elif what in user.parts:
                self._finish(user.parts[what])
            # a program that is refused ends on some ranks only
            if self.program.refused is None and draw.random() < _OWN_COLLECTIVES:
                self._use_own_collective(place)
        for number in self.oracles:
            names = [name for name in step.direct if self._part_of[name].compressor == number]
            self._reduce_directly(number, names)
        for number, oracle in self.oracles.items():
            if step.look or step.checkpoint is not None or not oracle.knows_sums:
                self._balances[number].look()
            if step.checkpoint is not None:
                self._checkpoints.take(number, step.checkpoint)

    def _use_own_collective(self, place):
        """Sum something of the program itself, while gradients may be in flight."""
        own = torch.tensor([hvd.rank() + 1.0])
        total = hvd.allreduce(own, op=hvd.Sum, name=f"{self.label}.own.{place}")
        self.expect(int(total) == sum(range(hvd.size() + 1)), "a sum of the program is", total)

    def forget(self, number):
        """Forget the balances of a compressor whose memories were replaced."""
        self._balances[number].forget()

    def _backward(self, turns):
        terms = []
        for part, turn in turns:
            part = self.user.parts[part]
            for one in part.parameters:
                made = self.oracles[part.compressor].models[one.name].made
                for place, rank in enumerate(self.ranks[one.name]):
                    if not self._gradients.uses(one, self.number, turn, rank):
                        continue
                    made[place] = True
                    gradient = self._gradients.of_pass(one, self.number, turn, rank)
                    before = self.sums[one.name][place]
                    self.sums[one.name][place] = gradient if before is None else before + gradient
                    if rank == hvd.rank():
                        weight = self.user.weights[one.name]
                        terms += self._gradients.terms(one, weight, self.number, turn, rank)
        if terms:
            sum(terms).backward()

    def gradients_of(self, name):
        """Return [contiguous (d,) gradient per rank], as Horovod gets them."""
        one = self.parameters[name]
        zeros = torch.zeros(one.shape, dtype=one.dtype)
        return [dense(zeros if part is None else part) for part in self.sums[name]]

    def factor(self, part):
        """Return (the factor that a reduction applies, whether it causes no rounding)."""
        size = len(self.program.ranks_of(part))
        if part.op == "Sum":
            return 1.0, True
        return 1.0 / size, all(math.log2(one).is_integer() for one in (size, part.predivide))

    def _finish(self, part):
        user, oracle = self.user, self.oracles[part.compressor]
        weights = user.weights
        own = [one for one in part.parameters if not one.frozen]
        if part.by_hand:  # what no rank has used is left out
            own = [one for one in own if any(oracle.models[one.name].made)]
            for one in own:
                if weights[one.name].grad is None:
                    weights[one.name].grad = torch.zeros_like(weights[one.name])
        before = {one.name: weights[one.name].grad for one in own}
        kept = {name: bits(grad) for name, grad in before.items()} if part.by_hand else {}
        strides = {name: self._strides_of(name, grad) for name, grad in before.items()}
        others = self._idle_gradients(part)
        self._expect_own_gradients(before, oracle)

        user.reduce(part, self.number, own)
        results = {one.name: weights[one.name].grad for one in own}
        for name, grad in self._idle_gradients(part).items():
            self.expect(grad == others[name], name, "had its gradient changed by", part.name)
        for name, was in kept.items():
            self.expect(bits(before[name]) == was, name, "was overwritten by hvd.allreduce")
            apart = not results[name].numel() or results[name].data_ptr() != before[name].data_ptr()
            self.expect(apart, name, "shares memory with what hvd.allreduce returned")

        # Without sparse_as_dense, Horovod sums sparse gradients by itself.
        passing = {
            name for name, grad in before.items()
            if grad is not None and grad.is_sparse and not part.sparse_as_dense
        }  # fmt: skip
        compressed = {name: results[name] for name in results if name not in passing}
        if part.by_hand:
            plan = [[name] for name in oracle.models]
        else:
            frozen = {one.name for one in part.parameters if one.frozen} | self._step.frozen
            plan = oracle.buckets_of({one.name for one in part.parameters}, frozen)
        self._compare(part, plan, compressed)
        for name in passing:
            oracle.models[name].steps += 1
            self._compare_summed_by_horovod(part, name, results[name])
        self._compare_forms(part, results, strides)

        void = not all(bool(dense(result).isfinite().all()) for result in results.values())
        if void:
            oracle.undo(compressed)
        self._balances[part.compressor].count(part, compressed, void)
        stepped = part.plain_step
        if not part.plain_step:
            for result in results.values():
                result.mul_(1 / self._step.scale)
            if not void:
                user.step(part)
                stepped = True
        self._step_twins(part, stepped)

    def _reduce_directly(self, number, names):
        """Reduce existing gradients, equal on all ranks, with hvd.allreduce in one step."""
        results = {}
        for name in names:
            part, grad = self._part_of[name], self.user.weights[name].grad
            was = bits(grad)
            results[name] = self.user.allreduce(part, grad, f"{self.label}.{name}")
            self.expect(bits(grad) == was, name, "was overwritten by hvd.allreduce")
            self.sums[name] = [grad.clone() for _ in self.ranks[name]]
            self._compare(part, [[name]], {name: results[name]}, direct=True)
        void = not all(bool(result.isfinite().all()) for result in results.values())
        if void:
            self.oracles[number].undo(names)
        for name, result in results.items():
            self._balances[number].count(self._part_of[name], {name: result}, void)

    # --- what must hold ---

    def _expect_own_gradients(self, before, oracle):
        """Check that the oracle knows the gradients that this rank passes to Horovod."""
        for name, grad in before.items():
            # Horovod may already have reduced uncompressed gradients in place.
            if grad is not None and not oracle.models[name].dense:
                own = self.gradients_of(name)[oracle.ranks.index(hvd.rank())]
                same = torch.equal(dense(grad).nan_to_num(), own.nan_to_num())
                self.expect(same, name, "had another gradient than the oracle before reduction")

    def _strides_of(self, name, grad):
        """Return the strides that a result must have."""
        weight = self.user.weights[name]
        if grad is None or grad.is_sparse:
            return weight.stride()
        oracle = self.oracles[self._part_of[name].compressor]
        made = oracle.models[name].made[oracle.ranks.index(hvd.rank())]
        return grad.stride() if made else weight.stride()

    def _idle_gradients(self, part):
        """Return {name: bytes} of the gradients of other parts that Horovod does not work on."""
        found = {}
        for other in self.user.parts.values():
            optimizer = self.user.optimizers[other.name]
            if other is part or (not other.by_hand and optimizer._handles):
                continue
            for one in other.parameters:
                grad = self.user.weights[one.name].grad
                found[one.name] = b"" if grad is None else bits(grad)
        return found

    def _compare(self, part, plan, results, direct=False):
        """Compare results with the oracle; ``direct`` is for hvd.allreduce alone."""
        oracle, compressor = self.oracles[part.compressor], self.user.compressors[part.compressor]
        schemes = {}
        if isinstance(oracle.settings.communicator, dr.Auto):
            schemes = {name: row["communicator"] for name, row in compressor.stats().items()}
        factor, exact = self.factor(part)
        if direct:
            exact = math.log2(len(self.program.ranks_of(part))).is_integer() or part.op == "Sum"
        gradients = {name: self.gradients_of(name) for name in results}
        expected = oracle.reduce(plan, gradients, self._step.scale, factor, exact, schemes)
        for name, one in expected.items():
            got = dense(results[name])
            if not one.accepts(got):
                got, wanted = got.double().numpy(), np.asarray(one.values, dtype=np.float64)
                where = np.flatnonzero((got != wanted) & ~(np.isnan(got) & np.isnan(wanted)))
                self.problems.append(
                    f"{name}: {where.size} of {got.size} elements are not what was expected: at "
                    f"{where[:4]} got {got[where[:4]]}, expected {wanted[where[:4]]} "
                    f"{schemes.get(name, '')}"
                )

    def _compare_summed_by_horovod(self, part, name, result):
        factor, _ = self.factor(part)
        expected = sum(one.double() for one in self.gradients_of(name)) * factor
        got = dense(result).double()
        finite = expected.isfinite()
        self.expect(torch.equal(finite, got.isfinite()), name, "has NaN or Inf elsewhere")
        largest = float(expected[finite].abs().max()) if finite.any() else 0.0
        close = (got - expected).abs() <= 1e-6 * largest
        self.expect(bool((close | ~finite).all()), name, "was summed by Horovod, and is wrong")

    def _compare_forms(self, part, results, strides):
        for name, result in results.items():
            one = self.parameters[name]
            same = result.dtype == one.dtype and tuple(result.shape) == tuple(one.shape)
            self.expect(same, name, "became", result.dtype, tuple(result.shape))
            if not result.is_sparse:
                same = result.stride() == strides[name]
                self.expect(same, name, "has strides", result.stride(), "not", strides[name])
            if name in self._step.frozen:
                self.expect(not dense(result).any(), name, "is frozen and gets a gradient")
        for one in part.parameters:
            if one.frozen:
                grad = self.user.weights[one.name].grad
                self.expect(grad is None, one.name, "was frozen from the start and has a gradient")

    def _step_twins(self, part, stepped):
        """Check that PyTorch's optimizer with the same gradients gives the same parameters."""
        for one in part.parameters:
            grad = self.user.weights[one.name].grad
            self._twin_weights[one.name].grad = None if grad is None else grad.detach().clone()
        if stepped:
            self._twins[part.name].step()
        for one in part.parameters:
            same = bits(self.user.weights[one.name]) == bits(self._twin_weights[one.name])
            self.expect(same, one.name, "was not moved as its optimizer says")
