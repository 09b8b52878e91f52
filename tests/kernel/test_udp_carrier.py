from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Literal

import pytest

from backends.kernel.netlink import NetlinkKernel
from backends.udp.carrier import CarrierSpec, UdpCarrier, native_available
from backends.udp.wire import open_wire
from subnet.errors import KernelError
from subnet.model import Subnets
from tests.support import ipv4
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.overlay import NETWORK, PORT, Node, bad_checksums, pair, peer, subnet, transfer, until
from tests.support.paths import BpfNode, finish_packets

pytestmark = pytest.mark.kernel

needs_native = pytest.mark.skipif(not native_available(), reason="the native pump was not built")
PUMPS = [pytest.param(True, id="native", marks=needs_native), pytest.param(False, id="python")]

FOREIGN = "192.0.2.9"
"""A peer played by the test: a plain socket, one datagram at a time."""


class Played:
    """A node with a carrier, and a plain UDP socket in the place of its peer 10.5.9.0/24."""

    def __init__(self, make: MakeNamespace, path: Literal["native", "python", "bpf"]) -> None:
        near, self.far = make("near"), make("far")
        veth(near, self.far)
        self.far.ip(f"addr add {FOREIGN}/24 dev eth0")
        if path == "bpf":
            finish_packets(near)
        self.node = BpfNode(near, 1) if path == "bpf" else Node(near, 1, path == "native")
        self.node.up(peer(9))
        near.ip("addr add 10.5.1.2/32 dev lo")
        self.socket = self.far.socket()
        self.socket.bind((FOREIGN, PORT))
        self.socket.settimeout(5)
        self.socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 21)  # SO_RCVBUFFORCE: bursts are meant to arrive

    def close(self) -> None:
        self.node.carrier.close()
        self.socket.close()

    def inside(self, kind: int = socket.SOCK_DGRAM, proto: int = 0) -> socket.socket:
        """A socket of a container of the node, which has 10.5.1.2."""
        sock = self.node.namespace.socket(socket.AF_INET, kind, proto)
        if kind == socket.SOCK_DGRAM:
            sock.bind(("10.5.1.2", 4000))
        sock.settimeout(5)
        sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 21)
        return sock

    def send(self, packet: bytes) -> None:
        self.socket.sendto(packet, (self.node.underlay, PORT))

    def receive(self) -> bytes:
        """The next IPv4 datagram of the node that is not the kernel's own chatter."""
        return self.socket.recv(65535)

    def count(self, name: str) -> int:
        """What the pump counted, and the programs where there are any."""
        stats = self.node.carrier.stats()
        return stats[name] + stats.get(f"bpf_{name}", 0)


@pytest.fixture(params=PUMPS)
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "python", "bpf"])
def played(make_namespace: MakeNamespace, request: pytest.FixtureRequest) -> Iterator[Played]:
    one = Played(make_namespace, request.param)
    yield one
    one.close()


def test_one_plain_packet_per_datagram(played: Played) -> None:
    with played.inside() as sock:
        sock.sendto(b"probe", ("10.5.9.2", 4001))
    packet, sender = played.socket.recvfrom(65535)
    assert sender == (played.node.underlay, PORT)
    assert ipv4.ip_valid(packet)
    assert ipv4.l4_valid(packet)
    assert (packet[8], packet[12:20], packet[28:]) == (63, bytes([10, 5, 1, 2, 10, 5, 9, 2]), b"probe")


@pytest.mark.stock
def test_a_burst_stays_in_order_and_apart(played: Played) -> None:
    with played.inside() as sock:
        for number in range(200):
            sock.sendto(number.to_bytes(2, "big") * (1 + number % 3), ("10.5.9.2", 4001))
    packets = [played.receive() for _ in range(200)]
    assert all(ipv4.ip_valid(p) and ipv4.l4_valid(p) for p in packets)
    assert [int.from_bytes(p[28:30], "big") for p in packets] == list(range(200))


@pytest.mark.stock
def test_a_super_packet_of_a_container_is_cut(played: Played) -> None:
    udp_segment = [(17, 103, struct.pack("=H", 500))]
    with played.inside() as sock:
        try:
            sock.sendmsg([bytes(range(200)) * 11], udp_segment, 0, ("10.5.9.2", 4001))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            pytest.skip("this kernel cuts nothing for a device without checksum offload")
    packets = [played.receive() for _ in range(5)]
    assert all(ipv4.ip_valid(p) and ipv4.l4_valid(p) for p in packets)
    assert [len(p) - 28 for p in packets] == [500, 500, 500, 500, 200]
    assert b"".join(p[28:] for p in packets) == bytes(range(200)) * 11


@pytest.mark.stock
def test_what_arrives_is_delivered_in_order(played: Played) -> None:
    with played.inside() as sock:
        for number in range(300):
            payload = number.to_bytes(2, "big") * (50 if number % 7 else 20)
            played.send(ipv4.datagram(payload, (4001, 4000), source="10.5.9.2", destination="10.5.1.2"))
        got = [sock.recv(2000) for _ in range(300)]
    assert [int.from_bytes(p[:2], "big") for p in got] == list(range(300))
    assert [len(p) for p in got] == [100 if n % 7 else 40 for n in range(300)]


def test_U05_garbage_is_dropped(played: Played) -> None:
    good = ipv4.datagram(b"good", (4001, 4000), source="10.5.9.2", destination="10.5.1.2")
    garbage = [b"", b"x", b"\0" * 19, b"\x60" + b"\0" * 60, os.urandom(1500), b"\x45" + b"\xff" * 40, good[:-1]]
    with played.inside() as sock:
        for junk in garbage:
            played.send(junk)
        played.send(good + b"trailing bytes")
        assert sock.recv(100) == b"good"
    until("the count", lambda: played.count("malformed") >= len(garbage) - 1)


def test_a_stranger_is_not_listened_to(played: Played) -> None:
    played.far.ip("addr add 192.0.2.66/24 dev eth0")
    datagram = ipv4.datagram(b"stranger", (4001, 4000), source="10.5.9.2", destination="10.5.1.2")
    with played.inside() as sock, played.far.socket() as stranger:
        stranger.bind(("192.0.2.66", PORT))
        for _ in range(3):
            stranger.sendto(datagram, (played.node.underlay, PORT))
        until("the count", lambda: played.count("unknown_sender") == 3)
        played.send(ipv4.datagram(b"peer", (4001, 4000), source="10.5.9.2", destination="10.5.1.2"))
        assert sock.recv(100) == b"peer"
        played.node.know(peer(9), peer(66))
        stranger.sendto(datagram, (played.node.underlay, PORT))
        assert sock.recv(100) == b"stranger"
    until("the count", lambda: played.count("rx_packets") == 2)


def test_strangers_are_listened_to_where_that_is_asked_for(make_namespace: MakeNamespace, native: bool) -> None:
    near, far = make_namespace("near"), make_namespace("far")
    veth(near, far)
    far.ip("addr add 192.0.2.66/24 dev eth0")
    node = Node(near, 1, native)
    node.carrier = UdpCarrier(replace(node.carrier.spec, allow_unknown=True), native=native)
    node.up(peer(9))
    near.ip("addr add 10.5.1.2/32 dev lo")
    try:
        with near.socket() as sock, far.socket() as stranger:
            sock.bind(("10.5.1.2", 4000))
            sock.settimeout(5)
            datagram = ipv4.datagram(b"stranger", (4001, 4000), source="10.5.9.2", destination="10.5.1.2")
            stranger.sendto(datagram, (node.underlay, PORT))
            assert sock.recv(100) == b"stranger"
    finally:
        node.carrier.close()


def raw_icmp(played: Played) -> socket.socket:
    return played.inside(socket.SOCK_RAW, socket.IPPROTO_ICMP)


def icmp_errors(sock: socket.socket) -> tuple[int, int, str, bytes]:
    packet = sock.recv(2000)
    assert ipv4.ip_valid(packet)
    assert ipv4.ones_complement(packet[20:]) == 0
    return packet[20], packet[21], socket.inet_ntoa(packet[12:16]), packet[28:]


def test_U05_a_packet_to_nobody_is_answered(played: Played) -> None:
    with raw_icmp(played) as listener, played.inside() as sock:
        sock.sendto(b"to nobody", ("10.5.250.1", 4001))
        kind, code, source, quoted = icmp_errors(listener)
        assert (kind, code, source) == (3, 0, "10.5.0.0")
        assert quoted[12:20] == bytes([10, 5, 1, 2, 10, 5, 250, 1])
        assert quoted[28:] == b"to nobody"
    assert played.count("no_route") == 1


def test_U05_a_ttl_that_ends_here_is_answered_to_the_local_sender(played: Played) -> None:
    with raw_icmp(played) as listener, played.inside() as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
        sock.sendto(b"short lived", ("10.5.9.2", 4001))
        assert icmp_errors(listener)[:3] == (11, 0, "10.5.0.0")


def test_U05_a_ttl_that_ends_here_is_answered_to_the_remote_sender(played: Played) -> None:
    offender = ipv4.datagram(b"short lived", source="10.5.9.2", destination="10.5.1.2", ttl=1)
    played.send(offender)
    answer = played.receive()
    assert ipv4.ip_valid(answer)
    assert (answer[12:20], answer[20], answer[21]) == (bytes([10, 5, 1, 0, 10, 5, 9, 2]), 11, 0)
    assert answer[28:] == offender
    played.send(ipv4.ip(b"\x0b\0\0\0", ipv4.ICMP, "10.5.9.2", "10.5.1.2", ttl=1))
    until("the count", lambda: played.count("ttl_exceeded") == 2)
    assert played.count("icmp_sent") == 1


@needs_native
def test_icmp_errors_are_limited(make_namespace: MakeNamespace) -> None:
    played = Played(make_namespace, "native")
    try:
        with played.inside() as sock:

            def limited() -> bool:
                for _ in range(300):
                    sock.sendto(b"to nobody", ("10.5.250.1", 4001))
                return 0 < played.count("icmp_sent") < played.count("no_route") - 100

            until("the limit", limited)
    finally:
        played.close()


def test_U05_options_and_fragments_pass(played: Played) -> None:
    with played.inside() as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"\1\1\1\0")
        sock.sendto(b"options", ("10.5.9.2", 4001))
        packet = played.receive()
        assert (packet[0], packet[20:24], packet[-7:]) == (0x46, b"\1\1\1\0", b"options")
        assert ipv4.ip_valid(packet)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"")
        sock.setsockopt(socket.IPPROTO_IP, 10, 0)  # IP_MTU_DISCOVER, IP_PMTUDISC_DONT
        payload = os.urandom(4000)
        sock.sendto(payload, ("10.5.9.2", 4001))
        fragments = [played.receive() for _ in range(3)]
        assert all(ipv4.ip_valid(p) for p in fragments)
        assert b"".join(p[20:] for p in fragments)[8:] == payload

        header = ipv4.datagram(payload, (4001, 4000), source="10.5.9.2", destination="10.5.1.2")
        body = header[20:]
        for at in range(0, len(body), 1400):
            more = 0x2000 if at + 1400 < len(body) else 0
            part = body[at : at + 1400]
            played.send(ipv4.ip(part, 17, "10.5.9.2", "10.5.1.2", identification=7, fragment=more | at // 8))
        assert sock.recv(5000) == payload


def test_a_packet_larger_than_a_shrunken_link_is_fragmented_outside(played: Played) -> None:
    played.node.namespace.ip("link set eth0 mtu 1000")
    with played.inside() as sock:
        for number in range(20):
            sock.sendto(bytes([number]) * 1400, ("10.5.9.2", 4001))
    assert [played.receive()[28] for _ in range(20)] == list(range(20))


def test_routes_change_while_packets_flow(played: Played) -> None:
    def flood() -> None:
        with played.inside() as sock, suppress(OSError):  # at the end there is no route any more
            while not stop.is_set():
                sock.sendto(b"x" * 100, ("10.5.9.2", 4001))

    stop = threading.Event()
    sender = threading.Thread(target=flood, name="test-flood")
    sender.start()
    try:
        until("packets", lambda: played.count("tx_packets") > 1000)
        for _ in range(20):
            played.node.know(*[peer(n) for n in range(2, 200) if n != 9], peer(9))
            played.node.know(peer(9))
        assert played.count("no_route") == 0
        played.node.know()
        until("the route to go", lambda: played.count("no_route") > 0, 5)
        played.node.know(peer(9))
        sent = played.count("tx_packets")
        until("packets again", lambda: played.count("tx_packets") > sent + 100, 5)
        began = time.monotonic()
        with played.node.namespace.inside():
            played.node.carrier.discard()
        assert time.monotonic() - began < 2
    finally:
        stop.set()
        sender.join()
    assert played.node.namespace.ip_json("link show type tun") == []


def test_a_peer_of_another_backend_gets_nothing(played: Played) -> None:
    played.node.know(peer(9, FOREIGN, "vxlan"))
    with played.inside() as sock:
        sock.sendto(b"x", ("10.5.9.2", 4001))
    until("the count", lambda: played.count("no_route") == 1)


def test_a_device_that_was_deleted_or_changed_is_mended(
    make_namespace: MakeNamespace, native: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(make_namespace, (native, native)) as (first, second):
        first.namespace.ip("link del flannel0")
        with caplog.at_level(logging.WARNING), first.namespace.inside():
            kernel = NetlinkKernel()
            first.carrier.ensure(kernel)  # nobody moved, so that nothing is told again
            kernel.close()
        assert "flannel0 was deleted" in caplog.text
        first.namespace.ip(f"addr add {first.overlay}/32 dev flannel0")
        first.namespace.ip(f"route add {NETWORK} dev flannel0")
        assert first.namespace.run("ping", "-c1", "-W5", second.overlay)
        first.namespace.ip("link set flannel0 down mtu 1000")
        first.up(peer(2))
        (link,) = first.namespace.ip_json("link show flannel0")
        assert link["mtu"] == 1472
        assert "UP" in link["flags"]


def test_full_packets_pass_undivided(make_namespace: MakeNamespace, native: bool) -> None:
    with pair(make_namespace, (native, native)) as (first, second):
        for size, good in ((1444, True), (1445, False)):
            argv = ("ping", "-c1", "-W5", "-M", "do", "-s", str(size), second.overlay)
            assert ("1 received" in first.namespace.run(*argv, check=False)) is good


def test_U03_jumbo_frames_arrive_whole(make_namespace: MakeNamespace, native: bool) -> None:
    with pair(make_namespace, (native, native), mtu_bytes=9000) as (first, second):
        (link,) = first.namespace.ip_json("link show flannel0")
        assert link["mtu"] == 8972
        with first.namespace.socket() as sender, second.namespace.socket() as receiver:
            receiver.bind((second.overlay, 4000))
            receiver.settimeout(5)
            for _ in range(10):
                payload = os.urandom(8972 - 28)
                sender.sendto(payload, (second.overlay, 4000))
                assert receiver.recv(10000) == payload
        if native:
            transfer(first, second, 20 << 20)


@pytest.mark.parametrize(
    "natives",
    [
        pytest.param((True, True), id="native", marks=needs_native),
        pytest.param((True, False), id="native with python", marks=needs_native),
        pytest.param((False, False), id="python"),
    ],
)
def test_bulk_data_arrives_intact_both_ways(make_namespace: MakeNamespace, natives: tuple[bool, bool]) -> None:
    size = (100 if all(natives) else 5) << 20
    with pair(make_namespace, natives) as (first, second):
        other = threading.Thread(target=transfer, args=(second, first, size, 5002), name="test-transfer")
        other.start()
        transfer(first, second, size)
        other.join(60)
        assert bad_checksums(first) == bad_checksums(second) == 0
        if all(natives):
            stats = first.carrier.stats()
            assert stats["tx_messages"] < stats["tx_packets"] * 0.8
            assert stats["rx_writes"] < stats["rx_packets"] * 0.8


@needs_native
def test_bulk_data_with_a_per_packet_peer(make_namespace: MakeNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_wire

    def plain(address: IPv4Address, port: int, *, gro: bool) -> object:
        assert gro
        wire = opened(address, port, gro=False)
        return type(wire)(wire.socket, False, False)

    with pair(make_namespace, (True, False)) as (first, second):
        second.carrier.close()
        monkeypatch.setattr("backends.udp.carrier.open_wire", plain)
        second.up(peer(1))
        transfer(first, second, 5 << 20)
        transfer(second, first, 5 << 20)
        assert bad_checksums(first) == bad_checksums(second) == 0
        stats = second.carrier.stats()
        assert stats["tx_messages"] == stats["tx_packets"]


def test_U04_only_the_interface_address_is_listened_on(namespace: Namespace, native: bool) -> None:
    namespace.ip("addr add 192.0.2.1/32 dev lo")
    namespace.ip("addr add 192.0.2.7/32 dev lo")
    carrier = UdpCarrier(CarrierSpec(IPv4Address("192.0.2.1"), PORT, 1472, NETWORK), native=native)
    with namespace.inside():
        kernel = NetlinkKernel()
        try:
            carrier.ensure(kernel)
            rows = [line.split() for line in namespace.run("cat", "/proc/net/udp").splitlines()[1:]]
            assert [row[1] for row in rows] == [f"{socket.htonl(0xC0000201):08X}:{PORT:04X}"]
            rival = UdpCarrier(CarrierSpec(IPv4Address("192.0.2.1"), PORT, 1472, NETWORK), native=native)
            with pytest.raises(KernelError, match=r"bind UDP 192\.0\.2\.1:8285: the port is taken"):
                rival.ensure(kernel)
            nowhere = UdpCarrier(CarrierSpec(IPv4Address("192.0.2.8"), PORT, 1472, NETWORK), native=native)
            with pytest.raises(KernelError, match=r"192\.0\.2\.8:8285: the address is not one of this host"):
                nowhere.ensure(kernel)
        finally:
            carrier.close()
            kernel.close()


def test_a_carrier_without_a_device_says_so() -> None:
    carrier = UdpCarrier(CarrierSpec(IPv4Address("192.0.2.1"), PORT, 1472, NETWORK))
    carrier.carry(Subnets(subnet(1)), [peer(2)])
    carrier.close()
    assert carrier.stats() == {}
    with pytest.raises(KernelError, match="not open"):
        assert carrier.device
