"""Profiles of measured jobs as JSON, and files of layer times."""

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from deepreduce_hvd.argument_checks import is_number
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.fields import (
    expect,
    expect_keys,
    expect_unique,
    integer_of,
    json_of,
    list_of,
    number_of,
    pairs_of,
    parsed,
    set_fields,
    text_of,
    text_of_file,
)
from deepreduce_hvd.schedule.links import Link
from deepreduce_hvd.schedule.parameter import DEFAULT_DENSITY, Parameter, parameter_of
from deepreduce_hvd.schedule.slowest import slowest, slowest_table
from deepreduce_hvd.schedule.tables import Fit, Table

FORMAT, VERSION = "deepreduce_hvd profile", 1
#: the codec for which payloads are estimated if nothing else is known
ASSUMED_CODEC = "the default codec"
_TABLES = ("allgather", "allreduce", "allreduce_fp16")
#: seconds per element
_PER_ELEMENT = ("to_fp16_seconds", "from_fp16_seconds", "seconds_per_kept_element")
_OPTIONAL_NUMBERS = (*_PER_ELEMENT, "max_density", "gather_overlap", "encoding_delay")
_OPTIONAL = (*_OPTIONAL_NUMBERS, "has_ratio")
_NUMBERS = ("forward_seconds", "update_seconds", "density", *_OPTIONAL_NUMBERS)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measurements of a job.

    Attributes:
        parameters: the parameters, in the order in which their gradients are ready.
        forward_seconds: seconds before backward starts.
        update_seconds: seconds after the last gradient is decoded.
        hosts: the number of hosts on which the tables were measured.
        ranks_per_host: their number of ranks per host.
        codec: the codec of the payloads, as text.
        density: the density at which ``encode_seconds`` and ``decode_seconds`` were measured.
        allgather: measured seconds of an allgather, by the bytes of one rank's payload.
        allreduce: measured seconds of a dense allreduce, by the bytes of the tensor.
        allreduce_fp16: the same for tensors of float16; None if it was not measured.
        gather_overlap: seconds at the end of each allgather in which the next one can already be
            under way.
        to_fp16_seconds: seconds per element in which one rank converts a gradient to float16.
        from_fp16_seconds: seconds per element in which it converts the sum back.
        seconds_per_kept_element: seconds of encoding for each element that a density above
            ``density`` sends in addition.
        max_density: the largest density of the codec in a plan. With few bits per value, a larger
            one can carry less of a gradient.
        encoding_delay: seconds by which each second of encoding delays backward. With 1, backward
            waits for encoding. With 0, threads encode while it goes on.
        has_ratio: whether the sparsifier has a ratio, as ``TopK(0.01)`` has. Without one, as with
            ``Threshold``, no plan changes the density. Then ``density`` is the share of the
            elements of all parameters that was sent, ``max_density`` is the same, and payloads are
            known at this density only.
    """

    parameters: tuple[Parameter, ...]
    forward_seconds: float = 0.0
    update_seconds: float = 0.0
    hosts: int = 1
    ranks_per_host: int = 1
    codec: str = ASSUMED_CODEC
    density: float = DEFAULT_DENSITY
    allgather: Table | None = None
    allreduce: Table | None = None
    allreduce_fp16: Table | None = None
    to_fp16_seconds: float = 0.0
    from_fp16_seconds: float = 0.0
    seconds_per_kept_element: float = 0.0
    encoding_delay: float = 1.0
    max_density: float = 1.0
    gather_overlap: float = 0.0
    has_ratio: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.parameters))
        expect(bool(self.parameters), "parameters", "at least one", "none")
        kinds = {type(parameter).__name__ for parameter in self.parameters}
        only = all(isinstance(parameter, Parameter) for parameter in self.parameters)
        expect(only, "parameters", "objects of Parameter", ", ".join(sorted(kinds)))
        text_of(vars(self), "codec", "profile")
        set_fields(self, "profile", _NUMBERS, {"hosts": 1, "ranks_per_host": 1})
        for what in ("density", "max_density"):
            value = getattr(self, what)
            expect(0 < value <= 1, f"profile {what}", "a density in (0, 1]", value)
        is_bool = isinstance(self.has_ratio, bool)
        expect(is_bool, "profile has_ratio", "True or False", repr(self.has_ratio))
        if not self.has_ratio:
            known = {at for part in self.parameters for at, _ in part.payload_bytes}
            others = sorted({*known, self.max_density} - {self.density})
            where = "profile max_density and payload_bytes"
            expect(not others, where, f"the density {self.density} without a ratio", others)
        delay = self.encoding_delay
        expect(0 <= delay <= 1, "profile encoding_delay", "a number in [0, 1]", delay)
        names = [parameter.name for parameter in self.parameters]
        expect_unique(names, "parameters", "names")
        at = [parameter.ready_seconds for parameter in self.parameters]
        expect(
            at == sorted(at), "parameters", "ascending ready_seconds, as backward computes them", at
        )
        measured = self.allgather is not None, self.allreduce is not None
        expect(
            measured in ((False, False), (True, True)) and (not measured[0] or self.hosts > 1),
            "link",
            "tables of both allgather and allreduce between at least 2 hosts, or none",
            f"allgather {self.allgather}, allreduce {self.allreduce}, {self.hosts} hosts",
        )

    @property
    def backward_seconds(self) -> float:
        """Seconds until the last gradient is ready, without any encoding."""
        return self.parameters[-1].ready_seconds

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    def link(self) -> Link | None:
        """Return the measured link, or None if the profile has no tables."""
        if self.allgather is None or self.allreduce is None:
            return None
        return Link.of_tables(
            self.allgather,
            self.allreduce,
            self.hosts,
            self.ranks_per_host,
            self.allreduce_fp16,
            self.gather_overlap,
        )

    @property
    def _tables(self) -> dict[str, Table]:
        """The tables that were measured, by the name of the field."""
        tables = {name: getattr(self, name) for name in _TABLES}
        return {name: table for name, table in tables.items() if table is not None}

    def fits(self) -> dict[str, Fit]:
        """Return the lines through the tables, by the name of the collective."""
        return {name: table.fit() for name, table in self._tables.items()}

    def digest(self) -> str:
        """Return the SHA-256 of the profile's JSON, as hexadecimal text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the profile as JSON text; equal profiles give equal text."""
        rows = [dataclasses.asdict(parameter) for parameter in self.parameters]
        link = {
            name: {"seconds": table.points, "fit": dataclasses.asdict(table.fit())}
            for name, table in self._tables.items()
        }
        head = {"format": FORMAT, "version": VERSION}
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("parameters", *_TABLES)
        }
        return json.dumps({**head, **plain, "link": link, "parameters": rows}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Return the profile of a JSON text.

        Args:
            text: what :meth:`to_json` returned.

        Returns:
            A :class:`Profile`.

        Raises:
            InvalidArgumentError: the text is not a profile of this version.
        """
        data = parsed(text, FORMAT, VERSION, "profile")
        plain = ("forward_seconds", "update_seconds", "hosts", "ranks_per_host", "codec", "density")
        required = ("format", "version", "link", "parameters", *plain)
        expect_keys(data, "profile", required, _OPTIONAL)
        measured: dict[str, Any] = {key: data[key] for key in (*plain, *_OPTIONAL) if key in data}
        expect_keys(data["link"], "link", (), _TABLES)
        for name, table in data["link"].items():
            expect_keys(table, f"link {name}", ("seconds",), ("fit",))  # the fit is computed anew
            measured[name] = Table(pairs_of(table, "seconds", f"link {name}"))
        return cls(
            tuple(parameter_of(row) for row in list_of(data, "parameters", "profile")), **measured
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file.

        Args:
            path: path of the file.
        """
        pathlib.Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Return the profile of a file: a profile, or layer times as CSV or JSON.

        See :func:`layer_times` for files of layer times.

        Args:
            path: path of the file.

        Returns:
            A :class:`Profile`.

        Raises:
            InvalidArgumentError: the file is neither.
        """
        try:
            text = text_of_file(path, "profile")
            if text.lstrip()[:1] == "{" and '"format"' in text:
                return cls.from_json(text)
            return layer_times(text)
        except InvalidArgumentError as error:  # a command may have been given several files
            raise InvalidArgumentError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def merged(cls, profiles: Sequence["Profile"]) -> "Profile":
        """Merge the profiles of several ranks into one, with the largest of each measured number.

        A step ends when its slowest rank is ready, so all ranks need one common profile. Without a
        ratio, ranks may have different densities. The result then has the largest one.

        Args:
            profiles: the profiles of the ranks, at least one.

        Returns:
            A :class:`Profile`. Gradients that are ready at the same time are in the order of the
            first profile.

        Raises:
            InvalidArgumentError: the profiles are not of the same parameters, codec or network.
        """
        expect(bool(profiles), "profiles", "at least one", "none")
        first = profiles[0]
        density = None if first.has_ratio else max(profile.density for profile in profiles)
        same = ("density", "max_density") if first.has_ratio else ()
        by_name = [{part.name: part for part in profile.parameters} for profile in profiles]
        for number, profile in enumerate(profiles):
            for what in ("hosts", "ranks_per_host", "codec", "has_ratio", *same):
                expected, got = getattr(first, what), getattr(profile, what)
                where = f"profile {number} {what}"
                expect(expected == got, where, f"{expected!r} as in profile 0", repr(got))
            expected_elements, elements = (
                {name: part.elements for name, part in names.items()}
                for names in (by_name[0], by_name[number])
            )
            different = sorted(set(expected_elements.items()) ^ set(elements.items()))
            expect(
                not different,
                f"profile {number} parameters",
                "the names and elements of profile 0",
                f"a difference in {', '.join(sorted({name for name, _ in different}))}",
            )
        parameters = [
            slowest([names[part.name] for names in by_name], density) for part in first.parameters
        ]
        measured: dict[str, Any] = {
            name: slowest_table(name, [getattr(profile, name) for profile in profiles])
            for name in _TABLES
        }
        for key in (*_PER_ELEMENT, "encoding_delay"):
            measured[key] = max(getattr(profile, key) for profile in profiles)
        if density is not None:
            measured["density"] = measured["max_density"] = density
        parameters.sort(key=lambda part: part.ready_seconds)  # stable: ties in the first's order
        return dataclasses.replace(
            first,
            parameters=tuple(parameters),
            forward_seconds=max(profile.forward_seconds for profile in profiles),
            update_seconds=max(profile.update_seconds for profile in profiles),
            gather_overlap=min(profile.gather_overlap for profile in profiles),
            **measured,
        )


def least_density(profile: Profile, density: float | None, where: str) -> float:
    """Return the smallest density of a plan.

    Args:
        profile: the profile.
        density: a number in (0, 1]. None for the density of the profile.
        where: the place for the message.

    Raises:
        InvalidArgumentError: the number is out of range, or the codec has no ratio and the number
            is another one than the density of the profile.
    """
    if density is None:
        return profile.density
    expect(is_number(density) and 0 < density <= 1, where, "a number in (0, 1]", density)
    good = profile.has_ratio or density == profile.density
    expect(good, where, f"none for {profile.codec}, whose density no plan can change", density)
    return float(density)


#: The density at which payloads with one bit per value carry most of a gradient. With more
#: elements, the common magnitude of all fits the large ones less.
_MOST_OF_ONE_BIT = 0.5
_REQUIRED = ("name", "elements", "backward_seconds")
_COLUMNS = ("forward_seconds", "encode_seconds", "decode_seconds")


def layer_times(text: str) -> Profile:
    """Return the profile of a text with the seconds of layers, as CSV or JSON.

    CSV has a line of column names: ``name,elements,backward_seconds`` and optionally
    ``forward_seconds``, ``encode_seconds``, ``decode_seconds``. JSON is a list of objects with the
    same names. Layers are in the order of the model, so the gradient of the last one is ready
    first. Seconds that are missing count as 0, and payloads are estimated.

    Args:
        text: the text of a file.

    Returns:
        A :class:`Profile` without a network.

    Raises:
        InvalidArgumentError: the text is neither, a column is missing or unknown, or a value is not
            a number of at least 0.

    >>> layer_times("name,elements,backward_seconds\\nfirst,10,2\\nlast,5,1\\n").parameters[0].name
    'last'
    """
    text = text.removeprefix("\ufeff")  # a byte order mark, which some programs write
    if text.lstrip()[:1] in ("[", "{"):
        rows = json_of(text, "layer times")
        expect(isinstance(rows, list), "layer times", "a list of objects", type(rows).__name__)
    else:
        lines = io.StringIO(text)
        reader = csv.DictReader(lines, restkey="columns without a name", skipinitialspace=True)
        try:
            columns = list(reader.fieldnames or ())
            expect_unique(columns, "layer times", "columns")
            expect(
                set(_REQUIRED) <= set(columns) <= {*_REQUIRED, *_COLUMNS},
                "layer times",
                f"a first line with the columns {', '.join(_REQUIRED)}, separated by commas, and"
                f" optionally {', '.join(_COLUMNS)}",
                repr(text.split("\n", 1)[0].rstrip("\r")),
            )
            rows = [_numbers(row) for row in reader]
        except csv.Error as error:
            raise InvalidArgumentError(
                f"layer times: expected comma-separated values, got {error}"
            ) from error
    clock, parameters = 0.0, []
    for row in reversed(rows):
        expect_keys(row, "layer", _REQUIRED, _COLUMNS)
        name = text_of(row, "name", "layer")
        clock += number_of(row, "backward_seconds", name)
        encode, decode = (number_of(row, key, name) if key in row else 0.0 for key in _COLUMNS[1:])
        parameters.append(
            Parameter(name, integer_of(row, "elements", name, 1), clock, encode, decode)
        )
    forward = math.fsum(
        number_of(row, "forward_seconds", row["name"]) for row in rows if "forward_seconds" in row
    )
    return Profile(tuple(parameters), forward, max_density=_MOST_OF_ONE_BIT)


def _numbers(row: dict[Any, Any]) -> dict[Any, Any]:
    """Return a row of a CSV file with its numbers as numbers; other text stays, for the message."""

    def number(value: Any) -> Any:
        for kind in (int, float):
            try:
                return kind(value)
            except (TypeError, ValueError):
                continue
        return value

    return {key: value if key == "name" else number(value) for key, value in row.items()}
