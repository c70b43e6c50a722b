"""Hosts of their own on this machine: each has its own network, name, processes, /etc/hosts and shared memory.

All of a host is in Linux namespaces, which go with the host's first process, and with them whatever runs there, even
when the tests are killed. The cable between the hosts ends in the first one, not on this machine: nothing here is seen
outside, and two test sessions can use the same names and addresses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from support import unavailable

_NETWORK = "10.77.0"
_FIRST_PROCESS = """
echo "$1" > /proc/sys/kernel/hostname &&
mount --bind "$2" /etc/hosts &&
mount --bind /dev/null /etc/resolv.conf &&
mount -t tmpfs tmpfs /dev/shm &&
echo up &&
exec env --ignore-signal=CHLD cat > /dev/null
"""
"""Ends when nobody holds its standard input. Ignoring that signal reaps what the host's daemons leave.

With an empty resolv.conf a name is known or unknown at once.
"""


class Host:
    """One of the hosts.

    Args:
        name: its host name, which all the hosts know.
        address: of its interface, ``eth0``.
        hosts_file: its /etc/hosts.
    """

    def __init__(self, name: str, address: str, hosts_file: Path) -> None:
        self.name = name
        self.address = address
        spaces = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc"]
        arguments = ["sh", "-c", _FIRST_PROCESS, "sh", name, str(hosts_file)]
        self._process = subprocess.Popen(
            ["unshare", *spaces, "--kill-child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests, which end this
        )

    def wait_until_up(self) -> None:
        """Raises :class:`OSError` when namespaces cannot be made here."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != b"up\n":
            raise OSError(self._process.stderr.read().decode().strip())
        (first,) = psutil.Process(self._process.pid).children()
        self.pid = first.pid

    def command(self, *command: str) -> list[str]:
        """What to run here so that ``command`` runs there, in the folder of the caller."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--ipc", "--pid"]
        return [*inside, f"--wd={os.getcwd()}", *command]

    def run(self, *command: str, **variables: str) -> str:
        """What a short command there prints; :class:`OSError` with what it says when it fails."""
        return _run(self.command(*command), **variables)

    def network(self, *command: str) -> None:
        """Run a command with the network of this host, but all else of this machine."""
        _run(["nsenter", f"--target={self.pid}", "--net", *command])

    def processes(self) -> list[psutil.Process]:
        """All that run there now, as seen from this machine, but for the first."""
        there = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        return [p for p in psutil.process_iter() if p.pid != self.pid and _space(p.pid) == there]

    def close(self) -> None:
        """End all that runs there."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@contextmanager
def cabled_hosts(folder: Path, names: Sequence[str], loopback: str) -> Iterator[dict[str, Host]]:
    """Hosts with these names that reach each other, and nobody else; skips the test where there can be none.

    Args:
        folder: for their /etc/hosts.
        loopback: the name of one more, which to itself means 127.0.1.1, as Debian's installer writes it.
    """
    require(dict.fromkeys(("nsenter", "unshare"), "util-linux") | {"ip": "iproute2"})
    addresses = {name: f"{_NETWORK}.{n}" for n, name in enumerate([*names, loopback], 1)}
    files = dict.fromkeys(addresses, _write_hosts(folder / "hosts", addresses))
    own = {**addresses, loopback: "127.0.1.1"}
    files[loopback] = _write_hosts(folder / f"hosts-{loopback}", own)
    with ExitStack() as stack:
        hosts = {name: Host(name, addresses[name], files[name]) for name in addresses}
        for host in hosts.values():
            stack.callback(host.close)
        try:
            for host in hosts.values():
                host.wait_until_up()
            _connect(list(hosts.values()))
        except OSError as error:
            unavailable(f"this machine makes no namespaces: {error}")
        yield hosts


def require(tools: dict[str, str]) -> None:
    """Skip the test where a tool of these Debian packages, or root, is missing."""
    if os.geteuid() != 0:
        unavailable("hosts of their own need root")
    missing = sorted({package for tool, package in tools.items() if shutil.which(tool) is None})
    if missing:
        unavailable(f"not installed: {', '.join(missing)} (Debian's names)")


def _write_hosts(path: Path, addresses: dict[str, str]) -> Path:
    lines = [f"{address} {name}\n" for name, address in addresses.items()]
    path.write_text("".join(["127.0.0.1 localhost\n", *lines]))
    return path


def _connect(hosts: list[Host]) -> None:
    """A switch in the first host, and a cable from each of the others to it."""
    switch, *others = hosts
    _network(switch, "link add eth0 type bridge")
    for number, host in enumerate(others):
        end = f"port{number}"
        _network(switch, f"link add {end} type veth peer name eth0 netns {host.pid}")
        _network(switch, f"link set {end} master eth0 up")
    for host in hosts:
        _network(host, f"address add {host.address}/24 dev eth0")
        _network(host, "link set eth0 up")
        _network(host, "link set lo up")


def _network(host: Host, arguments: str) -> None:
    host.network("ip", *arguments.split())


def _run(command: Sequence[str], **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _space(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:  # it has ended
        return 0
