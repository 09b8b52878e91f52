from __future__ import annotations

import base64
import socket
import struct
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.generic.wireguard import wgmsg

from backends.dataplane.model import Change, Endpoint, Neighbour, Wireguard, WireguardPeer
from backends.kernel import genl, rtnl, wgnl

pytestmark = pytest.mark.pure

FAMILY, INDEX = 30, 7
KEY = st.binary(min_size=32, max_size=32).filter(any).map(lambda raw: base64.b64encode(raw).decode())
ADDRESS = st.ip_addresses(v=4) | st.ip_addresses(v=6)
PORT = st.integers(1, 65535)
SENT = 4242


@st.composite
def networks(draw: st.DrawFn) -> Any:
    address = draw(ADDRESS)
    return ip_network((address, draw(st.integers(0, address.max_prefixlen))), strict=False)


PEER = st.builds(
    WireguardPeer,
    st.just("flannel-wg"),
    KEY,
    st.builds(Endpoint, ADDRESS, PORT),
    st.lists(networks(), min_size=1, max_size=3, unique=True).map(wgnl.ordered),
    st.integers(0, 65535),
    st.just("") | KEY,
)


def reference(sequence: int, attrs: list[Any]) -> bytes:
    """The same message as pyroute2 encodes it."""
    message = wgmsg()
    message["header"]["type"] = FAMILY
    message["header"]["flags"] = 0x5
    message["header"]["sequence_number"] = sequence
    message["cmd"], message["version"] = 1, 1
    message["attrs"] = [["WGDEVICE_A_IFINDEX", INDEX], *attrs]
    message.encode()
    return bytes(message.data)


def peer_attrs(peer: WireguardPeer, with_endpoint: bool) -> list[Any]:
    no_key = base64.b64encode(bytes(32)).decode()
    attrs: list[Any] = [
        ["WGPEER_A_PUBLIC_KEY", peer.public_key],
        ["WGPEER_A_PRESHARED_KEY", peer.preshared_key or no_key],
        ["WGPEER_A_FLAGS", 2],
    ]
    if with_endpoint and peer.endpoint is not None:
        attrs.append(["WGPEER_A_ENDPOINT", {"addr": str(peer.endpoint.address), "port": peer.endpoint.port}])
    allowed = [
        {
            "attrs": [
                ["WGALLOWEDIP_A_FAMILY", socket.AF_INET if n.version == 4 else socket.AF_INET6],
                ["WGALLOWEDIP_A_IPADDR", n.network_address.packed],
                ["WGALLOWEDIP_A_CIDR_MASK", n.prefixlen],
            ]
        }
        for n in peer.allowed
    ]
    return [
        *attrs,
        ["WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL", peer.keepalive_s],
        ["WGPEER_A_ALLOWEDIPS", allowed],
    ]


@given(PEER, st.booleans())
def test_a_peer_is_put_as_pyroute2_does(peer: WireguardPeer, with_endpoint: bool) -> None:
    expected = reference(9, [["WGDEVICE_A_PEERS", [{"attrs": peer_attrs(peer, with_endpoint)}]]])
    assert wgnl.set_peer(FAMILY, 9, INDEX, Change("put", peer), with_endpoint) == expected


@given(PEER)
def test_a_peer_is_deleted_as_pyroute2_does(peer: WireguardPeer) -> None:
    attrs = [["WGPEER_A_PUBLIC_KEY", peer.public_key], ["WGPEER_A_FLAGS", 1]]
    expected = reference(3, [["WGDEVICE_A_PEERS", [{"attrs": attrs}]]])
    assert wgnl.set_peer(FAMILY, 3, INDEX, Change("delete", peer)) == expected


@given(KEY, st.integers(0, 65535))
def test_a_device_is_set_as_pyroute2_does(key: str, port: int) -> None:
    ports = [["WGDEVICE_A_LISTEN_PORT", port]] if port else []
    expected = reference(1, [["WGDEVICE_A_PRIVATE_KEY", key], *ports])
    assert wgnl.set_device(FAMILY, 1, INDEX, Wireguard(port, key)) == expected


def test_only_peers_have_a_message() -> None:
    with pytest.raises(TypeError, match="neigh"):
        wgnl.set_peer(FAMILY, 1, INDEX, Change("put", Neighbour("x", ip_address("10.5.2.0"), "02:00:00:00:00:01")))


def nested(*parts: bytes) -> bytes:
    return rtnl.attribute(rtnl.NLA_F_NESTED, b"".join(parts))


def shown_peer(peer: WireguardPeer, handshake_s: int) -> bytes:
    """A peer as the kernel writes it: what it was set to, and what it counts."""
    whole = wgnl.set_peer(FAMILY, 1, INDEX, Change("put", peer))
    start = whole.index(base64.b64decode(peer.public_key)) - 4
    counted = rtnl.attribute(6, struct.pack("=qq", handshake_s, 500_000_000)) + rtnl.attribute(
        8, struct.pack("=Q", SENT)
    )
    return nested(whole[start:] + counted)


def dump(*bodies: bytes) -> list[tuple[bytes, rtnl.Header]]:
    found = []
    for body in bodies:
        buffer = rtnl.message(FAMILY, 2, 1, b"\0\1\0\0" + body)
        found += [(buffer, header) for header in rtnl.messages(buffer)]
    return found


@given(st.lists(PEER, max_size=4, unique_by=lambda peer: peer.public_key))
def test_what_was_put_reads_back(peers: list[WireguardPeer]) -> None:
    body = rtnl.attribute(8 | rtnl.NLA_F_NESTED, b"".join(shown_peer(peer, 1_700_000_000) for peer in peers))
    seen = wgnl.decode_peers(dump(body), "flannel-wg")
    assert [one.peer for one in seen] == peers
    assert {(one.handshake_s, one.sent_bytes) for one in seen} <= {(1_700_000_000.5, SENT)}


def test_a_peer_may_go_on_in_the_next_message() -> None:
    peer = WireguardPeer("wg", base64.b64encode(b"p" * 32).decode(), None, (ip_network("10.5.2.0/24"),), 25)
    key = rtnl.attribute(1, b"p" * 32)
    network = nested(
        rtnl.attribute(1, struct.pack("=H", socket.AF_INET6)),
        rtnl.attribute(2, ip_address("fd05::").packed),
        rtnl.attribute(3, b"\x40"),
    )
    rest = nested(key, rtnl.attribute(9 | rtnl.NLA_F_NESTED, network))
    first = rtnl.attribute(8 | rtnl.NLA_F_NESTED, shown_peer(peer, 5))
    seen = wgnl.decode_peers(dump(first, rtnl.attribute(8 | rtnl.NLA_F_NESTED, rest)), "wg")
    assert [(one.peer.allowed, one.peer.keepalive_s, one.handshake_s) for one in seen] == [
        ((ip_network("10.5.2.0/24"), ip_network("fd05::/64")), 25, 5.5)
    ]


def test_a_device_reads_back() -> None:
    body = rtnl.attribute(6, struct.pack("=H", 51821)) + rtnl.attribute(3, b"s" * 32) + rtnl.attribute(4, b"p" * 32)
    device = wgnl.decode_device(*dump(body)[0])
    assert (device.port, base64.b64decode(device.private_key), base64.b64decode(device.public_key)) == (
        51821,
        b"s" * 32,
        b"p" * 32,
    )
    assert wgnl.decode_device(*dump(b"")[0]) == Wireguard(0, "")


def test_secrets_are_not_shown() -> None:
    secret, psk = base64.b64encode(b"s" * 32).decode(), base64.b64encode(b"q" * 32).decode()
    peer = WireguardPeer("wg", "K", None, (), 0, psk)
    for shown in (Wireguard(1, secret), peer, Change("put", peer)):
        assert not {secret, psk} & {part.strip("'") for part in repr(shown).replace("=", "= ").split()}
        assert psk not in f"{shown!r}{shown}"
        assert secret not in f"{shown!r}{shown}"


def test_the_protocols_number_is_asked_for_by_name() -> None:
    assert genl.get_family(wgnl.FAMILY_NAME).endswith(b"\x0e\x00\x02\x00wireguard\0\0\0")
    buffer = rtnl.message(16, 0, 1, b"\1\2\0\0" + rtnl.attribute(2, b"wireguard\0") + rtnl.attribute(1, b"\x1e\0"))
    assert genl.decode_family(buffer, next(rtnl.messages(buffer))) == 30
