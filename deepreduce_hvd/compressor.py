"""Compressor: Horovod's compression interface over the stages, framework-neutral.

Horovod calls ``compress`` when a gradient is ready and ``decompress`` when its own reduction is
done. Between the two, the payload travels through a collective of ours that ``compress`` starts;
what ``compress`` returns to Horovod is a probe of four numbers, whose reduction tells
``decompress`` the scale in force.
"""

import importlib
import os
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any, cast

from deepreduce_hvd import container
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import Allgather, Auto, Communicator, Transport
from deepreduce_hvd.coordination.handshake import Setting
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.index_codecs import Rice
from deepreduce_hvd.stages.memories import Residual
from deepreduce_hvd.stages.sparsifiers import TopK
from deepreduce_hvd.stages.value_codecs import QSGD
from deepreduce_hvd.statistics import notes, summary_table
from deepreduce_hvd.validation import expect_settings, expect_stages, of_an_instance

#: of Compressor(bucket_bytes=)
DEFAULT_BUCKET_BYTES = 64 << 20
#: the top module of a parameter's type -> the module of this package with its ``Adapter``
_SESSIONS = {
    "torch": "deepreduce_hvd.torch.adapter",
    "tensorflow": "deepreduce_hvd.tensorflow.adapter",
    "keras": "deepreduce_hvd.tensorflow.adapter",
}

#: ranks of a process set -> the number of the next compressor for it; ranks outside of a set may
#: have no compressor for it
_next_numbers: dict[tuple[int, ...], int] = {}


def take_number(ranks, at_least=0):
    """A number that no compressor for the same process set has had in this process.

    Args:
        ranks: of the process set, a tuple; empty for all ranks.
        at_least: the smallest number to take; ranks that agree on the largest of what they would
            take next take the same.
    """
    number = max(next_number(ranks), at_least)
    _next_numbers[ranks] = number + 1
    return number


def next_number(ranks):
    """What :func:`take_number` would return."""
    return _next_numbers.get(ranks, 0)


def _ranks_of(process_set):
    """The key of a process set for :func:`take_number`; Horovod keeps names of different sets
    apart.
    """
    return (
        () if process_set is None or process_set.process_set_id == 0 else tuple(process_set.ranks)
    )


def collective_name(number, label):
    """The name of a collective: unique in the process and its process set, equal on all ranks, and
    the same in every framework.

    Args:
        number: of the compressor, which ranks must have agreed on.
        label: of a parameter, or any other text.

    Returns:
        ``deepreduce.NUMBER.LABEL``, with letters and digits of the label as they are, ``_``
        doubled, and all else as ``_x`` and two hexadecimal digits a byte. Different labels stay
        different where Horovod turns ``.`` into ``_``, as it does on TensorFlow.
    """
    escaped = re.sub(
        "[^a-zA-Z0-9]",
        lambda found: (
            "__" if found[0] == "_" else "".join(f"_x{byte:02x}" for byte in found[0].encode())
        ),
        label,
    )
    return f"deepreduce.{number}.{escaped}"


def recommended_codec() -> Codec:
    """The :class:`Codec` of ``Compressor(parameters=...)`` with nothing else said: the largest 1 %,
    Rice, 4-bit QSGD; README tells why.
    """
    return Codec(TopK(0.01), index=Rice(), value=QSGD(bits=4))


class Compressor:
    """What ``hvd.DistributedOptimizer(..., compression=)`` takes.

    >>> # comp = dr.Compressor(parameters=model.named_parameters())
    >>> # opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression=comp)

    Args:
        codec: a :class:`Codec`; by default the recommended one, top 1 %, Rice and 4-bit QSGD.
        memory: what becomes of what is not sent; :class:`Residual` by default.
        communicator: how payloads meet; :class:`Allgather` by default; "auto" picks bucket by
            bucket (:class:`Auto`).
        parameters: (name, parameter) pairs, as ``model.named_parameters()`` gives, or TensorFlow
            variables, as ``model.trainable_variables``; state belongs to a named parameter.
        bucket_bytes: gradients are merged into messages of at least so many dense bytes, in the
            order in which backward makes them ready; a message is sent when the last of its
            gradients is. 0 sends one message a gradient. On TensorFlow, where Horovod sends each
            gradient before it traces the next, its own ``groups=`` makes messages.
        dense_below: tensors with fewer elements go uncompressed through Horovod's own allreduce.
        seed: of all random choices; equal on all ranks.
        process_set: a Horovod process set, the same that DistributedOptimizer is given; all ranks
            by default. On TensorFlow, use compressors whose sets have ranks in common for the first
            time in the same order on every rank.
        loss_scale: with loss scaling, a function that returns the scale now, ``scaler.get_scale``
            on PyTorch, a variable or tensor on TensorFlow (``lambda: optimizer.dynamic_scale``):
            residuals follow the scale, and a step that overflows on any rank, or in the sum, leaves
            them everywhere as they were, for a second copy of them.
        writer: on PyTorch, a TensorBoard ``SummaryWriter``: gets scalars every ``writer_interval``
            steps.

    Codec, memory, communicator, bucket_bytes, dense_below, seed and the parameters' names and
    shapes must be equal on all ranks, and on PyTorch which of them are frozen and whether
    ``loss_scale`` is given. In the first step ranks compare them, before anything else travels, and
    all raise an InvalidArgumentError that names what differs.

    Raises:
        InvalidArgumentError: unnamed parameters, duplicate names, a wrong type or value, stages
            that the communicator cannot work with.
        NativeMissingError: the package was built without the operators of the parameters'
            framework.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        memory: Memory | None = None,
        communicator: Communicator | str | None = None,
        parameters: Iterable[Any] | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        dense_below: int = 1024,
        seed: int = 0,
        process_set: Any = None,
        loss_scale: Callable[[], float] | None = None,
        writer: Any = None,
        writer_interval: int = 100,
    ) -> None:
        self.codec = recommended_codec() if codec is None else codec
        self.memory = Residual() if memory is None else memory
        scheme = Auto() if communicator == "auto" else communicator
        self.communicator = cast(Communicator, Allgather() if scheme is None else scheme)
        expect_stages(self.codec, self.memory, self.communicator)
        expect_settings(
            bucket_bytes=bucket_bytes, dense_below=dense_below, seed=seed, process_set=process_set,
            loss_scale=loss_scale, writer=writer, writer_interval=writer_interval,
        )  # fmt: skip
        self.bucket_bytes = bucket_bytes
        self.dense_below = dense_below
        self.seed = seed
        self.process_set = process_set
        self.loss_scale = loss_scale
        self.writer = writer
        self.writer_interval = writer_interval
        named = self._named(parameters)
        adapter_module = _adapter_module(*named[0])
        # in order, on which buckets depend
        names = [(name, tuple(parameter.shape)) for name, parameter in named]
        description = (
            container.VERSION,
            repr(self.codec),
            repr(self.memory),
            repr(self.communicator),
            bucket_bytes,
            dense_below,
            seed,
            names,
        )
        #: 32 bits that ranks compare at every step
        self.fingerprint = zlib.crc32(repr(description).encode())
        #: of this compressor in its process: a part of its collectives' names
        self.number = take_number(_ranks_of(process_set))
        #: the adapter's side of this compressor
        self.adapter = importlib.import_module(adapter_module).Adapter(self, named)

    def settings(self, transport: Transport) -> list[Setting]:
        """What ranks compare in the handshake, of any framework."""
        alike = self.communicator.depends_on(transport)
        return [
            Setting("format version", str(container.VERSION)),
            Setting("codec", repr(self.codec)),
            Setting("memory", repr(self.memory)),
            Setting("communicator", repr(self.communicator)),
            *(Setting(what, str(found)) for what, found in alike.items()),
            Setting("bucket_bytes", str(self.bucket_bytes)),
            Setting("dense_below", str(self.dense_below)),
            Setting("seed", str(self.seed)),
            Setting("loss_scale", "not given" if self.loss_scale is None else "given"),
            Setting("number of parameters", str(len(self.adapter.slots))),
            Setting(
                "parameters",
                [f"{name} {tuple(slot.shape)}" for name, slot in self.adapter.slots.items()],
            ),
        ]

    def __reduce__(self):
        raise InvalidArgumentError(
            "Compressor: expected state_dict() to be saved or sent, got the compressor itself, which belongs to this process; elastic states "
            "that keep one are hvd.elastic.TorchState and those of deepreduce_hvd.tensorflow.elastic"
        )

    def __repr__(self) -> str:
        return (
            f"Compressor({self.codec!r}, memory={self.memory!r}, communicator={self.communicator!r}, "
            f"bucket_bytes={self.bucket_bytes}, dense_below={self.dense_below}, seed={self.seed}, "
            f"parameters={len(self.adapter.slots)} named)"
        )

    @staticmethod
    def _named(parameters):
        if parameters is not None and not hasattr(parameters, "__iter__"):
            raise InvalidArgumentError(
                "Compressor parameters: expected what model.named_parameters() returns, "
                f"got {parameters!r}{'; call it' if callable(parameters) else ''}"
            )
        if parameters is None:
            raise InvalidArgumentError(
                "Compressor parameters: expected model.named_parameters(), got None; state belongs to a named parameter (on TensorFlow: model.trainable_variables)"
            )
        named = [entry if isinstance(entry, tuple) else _with_name(entry) for entry in parameters]
        for entry in named:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
                raise InvalidArgumentError(
                    f"Compressor parameters: expected (name, parameter) pairs, got {type(entry).__name__}"
                )
        if not named:
            raise InvalidArgumentError(
                "Compressor parameters: expected at least one (name, parameter) pair, got none"
            )
        names = [name for name, _ in named]
        repeated = (
            sorted({name for name in names if names.count(name) > 1})
            if len(set(names)) < len(names)
            else []
        )
        if repeated:
            raise InvalidArgumentError(
                f"Compressor parameters: expected unique names, got {', '.join(repeated)} more than once"
            )
        return named

    @of_an_instance
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod: starts the exchange of one gradient; returns (what Horovod reduces,
        context).

        Args:
            tensor: the gradient of one of the parameters, in its shape; float32, float16, bfloat16
                or float64, sparse too.

        Returns:
            (4,) float32, the probe, or for what goes uncompressed the gradient itself; and what
            :meth:`decompress` wants to have back.

        Raises:
            InvalidArgumentError: not the gradient of one of the parameters.
        """
        return self.adapter.compress(tensor)

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Called by Horovod: the reduced gradient, in the gradient's own dtype, shape and layout.

        Args:
            tensor: what Horovod made of the first of what :meth:`compress` returned.
            context: the second.

        Raises:
            PeerFailedError: a rank could not encode its gradient; all ranks raise it.
            CorruptPayloadError: what a rank sent is not a payload.
            InvalidArgumentError: a reduction other than a sum or an average over the process set,
                or ranks that are configured differently.
        """
        return self.adapter.decompress(tensor, context)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step counters; save one a rank. Training resumed from it
        continues bit for bit.

        A dictionary of numbers, strings and the memory's float32 arrays in the parameters' shapes
        or flat: tensors on PyTorch, which ``torch.load(weights_only=True)`` takes, NumPy arrays on
        TensorFlow.
        """
        return self.adapter.state_dict()

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Takes what :meth:`state_dict` returned.

        Args:
            state: this rank's own state, or the list of all ranks' states in rank order. With the
                list the number of ranks may have changed: of P ranks now, rank r takes the sum of
                the old ranks r, r + P, r + 2P, …, so that the residuals' sum over all ranks is
                conserved; ranks without an old one start from zero.

        Raises:
            InvalidArgumentError: a state of another configuration (codec, memory, communicator,
                bucket_bytes, dense_below, seed) or model, or a single state of another rank or
                number of ranks; entries that are missing, unknown or not what they should be;
                memories of another shape or dtype, or with NaN or Inf; memories in units of a loss
                scale that this compressor does not follow, or the other way round; steps or loss
                scales that differ between ranks. The compressor is then as it was.
        """
        self.adapter.load_state_dict(state)

    @property
    def trackable(self) -> Any:
        """On TensorFlow, the state as ``tf.train.Checkpoint(compressor=comp.trackable)`` takes it;
        one checkpoint a rank.

        Restoring that of another rank, number of ranks, configuration or model raises
        InvalidArgumentError, and leaves the compressor as it was.
        """
        return self.adapter.trackable

    def bound_to(self, variables: Iterable[Any]) -> Any:
        """On TensorFlow, a view of this compressor for ``compression=``, whose gradients are those
        of ``variables`` alone.

        For gradients that could belong to several of the compressor's variables: of
        ``hvd.allreduce`` alone, which knows no variables, and of several eager tapes or Keras
        optimizers with gradients of equal shapes. Others need none.

        >>> # hvd.allreduce(gradient, compression=comp.bound_to([variable]))

        Args:
            variables: one or more of those that the compressor was given.

        Raises:
            InvalidArgumentError: a variable that the compressor was not given.
        """
        return self.adapter.bound_to(variables)

    def stats(self) -> dict[str, dict[str, Any]]:
        """{parameter name: {field: figure}} of the last step: bytes dense and sent, by section,
        relative error, seconds, steps and more.

        ``deepreduce_hvd.statistics.FIELDS`` has every field with its meaning;
        ``deepreduce_hvd.statistics.totals`` adds them up.
        """
        return self.adapter.stats()

    def summary(self) -> None:
        """Print :meth:`stats` as a table, and what was not compressed and why."""
        stats = self.stats()
        print("\n".join([summary_table(stats), *notes(stats, self.adapter.transport.size)]))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the layers' bytes, dense beside sent, and their relative errors.

        Needs matplotlib.

        Args:
            path: of the picture to write; its ending says the format, such as ``layers.png``.
        """
        from deepreduce_hvd.layers_plot import draw

        draw(self.stats(), path)


def _with_name(parameter):
    """A TensorFlow or Keras variable with its own name; anything else as it is, for the caller to
    refuse.
    """
    name = getattr(parameter, "path", None) or getattr(parameter, "name", None)
    return (name, parameter) if isinstance(name, str) else parameter


def _adapter_module(name, parameter):
    """The module of this package with the ``Adapter`` for a parameter's framework."""
    for kind in type(parameter).__mro__:
        module = _SESSIONS.get(kind.__module__.partition(".")[0])
        if module is not None:
            return module
    raise InvalidArgumentError(
        f"Compressor parameters: expected parameters of {', '.join(_SESSIONS)}, "
        f"got {type(parameter).__name__} for {name!r}"
    )
