"""Hosts of the udp backend without a daemon: a namespace each, joined by a bridge, with a carrier inside."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network

from backends.kernel.netlink import NetlinkKernel
from backends.udp.carrier import CarrierSpec, UdpCarrier
from subnet.model import Lease, LeaseAttrs, Subnets
from tests.support.netns import MakeNamespace, Namespace, veth

NETWORK = IPv4Network("10.5.0.0/16")
PORT = 8285


def subnet(number: int) -> IPv4Network:
    return IPv4Network(f"10.5.{number}.0/24")


def peer(number: int, public: str = "", kind: str = "") -> Lease:
    return Lease(
        Subnets(subnet(number)), LeaseAttrs(IPv4Address(public or f"192.0.2.{number}"), None, kind), f"k{number}"
    )


class Node:
    """Host N: 192.0.2.N on eth0, subnet 10.5.N.0/24."""

    def __init__(self, namespace: Namespace, number: int, native: bool, mtu_bytes: int = 1500) -> None:
        self.namespace, self.number = namespace, number
        self.underlay, self.overlay = f"192.0.2.{number}", f"10.5.{number}.0"
        namespace.ip(f"addr add {self.underlay}/24 dev eth0")
        spec = CarrierSpec(IPv4Address(self.underlay), PORT, mtu_bytes - 28, NETWORK)
        self.carrier = UdpCarrier(spec, native=native)

    def up(self, *peers: Lease) -> None:
        with self.namespace.inside():
            kernel = NetlinkKernel()
            try:
                self.carrier.ensure(kernel)
            finally:
                kernel.close()
        self.namespace.ip(f"addr replace {self.overlay}/32 dev {self.carrier.device}")
        self.namespace.ip(f"route replace {NETWORK} dev {self.carrier.device}")
        self.know(*peers)

    def know(self, *peers: Lease) -> None:
        self.carrier.carry(Subnets(subnet(self.number)), peers)


@contextmanager
def pair(make: MakeNamespace, natives: tuple[bool, bool], mtu_bytes: int = 1500) -> Iterator[tuple[Node, Node]]:
    """Two nodes on one cable that know each other."""
    spaces = make("a"), make("b")
    veth(*spaces)
    for space in spaces:
        space.ip(f"link set eth0 mtu {mtu_bytes}")
    nodes = Node(spaces[0], 1, natives[0], mtu_bytes), Node(spaces[1], 2, natives[1], mtu_bytes)
    try:
        nodes[0].up(peer(2))
        nodes[1].up(peer(1))
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
    server = target.namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
    client = source.namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
    stream(server, client, (target.overlay, port), size)


def stream(server: socket.socket, client: socket.socket, address: tuple[str, int], size: int) -> None:
    """Send random bytes between fresh TCP sockets, which are closed; both ends' hashes must agree."""
    received, sent = hashlib.sha256(), hashlib.sha256()
    with server, client:
        server.settimeout(60)
        client.settimeout(60)
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
