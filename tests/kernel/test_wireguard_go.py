"""WireGuard in a process: on kernels that have none themselves."""

from __future__ import annotations

import base64
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from backends import wgkeys
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.model import Change, Endpoint, Link, LinkSpec, Wireguard, WireguardPeer
from backends.kernel.netlink import NetlinkKernel
from backends.kernel.wireguard_go import SOCKETS, installed
from flanneld.ctl.lab.tools import poll, run
from subnet.errors import KernelError
from tests.support.netns import MakeNamespace, Namespace, veth

pytestmark = pytest.mark.kernel

PSK = base64.b64encode(b"p" * 32).decode()
_numbers = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if installed() is None:
        pytest.skip("wireguard-go is not installed")
    if Path("/sys/module/wireguard").exists():
        pytest.skip("the kernel has WireGuard itself")


def key(number: int) -> str:
    return wgkeys.clamped(number.to_bytes(32, "big"))


@dataclass
class Node:
    """A host. Control sockets are common to all, so every device has a name of its own."""

    namespace: Namespace
    number: int
    device: str
    kernel: NetlinkKernel
    later_s: list[float]
    """By how much the clock is fast."""

    def spec(self, port: int = 51820) -> LinkSpec:
        return LinkSpec(self.device, 4, Wireguard(port, key(self.number)), 1400)

    def ensure(self, port: int = 51820) -> Link:
        with self.namespace.inside():
            return DeviceKeeper(self.kernel).ensure([self.spec(port)])[self.device]

    def as_peer_of(self, other: Node, address: str = "", **values: str) -> WireguardPeer:
        endpoint = Endpoint(ip_address(address or f"192.0.2.{self.number}"), 51820)
        networks = (ip_network(f"10.5.{self.number}.0/24"),)
        peer = WireguardPeer(other.device, wgkeys.public_key(key(self.number)), endpoint, networks)
        return replace(peer, **values)  # type: ignore[arg-type]

    def put(self, *peers: WireguardPeer) -> None:
        with self.namespace.inside():
            assert self.kernel.apply([Change("put", peer) for peer in peers]) == []

    def peers(self) -> frozenset[WireguardPeer]:
        with self.namespace.inside():
            return self.kernel.observe([self.device]).peers

    def silent(self, later_s: float) -> frozenset[WireguardPeer]:
        self.later_s[0] = later_s
        with self.namespace.inside():
            return self.kernel.observe([self.device]).silent

    def answers(self, other: Node) -> bool:
        return " 0% packet loss" in self.namespace.run("ping", "-c1", "-W3", f"10.5.{other.number}.0", check=False)

    def close(self) -> None:
        with self.namespace.inside(), suppress(KernelError):
            self.kernel.delete_link(self.device)
        poll("the end of wireguard-go", lambda: not self.socket.exists(), 10)
        self.kernel.close()

    @property
    def socket(self) -> Path:
        return SOCKETS / f"{self.device}.sock"


@pytest.fixture
def nodes(make_namespace: MakeNamespace) -> Iterator[list[Node]]:
    spaces = [make_namespace(label) for label in ("a", "b")]
    veth(spaces[0], spaces[1])
    made = []
    for number, space in enumerate(spaces, 1):
        space.ip(f"addr add 192.0.2.{number}/24 dev eth0")
        with space.inside():
            later_s = [0.0]
            kernel = NetlinkKernel(lambda later_s=later_s: time.time() + later_s[0])  # type: ignore[misc]
            made.append(Node(space, number, f"wg{os.getpid()}x{next(_numbers)}", kernel, later_s))
    yield made
    for node in made:
        node.close()


def connect(nodes: list[Node]) -> None:
    for node in nodes:
        node.ensure()
        node.namespace.ip(f"addr add 10.5.{node.number}.0/32 dev {node.device}")
        node.namespace.ip(f"route add 10.5.0.0/16 dev {node.device} scope link")
    first, second = nodes
    first.put(second.as_peer_of(first, preshared_key=PSK))
    second.put(first.as_peer_of(second, preshared_key=PSK))


def test_a_device_is_made_by_the_program_with_a_warning_and_mended_in_place(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    node = nodes[0]
    made = node.ensure()
    assert (made.kind, made.mtu_bytes, made.up) == ("tun", 1400, True)
    assert made.tunnel == Wireguard(51820, key(1))
    assert isinstance(made.tunnel, Wireguard)
    assert made.tunnel.public_key == wgkeys.public_key(key(1))
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [f"carries the packets of {node.device}" in record.getMessage() for record in warnings] == [True]
    assert node.ensure() == made
    again = node.ensure(51999)
    assert (again.index, again.tunnel) == (made.index, Wireguard(51999, key(1)))
    assert re.search(r"(0\.0\.0\.0|\*|\[::\]):51999 ", node.namespace.run("ss", "-Hlun"))
    assert key(1) not in caplog.text


def test_any_port_is_one_that_the_program_really_has(nodes: list[Node]) -> None:
    tunnel = nodes[0].ensure(0).tunnel
    assert isinstance(tunnel, Wireguard)
    assert tunnel.port > 0
    assert f":{tunnel.port} " in nodes[0].namespace.run("ss", "-Hlun")


def test_a_taken_port_is_named_and_taken_once_it_is_free(nodes: list[Node]) -> None:
    node = nodes[0]
    with node.namespace.socket() as holder:
        holder.bind(("0.0.0.0", 51820))
        with pytest.raises(KernelError, match="UDP port 51820 is taken"):
            node.ensure()
    assert node.ensure().tunnel == Wireguard(51820, key(1))


def test_peers_are_put_replaced_and_deleted(nodes: list[Node]) -> None:
    first, second = nodes
    first.ensure()
    peer = second.as_peer_of(first, preshared_key=PSK)
    other = replace(
        peer, public_key=wgkeys.public_key(key(9)), allowed=(ip_network("fd05:0:0:9::/64"),), keepalive_s=25
    )
    first.put(peer, other)
    assert first.peers() == {peer, other}
    moved = replace(other, allowed=(ip_network("10.5.2.0/24"),), preshared_key="", keepalive_s=0)
    first.put(moved)
    assert first.peers() == {replace(peer, allowed=()), moved}
    with first.namespace.inside():
        assert first.kernel.apply([Change("delete", peer), Change("delete", peer)]) == []
    assert first.peers() == {moved}


def test_hosts_reach_each_other_encrypted_and_a_moved_peer_is_followed(nodes: list[Node]) -> None:
    connect(nodes)
    first, second = nodes
    poll("an answer", lambda: first.answers(second), 30)
    second.namespace.ip("addr add 192.0.2.77/24 dev eth0")
    second.namespace.ip("addr del 192.0.2.2/24 dev eth0")
    second.namespace.ip("addr replace 192.0.2.77/24 dev eth0")
    poll("an answer after the move", lambda: second.answers(first), 30)
    assert first.peers() == {second.as_peer_of(first, preshared_key=PSK)}
    first.put(replace(second.as_peer_of(first, preshared_key=PSK), keepalive_s=25))
    assert first.answers(second)


def test_a_wrong_preshared_key_is_seen(nodes: list[Node]) -> None:
    connect(nodes)
    first, second = nodes
    second.put(first.as_peer_of(second, preshared_key=base64.b64encode(b"w" * 32).decode()))
    assert first.silent(0) == frozenset()
    assert not first.answers(second)
    assert first.silent(0) == frozenset()
    assert first.silent(16) == {second.as_peer_of(first, preshared_key=PSK)}


def test_W07_a_device_whose_program_died_is_made_again(nodes: list[Node]) -> None:
    connect(nodes)
    first, second = nodes
    poll("an answer", lambda: first.answers(second), 30)
    (pid,) = run("ip", "netns", "pids", first.namespace.name).split()
    os.kill(int(pid), signal.SIGKILL)
    poll("the end of the device", lambda: first.device not in _links(first), 10)
    assert first.ensure().tunnel == Wireguard(51820, key(1))
    first.namespace.ip(f"addr add 10.5.1.0/32 dev {first.device}")
    first.namespace.ip(f"route add 10.5.0.0/16 dev {first.device} scope link")
    first.put(second.as_peer_of(first, preshared_key=PSK))
    poll("an answer of the new device", lambda: first.answers(second), 60)


def _links(node: Node) -> dict[str, Link]:
    with node.namespace.inside():
        return node.kernel.links()


def test_a_device_and_its_program_end_together(nodes: list[Node]) -> None:
    node = nodes[0]
    node.ensure()
    with node.namespace.inside():
        node.kernel.delete_link(node.device)
    poll("the end of the program", lambda: not node.socket.exists(), 10)
    with pytest.raises(KernelError, match="no such device"):
        node.peers()
