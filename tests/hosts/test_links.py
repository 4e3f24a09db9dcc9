"""Test that the rate of a shaped link holds from the first bytes after a pause."""

import statistics
import subprocess

import links
import network
import pytest

_MISSING = network.problems()
needs_hosts = pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
_TIMES = 5
_HEADERS = 1514 / 1448  # Ethernet, IP and TCP with time stamps, per full segment

# All hosts are on one machine, so they share one clock. The first message opens TCP's window and
# does not count. The pauses fill the bucket of tbf.
_RECEIVE = """
import socket, sys, time
count, times = map(int, sys.argv[1:])
listener = socket.create_server(("", 7000))
print("ready", flush=True)
connection, _ = listener.accept()
for _ in range(times):
    left = count
    while left:
        left -= len(connection.recv(min(left, 1 << 20)))
    print(time.monotonic(), flush=True)
"""
_SEND = """
import socket, sys, time
count, times = map(int, sys.argv[1:])
connection = socket.create_connection(("h2", 7000))
for _ in range(times):
    time.sleep(0.3)
    print(time.monotonic(), flush=True)
    connection.sendall(bytes(count))
"""


def seconds_after_pauses(hosts, count):
    """Return the seconds that ``count`` bytes take from h1 to h2 after each of some pauses."""

    def start(host, script):
        words = ["python3", "-c", script, count, _TIMES + 1]
        return hosts.start(host, words, stdout=subprocess.PIPE, text=True)

    receiver = start("h2", _RECEIVE)
    assert receiver.stdout.readline() == "ready\n"
    sender = start("h1", _SEND)
    sent, received = sender.communicate(timeout=60)[0], receiver.communicate(timeout=60)[0]
    return [
        float(end) - float(begin) for begin, end in list(zip(sent.split(), received.split()))[1:]
    ]


@needs_hosts
@pytest.mark.parametrize("rate, count", [("100mbit", 500_000), ("1gbit", 5_000_000)])
def test_bytes_take_their_time_right_after_a_pause(rate, count):
    """A burst must not let 500 kB, about a compressed step of ResNet-50, through at once."""
    with network.Network(2, rate) as hosts:
        taken = seconds_after_pauses(hosts, count)
    expected = count * _HEADERS * 8 / links.bits_per_second(rate)
    shares = [seconds / expected for seconds in taken]
    # only the burst, 2.6 ms at 100 Mb/s and 2.1 ms at 1 Gb/s, may exceed the rate
    assert min(shares) > 0.90, f"{rate}: seconds over bytes / rate: {shares}"
    # a busy machine may delay some messages
    assert statistics.median(shares) < 1.25, f"{rate}: seconds over bytes / rate: {shares}"


def test_the_burst_of_a_rate():
    rates = {"1mbit": 16, "10mbit": 16, "100mbit": 32, "1gbit": 256, "10gbit": 512, "40gbit": 512}
    assert {rate: links.burst(rate) // 1024 for rate in rates} == rates
    with pytest.raises(links.NetworkError, match="expected a number and one of bit, kbit"):
        links.burst("fast")
