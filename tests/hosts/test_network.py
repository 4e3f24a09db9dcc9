"""Test network namespaces: links have the requested speed, and nothing remains afterwards."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import network
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_MISSING = network.problems()
needs_hosts = pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))

#: headers of Ethernet, IP and TCP with time stamps, per packet as the interface counts them
_HEADER_BYTES = 14 + 20 + 32

_MAKER = """
import time
from network import Network
with Network(2) as hosts:
    hosts.start("h2", ["sleep", "1000"])
    print("made", flush=True)
    time.sleep(1000)
"""


def made_by(pid):
    """Return everything on this machine that is named after a process."""
    namespaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    folders = pathlib.Path("/etc/netns").glob(f"deepreduce{pid}-*")
    return [
        *(line for line in namespaces.splitlines() if f"deepreduce{pid}-" in line),
        *(line for line in links.splitlines() if f" dr{pid}b:" in line or f" dr{pid}h" in line),
        *map(str, folders),
    ]  # fmt: skip


def maker():
    """A process that has created two hosts, with a child process in one of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MAKER],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "made\n"
    assert len(made_by(process.pid)) == 2 + 3 + 2
    return process


@needs_hosts
def test_hosts_and_links():
    with network.Network(2, "80mbit") as hosts:
        names = hosts.start(
            "h1",
            ["sh", "-c", "cat /proc/sys/kernel/hostname; ssh h2 cat /proc/sys/kernel/hostname"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert names.communicate()[0].split() == ["h1", "h2"]
        before, started = hosts.counters("h2"), time.monotonic()
        sent = hosts.start("h1", ["sh", "-c", "head -c 10000000 /dev/zero | ssh h2 cat >/dev/null"])
        assert sent.wait() == 0
        spent, after = time.monotonic() - started, hosts.counters("h2")
        # a busy machine sends smaller packets, with more headers
        received = after["received_bytes"] - before["received_bytes"]
        received -= _HEADER_BYTES * (after["received_packets"] - before["received_packets"])
        assert 10e6 < received < 10.1e6, "10 MB and what ssh adds"
        assert spent > 0.9, "10 MB at 80 Mb/s take a second"
        hosts.set_link("h2", False)
        assert (
            hosts.start(
                "h1", ["ssh", "-o", "ConnectTimeout=1", "h2", "true"], stderr=subprocess.DEVNULL
            ).wait()
            != 0
        )
        hosts.set_link("h2", True)
        hosts.shape(None)
        assert hosts.start("h1", ["ssh", "-o", "ConnectTimeout=10", "h2", "true"]).wait() == 0
        with pytest.raises(network.NetworkError, match="at most one network in a process"):
            network.Network(2).__enter__()
        assert len(made_by(os.getpid())) == 2 + 3 + 2, (
            "the refused second network must leave the first alone"
        )
    assert made_by(os.getpid()) == []


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_everything(number):
    process = maker()
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert made_by(process.pid) == []


@needs_hosts
def test_what_a_killed_process_left_is_removed_at_the_next_start():
    killed, living = maker(), maker()
    try:
        killed.kill()
        killed.wait()
        assert len(made_by(killed.pid)) == 2 + 3 + 2
        network.remove_leftovers()
        assert made_by(killed.pid) == []
        assert len(made_by(living.pid)) == 2 + 3 + 2, "another's, who lives, must stay"
    finally:
        living.terminate()
        living.wait()


@needs_hosts
def test_only_its_own_names_are_touched():
    foreign = f"other{os.getpid()}"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with network.Network(2):
            pass
        network.remove_leftovers()
        assert (
            foreign
            in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        )
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


@needs_hosts
def test_a_rate_that_tbf_refuses():
    with pytest.raises(network.NetworkError, match="tbf"):
        network.Network(2, "fast").__enter__()
    assert made_by(os.getpid()) == []


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.preflight.shutil, "which", lambda name, **_: None)
    found = "\n".join(network.problems())
    assert "expected root, which network namespaces need, got user 1000" in found
    assert "expected sshd on PATH, got none; Debian package: openssh-server" in found
    assert "expected ip on PATH, got none; Debian package: iproute2" in found
    with pytest.raises(network.NetworkError, match="openssh-server"):
        network.Network(2).__enter__()
