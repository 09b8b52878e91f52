"""Wire format of the netlink messages that set tunnel policies of IPsec and remove security associations.

Pure encoding and decoding: pyroute2 has no messages of this protocol. Source:
linux/xfrm.h; the tests compare with what ip-xfrm(8) makes and shows.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Literal

from backends.dataplane.model import Change, IpsecPolicy
from backends.kernel.rtnl import DUMP_FLAGS, NLM_F_ACK, NLM_F_REQUEST, Header, attribute, attributes, message
from subnet.model import IPAddress, IPNetwork

XFRM_MSG_NEWSA, XFRM_MSG_DELSA, XFRM_MSG_GETSA = 0x10, 0x11, 0x12
XFRM_MSG_NEWPOLICY, XFRM_MSG_DELPOLICY, XFRM_MSG_GETPOLICY, XFRM_MSG_UPDPOLICY = 0x13, 0x14, 0x15, 0x19
XFRMA_TMPL, XFRMA_SRCADDR, XFRMA_MARK, XFRMA_IF_ID = 5, 13, 21, 31
DIRECTIONS: dict[int, Literal["out", "in", "fwd"]] = {0: "in", 1: "out", 2: "fwd"}
DIRECTION_NUMBERS = {name: number for number, name in DIRECTIONS.items()}
XFRM_POLICY_ALLOW, XFRM_MODE_TUNNEL = 0, 1
REQID = 11
"""What joins policies and security associations on every node of a cluster, upstream's included."""
PRIORITY = 0
NO_LIMIT = (1 << 64) - 1
ALL_ALGORITHMS = (1 << 32) - 1

_SELECTOR = struct.Struct("=16s16sHHHHHBBB3xiI")
_LIFETIME = struct.Struct("=QQQQQQQQ")
_USED = struct.Struct("=QQQQ")
_POLICY_END = struct.Struct("=IIBBBB4x")
_ID_END = struct.Struct("=IB3x")
_TEMPLATE = struct.Struct("=16sIB3xH2x16sIBBBxIII")
_ID = struct.Struct("=16sIB3x16s")
_SA_ID = struct.Struct("=16sIHBx")
_REQID_AND_FAMILY = struct.Struct("=IH")
_REQID_AT = _SELECTOR.size + _ID.size + _LIFETIME.size + _USED.size + 16
_POLICY_START = _SELECTOR.size + _LIFETIME.size + _USED.size


def _selector(policy: IpsecPolicy) -> bytes:
    source, destination = policy.source, policy.destination
    return _SELECTOR.pack(
        _packed(destination.network_address),
        _packed(source.network_address),
        *(0, 0, 0, 0),
        _family(source.version),
        destination.prefixlen,
        source.prefixlen,
        *(0, 0, 0),
    )


def _packed(address: IPAddress) -> bytes:
    return address.packed.ljust(16, b"\0")


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def encode(change: Change, sequence: int) -> bytes:
    """Return the request for one change of a policy; a put adds or replaces."""
    policy = change.target
    if not isinstance(policy, IpsecPolicy):
        raise TypeError(f"no policy message for {policy}")
    flags, selector, direction = NLM_F_REQUEST | NLM_F_ACK, _selector(policy), DIRECTION_NUMBERS[policy.direction]
    if change.verb == "delete":
        return message(XFRM_MSG_DELPOLICY, flags, sequence, selector + _ID_END.pack(0, direction))
    body = selector + _LIFETIME.pack(NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT, 0, 0, 0, 0) + _USED.pack(0, 0, 0, 0)
    body += _POLICY_END.pack(PRIORITY, 0, direction, XFRM_POLICY_ALLOW, 0, 0)
    template = _TEMPLATE.pack(
        _packed(policy.outer_destination),
        0,
        socket.IPPROTO_ESP,
        _family(policy.outer_source.version),
        _packed(policy.outer_source),
        REQID,
        XFRM_MODE_TUNNEL,
        0,
        0,
        *(ALL_ALGORITHMS, ALL_ALGORITHMS, ALL_ALGORITHMS),
    )
    return message(XFRM_MSG_UPDPOLICY, flags, sequence, body + attribute(XFRMA_TMPL, template))


def dump_policies(sequence: int = 0) -> bytes:
    """Ask for all policies of the network namespace."""
    return message(XFRM_MSG_GETPOLICY, DUMP_FLAGS, sequence, bytes(_SELECTOR.size + _ID_END.size))


@dataclass(frozen=True, slots=True)
class Association:
    """What tells a security association of ours from others. ``spi`` as on the wire, read as a number of this host."""

    source: IPAddress
    destination: IPAddress
    spi: int
    protocol: int


def dump_associations(sequence: int = 0) -> bytes:
    """Ask for all security associations of the network namespace."""
    return message(XFRM_MSG_GETSA, DUMP_FLAGS, sequence, b"")


def decode_association(buffer: bytes, header: Header) -> Association | None:
    """Return an association under our request id, None for every other."""
    destination, spi, protocol, source = _ID.unpack_from(buffer, header.start + _SELECTOR.size)
    reqid, family = _REQID_AND_FAMILY.unpack_from(buffer, header.start + _REQID_AT)
    if reqid != REQID:
        return None
    return Association(_address(source, family), _address(destination, family), spi, protocol)


def delete_association(association: Association, sequence: int) -> bytes:
    """Remove an association; its keys are gone with it."""
    destination = association.destination
    body = _SA_ID.pack(_packed(destination), association.spi, _family(destination.version), association.protocol)
    body += attribute(XFRMA_SRCADDR, _packed(association.source))
    return message(XFRM_MSG_DELSA, NLM_F_REQUEST | NLM_F_ACK, sequence, body)


def decode(buffer: bytes, header: Header) -> IpsecPolicy | None:
    """Return a policy of the form that ``encode`` makes, None for every other."""
    *ends, family, length_d, length_s, protocol, index, user = _SELECTOR.unpack_from(buffer, header.start)
    priority, _, direction, action, _, _ = _POLICY_END.unpack_from(buffer, header.start + _POLICY_START)
    found = attributes(buffer, header.start + _POLICY_START + _POLICY_END.size, header.end)
    raw = found.get(XFRMA_TMPL, b"")
    plain = not any(ends[2:]) and not protocol and not index and not user and found.keys().isdisjoint(_FOREIGN)
    if not plain or (priority, action) != (PRIORITY, XFRM_POLICY_ALLOW) or len(raw) != _TEMPLATE.size:
        return None
    outer_d, _, kind, outer_family, outer_s, reqid, mode, _, optional, *_ = _TEMPLATE.unpack(raw)
    if (kind, reqid, mode, optional) != (socket.IPPROTO_ESP, REQID, XFRM_MODE_TUNNEL, 0):
        return None
    if direction not in DIRECTIONS:
        return None
    return IpsecPolicy(
        DIRECTIONS[direction],
        _network(ends[1], family, length_s),
        _network(ends[0], family, length_d),
        _address(outer_s, outer_family),
        _address(outer_d, outer_family),
    )


_FOREIGN = frozenset({XFRMA_MARK, XFRMA_IF_ID})


def _address(raw: bytes, family: int) -> IPAddress:
    return ip_address(raw[:4] if family == socket.AF_INET else raw)


def _network(raw: bytes, family: int, length: int) -> IPNetwork:
    return ip_network((_address(raw, family), length), strict=False)
