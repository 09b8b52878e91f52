"""IPv6 packets for tests, put together and taken apart independently of the code under test."""

from __future__ import annotations

import struct
from ipaddress import IPv6Address

from tests.support.ipv4 import ACK, CWR, FIN, PSH, TCP, UDP, ones_complement

ICMP = 58
NEEDS_CSUM, TCPV6, UDP_L4 = 1, 4, 5


def ip(  # noqa: PLR0917
    payload: bytes = b"",
    protocol: int = UDP,
    source: str = "fd05:0:0:1::2",
    destination: str = "fd05:0:0:2::2",
    hops: int = 64,
    flow: int = 0x12345,
) -> bytes:
    ends = IPv6Address(source).packed + IPv6Address(destination).packed
    return struct.pack("!IHBB", 6 << 28 | flow, len(payload), protocol, hops) + ends + payload


def _sum(packet: bytes, at: int, protocol: int) -> int:
    pseudo = packet[8:40] + struct.pack("!II", len(packet) - at, protocol)
    return ones_complement(pseudo + packet[at:])


def valid(packet: bytes, at: int = 40) -> bool:
    """Whether lengths are right and so is the checksum of what begins at ``at``."""
    whole = packet[0] >> 4 == 6 and int.from_bytes(packet[4:6], "big") == len(packet) - 40
    return whole and _sum(packet, at, packet[6] if at == 40 else UDP) == 0


def _finished(packet: bytes, at: int, offset: int, protocol: int) -> bytes:
    place = at + offset
    clean = packet[:place] + b"\0\0" + packet[place + 2 :]
    value = _sum(clean, at, protocol) or (0xFFFF if protocol == UDP else 0)
    return clean[:place] + value.to_bytes(2, "big") + clean[place + 2 :]


def datagram(
    payload: bytes = b"", ports: tuple[int, int] = (40000, 53), extension: bytes = b"", **head: object
) -> bytes:
    """A UDP datagram; ``extension`` is a header of destination options (60) before it."""
    body = extension + struct.pack("!HHHH", *ports, 8 + len(payload), 0) + payload
    return _finished(ip(body, 60 if extension else UDP, **head), 40 + len(extension), 6, UDP)  # type: ignore[arg-type]


def segment(
    payload: bytes = b"", seq: int = 1000, flags: int = ACK, ports: tuple[int, int] = (40000, 80), **head: object
) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", *ports, seq % 2**32, 77, 5 << 4, flags, 500, 0, 0)
    return _finished(ip(tcp + payload, TCP, **head), 40, 16, TCP)  # type: ignore[arg-type]


def icmp(kind: int, body: bytes = bytes(6), **head: object) -> bytes:
    return _finished(ip(bytes([kind, 0, 0, 0]) + body, ICMP, **head), 40, 2, ICMP)  # type: ignore[arg-type]


def super_packet(first: bytes, payload: bytes, size: int, before: int = 40) -> bytes:
    """Return vnet header and packet as the kernel hands over ``first``'s headers with a long payload."""
    udp = first[6] == UDP or before > 40
    l4, offset = (8, 6) if udp else (20, 16)
    whole = bytearray(first[: before + l4] + payload)
    whole[4:6] = (len(whole) - 40).to_bytes(2, "big")
    if udp:
        whole[before + 4 : before + 6] = (len(whole) - before).to_bytes(2, "big")
    pseudo = bytes(whole[8:40]) + struct.pack("!II", len(whole) - before, UDP if udp else TCP)
    place = before + offset
    whole[place : place + 2] = (0xFFFF ^ ones_complement(pseudo)).to_bytes(2, "big")
    kind = UDP_L4 if udp else TCPV6
    return struct.pack("=BBHHHH", NEEDS_CSUM, kind, before + l4, size, before, offset) + bytes(whole)


def cut(written: bytes) -> list[bytes]:
    """Return the packets on the wire for what is read from or written to a TUN with a vnet header."""
    flags, kind, _, size, start, offset = struct.unpack("=BBHHHH", written[:10])
    packet = written[10:]
    if kind == 0:
        return [packet]
    assert (flags, offset) == (NEEDS_CSUM, 6 if kind == UDP_L4 else 16)
    assert kind in {TCPV6, UDP_L4}
    l4 = 8 if kind == UDP_L4 else (packet[start + 12] >> 4) * 4
    payload, found = packet[start + l4 :], []
    for at in range(0, len(payload), size):
        one = bytearray(packet[: start + l4] + payload[at : at + size])
        one[4:6] = (len(one) - 40).to_bytes(2, "big")
        if kind == UDP_L4:
            one[start + 4 : start + 6] = (len(one) - start).to_bytes(2, "big")
        else:
            seq = (int.from_bytes(packet[start + 4 : start + 8], "big") + at) % 2**32
            one[start + 4 : start + 8] = seq.to_bytes(4, "big")
            one[start + 13] &= 0xFF ^ (FIN | PSH if at + size < len(payload) else 0) ^ (CWR if at else 0)
        found.append(_finished(bytes(one), start, offset, UDP if kind == UDP_L4 else TCP))
    return found
