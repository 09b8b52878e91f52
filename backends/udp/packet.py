"""IPv4 packets as the pump handles them: checks, TTL, checksums, ICMP errors; ``packet6`` for IPv6. Pure.

Sources: RFC 791 (IPv4), RFC 792 (ICMP), RFC 1071 and 1624 (checksum and its
incremental update), RFC 1122 s3.2.2 and RFC 1812 s4.3.2 (when and how to
answer with ICMP), RFC 1191 (fragmentation needed).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES: Final = 20
"""An IPv4 header without options."""
OVERHEAD_BYTES: Final = 28
"""Outer IPv4 and UDP header."""
MAX_DATAGRAM_BYTES: Final = 65535 - OVERHEAD_BYTES

PROTO_ICMP: Final = 1
NET_UNREACHABLE: Final = (3, 0)
FRAGMENTATION_NEEDED: Final = (3, 4)
TIME_EXCEEDED: Final = (11, 0)
_ICMP_ERRORS: Final = frozenset({3, 4, 5, 11, 12})
_ICMP_TTL: Final = 64
_ICMP_LIMIT_BYTES: Final = 576
"""An ICMP error quotes as much of its offender as fits into this (RFC 1812 s4.3.2.3)."""

GLANCE: Final = struct.Struct("!BxHxxxxBBHxxxxI")
"""Version and header length, total length, TTL, protocol, header checksum, destination."""
TTL: Final = struct.Struct("!BBH")
TTL_AT: Final = 8
"""TTL, protocol and header checksum lie together."""

_DF, _OFFSET_MASK = 0x4000, 0x1FFF
_IP = struct.Struct("!BBHHHBBHII")
_ICMP = struct.Struct("!BBHHH")


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of an IP header that forwarding looks at. Addresses are numbers."""

    header_bytes: int
    total_bytes: int
    fragment: int
    ttl: int
    protocol: int
    source: int
    destination: int

    @property
    def unfragmentable(self) -> bool:
        """Whether the sender forbids fragmentation."""
        return bool(self.fragment & _DF)

    @property
    def later_fragment(self) -> bool:
        """Whether this is a fragment other than the first."""
        return bool(self.fragment & _OFFSET_MASK)


def checksum(data: Buffer) -> int:
    """Return the Internet checksum: the ones' complement of the 16-bit ones' complement sum."""
    total = int(sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) & ~1])))
    if len(data) & 1:
        total += data[-1] << 8
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def parse(packet: Buffer) -> Header | None:
    """Return the header, None for what is no whole IPv4 packet or has a wrong header checksum.

    Bytes after the packet's end are tolerated, as upstream and the kernel do.
    """
    if len(packet) < HEADER_BYTES:
        return None
    first, _, total, _, fragment, ttl, protocol, _, source, destination = _IP.unpack_from(packet)
    header_bytes = (first & 0x0F) * 4
    if first >> 4 != 4 or header_bytes < HEADER_BYTES or not header_bytes <= total <= len(packet):
        return None
    if checksum(packet[:header_bytes]):
        return None
    return Header(header_bytes, total, fragment, ttl, protocol, source, destination)


def decrement_ttl(packet: bytearray | memoryview) -> None:
    """Take one from the TTL, which must not be 0, and mend the header checksum."""
    ttl, protocol, value = TTL.unpack_from(packet, TTL_AT)
    TTL.pack_into(packet, TTL_AT, ttl - 1, protocol, mended(value))


def mended(value: int) -> int:
    """Return a header checksum as it is after the TTL fell by one.

    The TTL is the upper half of its word, so the checksum grows by 0x0100, with
    end-around carry and without -0 (RFC 1624 s3).
    """
    value += 0x0100
    return (value + 1) & 0xFFFF if value >= 0xFFFF else value


def may_answer(packet: Buffer, header: Header) -> bool:
    """Whether an ICMP error about the packet may be sent (RFC 1122 s3.2.2).

    Not about ICMP errors, later fragments, and what was not sent to one host by one host.
    """
    if header.later_fragment or not _is_host(header.source) or header.destination >> 28 >= 0xE:
        return False
    if header.protocol != PROTO_ICMP:
        return True
    return header.total_bytes > header.header_bytes and packet[header.header_bytes] not in _ICMP_ERRORS


def _is_host(address: int) -> bool:
    """Whether it is neither in 0.0.0.0/8 nor 127.0.0.0/8, nor multicast, reserved or broadcast."""
    return address >> 24 not in (0, 127) and address >> 28 < 0xE


def icmp_error(kind: tuple[int, int], offender: Buffer, header: Header, source: int, mtu_bytes: int = 0) -> bytes:
    """Return the ICMP error packet of type and code ``kind`` to the offender's sender.

    ``source`` is the address it comes from; ``mtu_bytes`` tells what would fit
    (FRAGMENTATION_NEEDED only).
    """
    quote = bytes(offender[: min(header.total_bytes, _ICMP_LIMIT_BYTES - HEADER_BYTES - _ICMP.size)])
    body = _ICMP.pack(*kind, 0, 0, mtu_bytes) + quote
    body = body[:2] + checksum(body).to_bytes(2, "big") + body[4:]
    total = HEADER_BYTES + len(body)
    # Internetwork control precedence, as routers mark such messages (RFC 1812 s4.3.2.5).
    ip = _IP.pack(0x45, 0xC0, total, 0, 0, _ICMP_TTL, PROTO_ICMP, 0, source, header.source)
    return ip[:10] + checksum(ip).to_bytes(2, "big") + ip[12:] + body
