"""Wire format of the generic netlink messages of WireGuard.

Pure encoding and decoding, packed by hand because peers grow with the cluster
(pyroute2 takes two milliseconds for one). Sources: linux/wireguard.h,
linux/genetlink.h; encodings are compared with pyroute2's in the tests.
"""

from __future__ import annotations

import base64
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network

from backends.dataplane.model import Change, Endpoint, Wireguard, WireguardPeer
from backends.kernel.genl import attributes_of, request
from backends.kernel.rtnl import DUMP_FLAGS, NLA_F_NESTED, NLM_F_ACK, NLM_F_REQUEST, Header, attribute, attributes
from subnet.model import IPNetwork

FAMILY_NAME = "wireguard"
VERSION = 1
WG_CMD_GET_DEVICE, WG_CMD_SET_DEVICE = 0, 1
WGDEVICE_A_IFINDEX, WGDEVICE_A_PRIVATE_KEY, WGDEVICE_A_PUBLIC_KEY = 1, 3, 4
WGDEVICE_A_LISTEN_PORT, WGDEVICE_A_PEERS = 6, 8
WGPEER_A_PUBLIC_KEY, WGPEER_A_PRESHARED_KEY, WGPEER_A_FLAGS, WGPEER_A_ENDPOINT = 1, 2, 3, 4
WGPEER_A_KEEPALIVE, WGPEER_A_LAST_HANDSHAKE_TIME, WGPEER_A_TX_BYTES, WGPEER_A_ALLOWEDIPS = 5, 6, 8, 9
WGPEER_F_REMOVE_ME, WGPEER_F_REPLACE_ALLOWEDIPS = 0x1, 0x2
WGALLOWEDIP_A_FAMILY, WGALLOWEDIP_A_IPADDR, WGALLOWEDIP_A_CIDR_MASK = 1, 2, 3
NO_KEY = bytes(32)
"""How the kernel writes that there is no preshared key, and takes one away."""

_U8, _U16, _U32, _U64 = (struct.Struct(f"={code}") for code in "BHIQ")
_TIME = struct.Struct("=qq")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A peer as the kernel holds it. ``handshake_s``: Unix time of the last one, 0 for never."""

    peer: WireguardPeer
    handshake_s: float
    sent_bytes: int


def _raw(key: str) -> bytes:
    return base64.b64decode(key) if key else NO_KEY


def _text(key: bytes | None) -> str:
    return base64.b64encode(key).decode() if key and key != NO_KEY else ""


def get_device(family: int, index: int) -> bytes:
    """Ask for a device and all its peers: a dump."""
    return request(family, VERSION, DUMP_FLAGS, 0, WG_CMD_GET_DEVICE, attribute(WGDEVICE_A_IFINDEX, _U32.pack(index)))


def set_device(family: int, sequence: int, index: int, wanted: Wireguard) -> bytes:
    """Give a device its private key and, unless it is 0, its port. Peers stay."""
    body = attribute(WGDEVICE_A_IFINDEX, _U32.pack(index))
    body += attribute(WGDEVICE_A_PRIVATE_KEY, _raw(wanted.private_key))
    if wanted.port:
        body += attribute(WGDEVICE_A_LISTEN_PORT, _U16.pack(wanted.port))
    return request(family, VERSION, NLM_F_REQUEST | NLM_F_ACK, sequence, WG_CMD_SET_DEVICE, body)


def set_peer(family: int, sequence: int, index: int, change: Change, with_endpoint: bool = True) -> bytes:
    """Put or delete a peer. A put sets all there is, the endpoint only if asked to."""
    peer = change.target
    if not isinstance(peer, WireguardPeer):
        raise TypeError(f"no WireGuard message for {peer}")
    body = attribute(WGPEER_A_PUBLIC_KEY, _raw(peer.public_key))
    if change.verb == "delete":
        body += attribute(WGPEER_A_FLAGS, _U32.pack(WGPEER_F_REMOVE_ME))
    else:
        body += attribute(WGPEER_A_PRESHARED_KEY, _raw(peer.preshared_key))
        body += attribute(WGPEER_A_FLAGS, _U32.pack(WGPEER_F_REPLACE_ALLOWEDIPS))
        if with_endpoint and peer.endpoint is not None:
            body += attribute(WGPEER_A_ENDPOINT, _sockaddr(peer.endpoint))
        body += attribute(WGPEER_A_KEEPALIVE, _U16.pack(peer.keepalive_s))
        body += attribute(WGPEER_A_ALLOWEDIPS | NLA_F_NESTED, _array(map(_allowed_ip, peer.allowed)))
    peers = attribute(WGDEVICE_A_PEERS | NLA_F_NESTED, _array([body]))
    device = attribute(WGDEVICE_A_IFINDEX, _U32.pack(index))
    return request(family, VERSION, NLM_F_REQUEST | NLM_F_ACK, sequence, WG_CMD_SET_DEVICE, device + peers)


def _array(elements: Iterable[bytes]) -> bytes:
    return b"".join(attribute(number | NLA_F_NESTED, element) for number, element in enumerate(elements, 1))


def _sockaddr(endpoint: Endpoint) -> bytes:
    """The address as sockaddr_in or sockaddr_in6 (ip(7), ipv6(7))."""
    packed, port = endpoint.address.packed, _PORT.pack(endpoint.port)
    if endpoint.address.version == 4:
        return _FAMILY.pack(socket.AF_INET) + port + packed + bytes(8)
    return _FAMILY.pack(socket.AF_INET6) + port + bytes(4) + packed + bytes(4)


def _endpoint(raw: bytes) -> Endpoint:
    (family,), (port,) = _FAMILY.unpack_from(raw), _PORT.unpack_from(raw, 2)
    return Endpoint(ip_address(raw[4:8] if family == socket.AF_INET else raw[8:24]), port)


def _allowed_ip(network: IPNetwork) -> bytes:
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    return (
        attribute(WGALLOWEDIP_A_FAMILY, _U16.pack(family))
        + attribute(WGALLOWEDIP_A_IPADDR, network.network_address.packed)
        + attribute(WGALLOWEDIP_A_CIDR_MASK, _U8.pack(network.prefixlen))
    )


def decode_device(buffer: bytes, header: Header) -> Wireguard:
    """Return what the first message of a dump says of the device itself."""
    found = attributes_of(buffer, header)
    port = found.get(WGDEVICE_A_LISTEN_PORT, b"\0\0")
    return Wireguard(
        _U16.unpack(port)[0], _text(found.get(WGDEVICE_A_PRIVATE_KEY)), _text(found.get(WGDEVICE_A_PUBLIC_KEY))
    )


def decode_peers(dump: Iterable[tuple[bytes, Header]], device: str) -> list[PeerSeen]:
    """Return the peers of a dump. One whose networks fill a message goes on in the next."""
    found: dict[str, PeerSeen] = {}
    for buffer, header in dump:
        listed = attributes_of(buffer, header).get(WGDEVICE_A_PEERS, b"")
        for raw in _elements(listed):
            seen = _decode_peer(raw, device)
            key = seen.peer.public_key
            begun = found.get(key)
            if begun is not None:
                allowed = begun.peer.allowed + seen.peer.allowed
                seen = replace(begun, peer=replace(begun.peer, allowed=ordered(allowed)))
            found[key] = seen
    return list(found.values())


def ordered(networks: Iterable[IPNetwork]) -> tuple[IPNetwork, ...]:
    """Return networks in the order in which peers are compared: IPv4 first, ascending."""
    return tuple(sorted(networks, key=lambda n: (n.version, int(n.network_address), n.prefixlen)))


def _elements(raw: bytes) -> Iterator[bytes]:
    """Yield the elements of a nested array; their types mean nothing."""
    at = 0
    while at + 4 <= len(raw):
        (length,) = _U16.unpack_from(raw, at)
        if length < 4:
            return
        yield raw[at + 4 : at + length]
        at += (length + 3) & ~3


def _decode_peer(raw: bytes, device: str) -> PeerSeen:
    found = attributes(raw, 0, len(raw))
    networks: list[IPNetwork] = []
    for element in _elements(found.get(WGPEER_A_ALLOWEDIPS, b"")):
        parts = attributes(element, 0, len(element))
        networks.append(ip_network((parts[WGALLOWEDIP_A_IPADDR], parts[WGALLOWEDIP_A_CIDR_MASK][0])))
    endpoint = found.get(WGPEER_A_ENDPOINT)
    peer = WireguardPeer(
        device,
        _text(found.get(WGPEER_A_PUBLIC_KEY)),
        _endpoint(endpoint) if endpoint else None,
        ordered(networks),
        _U16.unpack(found.get(WGPEER_A_KEEPALIVE, b"\0\0"))[0],
        _text(found.get(WGPEER_A_PRESHARED_KEY)),
    )
    seconds, nanoseconds = _TIME.unpack(found.get(WGPEER_A_LAST_HANDSHAKE_TIME, bytes(16)))
    return PeerSeen(peer, seconds + nanoseconds / 1e9, _U64.unpack(found.get(WGPEER_A_TX_BYTES, bytes(8)))[0])
