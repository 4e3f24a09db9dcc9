"""The configuration of a compressor: what a state is for, as a number and in words."""

import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepreduce_hvd import container
from deepreduce_hvd.argument_checks import is_integer
from deepreduce_hvd.errors import InvalidArgumentError


class Configuration(NamedTuple):
    """What must be equal for a compressor to load a state.

    Attributes:
        fingerprint: CRC-32 of the configuration.
        settings: {setting: its value as text}, for error messages.
    """

    fingerprint: int
    settings: dict[str, str]

    def expect(self, where, fingerprint, settings):
        """Raise InvalidArgumentError unless a saved configuration is equal to this one.

        Args:
            where: what has the saved configuration, for the error message.
            fingerprint, settings: the saved ones. Older states have no settings.
        """
        if fingerprint == self.fingerprint:
            return
        found = self._difference(settings)
        if found is None:
            got = f"{fingerprint:08x}" if is_integer(fingerprint) else repr(fingerprint)
            raise InvalidArgumentError(
                f"{where}: expected one with the same configuration and parameters"
                f" ({self.fingerprint:08x}), got {got}"
            )
        what, expected, got = found
        raise InvalidArgumentError(
            f"{where}: {what}: expected {expected}, as in this Compressor, got {got}"
        )

    def _difference(self, saved):
        """Return (setting, own value, saved value) of the first difference; None if unknown."""
        if not saved:
            return None
        for what in (*self.settings, *saved):
            own, other = self.settings.get(what, "none"), saved.get(what, "none")
            if own != other:
                return what, own, other
        for own, other in zip(self.settings, saved):
            if own != other:  # gradients share a message by the order of the parameters
                return "order of the parameters", f"{own} next", other
        return None


def configuration_of(
    codec: str,
    memory: str | list[str],
    others: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    policies: Mapping[str, Any],
) -> Configuration:
    """Return the configuration of a compressor.

    Args:
        codec, memory: the codec and the memory as text. If they depend on the parameter, the second
            is a list of texts.
        others: {setting: value} of all other settings.
        shapes: {parameter name: shape}, in the order of the parameters.
        policies: {parameter name: its policy}.
    """
    # equal texts as one object, which a pickled state contains only once
    chosen = {name: sys.intern(repr(policy)) for name, policy in policies.items()}
    description = (
        container.VERSION, codec, memory, *others.values(), list(shapes.items()),
        list(chosen.values()),
    )  # fmt: skip
    depends = isinstance(memory, list)
    settings = {
        "format version": str(container.VERSION),
        "codec": "by parameter" if depends else codec,
        "memory": "by parameter" if depends else str(memory),
        **{name: str(value) for name, value in others.items()},
        **{f"parameter {name}": sys.intern(f"shape {shape}") for name, shape in shapes.items()},
        **{f"codec of parameter {name}": text for name, text in chosen.items()},
    }
    return Configuration(zlib.crc32(repr(description).encode()), settings)
