"""Names for the program's own Horovod collectives that have none.

Horovod matches a collective without a name by the number of all collectives before it. The
exchanges of compressors are collectives too, and when one starts depends on timing. So ranks would
count differently, and wait for each other for ever. Here only the collectives without a name count.
"""

import collections
import functools
import inspect
import itertools
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
    """The numbers of the collectives without a name, since Horovod was initialized."""

    def __init__(self, initialization: object) -> None:
        self.initialization = initialization
        self._counts: dict[tuple[str, int], itertools.count[int]] = {}
        self._of_handle: collections.OrderedDict[int, int] = collections.OrderedDict()

    def next(self, kind: str, process_set: int) -> int:
        return next(self._counts.setdefault((kind, process_set), itertools.count()))

    def remember(self, handle: int, number: int) -> None:
        self._of_handle[handle] = number
        if len(self._of_handle) > _MOST_HANDLES:
            self._of_handle.popitem(last=False)

    def of(self, handle: Any) -> int | None:
        return self._of_handle.get(handle)


_numbers = _Numbers(None)


def _current() -> _Numbers:
    """Return the numbers; they start again when Horovod does, as its own do."""
    global _numbers
    if _numbers.initialization is not mpi_ops._handle_map:  # replaced by hvd.init()
        _numbers = _Numbers(mpi_ops._handle_map)
    return _numbers


def _naming(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters)
    name_at, set_at = parameters.index("name"), parameters.index("process_set")
    kind = function.__name__.strip("_").removesuffix("_async")

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        given = [*arguments, *(named[one] for one in parameters[len(arguments) :] if one in named)]
        if len(given) < len(parameters) or given[name_at] is not None:
            return function(*arguments, **named)
        numbers = _current()
        number = numbers.next(kind, given[set_at].process_set_id)
        given[name_at] = f"{kind}.unnamed.{number}"
        handle = function(*given)
        numbers.remember(handle, number)
        return handle

    return call


def name_all() -> None:
    """Give a name to every collective without one that the program starts from now on.

    All ranks must call this between the same two collectives without a name. They do, because they
    create their first compressor there.
    """
    for name in _FUNCTIONS:
        function = getattr(mpi_ops, name)
        if function.__module__ == mpi_ops.__name__ and not hasattr(function, "__wrapped__"):
            setattr(mpi_ops, name, _naming(function))


def number_of(handle: Any) -> int | None:
    """Return the number of a collective that had no name, or None."""
    return _current().of(handle)
