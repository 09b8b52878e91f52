"""Wire format of links, addresses and look-ups: what every start asks the kernel, and what makes a tunnel device.

Pure encoding and decoding. pyroute2 takes longer to load than all else
together, and a device that somebody deleted is to be back sooner; only
WireGuard's are made through it. Sources: rtnetlink(7), linux/if_link.h,
linux/if_addr.h, linux/if_tunnel.h; encodings are compared with pyroute2's in
the tests.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface

from backends.dataplane.model import Address, Ip6Tunnel, Ipip, KeptTun, Link, LinkSpec, Tunnel, Vxlan, Wireguard
from backends.kernel.rtnl import (
    ADDRESS_FAMILY,
    AF_INET,
    AF_INET6,
    DELETE_FLAGS,
    DUMP_FLAGS,
    IFA_ADDRESS,
    IFA_FLAGS,
    IFA_LOCAL,
    IFLA_IFNAME,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_REQUEST,
    RTA_DST,
    RTA_GATEWAY,
    RTA_OIF,
    RTA_PREFSRC,
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    SCOPES,
    Header,
    attribute,
    attributes,
    message,
)
from subnet.model import IPAddress

RTM_GETLINK, RTM_GETADDR = 18, 22
NLM_F_EXCL = 0x200
CREATE_FLAGS = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL

IFF_UP, IFF_LOOPBACK, IFF_POINTOPOINT = 0x1, 0x8, 0x10
IFLA_ADDRESS, IFLA_MTU, IFLA_TXQLEN, IFLA_LINKINFO = 1, 4, 13, 18
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
VXLAN_ID, VXLAN_GROUP, VXLAN_LINK, VXLAN_LOCAL, VXLAN_TTL, VXLAN_TOS, VXLAN_LEARNING = range(1, 8)
VXLAN_PROXY, VXLAN_RSC, VXLAN_L2MISS, VXLAN_L3MISS, VXLAN_PORT, VXLAN_GROUP6, VXLAN_LOCAL6 = range(11, 18)
VXLAN_UDP_ZERO_CSUM6_TX, VXLAN_UDP_ZERO_CSUM6_RX, VXLAN_GBP = 19, 20, 23
IPTUN_LOCAL, IPTUN_REMOTE, IPTUN_TTL, IPTUN_TOS, IPTUN_PROTO, IPTUN_PMTUDISC = 2, 3, 4, 5, 9, 10
IPTUN_ENCAP_TYPE, IPTUN_ENCAP_FLAGS, IPTUN_ENCAP_SPORT, IPTUN_ENCAP_DPORT, IPTUN_COLLECT_METADATA = range(15, 20)
ENCAP_FOU, ENCAP_CSUM = 1, 1
"""TUNNEL_ENCAP_FOU, TUNNEL_ENCAP_FLAG_CSUM (linux/if_tunnel.h)."""
IPPROTO_IPV6 = 41
TUN_TYPE, TUN_PERSIST = 3, 6
IFF_TUN = 0x0001
IFA_LABEL = 3
IFA_F_SECONDARY, IFA_F_DEPRECATED, IFA_F_TENTATIVE, IFA_F_PERMANENT = 0x01, 0x20, 0x40, 0x80


_IFINFOMSG = struct.Struct("=BBHiII")
_IFADDRMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")
_U8, _U16, _U32 = struct.Struct("=B"), struct.Struct("=H"), struct.Struct("=I")
_PORT = struct.Struct("!H")


def dump_links(index: int = 0) -> bytes:
    """Ask for all devices, or for one."""
    return message(RTM_GETLINK, NLM_F_REQUEST if index else DUMP_FLAGS, 0, _IFINFOMSG.pack(0, 0, 0, index, 0, 0))


def dump_addresses() -> bytes:
    """Ask for the addresses of all devices."""
    return message(RTM_GETADDR, DUMP_FLAGS, 0, _IFADDRMSG.pack(0, 0, 0, 0, 0))


def get_route(target: IPAddress) -> bytes:
    """Ask for the way to an address."""
    family = ADDRESS_FAMILY[4 if target.version == 4 else 6]
    body = _RTMSG.pack(family, target.max_prefixlen, 0, 0, 0, 0, 0, 0, 0) + attribute(RTA_DST, target.packed)
    return message(RTM_GETROUTE, NLM_F_REQUEST, 0, body)


def address_change(put: bool, index: int, address: Address, sequence: int) -> bytes:
    """Return the request that gives a device an address, or takes it away."""
    raw = address.interface.ip.packed
    body = _IFADDRMSG.pack(ADDRESS_FAMILY[address.family], address.interface.network.prefixlen, 0, 0, index)
    body += attribute(IFA_LOCAL, raw) + attribute(IFA_ADDRESS, raw)
    if address.label:
        body += attribute(IFA_LABEL, address.label.encode() + b"\0")
    return message(RTM_NEWADDR if put else RTM_DELADDR, CREATE_FLAGS if put else DELETE_FLAGS, sequence, body)


def link_change(
    index: int, sequence: int, *, up: bool | None = None, mtu_bytes: int | None = None, mac: str | None = None
) -> bytes:
    """Return the request that changes a device; None leaves as it is."""
    body = _IFINFOMSG.pack(0, 0, 0, index, IFF_UP if up else 0, 0 if up is None else IFF_UP)
    if mtu_bytes is not None:
        body += attribute(IFLA_MTU, _U32.pack(mtu_bytes))
    if mac is not None:
        body += attribute(IFLA_ADDRESS, bytes.fromhex(mac.replace(":", "")))
    return message(RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, sequence, body)


def learning_change(index: int, sequence: int, learning: bool) -> bytes:
    """Return the request that switches a VXLAN device's learning."""
    body = _IFINFOMSG.pack(0, 0, 0, index, 0, 0)
    body += _kind(Vxlan.kind, attribute(VXLAN_LEARNING, _U8.pack(learning)))
    return message(RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, sequence, body)


def link_delete(index: int, sequence: int) -> bytes:
    """Return the request that deletes a device."""
    return message(RTM_DELLINK, DELETE_FLAGS, sequence, _IFINFOMSG.pack(0, 0, 0, index, 0, 0))


def link_create(spec: LinkSpec, sequence: int) -> bytes:
    """Return the request that makes a device, down and without addresses."""
    body = _IFINFOMSG.pack(0, 0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, spec.name.encode() + b"\0")
    body += attribute(IFLA_MTU, _U32.pack(spec.mtu_bytes)) + attribute(IFLA_TXQLEN, _U32.pack(0))
    if spec.mac:
        body += attribute(IFLA_ADDRESS, bytes.fromhex(spec.mac.replace(":", "")))
    body += _kind(spec.tunnel.kind, _data(spec.tunnel))
    return message(RTM_NEWLINK, CREATE_FLAGS, sequence, body)


def _kind(kind: str, data: bytes) -> bytes:
    info = attribute(IFLA_INFO_KIND, kind.encode() + b"\0") + attribute(IFLA_INFO_DATA | NLA_F_NESTED, data)
    return attribute(IFLA_LINKINFO | NLA_F_NESTED, info)


def _data(tunnel: Tunnel) -> bytes:
    """Return what makes the device. What is 0 here would otherwise be the kernel's choice."""
    match tunnel:
        case Vxlan():
            return _vxlan_data(tunnel)
        case Ipip():
            return _ipip_data(tunnel)
        case Ip6Tunnel():
            # The protocol keeps it to IPv6 inside IPv6; any would be taken otherwise.
            metadata = attribute(IPTUN_COLLECT_METADATA, b"") if tunnel.external else b""
            return attribute(IPTUN_PROTO, _U8.pack(IPPROTO_IPV6)) + metadata
        case Wireguard() | KeptTun():
            return b""


def _ipip_data(ipip: Ipip) -> bytes:
    zero = _U8.pack(0)
    data = b"".join(attribute(kind, zero) for kind in (IPTUN_TTL, IPTUN_TOS, IPTUN_PMTUDISC))
    for kind, end in ((IPTUN_LOCAL, ipip.local), (IPTUN_REMOTE, ipip.remote)):
        data += attribute(kind, end.packed) if end is not None else b""
    if ipip.fou_port:
        # With a checksum outside, as a socket sends: without one receivers do not merge datagrams. The TTL stays that
        # of the inner header: with one of its own the kernel would forbid fragmentation of every packet.
        data += attribute(IPTUN_ENCAP_TYPE, _U16.pack(ENCAP_FOU)) + attribute(IPTUN_ENCAP_FLAGS, _U16.pack(ENCAP_CSUM))
        for kind in (IPTUN_ENCAP_SPORT, IPTUN_ENCAP_DPORT):
            data += attribute(kind, _PORT.pack(ipip.fou_port))
    return data


def _vxlan_data(vxlan: Vxlan) -> bytes:
    zero = _U8.pack(0)
    data = attribute(VXLAN_ID, _U32.pack(vxlan.vni)) + attribute(VXLAN_LINK, _U32.pack(vxlan.lower_index))
    data += attribute(VXLAN_TTL, zero) + attribute(VXLAN_TOS, zero)
    data += attribute(VXLAN_LEARNING, _U8.pack(vxlan.learning))
    for off in (VXLAN_PROXY, VXLAN_RSC, VXLAN_L2MISS, VXLAN_L3MISS):
        data += attribute(off, zero)
    data += attribute(VXLAN_UDP_ZERO_CSUM6_TX, zero) + attribute(VXLAN_UDP_ZERO_CSUM6_RX, zero)
    if vxlan.local is not None:
        data += attribute(VXLAN_LOCAL if vxlan.local.version == 4 else VXLAN_LOCAL6, vxlan.local.packed)
    if vxlan.gbp:
        data += attribute(VXLAN_GBP, b"")
    if vxlan.port:
        data += attribute(VXLAN_PORT, _PORT.pack(vxlan.port))
    return data


def decode_link(buffer: bytes, header: Header) -> Link:
    """Return a device."""
    _, _, _, index, flags, _ = _IFINFOMSG.unpack_from(buffer, header.start)
    found = attributes(buffer, header.start + _IFINFOMSG.size, header.end)
    raw_info = found.get(IFLA_LINKINFO, b"")
    info = attributes(raw_info, 0, len(raw_info))
    kind = _text(info.get(IFLA_INFO_KIND, b""))
    data = info.get(IFLA_INFO_DATA)
    return Link(
        name=_text(found.get(IFLA_IFNAME, b"")),
        index=index,
        kind=kind,
        mac=found.get(IFLA_ADDRESS, b"").hex(":"),
        mtu_bytes=_number(found, IFLA_MTU),
        up=bool(flags & IFF_UP),
        tunnel=None if data is None else _tunnel(kind, attributes(data, 0, len(data))),
        loopback=bool(flags & IFF_LOOPBACK),
        point_to_point=bool(flags & IFF_POINTOPOINT),
    )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _number(found: dict[int, bytes], kind: int) -> int:
    """Return an attribute of one, two or four bytes in host order, 0 if it is absent."""
    raw = found.get(kind, b"")
    return {1: _U8, 2: _U16, 4: _U32}[len(raw)].unpack(raw)[0] if len(raw) in {1, 2, 4} else 0


def _tunnel(kind: str, data: dict[int, bytes]) -> Tunnel | None:
    """Return what makes an existing device, None for kinds that no backend makes or that say nothing here."""
    match kind:
        case Vxlan.kind:
            return _vxlan(data)
        case Ipip.kind:
            fou = _number(data, IPTUN_ENCAP_TYPE) == ENCAP_FOU
            port = data.get(IPTUN_ENCAP_DPORT) if fou else None
            ends = _end(data.get(IPTUN_LOCAL)), _end(data.get(IPTUN_REMOTE))
            return Ipip(*ends, _PORT.unpack(port)[0] if port else 0)
        case Ip6Tunnel.kind:
            return Ip6Tunnel(IPTUN_COLLECT_METADATA in data)
        case KeptTun.kind:
            kept = _number(data, TUN_TYPE) == IFF_TUN and _number(data, TUN_PERSIST)
            return KeptTun() if kept else None
        case _:
            return None


def _end(raw: bytes | None) -> IPv4Address | None:
    """An end of a tunnel; all zero is how the kernel writes that any will do."""
    return IPv4Address(raw) if raw and any(raw) else None


def _vxlan(data: dict[int, bytes]) -> Vxlan:
    raw = data.get(VXLAN_LOCAL) or data.get(VXLAN_LOCAL6)
    local: IPv4Address | IPv6Address | None = ip_address(raw) if raw else None
    port = data.get(VXLAN_PORT)
    return Vxlan(
        vni=_number(data, VXLAN_ID),
        port=_PORT.unpack(port)[0] if port else 0,
        local=local,
        lower_index=_number(data, VXLAN_LINK),
        learning=bool(_number(data, VXLAN_LEARNING)),
        gbp=VXLAN_GBP in data,
        multicast=VXLAN_GROUP in data or VXLAN_GROUP6 in data,
        l2miss=bool(_number(data, VXLAN_L2MISS)),
    )


def decode_address(buffer: bytes, header: Header) -> tuple[int, Address] | None:
    """Return device index and address, None for other protocols."""
    family, length, flags, scope, index = _IFADDRMSG.unpack_from(buffer, header.start)
    if family not in (AF_INET, AF_INET6):
        return None
    found = attributes(buffer, header.start + _IFADDRMSG.size, header.end)
    raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS))
    if raw is None:
        return None
    flags = _number(found, IFA_FLAGS) or flags
    return index, Address(
        device="",
        interface=ip_interface((raw, length)),
        scope=SCOPES.get(scope, "global"),
        dynamic=not flags & IFA_F_PERMANENT,
        temporary=bool(flags & IFA_F_SECONDARY),
        deprecated=bool(flags & IFA_F_DEPRECATED),
        tentative=bool(flags & IFA_F_TENTATIVE),
        label=_text(found.get(IFA_LABEL, b"")),
    )


@dataclass(frozen=True, slots=True)
class Way:
    """How packets to an address leave: device index (0: none), gateway, source address."""

    index: int
    gateway: IPAddress | None
    source: IPAddress | None


def decode_way(buffer: bytes, header: Header) -> Way:
    """Return the answer to ``get_route``."""
    found = attributes(buffer, header.start + _RTMSG.size, header.end)
    gateway, source = found.get(RTA_GATEWAY), found.get(RTA_PREFSRC)
    return Way(
        _number(found, RTA_OIF),
        ip_address(gateway) if gateway else None,
        ip_address(source) if source else None,
    )
