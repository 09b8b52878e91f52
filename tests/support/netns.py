"""Network namespaces for tests: unique names, removed with everything in them."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PREFIX = "fl-"
NETNS_DIR = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


def _setns(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Namespace:
    """A fresh network namespace with loopback up. A context manager."""

    def __init__(self, label: str = "") -> None:
        self.name = f"{PREFIX}{os.getpid()}-{next(_numbers)}{label and '-'}{label}"
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        self.ip("link set lo up")

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def delete(self) -> None:
        """Remove it. Devices in it go; processes in it are their starter's to end."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def argv(self, *argv: str) -> list[str]:
        """Return the command line that runs a program inside."""
        return ["ip", "netns", "exec", self.name, *argv]

    def run(self, *argv: str, text: str | None = None, check: bool = True) -> str:
        """Run a program inside and return what it printed."""
        done = subprocess.run(self.argv(*argv), input=text, capture_output=True, text=True, check=False, timeout=30)
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {' '.join(argv)}: rc {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def ip(self, arguments: str, check: bool = True) -> str:
        """Run ip(8) inside; ``arguments`` is split at blanks."""
        return self.run("ip", *arguments.split(), check=check)

    def ip_json(self, arguments: str) -> Any:
        """Run ``ip -j`` inside and return what it printed, decoded."""
        return json.loads(self.run("ip", "-j", *arguments.split()) or "[]")

    def sysctl(self, name: str, value: object) -> None:
        """Set a per-namespace sysctl, dots between its parts."""
        path = Path("/proc/sys") / name.replace(".", "/")
        with self.inside():
            path.write_text(str(value))

    def enter(self) -> None:
        """Move the calling thread in for good; programs it starts are inside too."""
        with (NETNS_DIR / self.name).open() as there:
            _setns(there.fileno())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread in for the length of the block."""
        with open("/proc/thread-self/ns/net") as before:
            self.enter()
            try:
                yield
            finally:
                _setns(before.fileno())

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_DGRAM, proto: int = 0) -> socket.socket:
        """Return a socket of this namespace, usable from anywhere."""
        with self.inside():
            return socket.socket(family, kind, proto)


def listen_in(name: str, address: str, port: int) -> socket.socket:
    """Return a listening TCP socket of the namespace with that name, usable from anywhere."""
    with open("/proc/thread-self/ns/net") as before, (NETNS_DIR / name).open() as there:
        _setns(there.fileno())
        try:
            return socket.create_server((address, port), backlog=64)
        finally:
            _setns(before.fileno())


def veth(a: Namespace, b: Namespace, name_a: str = "eth0", name_b: str = "eth0") -> None:
    """Join two namespaces by a cable; both ends are up."""
    a.ip(f"link add {name_a} type veth peer name {name_b} netns {b.name}")
    a.ip(f"link set {name_a} up")
    b.ip(f"link set {name_b} up")


def remove_stale() -> None:
    """Remove namespaces of test runs that were killed: their process is gone."""
    for path in NETNS_DIR.glob(f"{PREFIX}[0-9]*-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


MakeNamespace = Callable[..., Namespace]


@pytest.fixture(scope="session")
def _netns_possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    remove_stale()


@pytest.fixture
def make_namespace(_netns_possible: None) -> Iterator[MakeNamespace]:
    """Return a function that makes namespaces, all removed after the test."""
    made: list[Namespace] = []

    def make(label: str = "") -> Namespace:
        made.append(Namespace(label))
        return made[-1]

    yield make
    for namespace in made:
        namespace.delete()


@pytest.fixture
def namespace(make_namespace: MakeNamespace) -> Namespace:
    """Return one fresh namespace."""
    return make_namespace()
