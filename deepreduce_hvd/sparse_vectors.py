"""Collectives for sparse vectors: dr.sparse_allreduce, with or without a handle."""

import importlib
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.argument_checks import is_integer
from deepreduce_hvd.arrays import expect_array
from deepreduce_hvd.communicators import Allgather, Communicator
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.given_vectors import GivenVector, GivenVectorSum, VectorExchange
from deepreduce_hvd.coordination.collective_names import collective_name, process_set_key
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.numerics.exact_math import divided, is_nonzero
from deepreduce_hvd.recent import Recent
from deepreduce_hvd.stages.base import IndexCodec, ValueCodec
from deepreduce_hvd.stages.index_codecs import Rice
from deepreduce_hvd.stages.value_codecs import RawValue

#: {top-level module of an array's type: module of this package for such arrays}
_FRAMEWORKS = {
    "torch": "deepreduce_hvd.torch.vectors",
    "tensorflow": "deepreduce_hvd.tensorflow.vectors",
}
_INDEX_DTYPES = ("int32", "int64", "uint32", "uint64")
#: ranks of a process set -> (the initialization of Horovod, numbers for calls without a name)
_numbers: dict[tuple[int, ...], tuple[Any, "itertools.count[int]"]] = {}
#: (ranks of a process set, name) -> number of calls with this name, as far as this rank knows.
#: Bounded, because a program can give each call a new name.
_steps: Recent[tuple[Any, str], int] = Recent(1 << 16)
_in_flight: "weakref.WeakSet[SparseHandle]" = weakref.WeakSet()


class SparseVectors(NamedTuple):
    """The result of :func:`sparse_allreduce`, of the same kind and dtypes as the arguments.

    Attributes:
        indices: (n,) the indices of the nonzero elements of the result, ascending.
        values: (n,) their values, bit-identical on all ranks.
        rest_indices: (m,) indices of this rank's rest, ascending; empty if nothing is left out.
        rest_values: (m,) values of the rest.
    """

    indices: Any
    values: Any
    rest_indices: Any
    rest_values: Any


class SparseHandle:
    """The handle of a sum that :func:`sparse_allreduce_async` has started.

    Every rank must call :meth:`wait` for every handle, in any order.
    """

    def __init__(
        self,
        exchange: Exchange,
        name: str | None,
        key: Any,
        finish: Callable[[Exchange], SparseVectors],
    ) -> None:
        self._exchange = exchange
        self._name = name
        self._key = key
        self._finish = finish
        self._outcome: SparseVectors | None = None
        _in_flight.add(self)

    def poll(self) -> bool:
        """Return whether the sum is complete, and advance all sums in flight.

        Returns:
            True if :meth:`wait` would return without waiting.
        """
        for handle in list(_in_flight):
            handle._exchange.advance()
        return self._exchange.done

    def wait(self) -> SparseVectors:
        """Wait for the sum and return it.

        Other sums in flight advance meanwhile. Later calls return the same result.

        Returns:
            A :class:`SparseVectors` tuple, as from :func:`sparse_allreduce`.

        Raises:
            InvalidArgumentError: an argument of this rank is not valid, the arguments of the ranks
                differ, or the sum is not finite.
            PeerFailedError: another rank failed, or an argument of that rank is not valid.
        """
        self._exchange.wait([handle._exchange for handle in list(_in_flight) if handle is not self])
        _in_flight.discard(self)
        if self._outcome is None:
            self._outcome = self._finish(self._exchange)
        return self._outcome


def sparse_allreduce(
    indices: Any,
    values: Any,
    d: int,
    op: Any = None,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
    index: IndexCodec | None = None,
    value: ValueCodec | None = None,
    process_set: Any = None,
) -> SparseVectors:
    """Sum or average a sparse vector of ``d`` elements over all ranks.

    Every rank gives any number of elements, and receives the elements of the result. No
    :class:`Compressor` is needed, only ``hvd.init()``. With the default codecs the result is exact
    but for float32 rounding.

    **What is left out is returned.** Lossy codecs and :class:`GTopK` leave out parts of the sum.
    The rest of a rank is the part for which this rank is responsible. The sum over all ranks, plus
    the rests of all ranks, is the sum of all given vectors. Add the rest to the vector of the next
    call, or drop it. It is not divided by the number of ranks.

    Time and memory do not depend on ``d``, with these exceptions: the codecs :class:`Bitmap` and
    :class:`Bloom`, :class:`RawIndex` with value codecs that sort (:class:`FitPoly`,
    :class:`FitDExp`), and vectors or sums so full that all elements take fewer bytes.

    Args:
        indices: (n,) distinct integers in [0, d), in any order; int32, int64, uint32 or uint64. A
            NumPy array, torch tensor or eager TensorFlow tensor.
        values: (n,) float32, finite, of the same kind as ``indices``.
        d: the number of elements of the dense vector, at most 2^31 - 1; the same on all ranks.
        op: ``hvd.Average``, the default as in ``hvd.allreduce``, or ``hvd.Sum``.
        name: the name of this sum. It must be equal on all ranks, and only one sum of this name can
            be in flight. Without names, all ranks must make their calls in the same order. Elastic
            training needs names.
        communicator: :class:`Allgather` (the default), :class:`SplitAllgather`,
            :class:`RecursiveDoubling`, :class:`GTopK`, :class:`Auto`, or a custom communicator that
            sums what a bucket selects. ``GTopK`` keeps as many elements as the longest vector has.
            Use one ``Auto()`` for all calls, because it measures the links of a process set once.
        index: the codec of the indices. Default: :class:`Rice`.
        value: the codec of the values. Default: :class:`RawValue`.
        process_set: the Horovod process set of the ranks that take part. Default: all ranks.

    Returns:
        A :class:`SparseVectors` tuple (indices, values, rest_indices, rest_values), of the same
        kind and with the same dtypes as the arguments.

    Raises:
        InvalidArgumentError: an argument of this rank is not valid, the arguments of the ranks
            differ, or the sum is not finite.
        PeerFailedError: another rank failed, or an argument of that rank is not valid.

    >>> import horovod.torch as hvd  # doctest: +SKIP
    >>> hvd.init()  # doctest: +SKIP
    >>> indices, values = np.array([7, 2]), np.array([1.5, -1], dtype=np.float32)
    >>> # the same vector on two ranks
    >>> dr.sparse_allreduce(indices, values, d=10, op=hvd.Sum)[:2]  # doctest: +SKIP
    (array([2, 7]), array([-2.,  3.], dtype=float32))
    """
    return sparse_allreduce_async(
        indices, values, d, op, name, communicator=communicator, index=index, value=value,
        process_set=process_set,
    ).wait()  # fmt: skip


def sparse_allreduce_async(
    indices: Any,
    values: Any,
    d: int,
    op: Any = None,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
    index: IndexCodec | None = None,
    value: ValueCodec | None = None,
    process_set: Any = None,
) -> SparseHandle:
    """Start a sum or average of a sparse vector, and return its handle.

    Several sums can be in flight. On TensorFlow, Horovod has no handles, so this call makes the
    whole exchange.

    Args:
        indices, values: as for :func:`sparse_allreduce`. They are copied where needed, so they may
            be changed after this call.
        d, op, name, communicator, index, value, process_set: as for :func:`sparse_allreduce`.

    Returns:
        A :class:`SparseHandle`. Its method ``wait()`` returns the result, or raises the errors of
        :func:`sparse_allreduce`.

    Raises:
        InvalidArgumentError: Horovod is not initialized, this rank is not in ``process_set``, or
            ``name`` is not a text or is the name of another sum in flight. All other errors come
            from ``wait()``, so that all ranks raise them.
    """
    framework = _framework_of(indices)
    module = _module(framework)
    transport = module.transport(process_set)
    _expect_member(transport)
    key = process_set_key(process_set)
    label, collective = _names(name, key, module.initialization())
    try:
        average = _expect_op(op, transport.horovod)
        scheme = Allgather() if communicator is None else communicator
        GivenVectorSum.expect_communicator(scheme)
        codecs = (
            _expect_codec("index", index, IndexCodec, Rice),
            _expect_codec("value", value, ValueCodec, RawValue),
        )
        own_indices, own_values = _expect_vector(framework, indices, values, d)
        step = 0 if name is None else _steps.get((key, name), 0)
        vector = GivenVector(label, own_indices, own_values, d, transport.rank, step, name)
        total = GivenVectorSum(scheme, *codecs, {"op": "Average" if average else "Sum"})
    except Exception as error:  # tell the other ranks, or they would wait
        vector = GivenVector.failed(label, error, transport.rank)
        total, average = GivenVectorSum(None, None, None, {}), False
    exchange = VectorExchange(total, vector, transport, collective)

    def finish(exchange):
        result = exchange.finish()
        if name is not None:
            _steps[key, name] = vector.step + 1
        found = _finite_sum(label, result, transport.size if average else 1)
        return SparseVectors(*_as_given(framework, (*found, *vector.rest()), indices, values))

    return SparseHandle(exchange, name, key, finish)


def _framework_of(array):
    """Return "torch", "tensorflow", or "numpy", also for anything else."""
    for kind in type(array).__mro__:
        found = kind.__module__.partition(".")[0]
        if found in _FRAMEWORKS:
            return found
    return "numpy"


def _module(framework):
    """Return the module for the arrays of a framework.

    NumPy arrays travel through the Horovod that the program has initialized.
    """
    if framework == "numpy":
        for framework in _FRAMEWORKS:
            horovod = sys.modules.get(f"horovod.{framework}")
            if horovod is not None and horovod.is_initialized():
                break
        else:
            raise InvalidArgumentError(
                "sparse_allreduce: expected hvd.init() of horovod.torch or horovod.tensorflow"
                " before the first call, got none"
            )
    try:
        module = importlib.import_module(_FRAMEWORKS[framework])
    except ModuleNotFoundError as error:
        message = f"sparse_allreduce: expected horovod.{framework}, got {error}"
        raise InvalidArgumentError(message) from error
    if not module.HorovodTransport.horovod.is_initialized():
        raise InvalidArgumentError(
            f"sparse_allreduce: expected hvd.init() of horovod.{framework} before the first call,"
            " got none"
        )
    return module


def _expect_member(transport):
    if transport.horovod.rank() not in transport.ranks:
        raise InvalidArgumentError(
            f"process_set: expected one with this rank, {transport.horovod.rank()}, got one with"
            f" the ranks {transport.ranks}"
        )


def _names(name, key, initialization):
    """Return (label for messages, name of the collectives).

    Numbers start again when Horovod is initialized again, as Horovod's own do: in elastic training,
    ranks that join then count from the same number.
    """
    if name is None:
        known, numbers = _numbers.get(key, (None, itertools.count()))
        if initialization is not None and known is not initialization:
            known, numbers = initialization, itertools.count()
        _numbers[key] = known, numbers
        number = next(numbers)
        return f"sparse_allreduce number {number}", f"deepreduce.sparse.noname.{number}"
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"name: expected a text that is not empty, got {name!r}")
    if any(one._name == name and one._key == key for one in list(_in_flight)):
        raise InvalidArgumentError(
            f"name: expected a name that no sum in flight has, got {name!r}; wait for its handle"
            " first"
        )
    return f"sparse_allreduce {name}", collective_name("sparse", name)


def _expect_op(op, horovod):
    """Return whether ``op`` is an average; raise InvalidArgumentError if it is not a sum either."""
    if op is None or op is horovod.Average or (is_integer(op) and op == horovod.Average):
        return True
    if not (is_integer(op) and op == horovod.Sum):
        raise InvalidArgumentError(f"op: expected hvd.Average or hvd.Sum, got {op!r}")
    return False


def _expect_codec(what, codec, kind, default):
    if codec is None:
        return default()
    if not isinstance(codec, kind):
        raise InvalidArgumentError(
            f"{what}: expected a codec of type {kind.__name__}, got {codec!r}"
        )
    return codec


def _dtype_name(array):
    return getattr(array.dtype, "name", str(array.dtype)).removeprefix("torch.")


def _expect_vector(framework, indices, values, d):
    """Return the vector as (n,) uint32 ascending indices and (n,) float32 values."""
    if not is_integer(d) or not 1 <= d <= container.MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"d: expected an integer of at least 1 and at most {container.MAX_ELEMENTS}, got {d!r}"
        )
    arrays = []
    for what, array, dtypes in (
        ("indices", indices, _INDEX_DTYPES),
        ("values", values, ("float32",)),
    ):
        if _framework_of(array) != framework:
            raise InvalidArgumentError(
                f"{what}: expected the same kind of array as indices, {type(indices).__name__}, got"
                f" {type(array).__name__}"
            )
        if framework != "numpy":
            if _dtype_name(array) not in dtypes:
                raise InvalidArgumentError(
                    f"{what}: expected {' or '.join(dtypes)}, got {_dtype_name(array)}"
                )
            array = _module(framework).to_numpy(what, array)
        expect_array(what, array, tuple(map(np.dtype, dtypes)), contiguous=False)
        arrays.append(array)
    return _sorted_vector(arrays[0], arrays[1], d)


def _sorted_vector(indices, values, d):
    if indices.size != values.size:
        raise InvalidArgumentError(
            f"values: expected as many as indices, {indices.size}, got {values.size}"
        )
    if not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidArgumentError(
            f"values: expected finite numbers, got {values[place]} at position {place}"
        )
    for wrong in indices[(indices < 0) | (indices >= d)][:1]:
        raise InvalidArgumentError(
            f"indices: expected at least 0 and less than d = {d}, got {wrong}"
        )
    indices, values = indices.astype(np.uint32), values.astype(np.float32)
    if (indices[1:] <= indices[:-1]).any():
        order = np.argsort(indices, kind="stable")
        indices, values = indices[order], values[order]
        for wrong in indices[1:][indices[1:] == indices[:-1]][:1]:
            raise InvalidArgumentError(
                f"indices: expected distinct ones, got {wrong} more than once; add the values of"
                " equal indices first"
            )
    return indices, values


def _finite_sum(label, total, divisor):
    """Return the nonzero elements of the sum, divided by ``divisor``."""
    if not total.non_finite(0):
        indices, values = total.sparse(0, 1.0)
        if np.isfinite(values).all():
            values = divided(values, divisor)
            nonzero = is_nonzero(values)
            return indices[nonzero], values[nonzero]
    raise InvalidArgumentError(
        f"{label}: expected a sum within float32, got one that is not finite"
    )


def _as_given(framework, arrays, indices, values):
    """Return arrays of indices and values in turn, of the kind and dtypes of the arguments."""
    likes = (indices, values) * 2
    arrays = [array.astype(_dtype_name(like)) for array, like in zip(arrays, likes)]
    if framework == "numpy":
        return arrays
    from_numpy = _module(framework).from_numpy
    return [from_numpy(array, like) for array, like in zip(arrays, likes)]
