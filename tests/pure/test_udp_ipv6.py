"""IPv6 in both pumps: the native code against models in plain Python, and both against each other."""

from __future__ import annotations

import struct
from collections import defaultdict
from ipaddress import IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.udp import packet, packet6
from backends.udp.routes import Range, Table, pack, ranges
from tests.support import ipv6
from tests.support.ipv4 import ACK, CWR, FIN, PSH
from tests.support.ipv6 import cut, datagram, icmp, ip, segment, super_packet

pytestmark = pytest.mark.pure

native = pytest.importorskip("backends.udp._pump", reason="the native pump was not built")

OVERLAY = int(IPv6Address("fd05::"))
OPTIONS = bytes([17, 0, 1, 4, 0, 0, 0, 0])
"""Destination options before UDP: padding (RFC 8200 s4.6)."""


@given(
    st.integers(1, 9000),
    st.integers(1, 3000),
    st.sampled_from([ACK, ACK | PSH, ACK | FIN | PSH, ACK | CWR]),
    st.integers(0, 2**32 - 1),
)
def test_a_tcp_super_packet_becomes_its_segments(size: int, length: int, flags: int, seq: int) -> None:
    size, payload = max(size, length // 60 + 1), bytes(range(256)) * 12
    whole = super_packet(segment(b"", seq, flags), payload[:length], size)
    parts = range(0, length, size)
    expected = [
        segment(
            payload[at : min(at + size, length)],
            seq + at,
            flags & ~(0 if at == parts[-1] else FIN | PSH) & ~(CWR if at else 0),
        )
        for at in parts
    ]
    assert native.segment(whole) == expected == cut(whole)


@pytest.mark.parametrize("extension", [b"", OPTIONS], ids=["plain", "extension header"])
@pytest.mark.parametrize("size", [1, 7, 500, 1448])
def test_a_udp_super_packet_becomes_its_datagrams(size: int, extension: bytes) -> None:
    payload = bytes(range(200)) * 15
    payload = payload[: size * 40]
    whole = super_packet(datagram(b"", extension=extension), payload, size, 40 + len(extension))
    expected = [datagram(payload[at : at + size], extension=extension) for at in range(0, len(payload), size)]
    assert native.segment(whole) == expected


def test_the_largest_super_packet() -> None:
    whole = super_packet(segment(), bytes(65535 - 60), 1440)
    assert native.segment(whole) == cut(whole)


@given(st.binary(max_size=100), st.booleans())
def test_an_unfinished_checksum_is_completed(payload: bytes, tcp: bool) -> None:
    good = segment(payload) if tcp else datagram(payload)
    partial = super_packet(good[: 60 if tcp else 48], payload, 0)
    assert native.segment(partial[:1] + b"\0" + partial[2:]) == [good]


@pytest.mark.parametrize(
    ("kind", "start", "offset", "body"),
    [
        pytest.param(1, 40, 16, segment(b"x" * 100), id="type of IPv4"),
        pytest.param(4, 40, 16, datagram(b"x" * 100), id="type and protocol differ"),
        pytest.param(5, 40, 6, segment(b"x" * 100), id="protocol and type differ"),
        pytest.param(4, 20, 16, segment(b"x" * 100), id="inside the header"),
        pytest.param(4, 0xFFFF, 16, segment(b"x" * 100), id="outside"),
        pytest.param(4, 61, 16, segment(b"x" * 100), id="long extension headers"),
        pytest.param(4, 40, 16, segment(), id="no payload"),
        pytest.param(4, 40, 16, segment(b"x" * 100)[:-1], id="truncated"),
    ],
)
def test_what_cannot_be_cut_is_dropped(kind: int, start: int, offset: int, body: bytes) -> None:
    assert native.segment(struct.pack("=BBHHHH", 1, kind, 60, 50, start, offset) + body) == []


def writes(*packets: bytes, tcp: bool = True, udp: bool = True) -> list[list[bytes]]:
    return [cut(one) for one in native.coalesce(list(packets), tcp, udp)]


def stream(*sizes: int, **head: object) -> list[bytes]:
    seq, found = 2**32 - 250, []
    for number, size in enumerate(sizes):
        found.append(segment(bytes([number & 255]) * size, seq, **head))  # type: ignore[arg-type]
        seq += size
    return found


def test_a_stream_is_written_at_once() -> None:
    packets = stream(100, 100, 100, 40, 100, 100)
    assert writes(*packets) == [packets[:4], packets[4:]]
    assert writes(*packets, tcp=False) == [[one] for one in packets]
    packets = [datagram(bytes([n]) * 50) for n in range(70)]
    assert writes(*packets) == [packets[:64], packets[64:]]
    assert writes(*packets, udp=False) == [[one] for one in packets]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(segment(b"x" * 100, 1101), id="gap"),
        pytest.param(segment(b"x" * 100, 1100, hops=63), id="hop limit"),
        pytest.param(segment(b"x" * 100, 1100, flow=0x54321), id="flow label"),
        pytest.param(segment(b"x" * 100, 1100, flow=0x12345 | 3 << 20), id="congestion experienced"),
        pytest.param(segment(b"x" * 100, 1100, flags=ACK | FIN), id="FIN"),
        pytest.param(segment(b"x" * 100, 1100)[:-1] + b"y", id="damaged"),
        pytest.param(datagram(b"x" * 100, extension=OPTIONS), id="extension header"),
    ],
)
def test_what_differs_closes_the_flow_and_is_not_overtaken(second: bytes) -> None:
    first = segment(b"w" * 100)
    assert writes(first, second) == [[first], [second]]


def flows(packets: list[bytes]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for one in packets:
        found[one[6:7] + one[8:44]].append(one)
    return found


segments = st.builds(
    segment,
    st.integers(0, 40).map(lambda n: b"p" * n),
    st.sampled_from([0, 20, 40, 60]),
    st.sampled_from([ACK, ACK, ACK | PSH, ACK | FIN]),
    st.sampled_from([(1, 2), (1, 3)]),
)
datagrams = st.builds(datagram, st.sampled_from([b"u" * 20, b"u" * 9, b""]), st.sampled_from([(1, 2), (1, 3)]))


@given(st.lists(segments | datagrams | st.just(icmp(128)), max_size=30), st.booleans(), st.booleans())
def test_every_flow_arrives_as_it_was_sent(packets: list[bytes], tcp: bool, udp: bool) -> None:
    out = [one for written in native.coalesce(packets, tcp, udp) for one in cut(written)]
    assert flows(out) == flows(packets)


# -- the header ------------------------------------------------------------------------------------------


def test_a_header_is_read() -> None:
    header = packet6.parse(datagram(b"payload", source="fd05:0:0:1::9", hops=7) + b"trailing bytes")
    ends = int(IPv6Address("fd05:0:0:1::9")), int(IPv6Address("fd05:0:0:2::2"))
    assert header == packet.Header(40, 55, 0x4000, 7, 17, *ends)
    assert header.unfragmentable
    assert not header.later_fragment


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(b"", id="empty"),
        pytest.param(datagram()[:39], id="shorter than a header"),
        pytest.param(datagram(b"x")[:-1], id="truncated"),
        pytest.param(b"\x45" + datagram()[1:], id="version 4"),
    ],
)
def test_U05_what_is_no_whole_packet_is_refused(wrong: bytes) -> None:
    assert packet6.parse(wrong) is None
    assert native.coalesce([wrong], True, True) == []


FIRST, LATER = bytes([17, 0, 0, 1]) + bytes(4), bytes([17, 0, 0, 8]) + bytes(4)
ANSWERED = [
    pytest.param(datagram(b"hello"), True, id="udp"),
    pytest.param(datagram(b"hello", extension=OPTIONS), True, id="extension header"),
    pytest.param(icmp(128), True, id="echo request"),
    pytest.param(icmp(1), False, id="unreachable"),
    pytest.param(icmp(3), False, id="time exceeded"),
    pytest.param(icmp(137), False, id="redirect"),
    pytest.param(ip(b"", 58), False, id="ICMP without a type"),
    pytest.param(ip(bytes([58, 0, 1, 4, 0, 0, 0, 0, 1, 0, 0, 0]), 60), False, id="unreachable behind options"),
    pytest.param(ip(FIRST + b"x" * 16, 44), True, id="first fragment"),
    pytest.param(ip(LATER + b"x" * 16, 44), False, id="later fragment"),
    pytest.param(ip(b"x" * 4, 60), False, id="extension header cut off"),
    pytest.param(ip(b"x" * 8, source="::"), False, id="from nobody"),
    pytest.param(ip(b"x" * 8, source="::1"), False, id="from loopback"),
    pytest.param(ip(b"x" * 8, source="ff02::1"), False, id="from a group"),
    pytest.param(ip(b"x" * 8, destination="ff02::1"), False, id="to a group"),
]
KINDS = (packet.NET_UNREACHABLE, packet.FRAGMENTATION_NEEDED, packet.TIME_EXCEEDED)
"""As the native pump numbers them."""


@pytest.mark.parametrize(("offender", "answered"), ANSWERED)
def test_U05_who_is_answered(offender: bytes, answered: bool) -> None:
    header = packet6.parse(offender)
    assert header is not None
    assert packet6.may_answer(offender, header) is answered
    assert (native.icmp_error(0, offender, IPv6Address("fd05::").packed, 0) is not None) is answered


@pytest.mark.parametrize("size", [0, 1, 8, 1184, 1300])
@pytest.mark.parametrize(("kind", "says"), list(zip(KINDS, [(1, 0), (2, 0), (3, 0)], strict=True)))
def test_U05_an_icmp_error_quotes_the_offender(size: int, kind: tuple[int, int], says: tuple[int, int]) -> None:
    offender = datagram(b"q" * size)
    header = packet6.parse(offender)
    assert header is not None
    error = packet6.icmp_error(kind, offender, header, OVERLAY, 1400 if says == (2, 0) else 0)
    assert ipv6.valid(error)
    assert len(error) <= 1280
    assert (error[6], error[8:24], error[24:40]) == (58, IPv6Address("fd05::").packed, offender[8:24])
    assert (error[40], error[41]) == says
    assert error[44:48] == (1400 if says == (2, 0) else 0).to_bytes(4, "big")
    assert offender.startswith(error[48:])
    assert len(error) - 48 == min(len(offender), 1280 - 48)
    assert native.icmp_error(KINDS.index(kind), offender, IPv6Address("fd05::").packed, 1400) == error


offenders = st.builds(
    ip,
    st.binary(max_size=100),
    st.sampled_from([0, 6, 17, 43, 44, 58, 60]),
    st.sampled_from(["fd05:0:0:1::2", "::", "::1", "ff02::1"]),
    st.sampled_from(["fd05:0:0:2::2", "ff02::1"]),
    st.integers(1, 255),
)


@given(offenders)
def test_both_pumps_answer_the_same(offender: bytes) -> None:
    header = packet6.parse(offender)
    assert header is not None
    expected = packet6.icmp_error(packet.TIME_EXCEEDED, offender, header, OVERLAY)
    answered = packet6.may_answer(offender, header)
    assert native.icmp_error(2, offender, IPv6Address("fd05::").packed, 0) == (expected if answered else None)


@given(offenders)
def test_both_pumps_take_one_from_the_hop_limit(before: bytes) -> None:
    after = bytearray(before)
    packet6.decrement_ttl(after)
    assert after == before[:7] + bytes([before[7] - 1]) + before[8:]
    assert native.decrement_ttl(before) == after


# -- routes ----------------------------------------------------------------------------------------------

BASE = int(IPv6Address("fd05::"))


@st.composite
def networks(draw: st.DrawFn) -> IPv6Network:
    length = draw(st.sampled_from([48, 56, 60, 64, 64, 64, 66, 80, 112, 120, 126, 128]))
    number = draw(st.integers(0, 0xFFFF)) << 64 | draw(st.sampled_from([0, 1, 1 << 15, 1 << 63, 0xFFFF << 32]))
    return IPv6Network(((BASE | number) >> (128 - length) << (128 - length), length))


tables = st.dictionaries(networks(), st.integers(1, 2**128 - 1).map(IPv6Address), max_size=12)


@given(tables)
def test_the_longest_prefix_wins(table: dict[IPv6Network, IPv6Address]) -> None:
    asked = {0, 2**128 - 1, BASE}
    for network in table:
        first, last = int(network.network_address), int(network.broadcast_address)
        asked |= {first - 1, first, last, (last + 1) % 2**128}
    packed, lookup = pack(ranges(table), 6), Table(ranges(table))
    for destination in asked:
        covering = [network for network in table if IPv6Address(destination) in network]
        wanted = int(table[max(covering, key=lambda n: n.prefixlen)]) if covering else 0
        assert lookup.hop(destination) == wanted
        assert native.hops(6, packed, [destination.to_bytes(16, "big")]) == [wanted.to_bytes(16, "big")]


def test_many_subnets_and_the_whole_address_space() -> None:
    table = {IPv6Network((BASE | number << 64, 64)): IPv6Address(number + 1) for number in range(0, 20000, 3)}
    packed = pack(ranges(table), 6)
    for number in (0, 1, 2, 3, 9999, 19998, 20001):
        destination = IPv6Address(BASE | number << 64 | 7).packed
        wanted = number + 1 if number % 3 == 0 and number < 20000 else 0
        assert native.hops(6, packed, [destination]) == [wanted.to_bytes(16, "big")]
    last = 2**128 - 1
    everything = pack([Range(0, 0, 1), Range(1, last - 1, 2), Range(last, last, 3)], 6)
    for at, hop in ((0, 1), (1, 2), (1 << 127, 2), (last - 1, 2), (last, 3)):
        assert native.hops(6, everything, [at.to_bytes(16, "big")]) == [hop.to_bytes(16, "big")]
