"""The adapter of a Compressor for PyTorch's DistributedDataParallel (DDP)."""

import functools
import weakref

import numpy as np
import torch
import torch.distributed as dist

from deepreduce_hvd.adapters.base_adapter import ClosedAdapter
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.torch.cuda.device import DevicePath
from deepreduce_hvd.torch.ddp.base import DistributedAdapter, expect_unused
from deepreduce_hvd.torch.ddp.buckets import BucketJob
from deepreduce_hvd.torch.ddp.device_buckets import DeviceBucketJob, DeviceStreams
from deepreduce_hvd.torch.ddp.device_group import has_nccl
from deepreduce_hvd.torch.ddp.layouts import Layouts, in_layout_of
from deepreduce_hvd.torch.ddp.mirrors import Mirrors, expect_no_capture
from deepreduce_hvd.torch.ddp.transport import DistributedTransport, ranks_and_timeout
from deepreduce_hvd.torch.parameters import Parameters
from deepreduce_hvd.torch.unexchanged import Unexchanged
from deepreduce_hvd.user_warnings import warn


def register(compressor, model):
    """Implement :meth:`Compressor.register <deepreduce_hvd.Compressor.register>` for DDP."""
    _check(compressor, model)
    adapter = DdpAdapter(compressor, compressor.adapter.slots, model)
    adapter.attach()
    earlier = _states_of_closed(model)
    if earlier:  # DDP cannot replace a hook
        earlier[0].compressor = compressor
    else:
        model.register_comm_hook(HookState(compressor), compress_bucket)
    adapter.warn_of_others(model)  # at the end, as the program may turn warnings into errors


class HookState:
    """The state of DDP's communication hook.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
    """

    def __init__(self, compressor):
        self.compressor = compressor

    def __reduce__(self):
        raise InvalidArgumentError(
            "pickling or copying a DDP model: expected one without a compressor, got one with the "
            "compressor's hook, which belongs to this process; save model.module.state_dict() and "
            "compressor.state_dict()"
        )


@torch._disable_dynamo  # which would trace it in a training step that is compiled as a whole
def compress_bucket(
    state: HookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over all ranks; the communication hook of DDP."""
    return state.compressor.adapter.average(bucket)  # a closed compressor has another adapter


def _states_of_closed(model):
    """Return the :class:`HookState` of a DDP model whose compressor is closed, in a list."""
    return [
        state
        for _, state in model._comm_hooks
        if isinstance(state, HookState) and isinstance(state.compressor.adapter, ClosedAdapter)
    ]


def _check(compressor, model):
    """Raise InvalidArgumentError for what cannot be registered."""
    expect_unused(compressor)
    if model._use_python_reducer:
        raise InvalidArgumentError(
            "register: expected DDP's own reducer, got the one of "
            'torch._dynamo.config.optimize_ddp = "python_reducer", which calls hooks with single '
            "tensors; use another value of optimize_ddp"
        )
    has_hook = len(model._comm_hooks) > len(_states_of_closed(model))
    if has_hook or model.mixed_precision is not None:
        raise InvalidArgumentError(
            "register: expected a model without a communication hook, got one that has"
            f" {'mixed_precision=' if model.mixed_precision is not None else 'a hook'}; DDP allows"
            " one hook, and that of a compressor is free after its close()"
        )
    if model._delay_all_reduce_params:
        raise InvalidArgumentError(
            "register: expected no delay_all_reduce_named_params=, whose gradients DDP averages"
            f" without a hook, got {len(model._delay_all_reduce_params)} parameters; leave it out"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):  # PyTorch 2.6 may not have it
        raise InvalidArgumentError(
            "register: expected skip_all_reduce_unused_params=False, got True: DDP then calls no"
            " hook for a bucket whose parameters are all unused, so the compressor would not see"
            " where a backward pass begins and ends, and would lose gradients; leave it out"
        )
    _check_parameters(compressor.adapter, model)


def _check_parameters(adapter, model):
    known = {id(slot.parameter) for slot in adapter.slots.values()}
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    left_out = [one for one in model._module_parameters if id(one) not in known]
    for parameter in left_out:
        if parameter.requires_grad:
            raise InvalidArgumentError(
                "register: expected all trained parameters of the model, got none for"
                f" {names.get(id(parameter))}; create the compressor with"
                " parameters=network.named_parameters()"
            )
    if left_out:
        averaged = _averaged(model)
        for parameter in left_out:
            if id(parameter) in averaged:
                raise InvalidArgumentError(
                    "register: expected all parameters that the DDP model averages, got none for"
                    f" {names.get(id(parameter))}, which was frozen after DistributedDataParallel()"
                    " was called; freeze it before, or create the compressor with"
                    " parameters=network.named_parameters()"
                )
    for parameter in model._module_parameters:
        if parameter.requires_grad and parameter.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                "register: expected parameters on the host or on CUDA devices, got"
                f" {names.get(id(parameter))} on {parameter.device}"
            )


def _added_to(model, free):
    """Return (name, parameter) of parameters that have come into a DDP model's module too late.

    Args:
        model: the DDP model; None if it is gone.
        free: ids of parameters that no compressor has. Some may be of other models, and the program
            may have told DDP to ignore some.
    """
    return [
        (name, parameter)
        for name, parameter in (() if model is None else model.module.named_parameters())
        if id(parameter) in free and name not in model.parameters_to_ignore
    ]


def _averaged(model):
    """Return the ids of the parameters in DDP's buckets: those trained when DDP was called."""
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # a bucket of sparse gradients, which the first backward pass refuses
        return set()
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


class DdpAdapter(DistributedAdapter):
    """The side of one Compressor in PyTorch's DDP.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        slots: name of a parameter -> its :class:`~deepreduce_hvd.torch.slot.Slot`.
        model: the DDP model. All ranks of its process group create the adapter together.
    """

    def __init__(self, compressor, slots, model):
        transport = DistributedTransport(*ranks_and_timeout(model.process_group))
        self.device_path = _device_path(compressor, transport)
        why_not = self.device_path.why_not
        super().__init__(compressor, transport, slots, on_host=why_not is not None, hooks=True)
        self._model = weakref.ref(model)
        self._has_nccl = has_nccl(model.process_group)
        self._parameters = Parameters(slots)
        # the others are those that the program has told DDP to ignore, or of other models
        self._in_model = {id(parameter) for parameter in model._module_parameters}
        self._layouts = Layouts(slots.values())
        self._mirrors = Mirrors()  # of buckets on GPUs that are encoded on the host
        self._streams = {}  # GPU -> DeviceStreams, for buckets that are encoded there
        self.follow_tables()  # of a state that was loaded before
        for slot in slots.values():
            slot.move_to(self.device_path.home(slot.parameter))  # where gradients are encoded
            if slot.parameter.is_cuda and why_not is not None and not self.alone:
                self._warn_once(
                    "host",
                    f"gradients on {slot.parameter.device} are compressed on the host: {why_not}",
                )

    def attach(self):
        super().attach()
        model, in_model = self._model, self._in_model
        self._unexchanged = Unexchanged(
            self._parameters, self.transport,
            may_stay=lambda slot: model() is None or id(slot.parameter) not in in_model,
            added=lambda _, free: _added_to(model(), free),
        )  # fmt: skip

    def warn_of_others(self, model):
        """Warn of trained parameters that the DDP model neither averages nor was told to ignore."""
        inside = dict(model.module.named_parameters(remove_duplicate=False))
        ignored = {id(inside[name]) for name in model.parameters_to_ignore if name in inside}
        others = [
            name
            for name, slot in self.slots.items()
            if slot.parameter.requires_grad and id(slot.parameter) not in self._in_model | ignored
        ]
        if others and not self.alone:
            warn(
                f"register: the compressor has parameters that are not in the DDP model:"
                f" {some_of(others)}. It does not exchange their gradients. If no other DDP model"
                " does, the models of the ranks differ. Create the compressor with the parameters"
                " of the module inside DistributedDataParallel"
            )

    @property
    def may_leave_unused(self):  # type: ignore[override]  # static_graph may be set later
        model = self._model()
        return model is not None and (model.find_unused_parameters or model.static_graph)

    def agree(self):
        """Find hosts, compare settings, and use NCCL for payloads if all ranks can and match.

        The other ranks' payloads have the same bytes, wherever they are made.
        """
        self.transport.find_hosts(collective_name(self.compressor.number, "hosts"))
        super().agree()
        if self.alone:
            return
        device = self._device_for_nccl()
        able = np.array([device is not None], dtype=np.uint8)
        name = collective_name(self.compressor.number, "payloads on GPUs")
        if self.transport.wait(self.transport.allgather(able, name)).all():
            self.transport.use_device(device)
            self.device_path.nccl = True

    def _device_for_nccl(self):
        """Return the GPU of all trained parameters if their payloads can stay on it, or None."""
        trained = [slot.parameter for slot in self.slots.values() if not slot.frozen]
        devices = {parameter.device for parameter in trained}
        if len(devices) != 1 or not all(map(self.device_path.takes, trained)):
            return None
        return devices.pop() if self._has_nccl else None

    def _is_on_gpu(self, name):
        return self.device_path.takes(self.slots[name].parameter)

    def _join_streams(self):
        for streams in self._streams.values():
            streams.join()

    def close(self):
        super().close()
        self._unexchanged.close()
        self._mirrors.clear()

    def average(self, bucket):
        """Start to average the gradients of DDP's bucket and return the future of its buffer."""
        expect_no_capture(bucket.buffer().device)
        backward_pass = self._pass
        if bucket.index() == 0 or backward_pass is None:
            backward_pass = self._begin(has_batch=_in_backward())
        job = self._new_job(backward_pass, bucket.buffer())
        self._start(backward_pass, job, lambda: self._gradients_in(bucket, job))
        if bucket.is_last():
            self._at_last_bucket(backward_pass)
        return job.future

    def look_for_table(self, slot, gradient):
        """Look at a gradient if this pass has made it; a bucket may have one of an earlier pass."""
        return super().look_for_table(slot, gradient) if slot.made else (False, False)

    def _new_job(self, backward_pass, buffer):
        if not self.device_path.takes(buffer):
            return BucketJob(self, backward_pass, buffer)
        if buffer.device not in self._streams:
            self._streams[buffer.device] = DeviceStreams(buffer.device)
        if backward_pass.device_sums is None:
            backward_pass.device_sums = self.device_path.sums()
        return DeviceBucketJob(self, backward_pass, buffer, self._streams[buffer.device])

    def _gradients_in(self, bucket, job):
        """Return the slots and the gradients of a bucket, or of the mirror that its job gets."""
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise InvalidArgumentError(
                "DDP: expected dense gradients, got sparse ones; create the embedding with"
                " sparse=False"
            )
        if not getattr(self._model(), "_divide_by_initial_world_size", True):
            raise InvalidArgumentError(
                "DDP: expected join(divide_by_initial_world_size=True), got False, which DDP does"
                " not tell communication hooks; gradients are divided by the number of all ranks"
            )
        parameters, gradients = bucket.parameters(), bucket.gradients()
        slots = [self._parameters.get(parameter) for parameter in parameters]
        self._unexchanged.exchanged(slots)
        if _in_backward():
            self._layouts.expect_known(slots, gradients)
            for slot in () if self.alone else slots:
                self.look_for_discarded(slot, self._parameters)
        else:  # zeros of join(); a pass under no_sync() may have been the last one
            for slot in slots:
                slot.made = False
        changes = not self.alone or any(slot.remembers for slot in slots)
        if changes and buffer.device.type != "cpu" and not self.device_path.takes(buffer):
            mirror = self._mirrors.copy(bucket.index(), buffer)
            job.use(mirror)
            gradients = [mirror.view_of(gradient) for gradient in gradients]
        return slots, [in_layout_of(*pair) for pair in zip(parameters, gradients)]

    def _at_last_bucket(self, backward_pass):
        """End the step at the end of the backward pass; in join(), which has none, end it now.

        From a callback of the backward pass, an error keeps its type; DDP's own wait, which comes
        later, turns every error into a RuntimeError. A checkpoint with use_reentrant=True runs
        backward passes within this one. A callback at an earlier bucket may be one of theirs.
        """
        if not _in_backward():
            self._end_backward(backward_pass)
            return
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._end_backward, backward_pass))

    @torch._disable_dynamo  # which would trace it in a training step that is compiled as a whole
    def _end_backward(self, backward_pass):
        """Wait for all results; raise the error of the first bucket that failed."""
        error = backward_pass.end()
        if error is not None:
            raise error
        self.agree_on_tables()
        self.scheduler.step_ends(self.transport, self.slots)


def _device_path(compressor, transport):
    """Return the :class:`~deepreduce_hvd.torch.cuda.device.DevicePath` of a compressor.

    At first, payloads go through the host.
    """
    path = DevicePath(compressor, lambda: False, lambda: transport.rank)
    if path.why_not is None and compressor.schedule is not None:
        path.why_not = "schedule= works on the host with DDP"
    return path


def _in_backward():
    """Return whether this thread runs a backward pass; a rank in DDP's join() does not."""
    return torch._C._current_graph_task_id() != -1
