"""IPv6 packets as the pump handles them; ``packet`` for the other family. Pure.

Sources: RFC 8200 (IPv6), RFC 4443 (ICMPv6: what is answered, and how).
"""

from __future__ import annotations

import struct
from typing import Final

from backends.udp.packet import (
    FRAGMENTATION_NEEDED,
    NET_UNREACHABLE,
    TIME_EXCEEDED,
    Buffer,
    Header,
    checksum,
)

HEADER_BYTES: Final = 40
OVERHEAD_BYTES: Final = 48
"""Outer IPv6 and UDP header."""

PROTO_ICMP: Final = 58
_KINDS: Final = {NET_UNREACHABLE: (1, 0), FRAGMENTATION_NEEDED: (2, 0), TIME_EXCEEDED: (3, 0)}
"""Type and code by those of IPv4."""
_FIRST_INFORMATIONAL: Final = 128
_REDIRECT: Final = 137
_LIMIT_BYTES: Final = 1280
"""An ICMP error quotes as much of its offender as fits into this (RFC 4443 s2.4 c)."""
_EXTENSIONS: Final = frozenset({0, 43, 44, 60})
_FRAGMENT: Final = 44
_OFFSET_MASK: Final = 0xFFF8
_IP = struct.Struct("!IHBB16s16s")
_ICMP = struct.Struct("!BBHI")
_HOPS_AT: Final = 7
_DF: Final = 0x4000
"""In IPv4's words: no router fragments it."""


def parse(packet: Buffer) -> Header | None:
    """Return the header, None for what is no whole IPv6 packet. Bytes after the packet's end are tolerated."""
    if len(packet) < HEADER_BYTES:
        return None
    first, payload, following, hops, source, destination = _IP.unpack_from(packet)
    if first >> 28 != 6 or HEADER_BYTES + payload > len(packet):
        return None
    protocol, at, later = _upper(packet, following, HEADER_BYTES + payload)
    return Header(
        at,
        HEADER_BYTES + payload,
        _DF | later,
        hops,
        protocol,
        int.from_bytes(source, "big"),
        int.from_bytes(destination, "big"),
    )


def _upper(packet: Buffer, following: int, end: int) -> tuple[int, int, int]:
    """Return protocol and offset behind the extension headers (RFC 8200 s4), and 1 for a later fragment."""
    at = HEADER_BYTES
    while following in _EXTENSIONS:
        if at + 8 > end:
            return following, end, 1
        if following == _FRAGMENT and int.from_bytes(packet[at + 2 : at + 4], "big") & _OFFSET_MASK:
            return following, at, 1
        length = 8 if following == _FRAGMENT else 8 * (packet[at + 1] + 1)
        following, at = packet[at], at + length
    return following, min(at, end), int(at > end)


def decrement_ttl(packet: bytearray | memoryview) -> None:
    """Take one from the hop limit, which must not be 0."""
    packet[_HOPS_AT] -= 1


def may_answer(packet: Buffer, header: Header) -> bool:
    """Whether an ICMP error about the packet may be sent (RFC 4443 s2.4 e)."""
    if header.later_fragment or header.source <= 1 or header.source >> 120 == 0xFF or header.destination >> 120 == 0xFF:
        return False
    if header.protocol != PROTO_ICMP:
        return True
    if header.total_bytes <= header.header_bytes:
        return False
    return packet[header.header_bytes] >= _FIRST_INFORMATIONAL and packet[header.header_bytes] != _REDIRECT


def icmp_error(kind: tuple[int, int], offender: Buffer, header: Header, source: int, mtu_bytes: int = 0) -> bytes:
    """Return the ICMPv6 error packet that means what ``kind`` does in IPv4."""
    quote = bytes(offender[: min(header.total_bytes, _LIMIT_BYTES - HEADER_BYTES - _ICMP.size)])
    body = _ICMP.pack(*_KINDS[kind], 0, mtu_bytes) + quote
    ends = source.to_bytes(16, "big") + header.source.to_bytes(16, "big")
    value = checksum(ends + struct.pack("!II", len(body), PROTO_ICMP) + body)
    body = body[:2] + value.to_bytes(2, "big") + body[4:]
    return _IP.pack(6 << 28, len(body), PROTO_ICMP, 64, ends[:16], ends[16:]) + body
