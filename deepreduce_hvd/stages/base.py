"""Base classes of all stages.

A stage is a small immutable object with a stage id and at most four numeric parameters. Its class
contains the NumPy implementation. That implementation is the specification in code, and the tests
compare the native core with it.

A custom codec subclasses :class:`IndexCodec` or :class:`ValueCodec`, takes a stage id from 128 to
255 and registers itself. A custom sparsifier or memory needs neither, because payloads do not
contain its id. Nothing else has to change (docs/add-a-codec.md).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepreduce_hvd.argument_checks import expect_unset
from deepreduce_hvd.errors import InvalidArgumentError

#: The state arrays of a memory, (d,) float32 each.
Arrays = tuple[np.ndarray, ...]


class Stage:
    """Base class of all stages.

    Two stages are equal if they have the same class and parameters. Constructors raise
    InvalidArgumentError for arguments that are out of range. Built-in stages keep numbers of NumPy
    and fractions as a float or int of Python, with which NumPy computes as the native core does.
    """

    #: The stage id. Payloads contain those of the index codec and of the value codec, as listed in
    #: docs/format.md. A custom sparsifier or memory has none.
    stage_id: int | None = None

    #: The arguments of a call that makes an instance, as text, for suggestions in messages.
    example_arguments: str = ""

    def parameters(self, step: int = 0) -> Sequence[float]:
        """Return the parameters of this stage, as the native core takes them.

        Args:
            step: the training step. It matters only for schedules.

        Returns:
            At most four numbers.
        """
        return ()

    def fields(self, step: int = 0) -> list[float]:
        """Return the numbers that describe this stage to the native core.

        Args:
            step: the training step. It matters only for schedules.

        Returns:
            A list of five numbers, the stage id and four parameters. Unused parameters are 0.
        """
        parameters = [float(value) for value in self.parameters(step)]
        assert self.stage_id is not None
        return [float(self.stage_id), *parameters, *[0.0] * (4 - len(parameters))]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in cls.__mro__:
            slots = vars(base).get("__slots__")  # not in vars(), so ranks would not compare them
            if slots:
                raise InvalidArgumentError(
                    f"{cls.__name__}: expected a class without __slots__, because stages are equal"
                    f" if their attributes in __dict__ are, got {slots!r} in {base.__name__}"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if is_built_in(self):
            expect_unset(self, name, value)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self))))  # values may be lists and dictionaries

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class Sparsifier(Stage):
    """Base class of sparsifiers, which select the elements to send."""

    #: From this step on, ``parameters`` does not change.
    schedule_steps: int = 0

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        """Return the indices of the elements to send.

        Args:
            accumulated: (d,) float32, the gradient plus the memory.
            key: a 64-bit key for random choices, equal on all ranks.
            step: the training step, for schedules.

        Returns:
            Ascending, distinct uint32 indices less than d.
        """
        raise NotImplementedError

    def most_selected(self, d: int, step: int = 0) -> int | None:
        """Return the largest number of elements that :meth:`select` can select.

        :class:`GTopK` needs this number, and keeps as many of each sum. So it depends on ``d`` and
        ``step`` only, and is the same on all ranks.

        Args:
            d: the number of elements of the tensor.
            step: the training step, for schedules.

        Returns:
            The number, or None if it depends on the gradient.
        """
        return None

    def with_ratio(self, ratio: float) -> "Sparsifier | None":
        """Return a sparsifier like this one that keeps another share of the elements.

        Plans and ``schedule="auto"`` need this method.

        Args:
            ratio: the share of the elements to keep, a number in (0, 1].

        Returns:
            The sparsifier, or None if this one has no setting for the share.
        """
        return None


class IndexCodec(Stage):
    """Base class of index codecs, which encode a set of indices as bytes."""

    #: Whether the codec can encode indices in any order. Sorted values then need no order mapping.
    any_order: bool = False

    @property
    def misplaces_values(self) -> bool:
        """Whether values can arrive at other indices than their own.

        A memory would keep this error, which is larger than the values, and grow.
        """
        return False

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        """Encode indices as the index section of a payload.

        Args:
            indices: (k,) uint32, ascending, distinct, less than ``d``. If ``any_order`` is True,
                they can also come in another order.
            d: the number of elements of the tensor.
            key: a key for random choices. The receiver does not know it.
            value_bits: the cost of sending one more value, in bits.

        Returns:
            A tuple (section, decoded indices, values_stay). A lossless codec returns ``(section,
            indices, False)``. A lossy codec returns the ascending indices that the receiver will
            decode. The values sent are then the values at the decoded indices. If ``values_stay``
            is True, the values at the original indices are sent instead.
        """
        raise NotImplementedError

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        """Decode an index section.

        Args:
            section: the bytes that :meth:`encode` returned.
            d: the number of elements of the tensor.
            count: the number of indices.

        Returns:
            (count,) uint32, distinct, less than ``d``. The indices are ascending unless
            ``any_order`` is True.

        Raises:
            CorruptPayloadError: :meth:`encode` cannot have written the section.
        """
        raise NotImplementedError


class ValueCodec(Stage):
    """Base class of value codecs, which encode values as bytes."""

    #: Whether the codec changes the order of the values.
    sorts: bool = False

    @property
    def sends_zeros(self) -> bool:
        """Whether the codec can distinguish zeros from other values.

        If so, zeros decode to smaller magnitudes than other values. It is True unless a subclass
        overrides it. :class:`TopK` selects no zeros, but :class:`SplitAllgather` can send sums with
        many zeros. If this is False, it sends such sums with another codec.
        """
        return True

    def bits_per_value(self) -> float:
        """Return an estimate of the bits that one more value adds to the payload.

        Returns:
            Bits per value; 32 unless a subclass overrides it.
        """
        return 32.0

    def relative_error(self) -> float:
        """Return an estimate of the norm of the error divided by the norm of the values.

        Return the larger of two estimates, for many values: one for exponentially distributed
        magnitudes, as in whole gradients, one for equal magnitudes, as among the largest elements.
        Error feedback adds the error to the next gradient, so with a ratio of 1 or more
        the memory would grow without limit. :class:`~deepreduce_hvd.Compressor` therefore refuses
        such a codec together with a memory.

        Returns:
            The ratio; 0 unless a subclass overrides it.
        """
        return 0.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        """Encode values as the value section of a payload.

        Args:
            values: (k,) finite float32.
            key: a key for stochastic rounding.

        Returns:
            A tuple (section, decoded, order). ``decoded`` is a (k,) float32 array, in which
            ``decoded[i]`` is the decoded value of ``values[i]``. ``order`` is None unless ``sorts``
            is True. It is then a (k,) uint32 array, in which ``order[j]`` is the position in
            ``values`` of the j-th value in the section.
        """
        raise NotImplementedError

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        """Decode a value section.

        Args:
            section: the bytes that :meth:`encode` returned.
            count: the number of values.

        Returns:
            (count,) float32, in the order of the section.

        Raises:
            CorruptPayloadError: :meth:`encode` cannot have written the section.
        """
        raise NotImplementedError


class Memory(Stage):
    """Base class of memories, which keep the part of a gradient that was not sent.

    State arrays have the unit of the gradient. When the loss scale changes, they are multiplied by
    the ratio of the scales. When a rank takes over the memories of other ranks, their state arrays
    are added. If the number of ranks changes while gradients are averaged, state arrays are
    multiplied by the ratio of the numbers. All state arrays start at zero.
    """

    #: The names of the (d,) float32 state arrays of each parameter, in the order in which
    #: ``accumulate`` and ``update`` get them.
    state: tuple[str, ...] = ()
    #: Whether the first state array is exactly the residual: all that payloads have not carried.
    keeps_everything: bool = False
    #: Whether each gradient may be passed only once. If so, adding a new gradient to an average
    #: that is already in ``.grad`` raises an error.
    needs_new_gradients: bool = False

    def accumulate(self, gradient: np.ndarray, state: Arrays) -> tuple[np.ndarray, Arrays]:
        """Combine a gradient with the state.

        Args:
            gradient: (d,) float32, finite.
            state: a tuple of (d,) float32 arrays, finite.

        Returns:
            A tuple (accumulated, new state). ``accumulated`` is the (d,) float32 array that the
            sparsifier selects from. The arguments are not modified; the returned arrays are new.
        """
        raise NotImplementedError

    def update(
        self,
        gradient: np.ndarray,
        accumulated: np.ndarray,
        state: Arrays,
        indices: np.ndarray,
        decoded: np.ndarray,
    ) -> Arrays:
        """Compute the new state after a payload is encoded.

        Args:
            gradient: (d,) float32.
            accumulated: (d,) float32, as returned by :meth:`accumulate`.
            state: the state that :meth:`accumulate` returned.
            indices: (k,) uint32, the indices in the payload.
            decoded: (k,) float32, the decoded values of the payload at ``indices``.

        Returns:
            The new state, a tuple of (d,) float32 arrays. The arguments are not modified; the
            returned arrays are new.
        """
        raise NotImplementedError

    def put_back(self, state: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        """Return values to the state that were sent but did not reach the sum, in place.

        :class:`Allgather` is the only communicator that works without this method, alone or within
        :class:`Hierarchical`.

        Args:
            state: the state arrays.
            indices: (k,) uint32, distinct.
            values: (k,) float32, the lost values at ``indices``.
        """
        raise NotImplementedError


def is_ours(stage_class):
    """Return whether a class of stages belongs to this package."""
    return stage_class.__module__.partition(".")[0] == __name__.partition(".")[0]


def is_built_in(stage):
    """Return whether a stage belongs to this package, so that the native core knows it.

    A subclass of a built-in stage that the user defines is a custom stage.
    """
    return is_ours(type(stage))


def overrides(stage, base, method):
    """Return whether the class of a stage overrides ``method`` of ``base``.

    The method of the base class raises NotImplementedError.
    """
    own, inherited = (
        getattr(getattr(kind, method), "__func__", getattr(kind, method))
        for kind in (type(stage), base)
    )
    return own is not inherited
