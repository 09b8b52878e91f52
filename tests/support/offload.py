"""What a NIC does with a super-packet, in plain Python: the model that the native code is compared with."""

from __future__ import annotations

import struct

from tests.support.ipv4 import CWR, FIN, PSH, TCP, UDP, _pseudo, ones_complement

NEEDS_CSUM, TCPV4, UDP_L4, ECN = 1, 1, 5, 0x80


def super_packet(first: bytes, payload: bytes, size: int, ecn: bool = False) -> bytes:
    """Return vnet header and packet as the kernel hands over ``first``'s headers with a long payload."""
    header = (first[0] & 15) * 4
    udp = first[9] == UDP
    l4 = 8 if udp else (first[header + 12] >> 4) * 4
    whole = bytearray(first[: header + l4] + payload)
    whole[2:4] = len(whole).to_bytes(2, "big")
    whole[10:12] = b"\0\0"
    whole[10:12] = ones_complement(bytes(whole[:header])).to_bytes(2, "big")
    if udp:
        whole[header + 4 : header + 6] = (len(whole) - header).to_bytes(2, "big")
    offset = 6 if udp else 16
    at = header + offset
    whole[at : at + 2] = (0xFFFF ^ ones_complement(_pseudo(bytes(whole), len(whole) - header))).to_bytes(2, "big")
    kind = (UDP_L4 if udp else TCPV4) | (ECN if ecn else 0)
    return struct.pack("=BBHHHH", NEEDS_CSUM, kind, header + l4, size, header, offset) + bytes(whole)


def cut(written: bytes) -> list[bytes]:
    """Return the packets on the wire for what is read from or written to a TUN with a vnet header."""
    flags, kind, _, size, start, offset = struct.unpack("=BBHHHH", written[:10])
    packet = written[10:]
    if kind == 0:
        return [_finished(packet, start, offset) if flags & NEEDS_CSUM else packet]
    assert flags & NEEDS_CSUM
    header = (packet[0] & 15) * 4
    udp = packet[9] == UDP
    assert kind & ~ECN == (UDP_L4 if udp else TCPV4)
    assert (start, offset) == (header, 6 if udp else 16)
    l4 = 8 if udp else (packet[header + 12] >> 4) * 4
    payload = packet[header + l4 :]
    found = []
    for at in range(0, len(payload), size):
        part = payload[at : at + size]
        one = bytearray(packet[: header + l4] + part)
        one[2:4] = len(one).to_bytes(2, "big")
        one[4:6] = ((int.from_bytes(packet[4:6], "big") + at // size) & 0xFFFF).to_bytes(2, "big")
        one[10:12] = b"\0\0"
        one[10:12] = ones_complement(bytes(one[:header])).to_bytes(2, "big")
        if udp:
            one[header + 4 : header + 6] = (8 + len(part)).to_bytes(2, "big")
        else:
            assert packet[9] == TCP
            seq = (int.from_bytes(packet[header + 4 : header + 8], "big") + at) % 2**32
            one[header + 4 : header + 8] = seq.to_bytes(4, "big")
            if at + size < len(payload):
                one[header + 13] &= ~(FIN | PSH) & 0xFF
            if at:
                one[header + 13] &= ~CWR & 0xFF
        place = header + offset
        one[place : place + 2] = (0xFFFF ^ ones_complement(_pseudo(bytes(one), len(one) - header))).to_bytes(2, "big")
        found.append(_finished(bytes(one), start, offset))
    return found


def _finished(packet: bytes, start: int, offset: int) -> bytes:
    """Complete a checksum whose field holds the sum of the pseudo-header."""
    value = ones_complement(packet[start:])
    if packet[9] == UDP and value == 0:
        value = 0xFFFF
    return packet[: start + offset] + value.to_bytes(2, "big") + packet[start + offset + 2 :]
