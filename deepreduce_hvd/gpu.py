"""Which compressors work on a GPU. Their operators are the adapters'."""

from deepreduce_hvd.communicators.allgather import Allgather


def why_on_host(compressor, without_operators, cuda_supports):
    """Why gradients on a GPU are compressed on the host.

    Args:
        compressor: a :class:`~deepreduce_hvd.Compressor`.
        without_operators: the reason when the framework's operators are built without CUDA, or None.
        cuda_supports: a function that tells of a codec's 20 numbers whether the kernels know it.

    Returns:
        The reason as a text, or None when gradients are compressed on the GPU.
    """
    codec, memory = compressor.codec, compressor.memory
    if without_operators is not None:
        return f"{without_operators} (docs/gpu.md says how to build them)"
    if type(compressor.communicator) is not Allgather:
        return f"{compressor.communicator!r} works on the host"
    if not codec.is_native(memory):
        return f"{codec!r} with {memory!r} is not all built in"
    if not cuda_supports(codec.fields(memory)):
        return f"of {codec!r} the host must do a part (docs/gpu.md says which codecs, and why)"
    return None
