"""A dictionary that forgets what was not set for a long time."""

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A dictionary of the ``most`` keys that were set last."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)  # set again, it is the last one
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
