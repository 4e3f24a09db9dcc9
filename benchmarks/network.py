"""Several hosts on one machine: network namespaces on a bridge, with shaped links and sshd.

Each host has its own interface ``eth0``, address, host name, /etc/hosts, ssh keys and sshd, so
``horovodrun -H h1:1,h2:1`` over ssh works as between machines. Needs root, Debian's iproute2 and
openssh-server, and a kernel with the queueing discipline tbf. Everything that a process makes here
has a name that contains the process id. It is removed when the process ends. What a killed process
leaves behind is removed by the next one.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from folders import ROOT, module_at
from links import INTERFACE, SBIN, NetworkError, limit, run

preflight = module_at(ROOT / "scripts" / "preflight.py")
_ETC = pathlib.Path("/etc/netns")  # `ip netns exec NAME` shows /etc/netns/NAME/x as /etc/x
_NAMESPACE = re.compile(r"deepreduce(\d+)-h\d+")
_LINK = re.compile(r"dr(\d+)(?:b|h\d+)")
_READY_SECONDS = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SSHD = """Port 22
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
"""
_SSH = """Host *
  IdentityFile /etc/ssh/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""
# The first process of a host. It has its own /run, so that sshd's directory there need not exist on
# the machine.
_START_HOST = """
echo "$1" >/proc/sys/kernel/hostname
[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
exec "$2" -D -e -f /etc/ssh/sshd_config
"""


def problems():
    """Return what this machine lacks to run several hosts, one sentence each."""
    found = preflight.host_problems()
    if os.geteuid() != 0:
        found.insert(
            0, f"hosts: expected root, which network namespaces need, got user {os.geteuid()}"
        )
    return found


def _birth(pid):
    """Return when a process started, in the kernel's ticks; None if there is no such process.

    Process id and start time together are unique.
    """
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _namespaces(pid=None):
    """Return {namespace: process id of its maker}, of all makers or of one."""
    names = {
        word for line in run("ip", "netns", "list").splitlines() for word in line.split()[:1]
    } | {path.name for path in _ETC.glob("deepreduce*")}
    makers = {name: int(match[1]) for name in names if (match := _NAMESPACE.fullmatch(name))}
    return {name: maker for name, maker in sorted(makers.items()) if pid in (None, maker)}


def _links():
    """Return {interface outside namespaces: process id of its maker}."""
    names = (link["ifname"] for link in json.loads(run("ip", "-j", "link", "show")))
    return {name: int(match[1]) for name in names if (match := _LINK.fullmatch(name))}


def _remove(pid):
    """Remove everything that process ``pid`` made, and end all processes in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for namespace in _namespaces(pid):
            for process in run("ip", "netns", "pids", namespace, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), number)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and any(
            run("ip", "netns", "pids", name, check=False).strip() for name in _namespaces(pid)
        ):
            time.sleep(0.05)
    for namespace in _namespaces(pid):
        run("ip", "netns", "delete", namespace, check=False)
        shutil.rmtree(_ETC / namespace, ignore_errors=True)
    for link, maker in _links().items():
        if maker == pid:
            run("ip", "link", "delete", link, check=False)


def remove_leftovers():
    """Remove what killed processes left behind, and nothing of living processes."""
    for maker in {*_namespaces().values(), *_links().values()}:
        owner = _ETC / f"deepreduce{maker}-h1" / "ssh" / "maker"
        birth = _birth(maker)
        if birth is None or (owner.exists() and owner.read_text() != birth):
            _remove(maker)


class Network:
    """``hosts`` hosts h1, h2, ... in a row, for the duration of a ``with`` block.

    A process can have one Network at a time.

    >>> # with Network(2, rate="1gbit") as network:
    >>> #     network.horovodrun(["train.py"])

    Args:
        hosts: number of hosts, 2 to 200.
        rate: rate of every link in each direction, in the notation of tbf ("100mbit", "1gbit");
            None for no limit.

    Raises:
        NetworkError: the machine lacks something; the message names its Debian package.
    """

    def __init__(self, hosts, rate=None):
        if not 2 <= hosts <= 200:
            raise NetworkError(f"hosts: expected 2 to 200, got {hosts}")
        self.names = [f"h{number}" for number in range(1, hosts + 1)]
        self._rate = rate
        self._processes = {}
        self._handlers = {}
        self._prefix = f"dr{os.getpid()}"  # of interfaces; their names have 15 characters at most

    def _namespace(self, host):
        return f"deepreduce{os.getpid()}-{host}"

    def _outer(self, host):
        """Return the name of the bridge's end of a host's link."""
        return self._prefix + host

    # --- setup and cleanup ---

    def __enter__(self):
        found = problems()
        if found:
            raise NetworkError("\n".join(found))
        remove_leftovers()
        if _namespaces(os.getpid()):
            raise NetworkError("hosts: expected at most one network in a process, got a second one")
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, _leave)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for number in _SIGNALS:  # cleanup is short and must not be interrupted
            signal.signal(number, signal.SIG_IGN)
        try:
            _remove(os.getpid())
            for process in self._processes.values():
                process.wait()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _make(self):
        key = None
        hosts_file = "127.0.0.1 localhost\n" + "".join(
            f"{self._address(host)} {host}\n" for host in self.names
        )
        bridge = self._prefix + "b"
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "addrgenmode", "none", "up")
        for host in self.names:
            namespace, outer = self._namespace(host), self._outer(host)
            ssh = _ETC / namespace / "ssh"
            ssh.mkdir(parents=True)
            (ssh / "maker").write_text(_birth(os.getpid()))
            (ssh.parent / "hosts").write_text(hosts_file)
            (ssh / "sshd_config").write_text(_SSHD)
            (ssh / "ssh_config").write_text(_SSH)
            if key is None:
                key = ssh / "key"
                run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "deepreduce", "-f", key)
            else:
                for name in ("key", "key.pub"):
                    shutil.copy(key.with_name(name), ssh / name)  # with its mode
            run("ip", "netns", "add", namespace)
            run(
                "ip",
                "link",
                "add",
                outer,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                namespace,
            )
            run("ip", "link", "set", outer, "addrgenmode", "none", "master", bridge, "up")
            run(
                "ip",
                "-n",
                namespace,
                "address",
                "add",
                f"{self._address(host)}/24",
                "dev",
                INTERFACE,
            )
            for interface in ("lo", INTERFACE):
                run("ip", "-n", namespace, "link", "set", interface, "up")
        self.shape(self._rate)
        for host in self.names:
            command = [
                "ip",
                "netns",
                "exec",
                self._namespace(host),
                "unshare",
                "--uts",
                "sh",
                "-e",
                "-c",
                _START_HOST,
                "sh",
                host,
            ]
            with open(self._log(host), "w") as log:
                self._processes[host] = subprocess.Popen(
                    [*command, shutil.which("sshd", path=SBIN)], stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                    env=dict(os.environ, PATH=SBIN),
                )  # fmt: skip
        self._wait_for_sshd()

    def _address(self, host):
        return f"10.213.0.{host[1:]}"  # only the bridge has a route to it

    def _log(self, host):
        return _ETC / self._namespace(host) / "ssh" / "log"

    def _wait_for_sshd(self):
        deadline = time.monotonic() + _READY_SECONDS
        for host in self.names:
            while True:
                tried = self.start(
                    self.names[0],
                    ["ssh", "-o", "ConnectTimeout=2", host, "true"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                said = tried.communicate()[0]
                if tried.returncode == 0:
                    break
                if time.monotonic() > deadline or self._processes[host].poll() is not None:
                    raise NetworkError(
                        f"ssh to {host}: expected a connection within {_READY_SECONDS} s, "
                        f"got: {said.strip()}\n{self._log(host).read_text().strip()}"
                    )
                time.sleep(0.1)

    # --- use of hosts ---

    def shape(self, rate):
        """Limit every link to ``rate`` in each direction; None removes the limit."""
        for host in self.names:
            for command in (["tc"], ["tc", "-n", self._namespace(host)]):
                device = self._outer(host) if len(command) == 1 else INTERFACE
                limit(command, device, rate)

    def set_link(self, host, up):
        """Take a host's interface down, like an unplugged cable, or up again."""
        run("ip", "link", "set", self._outer(host), "up" if up else "down")

    def counters(self, host):
        """Return the counters of :func:`links.interface_counters`, read from outside the host."""
        (link,) = json.loads(
            run("ip", "-n", self._namespace(host), "-s", "-j", "link", "show", INTERFACE)
        )
        return {
            f"{way}_{unit}": link["stats64"][short][unit]
            for way, short in (("received", "rx"), ("sent", "tx")) for unit in ("bytes", "packets")
        }  # fmt: skip

    def start(self, host, command, cwd=None, **options):
        """Start ``command`` on a host, in a new process group; return a ``subprocess.Popen``."""
        inside = [
            "nsenter",
            "--target",
            str(self._processes[host].pid),
            "--net",
            "--uts",
            "--mount",
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
        ]
        return subprocess.Popen(
            [*inside, str(cwd or os.getcwd()), *map(str, command)],
            start_new_session=True,
            **options,
        )

    def horovodrun(self, command, environment=None):
        """Start ``horovodrun`` on the first host, with one rank per host.

        Args:
            command: words after the Python interpreter, such as ``["train.py", "--epochs", "3"]``.
            environment: variables in addition to those of this process.

        Returns:
            A ``subprocess.Popen`` whose output is one text stream.
        """
        launcher = pathlib.Path(sys.executable).with_name("horovodrun")
        places = ",".join(f"{host}:1" for host in self.names)
        words = [
            launcher,
            "--gloo",
            "--disable-cache",
            "-np",
            len(self.names),
            "-H",
            places,
            "--network-interfaces",
            INTERFACE,
            sys.executable,
            *command,
        ]
        return self._launch(self.names[0], words, environment, subprocess.PIPE)

    def torchrun(self, command, stdout, environment=None, ranks=1):
        """Start ``torchrun`` on every host.

        Args:
            command: words after the Python interpreter, such as ``["train.py", "--epochs", "3"]``.
            stdout: file for the output of all hosts.
            environment: variables in addition to those of this process.
            ranks: number of ranks per host.

        Returns:
            A ``subprocess.Popen`` for each host.
        """
        words = [
            pathlib.Path(sys.executable).with_name("torchrun"), "--nnodes", len(self.names),
            "--nproc-per-node", ranks,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.names[0]}:29500", *command,
        ]  # fmt: skip
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, **(environment or {})}
        return [self._launch(host, words, variables, stdout) for host in self.names]

    def _launch(self, host, words, environment, stdout):
        variables = dict(
            os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONUNBUFFERED="1", **(environment or {})
        )
        return self.start(
            host, words, env=variables, text=True, stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def _leave(number, _):
    print(f"ended by {signal.Signals(number).name}; hosts are removed", file=sys.stderr)
    sys.exit(128 + number)
