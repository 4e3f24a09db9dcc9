"""The public Compressor: the stages behind Horovod's compression interface, in any framework.

Horovod calls ``compress`` when a gradient is ready, and ``decompress`` when its own allreduce of
that gradient is done. ``compress`` starts a separate collective that sends the payload. It gives
Horovod a probe of a few numbers to reduce in place of the gradient. The reduced probe tells
``decompress`` which factor Horovod's reduction applies: 1 for a sum, 1 / size for an average.
"""

import functools
import os
import pkgutil
import zlib
from collections.abc import Callable, Iterable
from typing import Any, cast

from deepreduce_hvd import backends, container, layers_plot
from deepreduce_hvd.argument_checks import changed, expect_unset
from deepreduce_hvd.checkpoints.configuration import configuration_of
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import Allgather, Auto, Communicator, Transport
from deepreduce_hvd.coordination.collective_names import process_set_key, take_number
from deepreduce_hvd.coordination.compared_settings import Setting
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning import layout, policies
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.schedule.profile import Profile
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.statistics import summary_lines
from deepreduce_hvd.terminal import show
from deepreduce_hvd.validation import (
    expect_communicator,
    expect_settings,
    expect_stages,
    named_parameters,
    names_without_effect,
    of_an_instance,
    warn_of_growth,
)

#: default of ``Compressor(bucket_bytes=)``: 64 MiB
DEFAULT_BUCKET_BYTES = 64 << 20
#: settings that cannot be assigned: most would have no effect, the others on this rank only
_FIXED = frozenset((
    "codec", "memory", "communicator", "density", "warmup_steps", "bucket_bytes", "schedule",
    "threads", "dense_below", "seed", "process_set", "loss_scale",
))  # fmt: skip
_SHOWN_IF_CHANGED = (
    "density", "warmup_steps", "threads", "process_set", "loss_scale", "writer", "writer_interval"
)  # fmt: skip


class Compressor:
    """Compress gradients for ``hvd.DistributedOptimizer(..., compression=)``.

    >>> # comp = dr.Compressor(parameters=model.named_parameters())
    >>> # named = model.named_parameters()
    >>> # opt = hvd.DistributedOptimizer(opt, named_parameters=named, compression=comp)

    Args:
        codec: how a gradient becomes a payload, a :class:`Codec`; or ``"dense"``, uncompressed
            through the framework's own allreduce; or ``"fp16"``, the same converted to float16; or
            ``"rows"``, for embedding tables: all non-zero elements, in 4 bits each
            (docs/accuracy.md). Default: that of :func:`recommended_codec` for the parameter's
            shape; ``"rows"`` for embedding tables, which their first gradients show. To treat
            parameters differently, give an ordered mapping of name patterns to these, such as
            ``{"embed*": "rows", "*.bias": "fp16"}``: the first pattern that matches counts, ``*``
            and ``?`` are wildcards, and parameters that no pattern matches get the default. Or give
            a function of (name, shape) that returns one of these, or None for the default.
        memory: the error feedback, which keeps what a payload leaves out; a :class:`Memory`, or a
            mapping or a function as for ``codec``. Default: :class:`NoMemory` where the codec is
            ``"rows"``, and otherwise :class:`Residual`.
        communicator: how the payloads of all ranks become a sum. Default: :class:`Allgather`.
            ``"auto"`` selects a communicator for each bucket (:class:`Auto`).
        parameters: (name, parameter) pairs as from ``model.named_parameters()``, or TensorFlow
            variables as in ``model.trainable_variables``. Required, because state is stored by
            parameter name. If a parameter is given under several names, they need the same codec
            and memory, and the last name counts: the state of the others stays empty.
        density: share of the elements that the default codec sends of a large tensor, a number in
            (0, 1]. Parameters that get a codec from ``codec`` do not use it.
        warmup_steps: number of steps in which this share falls from 25 % to ``density``. 0 sends
            ``density`` from the first step on.
        bucket_bytes: size at which a bucket is full, in bytes of the uncompressed float32
            gradients; 64 MiB by default. Gradients are assigned to buckets in the order in which
            backward makes them ready. A bucket is sent when its last gradient is ready. 0 sends one
            message per gradient. On TensorFlow this setting has no effect, because Horovod requests
            the result of each gradient before it traces the next one. Use Horovod's ``groups=`` to
            merge messages.
        schedule: which gradients share a message and how each message is sent. None: buckets of
            ``bucket_bytes``. ``"auto"``: after some steps, the job measures its layers and network,
            tries the fastest plans, and uses the one whose steps take the least time; sending all
            gradients uncompressed, or as float16, is among them (docs/schedule.md). Embedding
            tables are part of no plan. On TensorFlow it needs a decorator or a callback. A
            :class:`~deepreduce_hvd.schedule.Plan`: use it from the first step on. After
            :meth:`register`, PyTorch decides which gradients share a message.
        threads: on PyTorch, number of threads that encode gradients while backward makes others; 0
            leaves encoding to the thread of backward. Payloads do not depend on it. Default:
            (cores / ranks on this host) - 1, limited to the range 0 to 4. Threads are used with
            :class:`Allgather`, on the host, for codecs without custom stages.
        dense_below: tensors with fewer elements are sent uncompressed, even if ``codec`` gives them
            a :class:`Codec`. Default: 32 for tensors with the default codec, and 1,024 for others.
            It is 1,024 for all tensors with a communicator other than :class:`Allgather` or with a
            ``schedule``, and for tensors with a memory other than :class:`Residual` and
            :class:`NoMemory`.
        seed: seed of all random choices; equal on all ranks.
        process_set: the Horovod process set; give the same one to DistributedOptimizer. Default:
            all ranks. On TensorFlow, compressors whose process sets share ranks must be used for
            the first time in the same order on every rank.
        loss_scale: for loss scaling, a function that returns the current scale:
            ``scaler.get_scale`` on PyTorch, ``lambda: model.optimizer.loss_scale`` in Keras 2,
            ``lambda: optimizer.dynamic_scale`` in Keras 3. It is called in each step. Residuals are
            then rescaled when the scale changes. A step that overflows on any rank, or in the sum,
            leaves the residuals of all ranks unchanged. This needs a second copy of the residuals.
        writer: on PyTorch, a TensorBoard ``SummaryWriter`` for scalars.
        writer_interval: number of steps between two writes of scalars.

    These must be equal on all ranks: codec, memory, communicator, schedule, density, warmup_steps,
    bucket_bytes, dense_below, seed, whether ``loss_scale`` is given, the names and shapes of the
    parameters, and on PyTorch which of them are frozen. Ranks compare them in the first step,
    before any other message. If they differ, all ranks raise an InvalidArgumentError that names the
    difference. No setting but the writer can be changed later: create another compressor.

    Raises:
        InvalidArgumentError: parameters without names, duplicate names, several names of one
            parameter with different codecs or memories, a wrong type or value, or stages that the
            communicator does not support.
        NativeMissingError: the package was built without the operators for TensorFlow.
    """

    def __init__(
        self,
        codec: policies.CodecChoice = None,
        memory: policies.MemoryChoice = None,
        communicator: Communicator | str | None = None,
        parameters: Iterable[Any] | None = None,
        *,
        density: float = policies.DENSITY,
        warmup_steps: int = policies.WARMUP_STEPS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        schedule: str | Plan | None = None,
        threads: int | None = None,
        dense_below: int | None = None,
        seed: int = 0,
        process_set: Any = None,
        loss_scale: Callable[[], float] | None = None,
        writer: Any = None,
        writer_interval: int = 100,
    ) -> None:
        #: as given; None for the default
        self.codec = codec
        self.memory = policies.default_memory(codec) if memory is None else memory
        if isinstance(communicator, str) and communicator == "auto":
            communicator = Auto()
        self.communicator = cast(
            Communicator, Allgather() if communicator is None else communicator
        )
        policies.expect_choice("codec", codec)
        policies.expect_choice("memory", memory)
        expect_communicator(self.communicator)
        bucket_bytes, threads, dense_below, seed, writer_interval = expect_settings(
            bucket_bytes=bucket_bytes, threads=threads, dense_below=dense_below, seed=seed,
            process_set=process_set, loss_scale=loss_scale, writer=writer,
            writer_interval=writer_interval,
        )  # fmt: skip
        # of the default codec
        self.density, self.warmup_steps = policies.expect_of_default(codec, density, warmup_steps)
        self.bucket_bytes = bucket_bytes
        self.schedule = schedule
        self.threads = threads
        self.dense_below = dense_below
        self.seed = seed
        self.process_set = process_set
        self.loss_scale = loss_scale
        self.writer = writer
        self.writer_interval = writer_interval
        named = named_parameters(parameters)
        adapter_name = backends.adapter_name(named)
        # in the given order, because buckets depend on it
        shapes = {name: tuple(map(int, parameter.shape)) for name, parameter in named}
        mixes = type(self.communicator) is Allgather  # a sum may have parts of several codecs
        # {name of a parameter: its Policy}; PyTorch's adapter changes those of embedding tables
        default = functools.partial(
            policies.recommended_codec, density=self.density, warmup_steps=self.warmup_steps
        )
        self.policies = policies.resolve(
            codec, memory, shapes, dense_below, mixes and schedule is None, default
        )
        # the same before a gradient was seen
        self.first_policies = self.policies
        # names of parameters that get the codec "rows" if their gradients are those of tables
        self.table_candidates: frozenset[str] = frozenset()
        if mixes:
            self.table_candidates = policies.table_candidates(codec, memory, shapes, self.policies)
        # names of parameters that also have a later name
        self.other_names = names_without_effect(named, self.policies, self.table_candidates)
        self.table_candidates -= layout.uncompressed_by(schedule)
        used = [(one.codec, one.memory) for one in self.policies.values() if not one.dense]
        single = default() if codec is None else codec
        if isinstance(single, Codec) and isinstance(self.memory, Memory):
            used.append((single, self.memory))  # even if all parameters are small
        for number, pair in enumerate(used):
            if used.index(pair) == number:  # no set: a memory may be a dataclass
                expect_stages(*pair, self.communicator)
                warn_of_growth(*pair)
        layout.expect_schedule(schedule, self.policies, self.communicator)
        others = {
            "communicator": repr(self.communicator), "bucket_bytes": bucket_bytes,
            "dense_below": dense_below, "seed": seed,
        }  # fmt: skip
        # what a state is for, and its number, which ranks compare in every step
        self.configuration = configuration_of(*self._stages(), others, shapes, self.policies)
        self.fingerprint = self.configuration.fingerprint
        # number of this compressor in its process and process set; part of its collectives' names
        self.number = take_number(process_set_key(process_set))
        # the PyTorch or TensorFlow side of this compressor
        self.adapter = pkgutil.resolve_name(adapter_name)(self, named)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED:
            expect_unset(self, name, value, "the settings of a compressor are fixed")
        super().__setattr__(name, value)

    def _stages(self) -> tuple[Any, Any]:
        """Return what ranks compare of codecs and memories: one of each, or one per parameter."""
        if policies.is_single(self.codec) and policies.is_single(self.memory):
            codec = policies.text_of(self.codec, self.density, self.warmup_steps)
            return codec, repr(self.memory)
        return "policies", [f"{name}: {policy!r}" for name, policy in self.first_policies.items()]

    def _schedule_text(self) -> str:
        if isinstance(self.schedule, Plan):
            number = zlib.crc32(self.schedule.to_json().encode())
            return f"a plan of {self.schedule.in_words()}, with CRC-32 {number:08x}"
        return repr(self.schedule)

    def settings(self, transport: Transport) -> list[Setting]:
        """Return the settings that ranks of any framework compare in the handshake."""
        alike = self.communicator.depends_on(transport)
        codec, memory = self._stages()
        return [
            Setting("format version", str(container.VERSION)),
            Setting("codec", codec),
            Setting("memory" if isinstance(memory, str) else "codecs and memories", memory),
            Setting("communicator", repr(self.communicator)),
            *(Setting(what, str(found)) for what, found in alike.items()),
            Setting("bucket_bytes", str(self.bucket_bytes)),
            Setting("schedule", self._schedule_text()),
            Setting("dense_below", str(self.dense_below)),
            Setting("seed", str(self.seed)),
            Setting("loss_scale", "not given" if self.loss_scale is None else "given"),
            Setting("parameters that may be embedding tables", sorted(self.table_candidates)),
            Setting("number of parameters", str(len(self.adapter.slots))),
            Setting(
                "parameters",
                [f"{name} {tuple(slot.shape)}" for name, slot in self.adapter.slots.items()],
            ),
        ]

    def __reduce__(self):
        raise InvalidArgumentError(
            "Compressor: expected state_dict() to be pickled or copied, got the compressor itself,"
            " which belongs to this process; for elastic training, create it after hvd.init() and"
            " give it to hvd.elastic.TorchState or a state of deepreduce_hvd.tensorflow.elastic"
        )

    def __repr__(self) -> str:
        return (
            f"Compressor({policies.text_of(self.codec)}, memory={policies.text_of(self.memory)},"
            f" communicator={self.communicator!r}, bucket_bytes={self.bucket_bytes},"
            f" schedule={self._schedule_text()}, dense_below={self.dense_below}, seed={self.seed}"
            f"{changed(Compressor, self, _SHOWN_IF_CHANGED)},"
            f" parameters={len(self.policies)} named)"
        )

    @of_an_instance
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Start the exchange of one gradient. Called by Horovod.

        Args:
            tensor: dense gradient of one of the parameters, in the parameter's shape; float32,
                float16, bfloat16 or float64. For sparse gradients, give Horovod
                ``sparse_as_dense=True``.

        Returns:
            A pair of the tensor that Horovod reduces and a context for :meth:`decompress`. The
            tensor is the probe, (4,) or (6,) float32, or the gradient itself when it is not
            compressed.

        Raises:
            InvalidArgumentError: not the gradient of one of the parameters.
        """
        return self.adapter.compress(tensor)

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the reduced gradient in its own dtype, shape and layout. Called by Horovod.

        Args:
            tensor: the first value that :meth:`compress` returned, after Horovod reduced it.
            context: the second value that :meth:`compress` returned.

        Returns:
            The sum or average over all ranks, as Horovod's operation requests.

        Raises:
            PeerFailedError: a rank could not encode its gradient; all ranks raise it.
            CorruptPayloadError: a rank sent bytes that are not a payload.
            InvalidArgumentError: the reduction is neither a sum nor an average over the process
                set, or the ranks' configurations differ.
        """
        return self.adapter.decompress(tensor, context)

    def register(self, model: Any, mesh: Any = None) -> None:
        """Compress the gradients of a model of PyTorch without Horovod.

        All ranks that train the model call this together, before the first backward pass. The
        compressor must have all parameters that are trained. PyTorch decides which gradients share
        a message, so ``bucket_bytes`` has no effect.

        >>> # model = torch.nn.parallel.DistributedDataParallel(network)
        >>> # comp = dr.Compressor(parameters=network.named_parameters())
        >>> # comp.register(model)

        Args:
            model: a ``DistributedDataParallel`` (DDP) model, its parameters possibly on a GPU; or a
                module that ``fully_shard`` (FSDP2) shards within each host, with parameters on the
                CPU: PyTorch averages its gradients within a host, the compressor between hosts.
            mesh: for ``fully_shard``, the one-dimensional ``DeviceMesh`` of the ranks that have the
                same shard, one per host (docs/tutorial-fsdp.md). None for DDP.

        Raises:
            InvalidArgumentError: not such a model, a model or a compressor that cannot be
                registered, or ranks whose configurations differ.
        """
        backends.registration().register(self, model, mesh)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, the step counters and the embedding tables of this rank.

        Save one state per rank, after ``optimizer.step()`` and before the next ``backward()``: what
        a step sends is in the weights after it, and in no state until then. Training that resumes
        continues bit for bit, with few exceptions, such as ``schedule="auto"``, which chooses a
        plan again. The tutorials name all of them. :attr:`plan` can be saved too.

        Returns:
            A dictionary of numbers, strings and the memory's float32 arrays, in the parameters'
            shapes or flat; with ``fully_shard``, those of this rank's shards. The arrays are
            tensors on PyTorch, which ``torch.load(weights_only=True)`` accepts, and NumPy arrays on
            TensorFlow. An all-zero tensor is a view of a single zero, so its file is small.

        Raises:
            InvalidArgumentError: this rank is not in the process set.
        """
        return self.adapter.state_dict()

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load a state that :meth:`state_dict` returned.

        Args:
            state: this rank's own state, or the list of all ranks' states in rank order. With the
                list, the number of ranks may differ from that of the saved run: with P ranks now,
                rank r takes the sum of the saved states r, r + P, r + 2P, … Ranks without a saved
                state start from zero. The gradient that has not been sent yet stays the same. With
                ``op=Sum``, it is the sum of the residuals of all ranks. With ``op=Average``, the
                default, it is their mean, so residuals from Q ranks are multiplied by P / Q. A
                state contains the operation as its ``"reduction"``. If no step has shown it yet, it
                counts as Average.

        Raises:
            InvalidArgumentError: for one of these reasons. The compressor is left unchanged.

                - This rank is not in the process set.
                - The state is of another configuration (codec, memory, communicator, bucket_bytes,
                  dense_below, seed) or model. The message names the first difference. With
                  ``schedule=``, the default codec does not compress small tensors, so this is
                  another configuration unless both jobs have ``dense_below=1024``.
                - A single state is of another rank or number of ranks.
                - Entries are missing, unknown or invalid.
                - A memory has the wrong shape or dtype, or contains NaN or Inf.
                - A memory is in units of a loss scale and this compressor has none, or the reverse.
                - Steps, loss scales, reductions or embedding tables differ between the ranks'
                  states.
        """
        self.adapter.load_state_dict(state)

    @property
    def trackable(self) -> Any:
        """The state for ``tf.train.Checkpoint(compressor=comp.trackable)``, on TensorFlow.

        Save one checkpoint per rank. Restoring a checkpoint of another rank, number of ranks,
        configuration or model raises InvalidArgumentError and leaves the compressor unchanged.
        """
        return self.adapter.trackable

    def bound_to(self, variables: Iterable[Any]) -> Any:
        """Return a view of this compressor for the gradients of ``variables`` only, on TensorFlow.

        Pass the view as ``compression=`` when a gradient could belong to several variables of the
        compressor. This happens with a direct call of ``hvd.allreduce``, which knows no variables,
        and with several eager tapes or Keras optimizers whose gradients have equal shapes. No other
        case needs a view.

        >>> # hvd.allreduce(gradient, compression=comp.bound_to([variable]))

        Args:
            variables: one or more variables of this compressor.

        Returns:
            The view, with the methods that Horovod calls.

        Raises:
            InvalidArgumentError: a variable that the compressor was not given, or no variable.
        """
        return self.adapter.bound_to(variables)

    def close(self) -> None:
        """Free the memories (residuals) of all parameters; later uses raise InvalidArgumentError.

        Call it on all ranks, between two steps, before another compressor for the same parameters
        is created. On TensorFlow nothing else frees them while the variables exist, because Horovod
        keeps every compressor forever. A second call does nothing.
        """
        self.adapter.close()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return statistics of the last step as {parameter name: {field: value}}.

        Fields include dense bytes, sent bytes in total and by section, relative error, seconds and
        steps. ``deepreduce_hvd.statistics.FIELDS`` describes every field.
        ``deepreduce_hvd.statistics.totals`` adds them up over the parameters.
        """
        return self.adapter.stats()

    def summary(self) -> None:
        """Print :meth:`stats` as a table, and which parameters were not compressed and why."""
        adapter = self.adapter
        lines = summary_lines(
            self.stats(), adapter.transport.size, adapter.frozen(), adapter.unregistered()
        )
        show("\n".join([*lines, *adapter.notes()]))

    def profile(self) -> Profile:
        """Return measurements of this rank's last steps. On TensorFlow, it needs ``"auto"``.

        The profile contains when gradients become ready, the seconds of encoding and decoding, and
        the sizes of payloads; with ``schedule="auto"``, also the network. ``profile().save(path)``
        writes a file for ``deepreduce-plan``. With DDP and ``fully_shard``, a gradient counts as
        ready when PyTorch hands over its bucket. Embedding tables that are sent by their rows are
        left out.

        Raises:
            InvalidArgumentError: no step with a compressed gradient is complete yet, the density
                still falls (``warmup_steps``), codecs have different ratios, or the job has a plan
                that does not compress all gradients alike.
        """
        return self.adapter.profile()

    @property
    def plan(self) -> Plan | None:
        """The plan of the next step; None without one."""
        return self.adapter.plan

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last complete step as a Chrome trace, for ui.perfetto.dev.

        Time 0 is the first gradient. A plan adds the predicted step. On TensorFlow, this needs
        ``schedule="auto"``.

        Args:
            path: path of the JSON file.

        Raises:
            InvalidArgumentError: no step is complete yet.
        """
        self.adapter.timeline(path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each layer's dense bytes, sent bytes and relative error, with matplotlib.

        Args:
            path: path of the image file. Its extension selects the format, as in ``layers.png``.

        Raises:
            InvalidArgumentError: no gradient was exchanged yet, or not a path of an image file.
        """
        layers_plot.draw(
            self.stats(), path, self.adapter.transport.size, self.adapter.unregistered()
        )
