from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from pyroute2 import WireGuard

from backends import wgkeys
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.model import Change, Endpoint, LinkSpec, ObservedState, Wireguard, WireguardPeer
from backends.kernel.netlink import NetlinkKernel
from flanneld.ctl.lab.tools import poll
from subnet.errors import KernelError
from tests.support.netns import MakeNamespace, Namespace, veth

pytestmark = [pytest.mark.kernel, pytest.mark.vm]

DEVICE = "flannel-wg"
PSK = base64.b64encode(b"p" * 32).decode()
MANY = 300


def key(number: int) -> str:
    return wgkeys.clamped(number.to_bytes(32, "big"))


def spec(number: int = 1, port: int = 51820) -> LinkSpec:
    return LinkSpec(DEVICE, 4, Wireguard(port, key(number)), 1420)


def put(kernel: NetlinkKernel, *peers: WireguardPeer) -> None:
    assert kernel.apply([Change("put", peer) for peer in peers]) == []


def delete(kernel: NetlinkKernel, *peers: WireguardPeer) -> None:
    assert kernel.apply([Change("delete", peer) for peer in peers]) == []


def shown() -> dict[str, Any]:
    """The peers by public key, read by another program's decoder."""
    with WireGuard() as reader:
        messages = list(reader.info(DEVICE))
    peers = [peer for message in messages for peer in message.get_attr("WGDEVICE_A_PEERS") or ()]
    return {peer.get_attr("WGPEER_A_PUBLIC_KEY").decode(): peer for peer in peers}


def allowed(peer: Any) -> list[str]:
    return sorted(entry["addr"] for entry in peer.get_attr("WGPEER_A_ALLOWEDIPS") or ())


def peer(number: int, *networks: str, address: str = "192.0.2.2", **values: Any) -> WireguardPeer:
    nets = tuple(ip_network(network) for network in networks or (f"10.5.{number}.0/24",))
    public = base64.b64encode(number.to_bytes(32, "little")).decode()
    return WireguardPeer(DEVICE, public, Endpoint(ip_address(address), 51999), nets, **values)


@pytest.fixture
def kernel(namespace: Namespace) -> Iterator[NetlinkKernel]:
    with namespace.inside():
        adapter = NetlinkKernel()
        yield adapter
        adapter.close()


def test_a_device_is_made_set_and_changed_in_place(namespace: Namespace, kernel: NetlinkKernel) -> None:
    keeper = DeviceKeeper(kernel)
    made = keeper.ensure([spec()])[DEVICE]
    assert isinstance(made.tunnel, Wireguard)
    assert made.tunnel == Wireguard(51820, key(1))
    (link,) = namespace.ip_json(f"-d link show dev {DEVICE}")
    assert (link["linkinfo"]["info_kind"], link["mtu"], link["link_type"]) == ("wireguard", 1420, "none")
    with WireGuard() as reader:
        (device,) = reader.info(DEVICE)
    assert device.get_attr("WGDEVICE_A_PRIVATE_KEY").decode() == key(1)
    assert device.get_attr("WGDEVICE_A_PUBLIC_KEY").decode() == made.tunnel.public_key
    put(kernel, peer(2))
    again = keeper.ensure([spec(3, 51900)])[DEVICE]
    assert again.index == made.index
    assert again.tunnel == Wireguard(51900, key(3))
    assert kernel.observe([DEVICE]).peers == {peer(2)}
    assert keeper.ensure([spec(3, 0)])[DEVICE].tunnel == again.tunnel
    kernel.delete_link(DEVICE)
    chosen = keeper.ensure([spec(3, 0)])[DEVICE].tunnel
    assert isinstance(chosen, Wireguard)
    assert chosen.port > 0


def test_a_taken_port_is_named_and_taken_once_it_is_free(namespace: Namespace, kernel: NetlinkKernel) -> None:
    with namespace.socket() as holder:
        holder.bind(("0.0.0.0", 51820))
        with pytest.raises(KernelError, match="UDP port 51820 is taken"):
            DeviceKeeper(kernel).ensure([spec()])
    assert DeviceKeeper(kernel).ensure([spec()])[DEVICE].up


def test_peers_are_put_replaced_and_deleted(kernel: NetlinkKernel) -> None:
    DeviceKeeper(kernel).ensure([spec()])
    first = peer(2, "10.5.2.0/24", "fd05:0:0:2::/64", keepalive_s=25, preshared_key=PSK)
    second = peer(3, address="2001:db8::3")
    put(kernel, first, second)
    assert kernel.observe([DEVICE]) == replace(kernel.observe([]), peers=frozenset({first, second}))
    seen = shown()[first.public_key]
    assert allowed(seen) == ["10.5.2.0/24", "fd05:0:0:2::/64"]
    assert seen.get_attr("WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL") == 25
    assert seen.get_attr("WGPEER_A_PRESHARED_KEY") == PSK.encode()
    assert (seen.get_attr("WGPEER_A_ENDPOINT")["addr"], seen.get_attr("WGPEER_A_ENDPOINT")["port"]) == (
        "192.0.2.2",
        51999,
    )
    assert shown()[second.public_key].get_attr("WGPEER_A_ENDPOINT")["addr"] == "2001:db8::3"

    changed = peer(2, address="192.0.2.22")
    put(kernel, changed)
    assert kernel.observe([DEVICE]).peers == {changed, second}
    delete(kernel, changed)
    delete(kernel, changed)
    assert kernel.observe([DEVICE]).peers == {second}


def test_W01_a_network_moves_to_the_peer_that_is_put_last(kernel: NetlinkKernel) -> None:
    DeviceKeeper(kernel).ensure([spec()])
    old, new = peer(2, "10.5.2.0/24"), peer(22, "10.5.2.0/24")
    put(kernel, old)
    put(kernel, new)
    assert kernel.observe([DEVICE]).peers == {replace(old, allowed=()), new}
    delete(kernel, old)
    assert kernel.observe([DEVICE]).peers == {new}


def test_many_peers_go_in_batches_and_read_back(kernel: NetlinkKernel) -> None:
    DeviceKeeper(kernel).ensure([spec()])
    peers = [peer(number, f"10.{number >> 8}.{number & 255}.0/24") for number in range(1, MANY + 1)]
    put(kernel, *peers)
    assert kernel.observe([DEVICE]).peers == set(peers)
    delete(kernel, *peers[1:])
    assert kernel.observe([DEVICE]).peers == {peers[0]}


def test_a_peer_of_a_device_that_is_not_there_is_refused(namespace: Namespace, kernel: NetlinkKernel) -> None:
    (failure,) = kernel.apply([Change("put", peer(2, preshared_key=PSK))])
    assert "no such device" in str(failure.error)
    assert PSK not in f"{failure}{failure!r}"
    assert kernel.apply([Change("delete", peer(2))]) == []
    namespace.ip(f"link add {DEVICE} type dummy")
    (failure,) = kernel.apply([Change("put", peer(2))])
    assert failure.error.errno == 95
    assert kernel.observe([DEVICE]).peers == frozenset()


@dataclass
class Clock:
    """Unix time, so much later."""

    later_s: float = 0

    def __call__(self) -> float:
        return time.time() + self.later_s


@dataclass
class Node:
    namespace: Namespace
    kernel: NetlinkKernel
    number: int
    clock: Clock
    public_key: str = ""

    def as_peer(self, psk: str = "") -> WireguardPeer:
        endpoint = Endpoint(ip_address(f"192.0.2.{self.number}"), 51820)
        return WireguardPeer(DEVICE, self.public_key, endpoint, (ip_network(f"10.5.{self.number}.0/24"),), 0, psk)

    def put(self, *peers: WireguardPeer) -> None:
        with self.namespace.inside():
            put(self.kernel, *peers)

    def observe(self, later_s: float = 0) -> ObservedState:
        self.clock.later_s = later_s
        with self.namespace.inside():
            return self.kernel.observe([DEVICE])

    def silent(self, later_s: float) -> set[str]:
        return {peer.public_key for peer in self.observe(later_s).silent}

    def reaches(self, other: Node) -> bool:
        done = self.namespace.run("ping", "-c1", "-W3", f"10.5.{other.number}.0", check=False)
        return " 0% packet loss" in done


@pytest.fixture
def nodes(make_namespace: MakeNamespace) -> Iterator[list[Node]]:
    found = []
    spaces = [make_namespace(f"n{number}") for number in (1, 2, 3)]
    hub = make_namespace("hub")
    hub.ip("link add br0 type bridge")
    hub.ip("link set br0 up")
    for number, space in enumerate(spaces, 1):
        veth(hub, space, f"p{number}", "eth0")
        hub.ip(f"link set p{number} master br0")
        space.ip(f"addr add 192.0.2.{number}/24 dev eth0")
        clock = Clock()
        with space.inside():
            kernel = NetlinkKernel(clock)
            tunnel = DeviceKeeper(kernel).ensure([spec(number)])[DEVICE].tunnel
        assert isinstance(tunnel, Wireguard)
        space.ip(f"addr add 10.5.{number}.0/32 dev {DEVICE}")
        space.ip(f"route add 10.5.0.0/16 dev {DEVICE}")
        found.append(Node(space, kernel, number, clock, tunnel.public_key))
    yield found
    for node in found:
        node.kernel.close()


def test_W12_a_peer_that_moved_keeps_its_endpoint_until_its_lease_changes(nodes: list[Node]) -> None:
    a, b, _ = nodes
    a.put(b.as_peer())
    b.put(a.as_peer())
    assert b.reaches(a)
    b.namespace.ip("addr del 192.0.2.2/24 dev eth0")
    b.namespace.ip("addr add 192.0.2.77/24 dev eth0")
    assert b.reaches(a)

    def endpoint() -> str:
        with a.namespace.inside():
            return str(shown()[b.public_key].get_attr("WGPEER_A_ENDPOINT")["addr"])

    assert endpoint() == "192.0.2.77"
    assert a.observe().peers == {b.as_peer()}
    a.put(replace(b.as_peer(), keepalive_s=25))
    assert endpoint() == "192.0.2.77"
    with a.namespace.inside():
        restarted = NetlinkKernel()
        roamed = replace(b.as_peer(), endpoint=Endpoint(ip_address("192.0.2.77"), 51820), keepalive_s=25)
        assert restarted.observe([DEVICE]).peers == {roamed}
        put(restarted, b.as_peer())
        assert restarted.observe([DEVICE]).peers == {b.as_peer()}
        restarted.close()
    assert endpoint() == "192.0.2.77"
    assert a.reaches(b)
    a.put(replace(b.as_peer(), endpoint=Endpoint(ip_address("192.0.2.78"), 51820)))
    assert endpoint() == "192.0.2.78"


@pytest.mark.parametrize("wrong", ["preshared key", "public key"])
def test_a_wrong_key_isolates_that_peer_alone_and_is_seen(nodes: list[Node], wrong: str) -> None:
    a, b, c = nodes
    other = base64.b64encode(b"q" * 32).decode()
    seen_by_c = a.as_peer(other) if wrong == "preshared key" else replace(a.as_peer(PSK), public_key=other)
    a.put(b.as_peer(PSK), c.as_peer(PSK))
    b.put(a.as_peer(PSK), c.as_peer(PSK))
    c.put(seen_by_c, b.as_peer(PSK))
    assert a.reaches(b)
    assert b.reaches(c)
    assert a.silent(0) == b.silent(0) == set()
    assert not a.reaches(c)
    assert not c.reaches(a)
    assert a.silent(0) == set()
    assert (a.silent(16), b.silent(16)) == ({c.public_key}, set())
    seen_by_c = a.as_peer(PSK)
    c.put(seen_by_c)
    poll("an answer", lambda: c.reaches(a), 60)
    assert a.silent(17) == set()
