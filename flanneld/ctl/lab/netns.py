"""A network namespace: made, entered, read and removed. See ip-netns(8)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from flanneld.ctl.lab.errors import CommandError
from flanneld.ctl.lab.tools import environment, run

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
RUN_NETNS = Path("/run/netns")
_libc = ctypes.CDLL(None, use_errno=True)

_SYSCTLS = (
    ("net/ipv4/ip_forward", "1"),
    ("net/ipv4/conf/all/rp_filter", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
    ("net/ipv6/conf/all/forwarding", "1"),
    ("net/ipv6/conf/all/accept_dad", "0"),
    ("net/ipv6/conf/default/accept_dad", "0"),
)
"""What a router among hosts needs; DAD would make every address wait a second."""


class Namespace:
    """A named network namespace, made by the constructor. Its sysctls are set for a host that forwards."""

    def __init__(self, name: str) -> None:
        self.name = name
        run("ip", "netns", "add", name)
        self._fd = os.open(RUN_NETNS / name, os.O_RDONLY | os.O_CLOEXEC)
        self.call(_forwarding_host)
        self.ip("link set lo up")

    def __repr__(self) -> str:
        return f"Namespace({self.name})"

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in a thread inside the namespace and return its value; its exceptions come through.

        Sockets and netlink connections opened there stay in the namespace.
        """
        values: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                if _libc.setns(self._fd, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {self.name}")
                values.append(function())
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=body, name=f"in-{self.name}", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return values[0]

    def open_socket(self, family: int, kind: int) -> socket.socket:
        """Return a socket that lives in the namespace."""
        return self.call(lambda: socket.socket(family, kind))

    def connect(self, host: str, port: int, timeout_s: float = 5.0) -> socket.socket:
        """Return a TCP connection made from inside; raises OSError like socket.create_connection."""
        return self.call(lambda: socket.create_connection((host, port), timeout_s))

    def sysctl(self, key: str, value: str | None = None) -> str:
        """Set, if a value is given, and return the value of ``net/...`` (sysctl(8), with slashes)."""

        def body() -> str:
            path = Path("/proc/sys") / key
            if value is not None:
                path.write_text(value)
            return path.read_text().strip()

        return self.call(body)

    def argv(self, *argv: str) -> tuple[str, ...]:
        """Return the command that runs ``argv`` inside; it replaces itself, so the process id is the tool's."""
        return ("ip", "netns", "exec", self.name, *argv)

    def run(self, *argv: str, check: bool = True, stdin: str | None = None, timeout_s: float = 30.0) -> str:
        """Run a tool inside, see ``tools.run``."""
        return run(*self.argv(*argv), check=check, stdin=stdin, timeout_s=timeout_s)

    def spawn(
        self,
        *argv: str,
        output: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a tool inside, in a session of its own: a Ctrl-C at the terminal is not for it. It has ``fds``, too."""
        return subprocess.Popen(
            self.argv(*argv),
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=subprocess.STDOUT if output else subprocess.DEVNULL,
            env=dict(env) if env is not None else environment(),
            start_new_session=True,
            pass_fds=fds,
        )

    def ip(self, *commands: str) -> None:
        """Apply commands of ip(8), all in one process; raises CommandError at the first that fails."""
        run("ip", "-n", self.name, "-batch", "-", stdin="".join(f"{c}\n" for c in commands))

    def show(self, command: str) -> list[dict[str, Any]]:
        """Return what ``ip -json -details`` says; empty if the object does not exist."""
        return _objects(run("ip", "-n", self.name, "-j", "-d", *command.split(), check=False))

    def link(self, device: str) -> dict[str, Any] | None:
        """Return a device as ip-link(8) shows it, None if there is none of that name."""
        return next(iter(self.show(f"link show dev {device}")), None)

    def links(self) -> dict[str, dict[str, Any]]:
        """Return all devices by name."""
        return {link["ifname"]: link for link in self.show("link show")}

    def addresses(self, device: str) -> list[str]:
        """Return the addresses of a device, IPv4 first, as ``address/length``."""
        found = self.show(f"addr show dev {device}")
        return [f"{a['local']}/{a['prefixlen']}" for link in found for a in link.get("addr_info", ())]

    def routes(self, family: int = 4) -> list[dict[str, Any]]:
        """Return the main table's routes."""
        return self.show(f"-{family} route show table main")

    def neighbours(self, device: str, family: int = 4) -> list[dict[str, Any]]:
        """Return the permanent neighbours of a device."""
        return self.show(f"-{family} neigh show dev {device} nud permanent")

    def fdb(self, device: str) -> list[dict[str, Any]]:
        """Return the forwarding entries of a tunnel device that name a destination (bridge(8))."""
        entries = _objects(run("bridge", "-n", self.name, "-j", "fdb", "show", "dev", device, check=False))
        return [e for e in entries if e.get("dst")]

    def iptables_save(self, family: int = 4, table: str = "") -> list[str]:
        """Return the rules as iptables-save(8) prints them, without comments and counters."""
        tool = "iptables-save" if family == 4 else "ip6tables-save"
        lines = self.run(tool, *(("-t", table) if table else ())).splitlines()
        return [line.split(" [")[0] if line.startswith(":") else line for line in lines if not line.startswith("#")]

    def ping(
        self, target: str, *, count: int = 3, payload_bytes: int = 56, dont_fragment: bool = False
    ) -> tuple[int, float | None]:
        """Return the number of answers and the mean round trip in milliseconds, None without answer."""
        argv = ["ping", "-n", "-q", "-c", str(count), "-i", "0.2", "-W", "1", "-s", str(payload_bytes)]
        argv += ["-M", "do"] if dont_fragment else []
        return parse_ping(self.run(*argv, target, check=False, timeout_s=count * 1.5 + 10))

    def delete(self) -> None:
        """End every process inside and remove the namespace; silent if it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        remove(self.name)


def parse_ping(text: str) -> tuple[int, float | None]:
    """Read the summary of ping(8): answers and mean round trip in milliseconds."""
    received, mean_ms = 0, None
    for line in text.splitlines():
        if " received" in line:
            received = int(line.split(" received")[0].rsplit(", ", 1)[-1])
        elif line.startswith(("rtt ", "round-trip ")):
            mean_ms = float(line.split("=")[1].split("/")[1])
    return received, mean_ms


def names(prefix: str) -> list[str]:
    """Return the named namespaces of this machine that start with ``prefix``."""
    try:
        return sorted(n for n in os.listdir(RUN_NETNS) if n.startswith(prefix))
    except FileNotFoundError:
        return []


def remove(name: str) -> None:
    """End every process of a namespace and delete it; silent if it is gone."""
    end = time.monotonic() + 5
    while (found := pids(name)) and time.monotonic() < end:
        for pid in found:
            _kill(pid)
        time.sleep(0.02)
    try:
        run("ip", "netns", "del", name)
    except CommandError:
        if (RUN_NETNS / name).exists():
            raise


def pids(name: str) -> list[int]:
    """Return the processes of a namespace; once it is deleted they cannot be found any more."""
    return [int(p) for p in run("ip", "netns", "pids", name, check=False).split() if int(p) != os.getpid()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _forwarding_host() -> None:
    for key, value in _SYSCTLS:
        path = Path("/proc/sys") / key
        if path.exists():
            path.write_text(value)


def _objects(text: str) -> list[dict[str, Any]]:
    found: Iterable[dict[str, Any]] = json.loads(text or "[]", object_pairs_hook=_first_of_each)
    return [x for x in found if x]


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """ip(8) repeats keys: the outer header that a route gives its packets has a ``dst``, too, after the route's own."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found
