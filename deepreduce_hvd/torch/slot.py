"""State that the compressor keeps per PyTorch parameter."""

import numpy as np
import torch

from deepreduce_hvd import statistics
from deepreduce_hvd.arrays import zeros_on_huge_pages
from deepreduce_hvd.schedule.dag import FP16
from deepreduce_hvd.torch.accumulation import refuse
from deepreduce_hvd.torch.cuda.copies import CopiesToHost
from deepreduce_hvd.torch.with_residual import add_residual


class Slot:
    """State and statistics of one named parameter.

    Attributes:
        policy: the :class:`~deepreduce_hvd.planning.policies.Policy` of its last gradient.
    """

    def __init__(self, name, parameter, key, policy, keep_backup, device="cpu"):
        self.name = name
        self.parameter = parameter
        self.key = key
        self.policy = policy
        d = self.shape.numel()
        self.state_names = policy.memory.state
        self.state = tuple(_zeros(d, device) for _ in self.state_names)
        #: whether the memory is in units of the scaled loss; a second copy then undoes void steps
        self.follows_loss_scale = keep_backup
        self.backup = tuple(_zeros(d, device) for _ in self.state) if keep_backup else ()
        # magnitude of the last k-th largest element: a hint that saves a pass over the gradient and
        # never changes the payload
        self.threshold = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.loss_scale = None
        #: whether its gradients are averaged or summed, one of ``wire.REDUCTIONS``
        self.reduction = None
        #: whether the ranks have found it to be an embedding table; None if that is not known
        self.is_table = None
        #: whether the memory may be nonzero
        self.remembers = False
        #: On a GPU, whether the last step emptied the memory: a flag that is on its way to the
        #: host, and the handle of the copy. None if nothing is under way.
        self._emptied = None
        #: whether the current step changes the memory, and the backup is from before this step
        self.changes = False
        #: whether the current backward pass continues the step of the last one
        self.continues = False
        #: with torch.distributed: whether the gradient of the current step has NaN or Inf
        self.void = False
        #: whether :meth:`memory` is that before the current step
        self.skipped = False
        #: whether a backward pass has made a gradient since the last step
        self.made = False
        #: whether the memory cannot take the gradient of the current pass
        self.refused = False
        #: last OptimizerStep with a gradient of this parameter
        self.last_step = None
        #: the last Encoding of a gradient by a thread, or None
        self.encoding = None
        #: the slot that has taken its place when the model was registered with fully_shard, or None
        self.successor = None
        self.rounds = 0
        self.communicator = None
        self.steps = 0
        #: how many of ``steps`` are of another job and not timed; less than 0 if steps went back
        self.untimed_steps = 0
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        self.payload = None
        #: bytes of the last payload that was exchanged; None if there was none
        self.payload_bytes = None
        self.dense_bytes = 0
        self.sent_bytes = 0
        #: ``dense``, ``fp16`` or ``sparse`` when Horovod sends its gradients, else None
        self.uncompressed_path = policy.way if policy.dense else None

    @property
    def dense(self):
        """Whether Horovod's own allreduce sends its gradients."""
        return self.policy.dense

    @property
    def frozen(self):
        """Whether the parameter is not trained now."""
        return not self.parameter.requires_grad

    def settle(self):
        """Wait until no thread reads or writes the memory."""
        if self.encoding is not None:
            self.encoding.wait()
            self.encoding = None

    def move_to(self, device):
        """Move the memory to the device of the gradient."""
        if self.state and self.state[0].device != device:  # all parts are on one device
            self.state = tuple(part.to(device) for part in self.state)
            self.backup = tuple(part.to(device) for part in self.backup)

    def follow_loss_scale(self, scale):
        """Rescale the residuals when the loss scale changes.

        They are in units of the scaled loss. The rescaling is exact when the scales are powers of
        two.
        """
        if scale is not None and self.loss_scale is not None and scale != self.loss_scale:
            for part in self.state:
                part.mul_(scale / self.loss_scale)
        self.loss_scale = scale

    @property
    def encoder_state(self):
        """The part of ``state`` that the encoder reads and writes.

        It is empty for an embedding table: its residual is left from before it was found.
        """
        return self.state if self.policy.memory.state else ()

    def before_encoding(self, gradient, made, loss_scale):
        """Return what to encode for a gradient, and prepare the memory for this step.

        A residual that the encoder does not use is added to the gradient.

        Args:
            gradient, made, loss_scale: as for :meth:`with_memory`.

        Raises:
            InvalidArgumentError: the gradient is ``refused``.
        """
        if self.refused:
            refuse(self)
        if self.state and not self.encoder_state:
            # float32 does not round; with size 1, nothing is left out for the range of a sum
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            whole = gradient.to(dtype) if self.remembers else gradient
            return self.with_memory(whole, made, loss_scale, 1, dtype, divides=False)
        self.follow_loss_scale(loss_scale)
        self.back_up()
        return gradient

    def back_up(self):
        """Note that this step changes the memory, and keep a copy if steps can become void."""
        kept_before = self.changes and self.continues
        self.changes = True
        self._may_remember()
        if not kept_before:
            for kept, part in zip(self.backup, self.state):
                kept.copy_(part)

    def restore(self):
        """Undo the last step."""
        self.payload = None
        if not self.changes:
            return
        self._may_remember()
        for kept, part in zip(self.backup, self.state):
            part.copy_(kept)

    def _may_remember(self):
        self.remembers, self._emptied = True, None

    def release(self):
        """Free the memory of a compressor that is closed."""
        self.settle()
        self.state = self.backup = ()
        self.payload = None

    def with_memory(self, gradient, made, loss_scale, size, dtype, divides):
        """Return what to send for a gradient whose encoder, if any, does not use the memory.

        The residual is added, as long as there may be one. It keeps what the message cannot carry:
        what float16 rounds, and what would exceed its range in the sum over all ranks. So as
        float16, there is always one. The residual stays as it is if backward did not make the
        gradient, so that it is zero, or if the gradient has NaN or Inf, which is then sent alone.

        Args:
            gradient: the gradient.
            made: whether backward made it.
            loss_scale: loss scale of this step, or None.
            size: number of ranks.
            dtype: dtype of the message.
            divides: whether the sum is divided as ``dtype``.

        Returns:
            The gradient itself, or a tensor of its shape with ``dtype``.
        """
        self.changes = self.changes and self.continues
        if not self.state:
            return gradient
        self.follow_loss_scale(loss_scale)
        if self._emptied is not None and self._emptied[1].query():
            self.remembers, self._emptied = not bool(self._emptied[0]), None
        if not self.remembers and self.policy.way != FP16:
            return gradient
        if not (made or bool(gradient.any())):
            return gradient
        self.move_to(gradient.device)
        under_way = self._emptied
        self.back_up()
        (residual,) = self.state  # only Residual, see planning/layout.py and table_candidates
        sent, empty = add_residual(gradient, residual, dtype, size, divides)
        if not isinstance(empty, torch.Tensor):
            self.remembers = not empty
        elif under_way is not None:  # a memory that was empty before this step still is
            self._emptied = under_way
        else:
            copies = CopiesToHost()
            stream = torch.cuda.current_stream(empty.device)
            self._emptied = copies.start(empty, stream), copies
        return sent

    def count_dense(self, tensor, reduced):
        self.dense_bytes = tensor.numel() * tensor.element_size()
        self.sent_bytes = reduced.numel() * reduced.element_size()
        self.uncompressed_path = self.policy.way
        self.rounds, self.communicator = 0, None

    def count_unsent(self, gradient):
        """Count a gradient of a job of one rank, which sends nothing."""
        self.dense_bytes, self.sent_bytes = gradient.numel() * gradient.element_size(), 0
        self.payload, self.payload_bytes = None, None
        self.uncompressed_path, self.rounds, self.communicator = "none", 0, None

    def count_sparse(self, gradient):
        """Count the indices and values of a sparse gradient that Horovod summed itself."""
        self.uncompressed_path = "sparse"
        self.made = False
        self.steps += 1
        values, indices = gradient._values(), gradient._indices()
        self.dense_bytes = gradient.numel() * values.element_size()
        self.sent_bytes = (
            values.numel() * values.element_size() + indices.numel() * indices.element_size()
        )

    def count_sent(self, tensor, exchange, control_bytes):
        """Count the bytes sent for this parameter.

        If it has its own payload, these are the payload's bytes. Otherwise they are its share, by
        elements, of the bucket's exchange. ``control_bytes`` are added.
        """
        self.dense_bytes = tensor.numel() * tensor.element_size()
        self.uncompressed_path = None  # an earlier gradient may have been sparse
        if self.payload is not None:
            sent = self.payload_bytes = self.payload.numel()
        else:
            self.payload_bytes = None
            sent = round(exchange.channel.sent_bytes * tensor.numel() / max(exchange.bucket.d, 1))
        self.sent_bytes = sent + control_bytes
        self.rounds = exchange.channel.rounds
        self.communicator = exchange.bucket.scheme

    def memory(self):
        """Return copies of the memory on the host as {name: (d,) float32 tensor}.

        Zeros are a view of one number, which takes no memory and no space in a file.
        """
        zero = torch.zeros(1, dtype=torch.float32, device="cpu")
        return {
            kind: part.to("cpu", copy=True) if _is_used(part) else zero.expand(part.shape)
            for kind, part in zip(self.state_names, self.backup if self.skipped else self.state)
        }

    @property
    def shape(self):
        return self.parameter.shape

    @staticmethod
    def numpy_of(value):
        """Return a float32 tensor or a NumPy array as a NumPy array; None for anything else."""
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.layout == torch.strided
        ):
            return value.detach().cpu().resolve_neg().numpy()
        return value if isinstance(value, np.ndarray) else None

    def set_steps(self, steps):
        """Continue after the steps of another job, which this one has not timed."""
        self.untimed_steps += steps - self.steps
        self.steps = steps

    def set_memory(self, arrays):
        self.threshold.zero_()
        self._may_remember()
        self.changes = self.skipped = False
        for kind, part in zip(self.state_names, self.state):
            loaded = torch.from_numpy(np.require(arrays[kind], requirements="W"))
            if _is_used(loaded) or _is_used(part):  # pages are allocated at the first write
                part.copy_(loaded)

    def statistics(self):
        """Return one row of Compressor.stats()."""
        payload = self.payload if self.uncompressed_path is None else None
        kept = payload is not None and self.policy.memory.keeps_everything
        path = "none" if self.steps == 0 else self.uncompressed_path or "compressed"
        return statistics.row(
            self.shape.numel(), self.dense_bytes, self.sent_bytes, self.steps, self.encode_seconds,
            self.decode_seconds, untimed_steps=self.untimed_steps,
            rounds=self.rounds, communicator=self.communicator, path=path,
            payload=None if payload is None else payload.cpu().numpy(),
            kept=self.state[0].cpu().numpy() if kept else None,
        )  # fmt: skip


def _is_used(part):
    """Return whether an array of a memory has any bits; -0.0 has one."""
    return bool(part.view(torch.int32).any())


def _zeros(d, device):
    """Return (d,) float32 zeros; on the host, pages are allocated at the first write."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(zeros_on_huge_pages(d))
    return torch.zeros(d, dtype=torch.float32, device=device)
