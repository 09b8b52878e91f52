"""IPv6 through the udp backend: in IPv6, one plain packet per datagram."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from ipaddress import IPv6Address

import pytest

from backends.udp.carrier import native_available
from tests.support import ipv6
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.overlay import PORT, Node, pair, peer_v6, until
from tests.support.paths import bad_checksums, mixed_datagrams, streams

pytestmark = pytest.mark.kernel

needs_native = pytest.mark.skipif(not native_available(), reason="the native pump was not built")
PAIRS = [
    pytest.param((True, True), id="native", marks=needs_native),
    pytest.param((True, False), id="native with python", marks=needs_native),
    pytest.param((False, False), id="python"),
]
PUMPS = [pytest.param(True, id="native", marks=needs_native), pytest.param(False, id="python")]
FOREIGN = "2001:db8:1::9"


@pytest.mark.parametrize("natives", PAIRS)
def test_everything_arrives_intact_and_in_order_both_ways(
    make_namespace: MakeNamespace, natives: tuple[bool, bool]
) -> None:
    size = (32 if all(natives) else 4) << 20
    with pair(make_namespace, natives, family=6) as (first, second):
        (link,) = first.namespace.ip_json("link show flannel-v6.0")
        assert link["mtu"] == 1452
        for source, target in ((first, second), (second, first)):
            for payload, good in ((1452 - 48, True), (1452 - 47, False)):
                full = ("ping", "-6", "-c1", "-W10", "-Mdo", f"-s{payload}", target.overlay)
                assert ("1 received" in source.namespace.run(*full, check=False)) is good
            mixed_datagrams(source, target, 2000)
        other = threading.Thread(target=streams, args=(second, first, 2, size // 2, 5201), name="test-back")
        other.start()
        streams(first, second, 4, size // 4)
        other.join()
        assert (bad_checksums(first), bad_checksums(second)) == ({}, {})
        if all(natives):
            stats = first.carrier.stats()
            assert stats["tx_messages"] < stats["tx_packets"] * 0.8
            assert stats["rx_writes"] < stats["rx_packets"] * 0.8


class Played:
    """A node with a carrier, and a plain UDP socket in the place of its peer fd05:0:0:9::/64."""

    def __init__(self, near: Namespace, far: Namespace, native: bool) -> None:
        veth(near, far)
        far.ip(f"addr add {FOREIGN}/64 dev eth0 nodad")
        self.node = Node(near, 1, native, family=6)
        self.node.up(peer_v6(9))
        near.ip("addr add fd05:0:0:1::2/128 dev lo nodad")
        self.socket = far.socket(socket.AF_INET6)
        self.socket.bind((FOREIGN, PORT))
        self.socket.settimeout(5)

    def inside(self, kind: int = socket.SOCK_DGRAM, proto: int = 0) -> socket.socket:
        """A socket of a container of the node, which has fd05:0:0:1::2."""
        sock = self.node.namespace.socket(socket.AF_INET6, kind, proto)
        if kind == socket.SOCK_DGRAM:
            sock.bind(("fd05:0:0:1::2", 4000))
        sock.settimeout(5)
        return sock

    def listener(self) -> socket.socket:
        """A socket that hears ICMPv6 errors about what the container sent."""
        sock = self.inside(socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        # ICMP6_FILTER (icmp6.h): a set bit keeps a type away. Neighbour discovery would be heard, too.
        sock.setsockopt(socket.IPPROTO_ICMPV6, 1, bytes([0b11110001]) + b"\xff" * 31)
        return sock

    def count(self, name: str) -> int:
        return self.node.carrier.stats()[name]


@pytest.fixture(params=PUMPS)
def played(request: pytest.FixtureRequest, make_namespace: MakeNamespace) -> Iterator[Played]:
    one = Played(make_namespace("near"), make_namespace("far"), bool(request.param))
    yield one
    one.node.carrier.close()
    one.socket.close()


def test_one_plain_packet_per_datagram(played: Played) -> None:
    with played.inside() as sock:
        sock.sendto(b"probe", ("fd05:0:0:9::2", 4001))
        packet, sender = played.socket.recvfrom(65535)
        assert sender[:2] == (played.node.underlay, PORT)
        assert ipv6.valid(packet)
        ends = IPv6Address("fd05:0:0:1::2").packed + IPv6Address("fd05:0:0:9::2").packed
        assert (packet[7], packet[8:40], packet[48:]) == (63, ends, b"probe")
        good = ipv6.datagram(b"answer", (4001, 4000), source="fd05:0:0:9::2", destination="fd05:0:0:1::2")
        for junk in (b"", b"x", b"\x60" + b"\xff" * 60, b"\x45" + bytes(60), good[:-1]):
            played.socket.sendto(junk, (played.node.underlay, PORT))
        played.socket.sendto(good + b"trailing bytes", (played.node.underlay, PORT))
        assert sock.recv(100) == b"answer"
    until("the count", lambda: played.count("malformed") >= 4)


def test_U05_a_packet_to_nobody_and_a_hop_limit_that_ends_are_answered(played: Played) -> None:
    with played.listener() as heard, played.inside() as sock:
        sock.sendto(b"to nobody", ("fd05:0:0:99::1", 4001))
        error, source = heard.recvfrom(2000)
        assert (error[0], error[1], source[0]) == (1, 0, "fd05::")
        assert error[8 + 24 : 8 + 40] == IPv6Address("fd05:0:0:99::1").packed
        assert error.endswith(b"to nobody")
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 1)
        sock.sendto(b"short lived", ("fd05:0:0:9::2", 4001))
        error, source = heard.recvfrom(2000)
        assert (error[0], error[1], source[0]) == (3, 0, "fd05::")
    offender = ipv6.datagram(b"short lived", source="fd05:0:0:9::2", destination="fd05:0:0:1::2", hops=1)
    played.socket.sendto(offender, (played.node.underlay, PORT))
    answer = played.socket.recv(2000)
    assert ipv6.valid(answer)
    assert (answer[40], answer[41], answer[48:]) == (3, 0, offender)
    assert answer[8:40] == IPv6Address("fd05:0:0:1::").packed + IPv6Address("fd05:0:0:9::2").packed


def test_fragments_pass(played: Played) -> None:
    payload = bytes(range(250)) * 16
    with played.inside() as sock:
        sock.sendto(payload, ("fd05:0:0:9::2", 4001))
        fragments = [played.socket.recv(65535) for _ in range(3)]
    assert all(one[6] == 44 for one in fragments)
    assert b"".join(one[48:] for one in fragments)[8:] == payload
