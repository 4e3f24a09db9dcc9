"""The expected state of a compressor, from one process that knows all ranks.

Payloads of Allgather are encoded and decoded by the NumPy reference. Schemes of several rounds run
on the simulator, with buckets that are built here. Nothing of the adapter for PyTorch is used. The
oracle has its own implementation of which gradients share a message, what is held back, steps, loss
scales and skipped steps.
"""

import zlib

import numpy as np
import torch

import deepreduce_hvd as dr
from deepreduce_hvd import reference
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.numpy_backend import as_float32
from deepreduce_hvd.planning.layout import assign_to_buckets

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_EPSILON = 2.0**-23
#: what Auto reports as its choice -> communicator
_SCHEMES = {
    "Allgather": dr.Allgather(),
    "SplitAllgather": dr.SplitAllgather(),
    "RecursiveDoubling": dr.RecursiveDoubling(),
}


class Model:
    """The oracle's state of one parameter: all ranks' memories, and what payloads depend on.

    Attributes:
        made: for each rank, whether backward has computed a gradient since the last step.
        states: for each rank, the memory's arrays; ``backups`` are those before the last step.
    """

    def __init__(self, parameter, size, memory, codec):
        self.name = parameter.name
        self.d = parameter.elements
        self.dtype = parameter.dtype
        self.codec = codec
        self.dense = dense = isinstance(codec, str)
        self.key = zlib.crc32(self.name.encode())
        self.steps = 0
        self.loss_scale = None
        self.made = [False] * size
        kinds = () if dense else memory.state
        self.states = [tuple(np.zeros(self.d, np.float32) for _ in kinds) for _ in range(size)]
        self.backups = self.states

    def copy_of_states(self):
        return [tuple(part.copy() for part in state) for state in self.states]

    def follow(self, loss_scale):
        if loss_scale is not None and self.loss_scale not in (None, loss_scale):
            factor = np.float32(loss_scale / self.loss_scale)
            self.states = [tuple(part * factor for part in state) for state in self.states]
        self.loss_scale = loss_scale


class Expected:
    """A reduced gradient: ``values`` (d,), and a tolerance.

    ``values`` is None if nothing is known in advance. A tolerance of 0 requires equality. With a
    tolerance of Inf, an element may have any value.
    """

    def __init__(self, values, tolerance=0.0):
        self.values = values
        self.tolerance = tolerance

    def accepts(self, result):
        """Return whether ``result``, a contiguous (d,) tensor, is as expected."""
        if self.values is None:
            return True
        expected = torch.from_numpy(self.values).to(result.dtype)
        if not np.any(self.tolerance):
            return bool(((expected == result) | (expected.isnan() & result.isnan())).all())
        info = torch.finfo(result.dtype)
        expected, got = expected.double(), result.double()
        tolerance = torch.as_tensor(self.tolerance, dtype=torch.float64)
        slack = tolerance + 2 * info.eps * expected.abs() + info.tiny
        close = expected.isfinite() & ((expected - got).abs() <= slack)
        # close to the largest number, rounding decides whether a value is finite
        unknown = tolerance.isinf() | (expected.isfinite() & (expected.abs() > 0.99 * info.max))
        return bool((close | unknown | (~expected.isfinite() & ~got.isfinite())).all())


class Oracle:
    """One compressor on all of its ranks.

    Args:
        settings: :class:`~torch_program.CompressorSettings`.
        parameters: the parameters, in the order in which the compressor got them.
        ranks: the ranks of its process set.
    """

    def __init__(self, settings, parameters, ranks):
        self.settings = settings
        self.ranks = ranks
        self.size = len(ranks)
        self.models = {}
        for one in parameters:
            codec = settings.codec_of(one.name, one.elements)
            self.models[one.name] = Model(one, self.size, settings.memory, codec)

    @property
    def knows_sums(self):
        """Whether all results are known in advance.

        From three ranks on, Horovod's own sums have an order that is not known here. Hierarchical
        selects from such sums of a host's ranks.
        """
        communicator = self.settings.communicator
        hierarchical = isinstance(communicator, dr.Hierarchical)
        return self.size < 3 or not hierarchical or communicator.ranks_per_host == 1

    def buckets_of(self, owned, frozen):
        """Return the buckets of an optimizer that owns the parameters ``owned``.

        Parameters in ``frozen`` are in separate buckets.
        """
        plan = []
        for now in (False, True):
            names = [
                name for name, model in self.models.items()
                if name in owned and (name in frozen) == now and not model.dense
            ][::-1]  # fmt: skip
            codecs = [self.models[name].codec for name in names]
            for codec in sorted(set(codecs), key=codecs.index):
                alike = [name for name, own in zip(names, codecs) if own == codec]
                sizes = [self.models[name].d for name in alike]
                cut = assign_to_buckets(sizes, self.settings.bucket_bytes)
                plan += [[alike[place] for place in places] for places in cut]
        return plan

    def reduce(self, plan, gradients, loss_scale, factor, exact, schemes):
        """Return the expected results of one step, and update the memories.

        Args:
            plan: buckets, lists of names.
            gradients: {name: [contiguous (d,) tensor per rank]} that Horovod gets.
            loss_scale: the loss scale of this step.
            factor: the factor that the reduction applies.
            exact: whether ``factor`` causes no rounding.
            schemes: {name: what the compressor reports as its scheme}, for Auto.

        Returns:
            {name: :class:`Expected`}.
        """
        results, held = {}, {}
        for name, parts in gradients.items():
            model = self.models[name]
            model.steps += 1
            held[name] = [not made and not part.any() for made, part in zip(model.made, parts)]
            model.made = [False] * self.size
            if model.dense:
                sent = [part.half() for part in parts] if model.codec == "fp16" else parts
                results[name] = self._dense(sent, factor)
            else:
                model.follow(loss_scale if self.settings.loss_scale else None)
                model.backups = model.copy_of_states()
        for bucket in plan:
            here = [name for name in bucket if name in gradients and not self.models[name].dense]
            if here and self.knows_sums:
                results.update(self._exchange(here, gradients, held, factor, exact, schemes))
            elif here:
                results.update({name: Expected(None) for name in here})
        return results

    def undo(self, names):
        """Undo a skipped step: with a loss scale, what it sent counts as not sent."""
        if self.settings.loss_scale:
            for name in names:
                self.models[name].states = self.models[name].backups

    def _dense(self, parts, factor):
        """Return Horovod's own sum, in the dtype of ``parts``."""
        numbers = [part.double().numpy() for part in parts]
        info = torch.finfo(parts[0].dtype)
        largest = sum(np.abs(one) for one in numbers)
        tolerance = 4 * self.size * info.eps * _finite(largest) * factor + info.tiny
        # near the largest number, the order decides whether partial sums are finite
        tolerance[np.isfinite(largest) & (largest > 0.4 * info.max)] = np.inf
        return Expected(sum(numbers) * factor, tolerance)

    def _exchange(self, names, gradients, held, factor, exact, schemes):
        communicator = self.settings.communicator
        if isinstance(communicator, dr.Auto):
            communicator = _SCHEMES[schemes[names[0]].partition(":")[0]]
        if isinstance(communicator, dr.Allgather):
            return {
                name: self._gathered(self.models[name], gradients[name], held[name], factor, exact)
                for name in names
            }
        if isinstance(communicator, dr.Hierarchical):
            per_host = communicator.ranks_per_host or self.size
            communicator = dr.Hierarchical(communicator.across, per_host)
        buckets = [self._job(names, gradients, held, place) for place in range(self.size)]
        outcomes = Simulator(self.size).run(communicator, buckets)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        if self.size > 2 and isinstance(communicator, (dr.CLTK, dr.SharedRandomK)):
            exact = False  # Horovod computes the sum
        results = {}
        for number, name in enumerate(names):
            model = self.models[name]
            out = np.zeros(model.d, dtype=np.float32)
            outcomes[0].add_to(number, out, factor)
            came = [*(_float32(part) for part in gradients[name])]
            came += [part for state in model.backups for part in state]
            largest = _finite(sum(np.abs(one, dtype=np.float64) for one in came)) * factor
            results[name] = Expected(out, 0.0 if exact else 8 * _EPSILON * largest)
        return results

    def _job(self, names, gradients, held, place):
        """Return one rank's side of a bucket."""
        members = []
        for name in names:
            model = self.models[name]
            gradient, state = _array(gradients[name][place]), model.states[place]
            code = _CODES[model.dtype]
            members.append(
                BucketMember(name, gradient, state, model.key, code, held=bool(held[name][place]))
            )
        settings, step = self.settings, self.models[names[0]].steps - 1
        rank = self.ranks[place]
        codec = self.models[names[0]].codec
        return Bucket(codec, settings.memory, members, settings.seed, step, rank)

    def _gathered(self, model, parts, held, factor, exact):
        """Return the sum of all ranks' payloads, which NumPy encodes, decodes and adds."""
        settings, codec = self.settings, model.codec
        stages = codec.sparsifier, codec.index, codec.value, settings.memory
        out = np.zeros(model.d, dtype=np.float32)
        largest = np.zeros(model.d)
        for place, rank in enumerate(self.ranks):
            if held[place]:
                continue
            payload, model.states[place] = reference.encode(
                stages, _float32(parts[place]), _CODES[model.dtype], model.states[place],
                settings.seed, model.steps - 1, model.key, rank,
            )  # fmt: skip
            reference.decode_sum([payload], out, factor)
            largest += _finite(np.abs(out, dtype=np.float64))
        return Expected(out, 0.0 if exact else 8 * _EPSILON * largest)

    # --- checkpoints ---

    def snapshot(self):
        """Return the complete state of all ranks."""
        return {
            name: (model.steps, model.loss_scale, model.copy_of_states())
            for name, model in self.models.items()
        }

    def restore(self, snapshot):
        for name, (steps, loss_scale, states) in snapshot.items():
            model = self.models[name]
            model.steps, model.loss_scale = steps, loss_scale
            model.states = [tuple(part.copy() for part in state) for state in states]


def _finite(array):
    return np.nan_to_num(array, nan=0, posinf=0)


def _array(gradient):
    """Return a NumPy array; bfloat16, which NumPy lacks, as its bits."""
    return (gradient.view(torch.int16) if gradient.dtype == torch.bfloat16 else gradient).numpy()


def _float32(gradient):
    return as_float32(_array(gradient), _CODES[gradient.dtype])
