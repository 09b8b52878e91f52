from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from backends.kernel import fdstore
from backends.kernel.fdstore import FdStore
from backends.kernel.netlink import NetlinkKernel
from backends.udp.carrier import CarrierSpec, UdpCarrier, native_available
from subnet.model import Subnets
from tests.support import ipv4
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.overlay import NETWORK, PORT, peer, subnet

pytestmark = pytest.mark.kernel

PUMPS = [
    pytest.param(True, id="native", marks=pytest.mark.skipif(not native_available(), reason="not built")),
    pytest.param(False, id="python"),
]
SPEC = CarrierSpec(IPv4Address("192.0.2.1"), PORT, 1472, NETWORK)


@pytest.fixture
def far(make_namespace: MakeNamespace) -> Namespace:
    return make_namespace("far")


@pytest.fixture
def host(make_namespace: MakeNamespace, far: Namespace) -> Namespace:
    near = make_namespace("near")
    veth(near, far)
    near.ip("addr add 192.0.2.1/24 dev eth0")
    far.ip("addr add 192.0.2.9/24 dev eth0")
    near.ip("addr add 10.5.1.2/32 dev lo")
    return near


class Keeper:
    """A service manager that keeps what it is given, for one carrier after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._kept: dict[str, int] = {}

    def hear(self) -> None:
        """Do what was asked for."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            except BlockingIOError:
                return
            said = dict(line.split("=") for line in data.decode().splitlines())
            if "FDSTOREREMOVE" in said:
                os.close(self._kept.pop(said["FDNAME"]))
            elif said["FDNAME"] in self._kept:
                os.close(fds[0])  # the same once more, which systemd finds out by kcmp(2)
            else:
                self._kept[said["FDNAME"]] = fds[0]

    def store(self, monkeypatch: pytest.MonkeyPatch) -> FdStore:
        """What a process started now would have."""
        self.hear()
        first = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 10
        for at, fd in enumerate(self._kept.values(), first):
            os.dup2(fd, at)
        monkeypatch.setattr(fdstore, "FIRST_FD", first)
        passed = {"LISTEN_PID": "1", "LISTEN_FDS": str(len(self._kept)), "LISTEN_FDNAMES": ":".join(self._kept)}
        return FdStore({"FDSTORE": "4", "NOTIFY_SOCKET": str(self._path), **passed}, 1)

    def close(self) -> None:
        self._socket.close()
        for fd in self._kept.values():
            os.close(fd)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    one = Keeper(tmp_path / "notify")
    yield one
    one.close()


def ensured(host: Namespace, carrier: UdpCarrier) -> int:
    with host.inside():
        kernel = NetlinkKernel()
        try:
            (link,) = carrier.ensure(kernel).values()
            return link.index
        finally:
            kernel.close()


@pytest.mark.parametrize("native", PUMPS)
def test_what_arrives_between_two_carriers_waits_for_the_second(
    host: Namespace, far: Namespace, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    first = UdpCarrier(SPEC, native=native, store=keeper.store(monkeypatch))
    index = ensured(host, first)
    first.carry(Subnets(subnet(1)), [peer(9)])
    host.ip("addr add 10.5.1.0/32 dev flannel0")
    host.ip(f"route add {NETWORK} dev flannel0")
    first.close()
    with host.socket() as inside, far.socket() as wire:
        inside.bind(("10.5.1.2", 4000))
        inside.settimeout(5)
        for number in range(600):
            inside.sendto(number.to_bytes(2, "big"), ("10.5.9.2", 4001))
        wire.sendto(
            ipv4.datagram(b"waits", (4001, 4000), source="10.5.9.2", destination="10.5.1.2"), ("192.0.2.1", PORT)
        )
        second = UdpCarrier(SPEC, native=native, store=keeper.store(monkeypatch))
        assert ensured(host, second) == index
        second.carry(Subnets(subnet(1)), [peer(9)])
        try:
            assert inside.recv(100) == b"waits"
            assert second.stats()["no_route"] == 0
            inside.sendto(b"last", ("10.5.9.2", 4001))
        finally:
            second.discard()
    keeper.hear()
    assert host.ip_json("link show type tun") == []


@pytest.mark.parametrize("native", PUMPS)
def test_what_does_not_fit_is_closed_and_made_anew(
    host: Namespace, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    first = UdpCarrier(SPEC, native=native, store=keeper.store(monkeypatch))
    index = ensured(host, first)
    first.close()
    moved = CarrierSpec(SPEC.local, 9000, 1472, NETWORK)
    second = UdpCarrier(moved, native=native, store=keeper.store(monkeypatch))
    other = ensured(host, second)
    keeper.hear()
    try:
        (link,) = host.ip_json("link show type tun")
        assert link["ifindex"] == other != index
    finally:
        second.discard()
    keeper.hear()
    assert host.ip_json("link show type tun") == []
