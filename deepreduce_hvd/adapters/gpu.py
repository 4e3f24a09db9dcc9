"""Decide whether a compressor encodes gradients on the GPU, for the adapters of all frameworks."""

from deepreduce_hvd.communicators.allgather import Allgather


def why_on_host(compressor, without_operators, cuda_supports):
    """Return why gradients on a GPU are compressed on the host, or None.

    Args:
        compressor: a :class:`~deepreduce_hvd.Compressor`.
        without_operators: why the framework has no CUDA operators, or None if it has them.
        cuda_supports: a function that takes the 20 numbers of a codec (:meth:`Codec.fields`) and
            returns whether the CUDA kernels support it.

    Returns:
        The reason as text, or None if gradients are compressed on the GPU.
    """
    if without_operators is not None:
        return f"{without_operators} (docs/gpu.md explains how to build them)"
    if type(compressor.communicator) is not Allgather:
        return f"{compressor.communicator!r} works on the host"
    for name, policy in compressor.policies.items():
        if name in compressor.table_candidates:  # a table gets a codec that works on the GPU
            policy = compressor.first_policies[name]
        codec, memory = policy.codec, policy.memory
        if codec is None:
            continue
        if not codec.is_native(memory):
            return f"{codec!r} with {memory!r} has a custom stage"
        if not cuda_supports(codec.fields(memory)):
            return (
                f"{codec!r} has a stage without CUDA kernels (docs/gpu.md lists these stages, with"
                " the reason)"
            )
    return None


class BaseDevicePath:
    """The path of one compressor for gradients on GPUs, in any framework.

    Args:
        compressor, without_operators, cuda_supports: as for :func:`why_on_host`.
        nccl_built: Horovod's ``nccl_built``.

    Attributes:
        why_not: why it compresses on the host, or None if it compresses on GPUs.
        nccl: whether collectives take payloads from the device.
    """

    def __init__(self, compressor, without_operators, cuda_supports, nccl_built):
        self.compressor = compressor
        self.why_not = why_on_host(compressor, without_operators, cuda_supports)
        self.nccl = self.why_not is None and bool(nccl_built())
