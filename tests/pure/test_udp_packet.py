from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.udp import packet
from backends.udp.api import overlay_address
from tests.support import ipv4

pytestmark = pytest.mark.pure


def number(text: str) -> int:
    return int(IPv4Address(text))


def test_checksum_of_rfc_1071() -> None:
    data = bytes.fromhex("0001f203f4f5f6f7")
    assert packet.checksum(data) == 0xFFFF ^ 0xDDF2


@given(st.binary(max_size=200))
def test_checksum_of_any_length(data: bytes) -> None:
    assert packet.checksum(data) == ipv4.ones_complement(data)


def test_a_header_is_read() -> None:
    header = packet.parse(ipv4.ip(b"payload", 17, "10.5.1.2", "10.5.2.3", ttl=9, fragment=0x2010, options=b"\1" * 8))
    assert header == packet.Header(28, 35, 0x2010, 9, 17, number("10.5.1.2"), number("10.5.2.3"))
    assert header.later_fragment
    assert not header.unfragmentable


WHOLE = ipv4.ip(b"payload")


def changed(at: int, value: int) -> bytes:
    """One byte replaced, the header checksum right."""
    header = bytearray(WHOLE[:20])
    header[at] = value
    header[10:12] = b"\0\0"
    header[10:12] = ipv4.ones_complement(bytes(header)).to_bytes(2, "big")
    return bytes(header) + WHOLE[20:]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(b"", id="empty"),
        pytest.param(WHOLE[:19], id="shorter than a header"),
        pytest.param(changed(0, 0x65), id="version 6"),
        pytest.param(changed(0, 0x44), id="header of 16 bytes"),
        pytest.param(changed(0, 0x4F), id="header longer than the packet"),
        pytest.param(changed(3, 19), id="total shorter than the header"),
        pytest.param(changed(3, 28), id="truncated"),
        pytest.param(WHOLE[:10] + b"\0\0" + WHOLE[12:], id="checksum"),
        pytest.param(b"\x45" + b"\xff" * 40, id="noise"),
    ],
)
def test_U05_what_is_no_whole_packet_is_refused(wrong: bytes) -> None:
    assert packet.parse(wrong) is None


def test_bytes_after_the_end_are_tolerated() -> None:
    header = packet.parse(WHOLE + b"padding")
    assert header is not None
    assert header.total_bytes == len(WHOLE)


@given(st.binary(max_size=60))
def test_U05_noise_never_raises(data: bytes) -> None:
    header = packet.parse(data)
    assert header is None or header.total_bytes <= len(data)


@given(st.integers(1, 255), st.integers(0, 0xFFFF), st.integers(0, 255))
def test_U05_the_checksum_stays_right_when_the_ttl_falls(ttl: int, identification: int, protocol: int) -> None:
    before = ipv4.ip(b"x" * 9, protocol, ttl=ttl, identification=identification)
    after = bytearray(before)
    packet.decrement_ttl(after)
    assert bytes(after) == ipv4.ip(b"x" * 9, protocol, ttl=ttl - 1, identification=identification)


ANSWERED = [
    pytest.param(ipv4.datagram(b"hello"), True, id="udp"),
    pytest.param(ipv4.ip(b"\x08\0\0\0", ipv4.ICMP), True, id="echo request"),
    pytest.param(ipv4.ip(b"\x03\0\0\0", ipv4.ICMP), False, id="unreachable"),
    pytest.param(ipv4.ip(b"\x0b\0\0\0", ipv4.ICMP), False, id="time exceeded"),
    pytest.param(ipv4.ip(b"", ipv4.ICMP), False, id="ICMP without a type"),
    pytest.param(ipv4.ip(b"x" * 8, fragment=0x2000), True, id="first fragment"),
    pytest.param(ipv4.ip(b"x" * 8, fragment=0x0001), False, id="later fragment"),
    pytest.param(ipv4.ip(b"x" * 8, source="0.0.0.0"), False, id="from nobody"),
    pytest.param(ipv4.ip(b"x" * 8, source="127.0.0.1"), False, id="from loopback"),
    pytest.param(ipv4.ip(b"x" * 8, source="224.0.0.1"), False, id="from a group"),
    pytest.param(ipv4.ip(b"x" * 8, destination="239.1.1.1"), False, id="to a group"),
    pytest.param(ipv4.ip(b"x" * 8, destination="255.255.255.255"), False, id="to all"),
]


@pytest.mark.parametrize(("offender", "answered"), ANSWERED)
def test_who_is_answered(offender: bytes, answered: bool) -> None:
    header = packet.parse(offender)
    assert header is not None
    assert packet.may_answer(offender, header) is answered


@pytest.mark.parametrize("size", [0, 1, 8, 520, 600, 1400])
def test_U05_an_icmp_error_quotes_the_offender(size: int) -> None:
    offender = ipv4.datagram(b"q" * size)
    header = packet.parse(offender)
    assert header is not None
    error = packet.icmp_error(packet.FRAGMENTATION_NEEDED, offender, header, number("10.5.0.0"), 1400)
    assert ipv4.ip_valid(error)
    assert len(error) <= 576
    assert (error[9], error[12:16], error[16:20]) == (1, bytes([10, 5, 0, 0]), bytes([10, 5, 1, 2]))
    icmp = error[20:]
    assert ipv4.ones_complement(icmp) == 0
    assert (icmp[0], icmp[1], icmp[6:8]) == (3, 4, (1400).to_bytes(2, "big"))
    assert offender.startswith(icmp[8:])
    assert len(icmp) - 8 == min(len(offender), 576 - 28)


@pytest.mark.parametrize(
    ("subnet", "address"),
    [("10.5.7.0/24", "10.5.0.0"), ("10.5.0.0/24", "10.5.1.0"), ("10.5.0.0/18", "10.5.64.0")],
)
def test_errors_to_local_senders_come_from_outside_the_own_subnet(subnet: str, address: str) -> None:
    assert overlay_address(IPv4Network("10.5.0.0/16"), IPv4Network(subnet)) == IPv4Address(address)
