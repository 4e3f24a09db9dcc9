"""``deepreduce-plan profile.json``: predict the step time under every scheduling rule.

Also ``python -m deepreduce_hvd.plan``. docs/schedule.md explains the model and the rules.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import reprlib
import sys
from collections.abc import Iterator, Sequence

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import CODEC, Message, Timeline
from deepreduce_hvd.schedule.fields import expect
from deepreduce_hvd.schedule.links import Link, Network
from deepreduce_hvd.schedule.pictures import draw, write_trace
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.schedule.profile import Profile, least_density
from deepreduce_hvd.schedule.rules import RULES, predict
from deepreduce_hvd.terminal import reader_may_end

#: units of step times, with their number per second
_UNITS = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))
#: the rules of a picture
_DRAWN = ("one message", "WFBP", "MG-WFBP", "dense", "fp16", "buckets", "plan")
_DEFAULT_HOSTS, _DEFAULT_LINK = "2,4,16,64", "1gbit"
_MEASURED = "measured"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepreduce-plan",
        description="Predict the seconds of a training step under every rule of scheduling.",
        epilog="The rules: " + "; ".join(f"{rule}: {what}" for rule, what in RULES.items()) + ".",
    )
    parser.add_argument(
        "profile",
        nargs="+",
        help="a profile (JSON); or layer times (CSV or JSON: name, elements, backward_seconds), in "
        "the order of the model. Several profiles are of several ranks: the slowest counts",
    )
    parser.add_argument(
        "--hosts", default=_DEFAULT_HOSTS, help="numbers of hosts; default %(default)s"
    )
    parser.add_argument(
        "--link",
        help="links between hosts, such as 100mbit,10gbit:25us (seconds per message after the "
        f"colon), or '{_MEASURED}'. Default: {_MEASURED} if the profile has a link, else "
        f"{_DEFAULT_LINK}",
    )
    parser.add_argument("--ranks-per-host", type=int, help="default: that of the profile")
    parser.add_argument("--density", type=float, help="smallest density; default: the profile's")
    parser.add_argument("--forward", type=float, metavar="SECONDS", help="seconds of forward")
    parser.add_argument("--update", type=float, metavar="SECONDS", help="seconds of the update")
    parser.add_argument(
        "--encode", type=float, metavar="NS", help="nanoseconds to encode an element"
    )
    parser.add_argument(
        "--decode",
        type=float,
        metavar="NS",
        help="nanoseconds to decode the payload of one rank, per element of the tensor",
    )
    parser.add_argument(
        "--delay",
        type=float,
        metavar="SHARE",
        help="seconds by which a second of encoding delays backward: 0 if threads with cores of"
        " their own encode; default: as in the profile, or 1",
    )
    parser.add_argument("--rules", help="rules to show; default: all")
    for option, what in (
        ("--plot", "draw the timelines to this file; needs matplotlib"),
        ("--trace", "write the timelines as a Chrome trace for ui.perfetto.dev"),
        ("--save", "write the plan of the rule 'plan' to this file"),
    ):
        parser.add_argument(
            option, metavar="FILE", help=f"{what}; of the first number of hosts and the first link"
        )
    return parser


def _loaded(arguments: argparse.Namespace) -> tuple[Profile, list[str]]:
    """Return the profile with the values of the command line, and notes about what is unknown."""
    profile = Profile.merged([Profile.load(path) for path in arguments.profile])
    for what in ("forward", "update", "encode", "decode"):
        value = getattr(arguments, what)
        expect(value is None or 0 <= value < float("inf"), f"--{what}", "at least 0", value)
    delay, per_host = arguments.delay, arguments.ranks_per_host
    expect(delay is None or 0 <= delay <= 1, "--delay", "a number in [0, 1]", delay)
    expect(per_host is None or per_host >= 1, "--ranks-per-host", "at least 1", per_host)
    notes = []
    forward = profile.forward_seconds if arguments.forward is None else arguments.forward
    if forward == 0 and arguments.forward is None:
        forward = profile.backward_seconds / 2
        notes.append("forward seconds are not known: half of backward (--forward)")
    update = profile.update_seconds if arguments.update is None else arguments.update
    parameters = [
        dataclasses.replace(
            part,
            encode_seconds=_per_element(arguments.encode, part.elements, part.encode_seconds),
            decode_seconds=_per_element(arguments.decode, part.elements, part.decode_seconds),
        )
        for part in profile.parameters
    ]
    for what in ("encode", "decode"):
        known = any(getattr(part, f"{what}_seconds") > 0 for part in parameters)
        if not known and getattr(arguments, what) is None:
            notes.append(f"{what} seconds are not known: counted as 0 (--{what})")
    if profile.to_fp16_seconds == profile.from_fp16_seconds == 0:
        notes.append(
            "conversion to float16 is not known: counted as free, so the steps of 'fp16' and 'plan'"
            " may take longer"
        )
    if not any(part.payload_bytes for part in parameters):
        notes.append("payloads are estimated: 1 bit per value, indices near the information bound")
    changed = dataclasses.replace(
        profile,
        parameters=tuple(parameters),
        forward_seconds=forward,
        update_seconds=update,
        encoding_delay=profile.encoding_delay if arguments.delay is None else arguments.delay,
    )
    return changed, notes


def _per_element(nanoseconds: float | None, elements: int, known: float) -> float:
    return known if nanoseconds is None else 1e-9 * nanoseconds * elements


def _networks(arguments: argparse.Namespace, profile: Profile) -> dict[str, list[Network]]:
    """Return {link: networks of each number of hosts}."""
    measured = profile.link()
    default = _MEASURED if measured is not None else _DEFAULT_LINK
    hosts = []
    for text in arguments.hosts.split(","):
        good = text.strip().isdecimal() and len(text.strip()) < 10 and int(text) >= 1
        expect(good, "--hosts", "numbers such as 2,4,16", reprlib.repr(arguments.hosts))
        hosts.append(int(text))
    per_host = arguments.ranks_per_host
    per_host = profile.ranks_per_host if per_host is None else per_host
    networks = {}
    for text in (default if arguments.link is None else arguments.link).split(","):
        if text.strip() == _MEASURED:
            expect(
                measured is not None, "--link measured", "a profile with a measured link", "none"
            )
            link = measured
        else:
            link = Link.parse(text, measured)
        assert link is not None
        networks[link.name.strip()] = [Network(number, link, per_host) for number in hosts]
    return networks


def _in_words(hosts: int) -> str:
    """Return a number of hosts in words."""
    return f"{hosts} host{'s' * (hosts > 1)}"


def _unit_of(seconds: float) -> tuple[str, float]:
    """Return a unit in which a time is readable with four decimals, and its number per second."""
    return next((unit for unit in _UNITS if seconds * unit[1] >= 0.01), _UNITS[0])


def _cell(found: Timeline, per_second: float) -> str:
    """Return the step time, and what takes most of it besides computing."""
    waits = found.waits()
    longest = max(("encode", "network", "decode"), key=lambda kind: waits[kind])
    share = waits[longest] / found.step_seconds if found.step_seconds else 0.0
    reason = f"{longest} {100 * share:3.0f} %" if share >= 0.005 else ""
    return f"{found.step_seconds * per_second:9.4f}  {reason:<14}"


def _described(messages: Sequence[Message]) -> str:
    """Return how many messages travel in which way."""
    parts = []
    for way in ("dense", "fp16"):
        count = sum(message.way == way for message in messages)
        if count:
            parts.append(f"{count} {way}")
    densities = [message.density for message in messages if message.density is not None]
    if densities:
        names = sorted({message.communicator for message in messages if message.way == CODEC})
        least, most = (f"{100 * value:.3g}" for value in (min(densities), max(densities)))
        span = least if least == most else f"{least} to {most}"
        parts.append(f"{len(densities)} of {span} % by {', '.join(names)}")
    plural = "" if len(messages) == 1 else "s"
    return f"{len(messages)} message{plural}: {'; '.join(parts)}"


def _show(
    profile: Profile, networks: Sequence[Network], rules: Sequence[str], density: float | None
) -> None:
    """Print the table of one link."""
    link = networks[0].link
    per_byte = link.gather_seconds_per_byte
    rate = f"{8e-6 / per_byte:,.5g} Mb/s" if per_byte > 0 else "no limit of the rate"
    print(f"\n{link.name}: {1e6 * link.gather_latency:.4g} us per message, {rate}")
    hosts = [_in_words(network.hosts) for network in networks]
    found = {rule: [predict(rule, profile, one, density) for one in networks] for rule in rules}
    unit, per_second = _unit_of(
        min(one.step_seconds for columns in found.values() for one, _ in columns)
    )
    print(f"{unit:12}" + "".join(f"{text:>9}{'':16}" for text in hosts).rstrip())
    for rule, columns in found.items():
        print(f"{rule:12}" + "".join(_cell(one, per_second) for one, _ in columns).rstrip())
    in_order = [rule for rule in RULES if rule in found]  # the later, the denser
    for column, text in enumerate(hosts):
        steps = {rule: found[rule][column][0].step_seconds for rule in in_order}
        best = [rule for rule in steps if steps[rule] <= min(steps.values()) * (1 + 1e-8)][-1]
        predicted, messages = found[best][column]
        waits = {kind: seconds for kind, seconds in predicted.waits().items() if seconds > 0}
        causes = ", ".join(f"{kind} {waits[kind] * per_second:.4f}" for kind in waits)
        print(f"  {text}: {best}, {_described(messages)}")
        print(f"    {unit}: {causes or 'none'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        with reader_may_end():
            _run(parsed)
    except (InvalidArgumentError, OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    except RecursionError:
        parser.error("profile: expected JSON of a few levels, got deeply nested lists or objects")
    return 0


def _expect_files_can_be_written(arguments: argparse.Namespace) -> None:
    """Check, before anything is computed, that the files to write are in folders that exist.

    Each must be another file, and none a profile that is read.
    """
    used = {pathlib.Path(path).resolve(): "the profile" for path in arguments.profile}
    for option in ("plot", "trace", "save"):
        path = getattr(arguments, option)
        if path is not None:
            good = pathlib.Path(path).parent.is_dir() and not pathlib.Path(path).is_dir()
            expect(good, f"--{option}", "a file in a folder that exists", path)
            place = pathlib.Path(path).resolve()
            other = used.setdefault(place, f"--{option}")
            free = other == f"--{option}" or place.is_char_device()  # such as /dev/null
            expect(free, f"--{option}", f"another file than {other}", path)


def _expect_a_picture_can_be_drawn(path: str) -> None:
    """Check, before anything is computed, that matplotlib can write a file with this extension."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise InvalidArgumentError(
            "--plot: expected matplotlib to be installed (pip install matplotlib), got none"
        ) from error
    known = FigureCanvasBase.filetypes
    good = pathlib.Path(path).suffix[1:].lower() in known
    expect(good, "--plot", f"a file name that ends in one of {', '.join(sorted(known))}", path)


def _run(arguments: argparse.Namespace) -> None:
    _expect_files_can_be_written(arguments)
    if arguments.plot:
        _expect_a_picture_can_be_drawn(arguments.plot)
    profile, notes = _loaded(arguments)
    networks = _networks(arguments, profile)
    given = arguments.rules
    rules = [*RULES] if given is None else [rule.strip() for rule in given.split(",")]
    for rule in rules:
        expect(rule in RULES, "--rules", f"some of {', '.join(RULES)}", repr(rule))
    density = arguments.density
    least = least_density(profile, density, "--density")
    more = " or more" if profile.has_ratio else ""
    print(
        f"{len(profile.parameters)} parameters, {profile.elements:,} elements; forward "
        f"{profile.forward_seconds:.4g} s, backward {profile.backward_seconds:.4g} s, update "
        f"{profile.update_seconds:.4g} s; density {100 * least:.3g} %{more}"
    )
    for name, fit in profile.fits().items():
        print(
            f"measured {name}, {profile.hosts} hosts: {1e3 * fit.alpha:.4g} ms + "
            f"{1e9 * fit.beta:.4g} ns per byte, error {100 * fit.error:.1f} %"
        )
    for note in notes:
        print(f"note: {note}")
    for of_link in networks.values():
        _show(profile, of_link, rules, density)
    first = next(iter(networks.values()))[0]
    if arguments.plot or arguments.trace:
        shown = _DRAWN if given is None else rules
        timelines = {rule: predict(rule, profile, first, density)[0] for rule in shown}
        if arguments.plot:
            with _naming(arguments.plot):
                draw(timelines, arguments.plot, f"{_in_words(first.hosts)}, {first.link.name}")
        if arguments.trace:
            with _naming(arguments.trace):
                write_trace(timelines, arguments.trace)
    if arguments.save:
        _, messages = predict("plan", profile, first, density)
        with _naming(arguments.save):
            Plan.of(profile, first, messages).save(arguments.save)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name a file in the error when it cannot be written; a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


if __name__ == "__main__":
    sys.exit(main())
