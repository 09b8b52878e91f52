"""IPv4, TCP and UDP packets for tests, put together and taken apart independently of the code under test."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any

TCP, UDP, ICMP = 6, 17, 1
FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80


def ones_complement(data: bytes) -> int:
    """RFC 1071: bytes as 16-bit numbers, added with end-around carry, complemented."""
    total = 0
    for at in range(0, len(data), 2):
        total += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def ip(  # noqa: PLR0917
    payload: bytes = b"",
    protocol: int = UDP,
    source: str = "10.5.1.2",
    destination: str = "10.5.2.2",
    ttl: int = 64,
    identification: int = 0,
    fragment: int = 0x4000,
    tos: int = 0,
    options: bytes = b"",
) -> bytes:
    words = (20 + len(options)) // 4
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x40 | words,
        tos,
        words * 4 + len(payload),
        identification,
        fragment,
        ttl,
        protocol,
        0,
        IPv4Address(source).packed,
        IPv4Address(destination).packed,
    )
    head += options
    return head[:10] + ones_complement(head).to_bytes(2, "big") + head[12:] + payload


def _pseudo(packet: bytes, length: int) -> bytes:
    return packet[12:20] + struct.pack("!BBH", 0, packet[9], length)


def l4_valid(packet: bytes) -> bool:
    header = (packet[0] & 15) * 4
    return ones_complement(_pseudo(packet, len(packet) - header) + packet[header:]) == 0


def ip_valid(packet: bytes) -> bool:
    header = (packet[0] & 15) * 4
    total = int.from_bytes(packet[2:4], "big")
    return packet[0] >> 4 == 4 and total == len(packet) and ones_complement(packet[:header]) == 0


def _with_checksum(packet: bytes, at: int, zero: int) -> bytes:
    header = (packet[0] & 15) * 4
    at += header
    clean = packet[:at] + b"\0\0" + packet[at + 2 :]
    value = ones_complement(_pseudo(clean, len(clean) - header) + clean[header:]) or zero
    return clean[:at] + value.to_bytes(2, "big") + clean[at + 2 :]


@dataclass(frozen=True)
class Segment:
    """A TCP segment."""

    payload: bytes = b""
    seq: int = 1000
    ack: int = 77
    flags: int = ACK
    window: int = 500
    options: bytes = b""
    ports: tuple[int, int] = (40000, 80)
    head: dict[str, Any] = field(default_factory=dict)
    reserved: int = 0
    urgent: int = 0

    def packet(self) -> bytes:
        words = (20 + len(self.options)) // 4
        tcp = struct.pack(
            "!HHIIBBHHH",
            *self.ports,
            self.seq % 2**32,
            self.ack,
            words << 4 | self.reserved,
            self.flags,
            self.window,
            0,
            self.urgent,
        )
        whole = ip(tcp + self.options + self.payload, TCP, **self.head)
        return _with_checksum(whole, 16, 0)


def datagram(payload: bytes = b"", ports: tuple[int, int] = (40000, 53), **head: Any) -> bytes:
    body = struct.pack("!HHHH", *ports, 8 + len(payload), 0) + payload
    return _with_checksum(ip(body, UDP, **head), 6, 0xFFFF)


def vnet(  # noqa: PLR0917
    flags: int = 0, kind: int = 0, header: int = 0, size: int = 0, start: int = 0, offset: int = 0
) -> bytes:
    """struct virtio_net_hdr of linux/virtio_net.h."""
    return struct.pack("=BBHHHH", flags, kind, header, size, start, offset)
