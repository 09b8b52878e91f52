"""Wire format of the rtnetlink messages that grow with the number of peers.

Pure encoding and decoding of neighbours, FDB entries and routes, and decoding
of the notifications the monitor listens to; links and addresses are in
``linkmsg``. Sources: rtnetlink(7), netlink(7), linux/rtnetlink.h,
linux/neighbour.h; encodings are compared with pyroute2's in the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_interface, ip_network

from backends.dataplane.model import (
    METRIC,
    Address,
    Change,
    Encap,
    FdbEntry,
    KernelObject,
    Neighbour,
    Route,
)
from backends.dataplane.ports import HookSeen, KernelEvent, LinkSeen, ObjectSeen
from subnet.model import Family, IPAddress

AF_INET, AF_INET6, AF_BRIDGE = 2, 10, 7
ADDRESS_FAMILY: dict[Family, int] = {4: AF_INET, 6: AF_INET6}

NLMSG_ERROR, NLMSG_DONE, NLMSG_OVERRUN = 2, 3, 4
RTM_NEWLINK, RTM_DELLINK = 16, 17
RTM_NEWADDR, RTM_DELADDR = 20, 21
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30
RTM_DELQDISC, RTM_DELTFILTER = 37, 45

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR = 0x01, 0x04, 0x10
NLM_F_DUMP, NLM_F_REPLACE, NLM_F_CREATE = 0x300, 0x100, 0x400
NLM_F_ACK_TLVS = 0x200
PUT_FLAGS = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
DELETE_FLAGS = NLM_F_REQUEST | NLM_F_ACK
DUMP_FLAGS = NLM_F_REQUEST | NLM_F_DUMP

NUD_PERMANENT = 0x80
NTF_SELF = 0x02
NDA_DST, NDA_LLADDR, NDA_CACHEINFO, NDA_PROBES, NDA_IFINDEX = 1, 2, 3, 4, 8
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC, RTA_MULTIPATH, RTA_TABLE = 1, 4, 5, 6, 7, 9, 15
RTA_ENCAP_TYPE, RTA_ENCAP = 21, 22
RTA_CACHEINFO, RTA_NH_ID = 12, 30
LWTUNNEL_ENCAP_IP6, LWTUNNEL_IP6_DST, LWTUNNEL_IP6_SRC = 4, 2, 3
NLA_F_NESTED = 0x8000
IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFLA_IFNAME = 3
NLMSGERR_ATTR_MSG = 1
RT_TABLE_MAIN = 254
RT_SCOPE_UNIVERSE, RT_SCOPE_NOWHERE = 0, 255
SCOPES = {0: "global", 200: "site", 253: "link", 254: "host", RT_SCOPE_NOWHERE: "nowhere"}
SCOPE_NUMBERS = {name: number for number, name in SCOPES.items()}
RTN_UNICAST = 1
RTNH_F_ONLINK = 0x04
RTM_F_CLONED = 0x200
ROUTE_TYPES = {1: "unicast", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
ROUTE_TYPE_NUMBERS = {name: number for number, name in ROUTE_TYPES.items()}
ARPHRD_ETHER = 1

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_NDMSG = struct.Struct("=BBHiHBB")
_RTMSG = struct.Struct("=BBBBBBBBI")
_IFADDRMSG = struct.Struct("=BBBBI")
_IFINFOMSG = struct.Struct("=BBHiII")
_TCMSG = struct.Struct("=xxxxiIII")
_RTNEXTHOP = struct.Struct("=HBBi")
_U16 = struct.Struct("=H")
_U32 = struct.Struct("=I")
_I32 = struct.Struct("=i")
_ATTRIBUTE_TYPE_MASK = 0x3FFF  # NLA_F_NESTED and NLA_F_NET_BYTEORDER are flags in the same field


def attribute(kind: int, value: bytes) -> bytes:
    """Return one attribute, padded."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """Return one netlink message with its header; port id 0 lets the kernel fill it in."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def with_sequence(request: bytes, sequence: int) -> bytes:
    """Return the same message under another sequence number."""
    return request[:8] + _U32.pack(sequence) + request[12:]


def acknowledged(request: bytes) -> bytes:
    """Return the same message, to be acknowledged."""
    return request[:6] + _U16.pack(_U16.unpack_from(request, 6)[0] | NLM_F_ACK) + request[8:]


def unacknowledged(request: bytes) -> bytes:
    """Return the same message, of which only a refusal is told."""
    return request[:6] + _U16.pack(_U16.unpack_from(request, 6)[0] & ~NLM_F_ACK) + request[8:]


def _mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _mac_text(raw: bytes) -> str:
    return raw.hex(":")


def _neighbour_body(index: int, entry: Neighbour) -> bytes:
    family = ADDRESS_FAMILY[4 if entry.address.version == 4 else 6]
    return (
        _NDMSG.pack(family, 0, 0, index, NUD_PERMANENT, 0, ARPHRD_ETHER)
        + attribute(NDA_DST, entry.address.packed)
        + attribute(NDA_LLADDR, _mac_bytes(entry.mac))
    )


def _fdb_body(index: int, entry: FdbEntry) -> bytes:
    return (
        _NDMSG.pack(AF_BRIDGE, 0, 0, index, NUD_PERMANENT, NTF_SELF, 0)
        + attribute(NDA_DST, entry.remote.packed)
        + attribute(NDA_LLADDR, _mac_bytes(entry.mac))
    )


def _route_body(index: int, route: Route, scope: int) -> bytes:
    flags = RTNH_F_ONLINK if route.onlink else 0
    body = _RTMSG.pack(
        ADDRESS_FAMILY[route.family],
        route.destination.prefixlen,
        0,
        0,
        RT_TABLE_MAIN,
        route.protocol,
        scope,
        ROUTE_TYPE_NUMBERS[route.type],
        flags,
    ) + attribute(RTA_DST, route.destination.network_address.packed)
    if route.gateway is not None:
        body += attribute(RTA_GATEWAY, route.gateway.packed)
    if index:
        body += attribute(RTA_OIF, _U32.pack(index))
    if route.source is not None:
        body += attribute(RTA_PREFSRC, route.source.packed)
    if route.metric is not None:
        body += attribute(RTA_PRIORITY, _U32.pack(route.metric))
    if route.encap is not None:
        header = attribute(LWTUNNEL_IP6_DST, route.encap.destination.packed)
        header += attribute(LWTUNNEL_IP6_SRC, route.encap.source.packed)
        body += attribute(RTA_ENCAP | NLA_F_NESTED, header)
        body += attribute(RTA_ENCAP_TYPE, _U16.pack(LWTUNNEL_ENCAP_IP6))
    return body


def encode(change: Change, index: int, sequence: int) -> bytes:
    """Return the request for one change of a neighbour, FDB entry or route; ``index`` is its device's."""
    target, put = change.target, change.verb == "put"
    flags = PUT_FLAGS if put else DELETE_FLAGS
    if isinstance(target, Route):
        # Deleting must not ask for one scope.
        body = _route_body(index, target, SCOPE_NUMBERS[target.scope] if put else RT_SCOPE_NOWHERE)
        return message(RTM_NEWROUTE if put else RTM_DELROUTE, flags, sequence, body)
    if isinstance(target, Neighbour):
        body = _neighbour_body(index, target)
    elif isinstance(target, FdbEntry):
        body = _fdb_body(index, target)
    else:
        raise TypeError(f"no bulk message for {target}")
    return message(RTM_NEWNEIGH if put else RTM_DELNEIGH, flags, sequence, body)


def dump_neighbours(family: Family, index: int, sequence: int = 0) -> bytes:
    """Ask for one device's neighbours; needs strict checking to be filtered by the kernel."""
    body = _NDMSG.pack(ADDRESS_FAMILY[family], 0, 0, 0, 0, 0, 0) + attribute(NDA_IFINDEX, _U32.pack(index))
    return message(RTM_GETNEIGH, DUMP_FLAGS, sequence, body)


def dump_fdb(index: int, sequence: int = 0) -> bytes:
    """Ask for one device's FDB entries; the kernel takes the index from the header here."""
    return message(RTM_GETNEIGH, DUMP_FLAGS, sequence, _NDMSG.pack(AF_BRIDGE, 0, 0, index, 0, 0, 0))


def dump_routes(family: Family, sequence: int = 0) -> bytes:
    """Ask for one family's routes of the main table."""
    body = _RTMSG.pack(ADDRESS_FAMILY[family], 0, 0, 0, RT_TABLE_MAIN, 0, 0, 0, 0)
    return message(RTM_GETROUTE, DUMP_FLAGS, sequence, body)


@dataclass(frozen=True, slots=True)
class Header:
    """A netlink message header and where its payload lies in the buffer."""

    kind: int
    flags: int
    sequence: int
    port: int
    start: int
    end: int


def messages(buffer: bytes) -> Iterator[Header]:
    """Yield the messages of one datagram; a truncated tail ends the iteration."""
    offset = 0
    while offset + _HEADER.size <= len(buffer):
        length, kind, flags, sequence, port = _HEADER.unpack_from(buffer, offset)
        if length < _HEADER.size or offset + length > len(buffer):
            return
        yield Header(kind, flags, sequence, port, offset + _HEADER.size, offset + length)
        offset += (length + 3) & ~3


def attributes(buffer: bytes, start: int, end: int) -> dict[int, bytes]:
    """Return the attributes in a part of a buffer by type, without the flags that types carry."""
    found: dict[int, bytes] = {}
    while start + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(buffer, start)
        if length < _ATTRIBUTE.size or start + length > end:
            break
        found[kind & _ATTRIBUTE_TYPE_MASK] = buffer[start + _ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3
    return found


def decode_error(buffer: bytes, header: Header) -> tuple[int, str]:
    """Return errno (0: acknowledged) and the kernel's own words, if it gave any."""
    (code,) = _I32.unpack_from(buffer, header.start)
    text = ""
    if header.flags & NLM_F_ACK_TLVS:
        said = attributes(buffer, header.start + _I32.size + _HEADER.size, header.end).get(NLMSGERR_ATTR_MSG)
        text = said.rstrip(b"\0").decode(errors="replace") if said else ""
    return -code, text


def _address(raw: bytes) -> IPAddress:
    return ip_address(raw)


def decode_neighbour(buffer: bytes, header: Header) -> tuple[int, Neighbour | FdbEntry, bool] | None:
    """Return device index, entry and whether it is permanent; None for what is no unicast entry of a tunnel."""
    family, _, _, index, state, _, _ = _NDMSG.unpack_from(buffer, header.start)
    found = attributes(buffer, header.start + _NDMSG.size, header.end)
    raw_mac, raw_address = found.get(NDA_LLADDR, b""), found.get(NDA_DST)
    if raw_address is None:
        return None
    permanent = bool(state & NUD_PERMANENT)
    mac = _mac_text(raw_mac)
    if family != AF_BRIDGE:
        return index, Neighbour("", _address(raw_address), mac), permanent
    # The kernel's own flooding entries have a zero or a multicast MAC: not ours, never touched.
    if len(raw_mac) != 6 or raw_mac[0] & 1 or not any(raw_mac):
        return None
    return index, FdbEntry("", mac, _address(raw_address)), permanent


def _decode_encap(found: Mapping[int, bytes]) -> Encap | None:
    """Return the outer IPv6 header that a route gives its packets, None for none and for other kinds."""
    if RTA_ENCAP not in found or _U16.unpack(found.get(RTA_ENCAP_TYPE, b"\0\0"))[0] != LWTUNNEL_ENCAP_IP6:
        return None
    header = attributes(found[RTA_ENCAP], 0, len(found[RTA_ENCAP]))
    unset = b"\0" * 16
    return Encap(IPv6Address(header.get(LWTUNNEL_IP6_SRC, unset)), IPv6Address(header.get(LWTUNNEL_IP6_DST, unset)))


def decode_route(buffer: bytes, header: Header) -> tuple[int, Route] | None:
    """Return device index (0: none) and route; None for other tables and cache entries.

    A multipath route has type ``multipath`` and the device and gateway of its first next hop.
    """
    family, length, _, _, table, protocol, scope, kind, flags = _RTMSG.unpack_from(buffer, header.start)
    if family not in (AF_INET, AF_INET6) or kind not in ROUTE_TYPES or flags & RTM_F_CLONED:
        return None
    found = attributes(buffer, header.start + _RTMSG.size, header.end)
    if RTA_TABLE in found:
        (table,) = _U32.unpack(found[RTA_TABLE])
    index = _U32.unpack(found[RTA_OIF])[0] if RTA_OIF in found else 0
    name = ROUTE_TYPES[kind]
    if RTA_MULTIPATH in found:
        hops = found[RTA_MULTIPATH]
        size, _, _, index = _RTNEXTHOP.unpack_from(hops)
        found |= attributes(hops, _RTNEXTHOP.size, size)
        name = "multipath"
    if table != RT_TABLE_MAIN or (name == "unicast" and not index):
        return None
    if name not in {"unicast", "multipath"}:
        # IPv6 shows these on the loopback device, IPv4 on none.
        index = 0
    version: Family = 4 if family == AF_INET else 6
    raw = found.get(RTA_DST, b"\0" * (4 if version == 4 else 16))
    metric: int | None = _U32.unpack(found[RTA_PRIORITY])[0] if RTA_PRIORITY in found else METRIC[version]
    return index, Route(
        destination=ip_network((raw, length)),
        device="",
        gateway=_address(found[RTA_GATEWAY]) if RTA_GATEWAY in found else None,
        onlink=bool(flags & RTNH_F_ONLINK),
        protocol=protocol,
        metric=None if metric == METRIC[version] else metric,
        type=name,
        source=_address(found[RTA_PREFSRC]) if RTA_PREFSRC in found else None,
        encap=_decode_encap(found),
        scope=SCOPES.get(scope, "global"),
    )


def _decode_address(buffer: bytes, header: Header) -> tuple[int, Address] | None:
    family, length, _, _, index = _IFADDRMSG.unpack_from(buffer, header.start)
    if family not in (AF_INET, AF_INET6):
        return None
    found = attributes(buffer, header.start + _IFADDRMSG.size, header.end)
    raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS))
    return None if raw is None else (index, Address("", ip_interface((raw, length))))


def decode_event(buffer: bytes, header: Header) -> KernelEvent | None:
    """Return what a notification says, None for what nobody waits for."""
    gone = header.kind in (RTM_DELLINK, RTM_DELADDR, RTM_DELROUTE, RTM_DELNEIGH)
    found: tuple[int, KernelObject] | None = None
    if header.kind in (RTM_NEWLINK, RTM_DELLINK):
        _, _, _, index, _, _ = _IFINFOMSG.unpack_from(buffer, header.start)
        name = attributes(buffer, header.start + _IFINFOMSG.size, header.end).get(IFLA_IFNAME, b"")
        return LinkSeen(name.rstrip(b"\0").decode(errors="replace"), index, gone)
    if header.kind in (RTM_DELQDISC, RTM_DELTFILTER):
        return HookSeen(int(_TCMSG.unpack_from(buffer, header.start)[0]))
    if header.kind in (RTM_NEWADDR, RTM_DELADDR):
        found = _decode_address(buffer, header)
    elif header.kind in (RTM_NEWROUTE, RTM_DELROUTE):
        found = decode_route(buffer, header)
    elif header.kind in (RTM_NEWNEIGH, RTM_DELNEIGH):
        entry = decode_neighbour(buffer, header)
        if entry is not None:
            index, target, permanent = entry
            # An entry that lost its permanence no longer is what we wrote.
            found = index, target
            gone = gone or not permanent
    return None if found is None else ObjectSeen(found[1], found[0], gone)
