"""Hosts of the udp backend without a daemon: a namespace each, joined by a bridge, with a carrier inside."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from backends.kernel.netlink import NetlinkKernel
from backends.udp.carrier import CarrierSpec, UdpCarrier
from subnet.model import Family, Lease, LeaseAttrs, Subnets
from tests.support.netns import MakeNamespace, Namespace, veth

NETWORK = IPv4Network("10.5.0.0/16")
NETWORK_V6 = IPv6Network("fd05::/48")
PORT = 8285


def subnet(number: int) -> IPv4Network:
    return IPv4Network(f"10.5.{number}.0/24")


def peer(number: int, public: str = "", kind: str = "") -> Lease:
    return Lease(
        Subnets(subnet(number)), LeaseAttrs(IPv4Address(public or f"192.0.2.{number}"), None, kind), f"k{number}"
    )


def subnet_v6(number: int) -> IPv6Network:
    return IPv6Network(f"fd05:0:0:{number}::/64")


def peer_v6(number: int) -> Lease:
    public = IPv6Address(f"2001:db8:1::{number}")
    return Lease(Subnets(None, subnet_v6(number)), LeaseAttrs(None, public), f"k{number}")


class Node:
    """Host N: 192.0.2.N on eth0, subnet 10.5.N.0/24; in family 6 2001:db8:1::N and fd05:0:0:N::/64."""

    def __init__(
        self, namespace: Namespace, number: int, native: bool, mtu_bytes: int = 1500, family: Family = 4
    ) -> None:
        self.namespace, self.number, self.family = namespace, number, family
        if family == 4:
            self.underlay, self.overlay, network = f"192.0.2.{number}", f"10.5.{number}.0", NETWORK
            namespace.ip(f"addr add {self.underlay}/24 dev eth0")
            spec = CarrierSpec(IPv4Address(self.underlay), PORT, mtu_bytes - 28, network)
        else:
            self.underlay, self.overlay = f"2001:db8:1::{number}", f"fd05:0:0:{number}::"
            namespace.ip(f"addr add {self.underlay}/64 dev eth0 nodad")
            spec = CarrierSpec(IPv6Address(self.underlay), PORT, mtu_bytes - 48, NETWORK_V6)
        self.carrier: UdpCarrier = UdpCarrier(spec, native=native)

    def ensure(self) -> None:
        """Compare once, as a daemon does now and then."""
        with self.namespace.inside():
            kernel = NetlinkKernel()
            try:
                self.carrier.ensure(kernel)
            finally:
                kernel.close()

    def up(self, *peers: Lease) -> None:
        self.ensure()
        bits, network = (32, NETWORK) if self.family == 4 else (128, NETWORK_V6)
        self.namespace.ip(f"addr replace {self.overlay}/{bits} dev {self.carrier.device}")
        self.namespace.ip(f"-{self.family} route replace {network} dev {self.carrier.device}")
        self.know(*peers)

    def know(self, *peers: Lease) -> None:
        own = Subnets(subnet(self.number)) if self.family == 4 else Subnets(None, subnet_v6(self.number))
        self.carrier.carry(own, peers)


@contextmanager
def pair(
    make: MakeNamespace, natives: tuple[bool, bool], mtu_bytes: int = 1500, family: Family = 4
) -> Iterator[tuple[Node, Node]]:
    """Two nodes on one cable that know each other."""
    spaces = make("a"), make("b")
    veth(*spaces)
    for space in spaces:
        space.ip(f"link set eth0 mtu {mtu_bytes}")
    first, second = (Node(s, n, natives[n - 1], mtu_bytes, family) for n, s in enumerate(spaces, 1))
    nodes, known = (first, second), peer if family == 4 else peer_v6
    try:
        nodes[0].up(known(2))
        nodes[1].up(known(1))
        yield nodes
    finally:
        for node in nodes:
            node.carrier.close()


def until(what: str, probe: Callable[[], object], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not probe():
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def transfer(source: Node, target: Node, size: int, port: int = 5001) -> None:
    """Send random bytes from node to node through a TCP connection."""
    family = socket.AF_INET if target.family == 4 else socket.AF_INET6
    server = target.namespace.socket(family, socket.SOCK_STREAM)
    client = source.namespace.socket(family, socket.SOCK_STREAM)
    stream(server, client, (target.overlay, port), size)


def stream(server: socket.socket, client: socket.socket, address: tuple[str, int], size: int) -> None:
    """Send random bytes between fresh TCP sockets, which are closed; both ends' hashes must agree."""
    received, sent = hashlib.sha256(), hashlib.sha256()
    with server, client:
        server.settimeout(60)
        client.settimeout(60)
        # The last words of an earlier connection may still be on their way.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        client.connect(address)
        accepted, _ = server.accept()

        def receive() -> None:
            with accepted:
                accepted.settimeout(60)
                while block := accepted.recv(1 << 20):
                    received.update(block)

        reader = threading.Thread(target=receive, name="test-receiver")
        reader.start()
        block = os.urandom(1 << 20)
        for at in range(0, size, len(block)):
            part = block[: size - at]
            client.sendall(part)
            sent.update(part)
        client.close()
        reader.join(60)
    assert not reader.is_alive()
    assert received.digest() == sent.digest()


def bad_checksums(node: Node) -> int:
    """TCP segments that the kernel refused for their checksum (/proc/net/snmp, InCsumErrors)."""
    lines = [
        line.split() for line in node.namespace.run("cat", "/proc/net/snmp").splitlines() if line.startswith("Tcp:")
    ]
    return int(dict(zip(*lines, strict=True))["InCsumErrors"])
