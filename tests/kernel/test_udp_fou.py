from __future__ import annotations

import json
import socket
from ipaddress import IPv4Address

import pytest

from backends.kernel import fou
from backends.kernel.ethtool import set_tx_checksum, unfinished
from backends.kernel.fou import FouPort
from backends.kernel.netlink import NetlinkKernel
from backends.udp.carrier import CarrierSpec, UdpCarrier
from backends.udp.fou import DEVICE, FouCarrier
from subnet.errors import KernelError
from tests.support import ipv4
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.overlay import NETWORK, PORT
from tests.support.paths import FouNode, connected, finish_packets, only_finished_packets_arrive

pytestmark = pytest.mark.kernel

LOCAL = IPv4Address("192.0.2.1")


def shown(namespace: Namespace) -> list[dict[str, object]]:
    return json.loads(namespace.run("ip", "-j", "fou", "show") or "[]")  # type: ignore[no-any-return]


def test_a_cable_between_namespaces_finishes_no_checksums_until_told_to(make_namespace: MakeNamespace) -> None:
    first, second = make_namespace("a"), make_namespace("b")
    veth(first, second)
    with first.inside():
        assert unfinished("eth0") == "eth0 (veth) hands packets on with unfinished checksums"
        assert set_tx_checksum("eth0", False) is False
        assert unfinished("eth0") == ""
        with pytest.raises(OSError, match="No such device"):
            unfinished("eth7")


def test_a_kernel_without_the_module_says_how_to_load_it(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fou, "_family", lambda _: 0)
    with namespace.inside():
        assert fou.ports() == frozenset()
        with pytest.raises(KernelError, match=r"open fou port 8285 local 192\.0\.2\.1 .*load it with: modprobe fou"):
            fou.add(FouPort(LOCAL, PORT))


@pytest.mark.vm
def test_ports_are_those_that_ip_shows(namespace: Namespace) -> None:
    namespace.ip("addr add 192.0.2.1/32 dev lo")
    with namespace.inside():
        assert fou.ports() == frozenset()
        for _ in range(2):
            fou.add(FouPort(LOCAL, PORT))
        assert fou.ports() == {FouPort(LOCAL, PORT)}
        (one,) = shown(namespace)
        assert (one["port"], one["ipproto"], one["local"]) == (PORT, 4, "192.0.2.1")
        namespace.run("ip", "fou", "add", "port", "9000", "ipproto", "4")
        namespace.run("ip", "fou", "add", "port", "9001", "ipproto", "41")
        namespace.run("ip", "fou", "add", "port", "9002", "gue")
        assert fou.ports() == {FouPort(LOCAL, PORT), FouPort(IPv4Address(0), 9000)}
        for _ in range(2):
            fou.remove(FouPort(LOCAL, PORT))
        assert fou.ports() == {FouPort(IPv4Address(0), 9000)}
        with namespace.socket() as taken:
            taken.bind(("192.0.2.1", PORT))
            with pytest.raises(KernelError, match="the port is taken, perhaps by another flanneld"):
                fou.add(FouPort(LOCAL, PORT))


@pytest.fixture
def played(make_namespace: MakeNamespace) -> tuple[FouNode, Namespace]:
    """A host carried by the kernel, and a namespace in the place of its peer 10.5.9.0/24, 192.0.2.9."""
    near, far = make_namespace("near"), make_namespace("far")
    veth(near, far)
    finish_packets(near)
    far.ip("addr add 192.0.2.9/24 dev eth0")
    node = FouNode(near, 1)
    node.up(9)
    return node, far


@pytest.mark.vm
def test_one_plain_packet_per_datagram_in_both_directions(played: tuple[FouNode, Namespace]) -> None:
    node, far = played
    with far.socket() as wire, node.namespace.socket() as inside:
        wire.bind(("192.0.2.9", PORT))
        wire.settimeout(20)
        inside.bind((node.overlay, 4000))
        inside.settimeout(20)
        for payload in (b"", b"probe", b"x" * 1444):
            inside.sendto(payload, ("10.5.9.2", 4001))
            packet, sender = wire.recvfrom(65535)
            assert sender == (node.underlay, PORT)
            assert ipv4.ip_valid(packet)
            assert ipv4.l4_valid(packet)
            assert (packet[0], packet[12:20], packet[28:]) == (0x45, bytes([10, 5, 1, 0, 10, 5, 9, 2]), payload)
            answer = ipv4.datagram(payload[::-1], (4001, 4000), source="10.5.9.2", destination=node.overlay)
            wire.sendto(answer, sender)
            assert inside.recv(2000) == payload[::-1]
        for junk in (b"", b"x", b"\x60" + bytes(60), b"\x45" + b"\xff" * 40):
            wire.sendto(junk, (node.underlay, PORT))
        wire.sendto(ipv4.datagram(b"good", (4001, 4000), source="10.5.9.2", destination=node.overlay), sender)
        assert inside.recv(2000) == b"good"


@pytest.mark.vm
def test_the_outer_header_is_that_of_a_datagram(played: tuple[FouNode, Namespace]) -> None:
    node, far = played
    with far.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as tap, node.namespace.socket() as inside:
        tap.bind(("eth0", 0x0800))
        tap.settimeout(20)
        inside.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 3)
        inside.sendto(b"probe", ("10.5.9.2", 4001))
        frame = tap.recv(2000)
        while frame[14 + 9] != socket.IPPROTO_UDP:
            frame = tap.recv(2000)
    outer, inner = frame[14:34], frame[42:]
    assert (outer[0], outer[1], outer[8]) == (0x45, 0, 3)
    assert ipv4.ip_valid(frame[14:])
    assert frame[34:38] == PORT.to_bytes(2, "big") * 2
    assert ipv4.l4_valid(frame[14:])
    assert frame[40:42] != b"\0\0"
    assert (inner[8], inner[28:33]) == (3, b"probe")


@pytest.mark.vm
def test_what_is_too_large_is_told_to_its_sender(played: tuple[FouNode, Namespace]) -> None:
    node, _ = played
    said = node.namespace.run("ping", "-c1", "-W2", "-Mdo", "-s1445", "10.5.9.2", check=False)
    assert "1 received" not in said
    with node.namespace.socket() as sender:
        sender.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
        with pytest.raises(OSError, match="Message too long"):
            sender.sendto(b"x" * 1445, ("10.5.9.2", 4001))


@pytest.mark.vm
def test_on_a_link_that_finishes_nothing_a_user_space_peer_loses_all_but_pings(make_namespace: MakeNamespace) -> None:
    """Why it is refused there."""
    with connected(make_namespace, ("fou", "plain")) as (first, second):
        with first.namespace.inside():
            set_tx_checksum("eth0", True)
            carrier = FouCarrier(FouPort(IPv4Address(first.underlay), PORT), "eth0")
            with pytest.raises(KernelError, match=r"DataPath fou on eth0: eth0 \(veth\) hands packets on"):
                carrier.ensure(NetlinkKernel())
        assert "1 received" in first.namespace.run("ping", "-c1", "-W20", second.overlay)
        only_finished_packets_arrive(first, second)


@pytest.mark.vm
def test_data_path_user_takes_the_port_over(make_namespace: MakeNamespace) -> None:
    near, far = make_namespace("near"), make_namespace("far")
    veth(near, far)
    finish_packets(near)
    FouNode(near, 1).up(9)
    carrier = UdpCarrier(CarrierSpec(LOCAL, PORT, 1472, NETWORK))
    with near.inside():
        kernel = NetlinkKernel()
        try:
            assert DEVICE in kernel.links()
            carrier.ensure(kernel)
            assert fou.ports() == frozenset()
        finally:
            carrier.close()
            kernel.close()
