"""Programs that carry: what is on the wire, what they leave to the pump, what outlives whom, and damage."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from backends.kernel import tcfilter
from backends.kernel.bpf import Map
from backends.kernel.ethtool import set_tx_checksum
from backends.kernel.netlink import NetlinkKernel
from backends.udp.bpf.carrier import BpfCarrier
from backends.udp.carrier import CarrierSpec, UdpCarrier
from subnet.errors import KernelError
from tests.support import ipv4
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.overlay import NETWORK, PORT, peer, until
from tests.support.paths import BpfNode, connected, finish_packets, only_finished_packets_arrive, streams

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

ROOT = Path(__file__).parents[2]
FAR = "192.0.2.9"


@contextmanager
def host(make: MakeNamespace, native: bool | None = None) -> Iterator[tuple[BpfNode, Namespace]]:
    """A host with programs and a container at 10.5.1.2, and a namespace in the place of its peer 10.5.9.0/24."""
    near, far = make("near"), make("far")
    veth(near, far)
    finish_packets(near)
    far.ip(f"addr add {FAR}/24 dev eth0")
    node = BpfNode(near, 1, native)
    node.up(peer(9))
    near.ip("addr add 10.5.1.2/32 dev lo")
    try:
        yield node, far
    finally:
        node.carrier.close()


@pytest.fixture
def played(make_namespace: MakeNamespace) -> Iterator[tuple[BpfNode, Namespace]]:
    with host(make_namespace) as both:
        yield both


def tap(namespace: Namespace) -> socket.socket:
    """A socket that sees the frames of a namespace's eth0."""
    sock = namespace.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    sock.bind(("eth0", 0x0800))
    sock.settimeout(20)
    return sock


def inside(node: BpfNode) -> socket.socket:
    """A socket of the container."""
    sock = node.namespace.socket()
    sock.bind(("10.5.1.2", 4000))
    sock.settimeout(20)
    return sock


def datagrams(sock: socket.socket, count: int) -> list[bytes]:
    """Return so many frames that hold IPv4 in UDP."""
    found: list[bytes] = []
    while len(found) < count:
        frame = sock.recv(65535)
        if frame[14 + 9] == ipv4.UDP and frame[36:38] == PORT.to_bytes(2, "big"):
            found.append(frame)
    return found


def carried(node: BpfNode) -> tuple[int, int]:
    """What programs sent and received, in packets."""
    stats = node.carrier.stats()
    return stats["bpf_tx_packets"], stats["bpf_rx_packets"]


def by_pump(node: BpfNode) -> tuple[int, int]:
    """What the pump sent and received, in packets."""
    stats = node.carrier.stats()
    return stats["tx_packets"], stats["rx_packets"]


def aged(packet: bytes) -> bytes:
    """The packet after one hop, its checksum computed afresh."""
    head = packet[:8] + bytes([packet[8] - 1]) + packet[9:10] + b"\0\0" + packet[12:20]
    return head[:10] + ipv4.ones_complement(head).to_bytes(2, "big") + head[12:] + packet[20:]


@pytest.mark.parametrize("payload", [b"", b"probe", os.urandom(1444)], ids=["empty", "short", "full"])
def test_the_frame_is_the_specified_one_byte_for_byte(played: tuple[BpfNode, Namespace], payload: bytes) -> None:
    node, far = played
    with tap(far) as wire, node.namespace.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sender:
        packet = ipv4.datagram(payload, (4000, 4001), source="10.5.1.2", destination="10.5.9.2", identification=7)
        sender.sendto(packet, ("10.5.9.2", 0))
        (frame,) = datagrams(wire, 1)
    udp = struct.pack("!HHHH", PORT, PORT, 8 + len(packet), 0)
    assert frame[14:] == ipv4.ip(udp + aged(packet), ipv4.UDP, node.underlay, FAR, ttl=64)
    assert far.ip_json("link show dev eth0")[0]["address"] == frame[:6].hex(":")
    assert (carried(node)[0], by_pump(node)[0]) == (1, 0)


def test_every_ttl_and_checksum_is_right_after_a_hop(played: tuple[BpfNode, Namespace]) -> None:
    node, far = played
    # Header checksums around both ends of their range, where the carry is.
    numbers = [n for n in range(65536) if ipv4.ip(identification=n)[10:11] in (b"\xfe", b"\xff", b"\x00")][::7]
    with tap(far) as wire, node.namespace.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sender:
        for number in numbers:
            sent = ipv4.datagram(b"x", source="10.5.1.2", destination="10.5.2.2", identification=number)
            packet = ipv4.ip(sent[20:], source="10.5.1.2", destination="10.5.9.2", identification=number)
            sender.sendto(packet, ("10.5.9.2", 0))
            (frame,) = datagrams(wire, 1)
            assert frame[42:] == aged(packet)
    assert carried(node)[0] == len(numbers)


def test_what_arrives_is_delivered_by_the_program(played: tuple[BpfNode, Namespace]) -> None:
    node, far = played
    with far.socket() as wire, inside(node) as sock, tap_tun(node) as seen:
        wire.bind((FAR, 999))  # a sender's port does not matter, as upstream
        packet = ipv4.datagram(b"answer", (4001, 4000), source="10.5.9.2", destination="10.5.1.2", identification=9)
        wire.sendto(packet, (node.underlay, PORT))
        assert sock.recv(100) == b"answer"
        assert seen.recv(2000) == aged(packet)
    assert (carried(node)[1], by_pump(node)[1]) == (1, 0)


def tap_tun(node: BpfNode) -> socket.socket:
    sock = node.namespace.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    sock.bind(("flannel0", 0x0800))
    sock.settimeout(20)
    return sock


def test_fragments_inside_are_everyday_packets_and_those_outside_are_not(played: tuple[BpfNode, Namespace]) -> None:
    node, far = played
    payload = os.urandom(4000)
    with tap(far) as wire, inside(node) as sock, far.socket() as peers:
        sock.setsockopt(socket.IPPROTO_IP, 10, 0)  # IP_MTU_DISCOVER, IP_PMTUDISC_DONT
        sock.sendto(payload, ("10.5.9.2", 4001))
        assert b"".join(frame[62:] for frame in datagrams(wire, 3))[8:] == payload
        assert carried(node)[0] == 3
        peers.bind((FAR, PORT))
        far.ip("link set eth0 mtu 600")
        peers.setsockopt(socket.IPPROTO_IP, 10, 0)
        peers.sendto(
            ipv4.datagram(payload[:1400], (4001, 4000), source="10.5.9.2", destination="10.5.1.2"),
            (node.underlay, PORT),
        )
        assert sock.recv(5000) == payload[:1400]
    until("the pump's count", lambda: (carried(node)[1], by_pump(node)[1]) == (0, 1))


def test_a_path_that_takes_less_is_known_and_left_to_the_pump_whatever_the_size(
    played: tuple[BpfNode, Namespace],
) -> None:
    node, far = played
    far.ip("addr add 198.51.100.1/32 dev lo")
    with far.socket() as wire, far.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as router:
        wire.bind((FAR, PORT))
        wire.settimeout(20)
        with tap(far) as seen, inside(node) as sock:
            sock.sendto(b"a" * 1400, ("10.5.9.2", 4001))
            (frame,) = datagrams(seen, 1)
            # RFC 1191 s4: a router on the way has a link of 1000 bytes.
            body = struct.pack("!BBHHH", 3, 4, 0, 0, 1000) + frame[14:62]
            router.sendto(body[:2] + ipv4.ones_complement(body).to_bytes(2, "big") + body[4:], (node.underlay, 0))
            until("the shorter path", lambda: "mtu 1000" in node.namespace.ip(f"route get {FAR}"))
            before = by_pump(node)[0]
            sock.sendto(b"b" * 1400, ("10.5.9.2", 4001))
            sock.sendto(b"c" * 400, ("10.5.9.2", 4001))
            assert [wire.recv(2000)[28:29] for _ in range(3)] == [b"a", b"b", b"c"]
    until("the pump's count", lambda: by_pump(node)[0] == before + 2)


def test_a_host_that_has_another_way_or_does_not_forward_leaves_packets_to_the_pump(
    played: tuple[BpfNode, Namespace],
) -> None:
    node, far = played
    with far.socket() as wire, inside(node) as sock:
        wire.bind((FAR, PORT))
        wire.settimeout(20)
        node.namespace.sysctl("net.ipv4.conf.all.forwarding", 0)
        sock.sendto(b"through the pump", ("10.5.9.2", 4001))
        assert wire.recv(100)[28:] == b"through the pump"
        until("the pump's count", lambda: (carried(node)[0], by_pump(node)[0]) == (0, 1))
        node.namespace.sysctl("net.ipv4.conf.all.forwarding", 1)
        node.namespace.ip(f"route add unreachable {FAR}/32")
        sock.sendto(b"to nowhere", ("10.5.9.2", 4001))
        until("the drop", lambda: node.carrier.stats()["tx_dropped"] == 1)
        assert carried(node)[0] == 0


def test_what_is_said_of_the_packet_inside_does_not_choose_the_way_of_the_outer(
    played: tuple[BpfNode, Namespace],
) -> None:
    node, far = played
    node.namespace.ip("rule add fwmark 7 table 77")
    node.namespace.ip(f"route add unreachable {FAR}/32 table 77")
    with far.socket() as wire, inside(node) as sock:
        wire.bind((FAR, PORT))
        wire.settimeout(20)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)
        sock.sendto(b"marked", ("10.5.9.2", 4001))
        assert wire.recv(100)[28:] == b"marked"


def test_strangers_are_listened_to_where_that_is_asked_for(make_namespace: MakeNamespace) -> None:
    near, far = make_namespace("near"), make_namespace("far")
    veth(near, far)
    finish_packets(near)
    far.ip("addr add 192.0.2.66/24 dev eth0")
    node = BpfNode(near, 1, unknown=True)
    node.up(peer(9))
    near.ip("addr add 10.5.1.2/32 dev lo")
    try:
        with inside(node) as sock, far.socket() as stranger:
            packet = ipv4.datagram(b"stranger", (4001, 4000), source="10.5.9.2", destination="10.5.1.2")
            stranger.sendto(packet, (node.underlay, PORT))
            assert sock.recv(100) == b"stranger"
        assert carried(node)[1] == 1
    finally:
        node.carrier.close()


def test_traceroute_shows_both_ends_of_the_tunnel(make_namespace: MakeNamespace) -> None:
    with connected(make_namespace, ("bpf", "bpf")) as (first, second):
        for ttl, answering in ((1, "10.5.0.0"), (2, second.overlay)):
            with (
                first.namespace.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as listener,
                first.namespace.socket() as sender,
            ):
                listener.settimeout(20)
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
                sender.sendto(b"probe", (second.overlay, 33434))
                packet = listener.recv(2000)
            assert (packet[20], packet[21], socket.inet_ntoa(packet[12:16])) == (11, 0, answering)
        with first.namespace.socket() as sender, second.namespace.socket() as receiver:
            receiver.bind((second.overlay, 33434))
            receiver.settimeout(20)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 3)
            sender.sendto(b"probe", (second.overlay, 33434))
            assert receiver.recv(100) == b"probe"


def test_full_packets_pass_and_larger_ones_are_told_to_their_sender(make_namespace: MakeNamespace) -> None:
    with connected(make_namespace, ("bpf", "bpf")) as (first, second):
        for size, good in ((1444, True), (1445, False)):
            argv = ("ping", "-c1", "-W20", "-Mdo", f"-s{size}", second.overlay)
            assert ("1 received" in first.namespace.run(*argv, check=False)) is good
        with first.namespace.socket() as sender:
            sender.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
            with pytest.raises(OSError, match="Message too long"):
                sender.sendto(b"x" * 1445, (second.overlay, 4001))


def test_on_a_link_that_finishes_nothing_it_is_refused_because_peers_would_lose_all_but_pings(
    make_namespace: MakeNamespace,
) -> None:
    with connected(make_namespace, ("bpf", "plain")) as (first, second):
        assert isinstance(first, BpfNode)
        with first.namespace.inside():
            set_tx_checksum("eth0", True)
        with pytest.raises(KernelError, match=r"DataPath bpf on eth0: eth0 \(veth\) hands packets on"):
            first.ensure()
        assert "1 received" in first.namespace.run("ping", "-c1", "-W20", second.overlay)
        only_finished_packets_arrive(first, second)
        first.ensure()


def test_without_a_usable_external_interface_it_says_so(make_namespace: MakeNamespace) -> None:
    near = make_namespace("near")
    near.ip("tuntap add eth0 mode tun")
    near.ip("link set eth0 up")
    node = BpfNode(near, 1)
    with pytest.raises(KernelError, match=r"use DataPath bpf on eth0: it is not Ethernet"):
        node.ensure()
    near.ip("link del eth0")
    near.ip("link add eth0 type veth peer name eth1")
    finish_packets(near)
    with pytest.raises(KernelError, match=r"find device eth0 of index \d+: it has gone"):
        node.ensure()
    assert near.ip_json("link show type tun") == []


# -- what outlives whom --------------------------------------------------------------------------------


class Counted:
    """Numbered datagrams from a host to its peer, one a millisecond."""

    def __init__(self, sender: BpfNode, receiver: BpfNode) -> None:
        self._from, self._to = sender.namespace.socket(), receiver.namespace.socket()
        self._address = (receiver.overlay, 4500)
        self._to.bind(self._address)
        self._to.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
        self._to.settimeout(20)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="test-counted")
        self.sent = 0

    def _send(self) -> None:
        while not self._stop.is_set():
            self._from.sendto(self.sent.to_bytes(4, "big"), self._address)
            self.sent += 1
            time.sleep(0.001)

    def __enter__(self) -> Counted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            assert [int.from_bytes(self._to.recv(4), "big") for _ in range(self.sent)] == list(range(self.sent))
        finally:
            self._from.close()
            self._to.close()

    def more(self, count: int = 100) -> None:
        """Wait for more to be sent."""
        mark = self.sent
        until("datagrams", lambda: self.sent >= mark + count)


def test_it_goes_on_without_a_process_and_a_new_one_takes_over_without_loss(make_namespace: MakeNamespace) -> None:
    with connected(make_namespace, ("bpf", "bpf")) as (first, second):
        assert isinstance(first, BpfNode)
        assert isinstance(second, BpfNode)
        with Counted(first, second) as there, Counted(second, first) as back:
            for node in (first, second):
                before = node.programs()
                (link,) = node.namespace.ip_json("link show flannel0")
                node.carrier.close()
                assert node.programs() == before
                there.more()
                node.carrier = BpfCarrier(node.spec)
                node.ensure()
                assert node.programs() == before  # an earlier run's, until the peers are known
                there.more()
                node.know(peer(2 if node is first else 1))
                assert all(node.programs()[place] not in ([], before[place]) for place in before)
                (now,) = node.namespace.ip_json("link show flannel0")
                assert now["ifindex"] == link["ifindex"]
                back.more()
        streams(first, second, 1, 4 << 20)


def test_the_pump_answers_again_once_a_process_is_back(played: tuple[BpfNode, Namespace]) -> None:
    node, _ = played
    node.carrier.close()
    node.carrier = BpfCarrier(node.spec)
    node.up(peer(9))
    with node.namespace.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as listener, inside(node) as sock:
        listener.settimeout(20)
        sock.sendto(b"to nobody", ("10.5.250.1", 4001))
        assert listener.recv(2000)[20:22] == bytes([3, 0])


def test_leases_come_move_and_go_by_what_differs(
    played: tuple[BpfNode, Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, far = played
    far.ip("addr add 192.0.2.10/24 dev eth0")
    written: list[int] = []
    put, remove = Map.put, Map.remove

    def put_counted(held: Map, entries: Mapping[bytes, bytes]) -> None:
        written.append(len(entries))
        put(held, entries)

    def remove_counted(held: Map, keys: Collection[bytes]) -> None:
        written.append(-len(keys))
        remove(held, keys)

    monkeypatch.setattr(Map, "put", put_counted)
    monkeypatch.setattr(Map, "remove", remove_counted)
    many = [peer(number) for number in range(20, 200)]
    node.know(peer(9), *many)
    assert written == [180, 180]
    node.know(peer(9, "192.0.2.10"), *many)
    # The new address as a peer, the subnet behind it, the old address gone.
    assert written[2:] == [1, 1, -1]
    with tap(far) as wire, inside(node) as sock:
        sock.sendto(b"moved", ("10.5.9.2", 4001))
        (frame,) = datagrams(wire, 1)
        assert socket.inet_ntoa(frame[30:34]) == "192.0.2.10"
    node.know(peer(9, "192.0.2.10"))
    assert written[5:] == [-180, -180]
    with inside(node) as sock:
        sock.sendto(b"to nobody", ("10.5.20.2", 4001))
        until("the count", lambda: node.carrier.stats()["no_route"] == 1)


def test_damage_is_mended_at_the_next_comparison(make_namespace: MakeNamespace) -> None:
    with connected(make_namespace, ("bpf", "bpf")) as (first, second):
        assert isinstance(first, BpfNode)
        for damage in (
            ("tc", "filter", "del", "dev", "flannel0", "egress"),
            ("tc", "filter", "del", "dev", "eth0", "ingress"),
            ("tc", "qdisc", "del", "dev", "flannel0", "clsact"),
            ("tc", "qdisc", "del", "dev", "eth0", "clsact"),
            ("ip", "link", "del", "flannel0"),
        ):
            whole = first.programs()
            first.namespace.run(*damage)
            assert first.programs() != whole
            first.ensure()
            assert [len(found) for found in first.programs().values()] == [1, 1], damage
            if damage[1] == "link":
                first.namespace.ip(f"addr add {first.overlay}/32 dev flannel0")
                first.namespace.ip(f"route add {NETWORK} dev flannel0")
            before = carried(first)
            assert "1 received" in first.namespace.run("ping", "-c1", "-W20", second.overlay), damage
            assert carried(first) == (before[0] + 1, before[1] + 1), damage
            again = first.programs()
            first.ensure()
            assert first.programs() == again


def test_nothing_of_it_stays_when_it_is_given_up(played: tuple[BpfNode, Namespace]) -> None:
    node, _ = played
    with node.namespace.inside():
        node.carrier.discard()
    assert node.programs() == {"dev flannel0 egress": [], "dev eth0 ingress": []}
    assert node.namespace.ip_json("link show type tun") == []
    assert "clsact" not in node.namespace.run("tc", "qdisc", "show")


def test_what_others_attached_stays(played: tuple[BpfNode, Namespace]) -> None:
    node, _ = played
    foreign = ("pref", "9", "protocol", "ip", "u32", "match", "u32", "0", "0")
    node.namespace.run("tc", "filter", "add", "dev", "eth0", "ingress", *foreign)
    with node.namespace.inside():
        kernel = NetlinkKernel()
        try:
            kept = kernel.remove_programs(node.carrier.hooked())
            removed = kernel.remove_programs(())
        finally:
            kernel.close()
    assert kept == []
    assert [text.split(" at ")[0] for text in removed] == ["tc filter flanneld-decap", "tc filter flanneld-encap"]
    assert node.programs() == {"dev flannel0 egress": [], "dev eth0 ingress": []}
    assert "pref 9 u32" in node.namespace.run("tc", "filter", "show", "dev", "eth0", "ingress")


def test_data_path_user_takes_the_device_over_and_lets_it_go_with_itself(played: tuple[BpfNode, Namespace]) -> None:
    node, _ = played
    (link,) = node.namespace.ip_json("link show flannel0")
    node.carrier.close()
    carrier = UdpCarrier(CarrierSpec(IPv4Address(node.underlay), PORT, 1472, NETWORK))
    with node.namespace.inside():
        kernel = NetlinkKernel()
        try:
            ((name, now),) = carrier.ensure(kernel).items()
            assert (name, now.index, now.tunnel) == ("flannel0", link["ifindex"], None)
            assert len(kernel.remove_programs(carrier.hooked())) == 2
        finally:
            carrier.close()
            kernel.close()
    assert node.namespace.ip_json("link show type tun") == []


def test_the_pump_in_python_does_for_the_rest_as_well(make_namespace: MakeNamespace) -> None:
    with host(make_namespace, native=False) as (node, far), far.socket() as wire, inside(node) as sock:
        wire.bind((FAR, PORT))
        wire.settimeout(20)
        sock.sendto(b"everyday", ("10.5.9.2", 4001))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"\1\1\1\0")
        sock.sendto(b"options", ("10.5.9.2", 4001))
        assert {wire.recv(100)[-7:] for _ in range(2)} == {b"veryday", b"options"}
        until("the pump's count", lambda: (carried(node)[0], by_pump(node)[0]) == (1, 1))


def test_a_way_in_that_was_made_by_others_is_shared(namespace: Namespace) -> None:
    namespace.ip("link add eth0 type veth peer name eth1")
    namespace.ip("link set eth0 up")
    namespace.run("tc", "qdisc", "add", "dev", "eth0", "ingress")
    finish_packets(namespace)
    node = BpfNode(namespace, 1)
    node.up(peer(9))
    try:
        assert len(node.programs()["dev eth0 ingress"]) == 1
        with namespace.inside():
            assert {one.name for one in tcfilter.attached()} == {"flanneld-encap", "flanneld-decap"}
    finally:
        node.carrier.close()
