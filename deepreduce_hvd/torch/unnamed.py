"""Names for the program's own Horovod collectives that have none.

Horovod matches a collective without a name by the number of all collectives before it. The
exchanges of compressors are collectives too, and when one starts depends on timing. So ranks would
count differently, and wait for each other for ever. Here only the collectives without a name count.
"""

import collections
import functools
import inspect
from collections.abc import Callable
from typing import Any

from horovod.torch import mpi_ops

#: the functions behind Horovod's public ones, to which ``name`` is an argument
_FUNCTIONS = (
    "_allreduce_async", "_grouped_allreduce_async", "_allgather_async",
    "_grouped_allgather_async", "_broadcast_async", "_alltoall_async", "_reducescatter_async",
    "_grouped_reducescatter_async",
)  # fmt: skip
_MOST_HANDLES = 1024


class _Numbers:
    """The numbers of the collectives without a name."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
        self._of_handle: collections.OrderedDict[int, int] = collections.OrderedDict()

    def next(self, kind: str, ranks: tuple[int, ...]) -> int:
        number = self._counts[kind, ranks]
        self._counts[kind, ranks] = number + 1
        return number

    def take_back(self, kind: str, ranks: tuple[int, ...], number: int) -> None:
        """Do not count a collective that has not started: the other ranks do not know of it."""
        if self._counts[kind, ranks] == number + 1:  # no other thread has started one since
            self._counts[kind, ranks] = number

    def remember(self, handle: int, number: int) -> None:
        self._of_handle[handle] = number
        if len(self._of_handle) > _MOST_HANDLES:
            self._of_handle.popitem(last=False)

    def of(self, handle: Any) -> int | None:
        return self._of_handle.get(handle)


_numbers = _Numbers()


def _starting_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Horovod's shutdown: the numbers start again after it, as its own do."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        global _numbers
        _numbers = _Numbers()
        return function(*arguments, **named)

    return call


def _naming(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters)
    name_at, set_at = parameters.index("name"), parameters.index("process_set")
    kind = function.__name__.strip("_").removesuffix("_async")

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > name_at and arguments[name_at] is not None:  # most have a name
            return function(*arguments, **named)
        given = [*arguments, *(named[one] for one in parameters[len(arguments) :] if one in named)]
        if len(given) < len(parameters) or given[name_at] is not None:
            return function(*arguments, **named)
        # ids of process sets are used again, their ranks tell them apart
        ranks = tuple(given[set_at].ranks or ())
        number = _numbers.next(kind, ranks)
        given[name_at] = f"{kind}.unnamed.{number}"
        try:
            handle = function(*given)
        except BaseException:
            _numbers.take_back(kind, ranks, number)
            raise
        _numbers.remember(handle, number)
        return handle

    return call


def name_all() -> None:
    """Give a name to every collective without one that the program starts from now on.

    All ranks must call this between the same two collectives without a name. They do, if all create
    their first compressor there.
    """
    if not hasattr(mpi_ops._allreduce_async, "__wrapped__"):
        for name in _FUNCTIONS:
            setattr(mpi_ops, name, _naming(getattr(mpi_ops, name)))
        mpi_ops.mpi_lib.horovod_torch_reset = _starting_again(mpi_ops.mpi_lib.horovod_torch_reset)


def number_of(handle: Any) -> int | None:
    """Return the number of a collective that had no name, or None."""
    return _numbers.of(handle)
