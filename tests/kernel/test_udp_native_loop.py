"""The native pump's loop between a socket pair in the TUN's place and a UDP socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest

from backends.udp import packet
from backends.udp.routes import Range, pack
from tests.support.ipv4 import Segment, datagram, vnet
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.offload import cut, super_packet

native = pytest.importorskip("backends.udp._pump", reason="the native pump was not built")

pytestmark = pytest.mark.kernel

PORT = 8285
OPEN_AT_ONCE = 16
"""Next hops for which packets are collected before they are sent (``RUNS`` in pump.h)."""


def hop(number: int) -> IPv4Address:
    return IPv4Address("127.1.0.0") + number


class Loop:
    """A pump, with everything that it reads and what it sent."""

    def __init__(self, near: Namespace, far: Namespace, gso: bool) -> None:
        self._tun, self.inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._tun.setblocking(False)
        self.wire, self.far = near.socket(), far.socket()
        self.far.bind(("0.0.0.0", PORT))
        self.far.settimeout(10)
        fds = self._tun.fileno(), self.wire.fileno()
        self.pump = native.Pump(*fds, vnet_hdr=True, tso=True, uso=True, gso=gso, port=PORT, mtu_bytes=1472, version=4)
        self.thread = threading.Thread(target=self.pump.run, name="test-pump")

    def close(self) -> None:
        self.pump.stop()
        self.thread.join(10)
        for one in (self._tun, self.inside, self.wire, self.far):
            one.close()
        assert not self.thread.is_alive()


@contextmanager
def loop(near: Namespace, far: Namespace, gso: bool) -> Iterator[Loop]:
    one = Loop(near, far, gso)
    try:
        yield one
    finally:
        one.close()


def one_hop_older(whole: bytes) -> bytes:
    """Return the packet as the next router hands it on."""
    mended = bytearray(whole)
    packet.decrement_ttl(mended)
    return bytes(mended)


@pytest.mark.parametrize("gso", [True, False], ids=["gso", "single"])
def test_more_next_hops_at_once_than_are_collected_leave_segments_as_they_were(namespace: Namespace, gso: bool) -> None:
    last: dict[str, Any] = {"destination": f"10.5.{OPEN_AT_ONCE}.2"}
    large = super_packet(Segment(head=last).packet(), bytes(range(256)) * 30, 1400)
    plain = [datagram(bytes([number]), destination=f"10.5.{number}.2") for number in range(OPEN_AT_ONCE)]
    with loop(namespace, namespace, gso) as one:
        table = [
            Range(int(IPv4Address(f"10.5.{number}.0")), int(IPv4Address(f"10.5.{number}.255")), int(hop(number)))
            for number in range(OPEN_AT_ONCE + 1)
        ]
        one.pump.forward(pack(table), b"", b"", None)
        for whole in (*(vnet() + each for each in plain), large):
            one.inside.send(whole)
        one.thread.start()
        expected = [one_hop_older(each) for each in (*plain, *cut(large))]
        assert [one.far.recv(2000) for _ in expected] == expected


def test_a_full_socket_is_waited_for_although_routes_just_changed(make_namespace: MakeNamespace) -> None:
    near, far = make_namespace("near"), make_namespace("far")
    veth(near, far)
    near.ip("addr add 192.0.2.1/24 dev eth0")
    far.ip("addr add 192.0.2.9/24 dev eth0")
    # A packet takes 1.5 ms, of the 20 ms that a full buffer is waited for.
    slow = "rate", "8mbit", "burst", "3000", "latency", "5s"
    near.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow, check=False)
    if "tbf" not in near.run("tc", "qdisc", "show", "dev", "eth0"):
        pytest.skip("the kernel has no token bucket filter")
    near.run("ping", "-c1", "-W10", "192.0.2.9")
    packets = [datagram(bytes(1440), identification=number) for number in range(60)]
    with loop(near, far, False) as one:
        one.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        network = IPv4Network("10.5.0.0/16")
        ends = int(network.network_address), int(network.broadcast_address), int(IPv4Address("192.0.2.9"))
        one.pump.forward(pack([Range(*ends)]), b"", b"", None)
        for whole in packets:
            one.inside.send(vnet() + whole)
        one.thread.start()
        assert [one.far.recv(2000) for _ in packets] == [one_hop_older(each) for each in packets]
        assert one.pump.stats()["tx_dropped"] == 0
