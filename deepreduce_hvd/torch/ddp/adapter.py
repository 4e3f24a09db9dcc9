"""The adapter of a Compressor for PyTorch's DistributedDataParallel (DDP)."""

import functools
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepreduce_hvd.base_adapter import BaseAdapter
from deepreduce_hvd.communicators.driver import Driver
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.collective_names import take_number
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.statistics import write_scalars
from deepreduce_hvd.torch.ddp.buckets import BucketJob, Round, in_layout_of
from deepreduce_hvd.torch.ddp.failures import watch
from deepreduce_hvd.torch.ddp.transport import DistributedTransport, new_group
from deepreduce_hvd.torch.host import HostPath
from deepreduce_hvd.torch.ops import WHY_NO_OPERATORS
from deepreduce_hvd.torch.parameters import Parameters
from deepreduce_hvd.torch.prepare import momentum_warning
from deepreduce_hvd.torch.slot import Slot
from deepreduce_hvd.validation import expect_loss_scale

#: keeps numbers of compressors in DDP and in Horovod apart; not the rank of a process set
_DDP = -1
_unchecked: weakref.WeakSet = weakref.WeakSet()  # adapters whose optimizer is not known yet


def register(compressor, model):
    """Implement :meth:`Compressor.register <deepreduce_hvd.Compressor.register>`."""
    old = compressor.adapter
    _check(compressor, old, model)
    adapter = DdpAdapter(compressor, old.slots, model)
    old.agreed = True  # no handshake of Horovod for this compressor
    # compressors of other groups, which some ranks do not have, do not count
    compressor.number = take_number((_DDP, *adapter.transport.ranks))
    compressor.adapter = adapter
    try:
        handshake.agree(adapter)
        compressor.communicator.prepare(adapter.transport)
    except BaseException:
        compressor.adapter = old
        raise
    model.register_comm_hook(adapter, compress_bucket)


def compress_bucket(
    state: "DdpAdapter", bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over all ranks; the communication hook of DDP."""
    return state.average(bucket)


def _check(compressor, adapter, model):
    """Raise InvalidArgumentError for what cannot be registered."""
    if isinstance(adapter, DdpAdapter):
        raise InvalidArgumentError(
            "register: expected a compressor without a model, got one that is registered with a "
            "model already; create one compressor per model"
        )
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgumentError(
            "register: expected a torch.nn.parallel.DistributedDataParallel, got "
            f"{type(model).__name__}; register before torch.compile, and wrap the model in DDP first"
        )
    if compressor.process_set is not None:
        raise InvalidArgumentError(
            "register: expected no process_set, which belongs to Horovod; give DDP a process_group"
        )
    if compressor.schedule is not None:
        raise InvalidArgumentError(
            "register: expected schedule=None, because DDP decides which gradients share a bucket, got "
            f"{compressor.schedule!r}; set DDP's bucket_cap_mb"
        )
    if any(not isinstance(slot, Slot) for slot in adapter.slots.values()):
        raise InvalidArgumentError(
            "register: expected a compressor of PyTorch parameters, got one of "
            f"{type(next(iter(adapter.slots.values()))).__module__}"
        )
    if getattr(adapter, "agreed", False):
        raise InvalidArgumentError(
            "register: expected a compressor that nothing uses, got one that Horovod has used; create "
            "another one"
        )
    if model._use_python_reducer:
        raise InvalidArgumentError(
            "register: expected DDP's own reducer, got the one of "
            'torch._dynamo.config.optimize_ddp = "python_reducer", which calls hooks with single '
            "tensors; use another value of optimize_ddp"
        )
    if model._comm_hooks or model.mixed_precision is not None:
        raise InvalidArgumentError(
            "register: expected a model without a communication hook, got one that has "
            f"{'mixed_precision=' if model.mixed_precision is not None else 'a hook'}; DDP allows one hook"
        )
    _check_parameters(adapter, model)


def _check_parameters(adapter, model):
    known = {id(slot.parameter) for slot in adapter.slots.values()}
    ignored = model.parameters_to_ignore
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad or name in ignored:
            continue
        if id(parameter) not in known:
            raise InvalidArgumentError(
                f"register: expected all trained parameters of the model, got none for {name}; "
                "create the compressor with parameters=network.named_parameters()"
            )
        if parameter.device.type != "cpu":
            raise InvalidArgumentError(
                f"register: expected parameters on the host, got {name} on {parameter.device}, "
                "which DDP's hook does not support yet; use Horovod for GPUs"
            )


class DdpAdapter(BaseAdapter):
    """The side of one Compressor in PyTorch's DDP, and the state of DDP's communication hook.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        slots: name of a parameter -> its :class:`~deepreduce_hvd.torch.slot.Slot`.
        model: the DDP model. All ranks of its process group create the adapter together.
    """

    def __init__(self, compressor, slots, model):
        backend = model.process_group._get_backend(torch.device("cpu"))
        options = getattr(backend, "options", None)  # not all backends have them
        timeout = dist.default_pg_timeout if options is None else options._timeout
        group = new_group(dist.get_process_group_ranks(model.process_group), timeout)
        super().__init__(compressor, DistributedTransport(group, timeout))
        self.slots = slots
        self.host_path = HostPath(None)
        self._model = weakref.ref(model)
        self._parameters = Parameters(slots)
        self._round = None
        self._rounds_closed = 0
        self._warned = set()
        if WHY_NO_OPERATORS is not None:
            self._warn_once(
                "operators",
                f"gradients are compressed by NumPy, which is slower: {WHY_NO_OPERATORS.removeprefix('deepreduce_hvd: ')}",
            )
        self._driver = Driver(self.transport)
        weakref.finalize(self, self._driver.stop)
        _watch_for_momentum(self)
        handshake.register(self)
        watch(self)

    def __reduce__(self):
        raise InvalidArgumentError(
            "pickling or copying a DDP model: expected one without a compressor, got one with the "
            "compressor's hook, which belongs to this process; save model.module.state_dict() and "
            "compressor.state_dict()"
        )

    def compress(self, tensor):
        self._refuse_horovod("compress")

    def decompress(self, tensor, context):
        self._refuse_horovod("decompress")

    @staticmethod
    def _refuse_horovod(what):
        raise InvalidArgumentError(
            f"{what}: expected a compressor of Horovod, got one that is registered with a DDP model; "
            "create another one for hvd.DistributedOptimizer"
        )

    def progress(self):
        """Return the number of steps that this compressor has begun."""
        return max((slot.steps for slot in self.slots.values()), default=0)

    # --- one bucket ---

    def average(self, bucket):
        """Start to average the gradients of DDP's bucket and return the future of its buffer."""
        if bucket.index() == 0 or self._round is None:
            self._begin()
        job = BucketJob(self, self._round, bucket.buffer())
        self._round.jobs.append(job)
        # an error of this rank is told to the others in place of the exchange
        try:
            self._round.loss_scale = self._loss_scale()
            job.encode(*self._gradients_in(bucket))
        except Exception as error:
            job.failure = error
        self._driver.put(job)
        return job.future

    def _gradients_in(self, bucket):
        """Return the slots and the gradients of a bucket."""
        if bucket.buffer().layout != torch.strided:
            raise InvalidArgumentError(
                "DDP: expected dense gradients, got sparse ones; create the embedding with sparse=False"
            )
        if not getattr(self._model(), "_divide_by_initial_world_size", True):
            raise InvalidArgumentError(
                "DDP: expected join(divide_by_initial_world_size=True), got False, which DDP does not "
                "tell communication hooks; gradients are divided by the number of all ranks"
            )
        parameters = bucket.parameters()
        views = [in_layout_of(*pair) for pair in zip(parameters, bucket.gradients())]
        return [self._parameters.get(parameter) for parameter in parameters], views

    def _loss_scale(self):
        """Return the loss scale of the step in progress; None without loss scaling."""
        function = self.compressor.loss_scale
        if function is None or self._round.loss_scale is not None:
            return self._round.loss_scale
        return expect_loss_scale(float(function()))

    def _begin(self):
        """Begin the step of a backward pass."""
        self.close_round()
        self._round = Round()
        # From a callback of the backward pass, an error keeps its type; DDP's own wait, which comes
        # later, turns every error into a RuntimeError. A rank in join() runs no backward pass.
        if torch._C._current_graph_task_id() != -1:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._round.wait)

    # --- end of a step, and state ---

    def close_round(self):
        """End the last step: undo it if it is void, and write scalars."""
        round_, self._round = self._round, None
        if round_ is None:
            return
        for job in round_.jobs:
            job.ended.wait()
        if round_.void and round_.loss_scale is not None:
            for slot in round_.slots:
                slot.restore()
        self._rounds_closed += 1
        writer = self.compressor.writer
        if writer is not None and self._rounds_closed % self.compressor.writer_interval == 0:
            write_scalars(writer, self.stats(), self._rounds_closed)

    def forget_rounds(self):
        """Discard the step in progress."""
        self._round = None

    # --- warnings ---

    def warn_of_non_finite(self, name):
        if self.compressor.loss_scale is None:
            self._warn_once(
                "non-finite",
                f"parameter {name}: every rank gets NaN or Inf, because the gradient of a rank contains it or because the sum is too large; if the "
                "optimizer skips such steps, as with loss scaling, give Compressor loss_scale=scaler.get_scale so that residuals keep what a skipped step sent",
            )

    def check_momentum(self, optimizer):
        """Warn if an optimizer steps compressed parameters with momentum.

        Returns:
            Whether the optimizer steps any of the parameters.
        """
        own = {id(slot.parameter) for slot in self.slots.values()}
        if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            return False
        message = momentum_warning(optimizer, self.compressor)
        if message is not None:
            self._warn_once("momentum", message)
        return True

    def _warn_once(self, topic, message):
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"deepreduce_hvd: {message}", stacklevel=3)


def _watch_for_momentum(adapter):
    """Check the first optimizer that steps an adapter's parameters; DDP does not know it."""
    _register_momentum_check()
    _unchecked.add(adapter)


@functools.cache
def _register_momentum_check():
    """Register the check with all optimizers of the process, once.

    It stays: an optimizer's step cannot remove a hook that it is running.
    """
    register_optimizer_step_pre_hook(_check_momentum)


def _check_momentum(optimizer, arguments, keywords):
    for adapter in list(_unchecked):
        if adapter.check_momentum(optimizer):
            _unchecked.discard(adapter)
