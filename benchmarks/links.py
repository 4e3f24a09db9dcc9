"""Network interfaces: limit their rate with the queueing discipline tbf, and read their
counters.
"""

import os
import pathlib
import re
import subprocess

INTERFACE = "eth0"  # of every host
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # a PATH
_LATENCY = "100ms"  # maximum time that tbf delays a packet before it drops it
_BURST_SECONDS = 0.002
_SMALLEST_BURST, _LARGEST_BURST = 16 * 1024, 512 * 1024
_BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class NetworkError(Exception):
    """Something could not be set up; the message says what is missing."""


def run(*command, check=True):
    """Run a command as root's shell finds it; return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        text=True,
        capture_output=True,
        env=dict(os.environ, PATH=SBIN),
    )
    if check and done.returncode != 0:
        raise NetworkError(
            f"{' '.join(map(str, command))}: expected exit status 0, got "
            f"{done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def bits_per_second(rate):
    """Return the bits per second of a rate in the notation of tbf, such as "100mbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)
    if match is None:
        raise NetworkError(
            f"rate: expected a number and one of {', '.join(_BITS)}, as tbf writes it "
            f"(100mbit), got {rate!r}"
        )
    return float(match[1]) * _BITS[match[2]]


def burst(rate):
    """Return the bytes that a link of this rate lets through at once after a pause.

    They are the power of two that holds 2 ms of the rate, between 16 KiB and 512 KiB. A larger
    burst lets a whole compressed step through without any delay. With a smaller one, tbf does not
    reach its rate.
    """
    size = _SMALLEST_BURST
    while size < min(bits_per_second(rate) / 8 * _BURST_SECONDS, _LARGEST_BURST):
        size *= 2
    return size


def limit(tc, device, rate):
    """Limit what an interface sends.

    Args:
        tc: the words of the command tc, with the namespace.
        device: name of the interface.
        rate: in the notation of tbf; None removes the limit.

    Raises:
        NetworkError: not a rate, or the kernel has no tbf.
    """
    if rate is None:
        run(*tc, "qdisc", "delete", "dev", device, "root", check=False)
        return
    words = ["rate", rate, "burst", burst(rate), "latency", _LATENCY]
    try:
        run(*tc, "qdisc", "replace", "dev", device, "root", "tbf", *words)
    except NetworkError as error:
        raise NetworkError(
            f"{error}\nexpected a kernel with the queueing discipline tbf (module "
            "sch_tbf, CONFIG_NET_SCH_TBF)"
        ) from None


def interface_counters():
    """Return the counters of the calling host's interface.

    The keys are "sent_bytes", "sent_packets", "received_bytes" and "received_packets".
    """
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == INTERFACE:
            figures = [int(figure) for figure in figures.split()]
            return {
                "received_bytes": figures[0],
                "received_packets": figures[1],
                "sent_bytes": figures[8],
                "sent_packets": figures[9],
            }
    raise NetworkError(f"/proc/net/dev: expected the interface {INTERFACE}, got none")
