from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.udp import packet, packet6
from tests.support import ipv4
from tests.support.ipv4 import ACK, CWR, FIN, PSH, Segment, datagram, ip, vnet
from tests.support.offload import NEEDS_CSUM, TCPV4, UDP_L4, cut, super_packet

native = pytest.importorskip("backends.udp._pump", reason="the native pump was not built")

pytestmark = pytest.mark.pure

OPTIONS = b"\1\1\x08\x0a" + b"\0\0\0\7\0\0\0\6"


@given(
    size=st.integers(1, 9000),
    length=st.integers(1, 3000),
    options=st.sampled_from([b"", OPTIONS]),
    ip_options=st.sampled_from([b"", b"\1" * 40]),
    flags=st.sampled_from([ACK, ACK | PSH, ACK | FIN | PSH, ACK | CWR]),
    seq=st.integers(0, 2**32 - 1),
    identification=st.integers(0, 0xFFFF),
)
def test_a_tcp_super_packet_becomes_its_segments(
    *, size: int, length: int, options: bytes, ip_options: bytes, flags: int, seq: int, identification: int
) -> None:
    size = max(size, length // 60 + 1)
    head: dict[str, Any] = {"identification": identification, "options": ip_options}
    payload = bytes(range(256)) * 12
    whole = super_packet(Segment(b"", seq, 5, flags, 100, options, head=head).packet(), payload[:length], size)
    parts = range(0, length, size)
    expected = [
        Segment(
            payload[at : min(at + size, length)],
            seq + at,
            5,
            flags & ~(0 if at == parts[-1] else FIN | PSH) & ~(CWR if at else 0),
            100,
            options,
            head=head | {"identification": (identification + number) & 0xFFFF},
        ).packet()
        for number, at in enumerate(parts)
    ]
    assert native.segment(whole) == expected == cut(whole)


@given(st.integers(1, 1500), st.binary(min_size=1, max_size=3000))
def test_a_udp_super_packet_becomes_its_datagrams(size: int, payload: bytes) -> None:
    size = max(size, len(payload) // 60 + 1)
    whole = super_packet(datagram(b"", identification=9), payload, size)
    expected = [
        datagram(payload[at : at + size], identification=9 + number)
        for number, at in enumerate(range(0, len(payload), size))
    ]
    assert native.segment(whole) == expected


@pytest.mark.parametrize("length", [65535 - 20 - 20, 65535 - 20 - 32])
def test_the_largest_super_packet(length: int) -> None:
    options = OPTIONS if length == 65535 - 20 - 32 else b""
    whole = super_packet(Segment(options=options).packet(), bytes(length), 1420)
    segments = native.segment(whole)
    assert segments == cut(whole)
    assert all(ipv4.ip_valid(s) and ipv4.l4_valid(s) for s in segments)


@given(st.binary(max_size=100), st.booleans())
def test_an_unfinished_checksum_is_completed(payload: bytes, tcp: bool) -> None:
    good = Segment(payload).packet() if tcp else datagram(payload)
    offset = 16 if tcp else 6
    whole = bytearray(good)
    partial = 0xFFFF ^ ipv4.ones_complement(ipv4._pseudo(good, len(good) - 20))
    whole[20 + offset : 22 + offset] = partial.to_bytes(2, "big")
    assert native.segment(vnet(NEEDS_CSUM, 0, 0, 0, 20, offset) + bytes(whole)) == [good]


TCP_ONE, UDP_ONE = Segment(b"x" * 100).packet(), datagram(b"x" * 100)


@pytest.mark.parametrize(
    "given_",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(vnet(), id="header alone"),
        pytest.param(vnet(NEEDS_CSUM, 0, 0, 0, 0, 10) + TCP_ONE, id="checksum in the IP header"),
        pytest.param(vnet(NEEDS_CSUM, 0, 0, 0, 20, 200) + TCP_ONE, id="checksum outside"),
        pytest.param(vnet(NEEDS_CSUM, 0, 0, 0, 0xFFFF, 0xFFFF) + TCP_ONE, id="checksum far outside"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 0, 20, 16) + TCP_ONE, id="size 0"),
        pytest.param(vnet(NEEDS_CSUM, UDP_L4, 40, 50, 20, 6) + TCP_ONE, id="type and protocol differ"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 50, 20, 16) + UDP_ONE, id="protocol and type differ"),
        pytest.param(vnet(NEEDS_CSUM, 3, 40, 50, 20, 6) + UDP_ONE, id="UFO"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 50, 20, 16) + Segment().packet(), id="no payload"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 9, 20, 16) + ip(b"x" * 19, 6), id="TCP header cut off"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 9, 20, 16) + ip(b"\0" * 40, 6), id="TCP header of 0 bytes"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 9, 20, 16) + ip(b"\xff" * 40, 6), id="TCP header of 60 bytes"),
        pytest.param(vnet(NEEDS_CSUM, UDP_L4, 40, 9, 20, 6) + ip(b"\xff" * 8, 17), id="UDP without payload"),
        pytest.param(vnet(NEEDS_CSUM, TCPV4, 40, 9, 20, 16) + ip(TCP_ONE[20:], 6, fragment=0x2000), id="fragment"),
    ],
)
def test_what_cannot_be_cut_is_dropped(given_: bytes) -> None:
    assert native.segment(given_) == []


# -- merging ---------------------------------------------------------------------------------------------


def writes(*packets: bytes, tcp: bool = True, udp: bool = True) -> list[list[bytes]]:
    """What each write to the TUN carries."""
    return [cut(one) for one in native.coalesce(list(packets), tcp, udp)]


def tcp_stream(*sizes: int, **more: Any) -> list[bytes]:
    seq, found = 2**32 - 250, []
    for number, size in enumerate(sizes):
        head: dict[str, Any] = {"identification": number}
        found.append(Segment(bytes([number & 255]) * size, seq, head=head, **more).packet())
        seq += size
    return found


def test_a_stream_is_written_at_once() -> None:
    stream = tcp_stream(100, 100, 100, 40, 100, 100)
    assert writes(*stream) == [stream[:4], stream[4:]]
    assert writes(*stream, tcp=False) == [[one] for one in stream]


def test_datagrams_are_written_at_once() -> None:
    stream = [datagram(bytes([n]) * 50, identification=n) for n in range(70)]
    assert writes(*stream) == [stream[:64], stream[64:]]
    assert writes(*stream, udp=False) == [[one] for one in stream]


def test_small_segments_are_merged_up_to_a_limit() -> None:
    stream = tcp_stream(*[1] * 300)
    assert [len(w) for w in writes(*stream)] == [256, 44]


def test_a_merged_packet_is_no_longer_than_a_packet_may_be() -> None:
    stream = tcp_stream(*[1448] * 50)
    assert [len(w) for w in writes(*stream)] == [45, 5]


def test_a_pushed_segment_ends_the_run_and_keeps_its_flag() -> None:
    first, second, third = tcp_stream(100, 100, 100)
    pushed = Segment(bytes([1]) * 100, 2**32 - 150, flags=ACK | PSH, head={"identification": 1}).packet()
    assert writes(first, pushed, third) == [[first, pushed], [third]]
    assert second != pushed


def test_flows_do_not_mix_and_keep_their_order() -> None:
    one, two = tcp_stream(100, 100, 100), tcp_stream(100, 100, 100, ports=(40001, 80))
    mixed = [p for both in zip(one, two, strict=True) for p in both]
    assert sorted(writes(*mixed)) == sorted([one, two])


NEXT: dict[str, Any] = {"seq": 1100, "head": {"identification": 1}}


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(Segment(b"x" * 100, **NEXT | {"seq": 1101}), id="gap"),
        pytest.param(Segment(b"x" * 100, **NEXT | {"seq": 1000}), id="sent again"),
        pytest.param(Segment(b"x" * 101, **NEXT), id="longer"),
        pytest.param(Segment(b"x" * 100, ack=78, **NEXT), id="acknowledgement"),
        pytest.param(Segment(b"x" * 100, window=501, **NEXT), id="window"),
        pytest.param(Segment(b"x" * 100, options=OPTIONS, **NEXT), id="options"),
        pytest.param(Segment(b"x" * 100, flags=ACK | FIN, **NEXT), id="FIN"),
        pytest.param(Segment(b"x" * 100, flags=ACK | CWR, **NEXT), id="CWR"),
        pytest.param(Segment(b"x" * 100, flags=0, **NEXT), id="no ACK"),
        pytest.param(Segment(b"x" * 100, reserved=1, **NEXT), id="AE"),  # RFC 9768
        pytest.param(Segment(b"x" * 100, urgent=1, **NEXT), id="urgent pointer"),
        pytest.param(Segment(b"", **NEXT), id="no payload"),
        pytest.param(Segment(b"x" * 100, **NEXT | {"head": {"tos": 3}}), id="congestion experienced"),
        pytest.param(Segment(b"x" * 100, **NEXT | {"head": {"ttl": 63}}), id="TTL"),
        pytest.param(Segment(b"x" * 100, **NEXT | {"head": {"fragment": 0}}), id="DF"),
        pytest.param(Segment(b"x" * 100, **NEXT | {"head": {"fragment": 0x2000}}), id="fragment"),
        pytest.param(Segment(b"x" * 100, **NEXT | {"head": {"options": b"\1" * 4}}), id="IP options"),
    ],
)
def test_a_segment_that_differs_closes_its_flow_and_is_not_overtaken(second: Segment) -> None:
    first = Segment(b"w" * 100).packet()
    assert writes(first, second.packet()) == [[first], [second.packet()]]


def test_without_df_the_ids_must_follow_each_other() -> None:
    head: dict[str, Any] = {"fragment": 0, "identification": 7}
    first = Segment(b"x" * 100, head=dict(head)).packet()
    for identification, together in ((8, True), (9, False)):
        second = Segment(b"x" * 100, 1100, head=head | {"identification": identification}).packet()
        assert len(writes(first, second)) == (1 if together else 2)


@pytest.mark.parametrize("wrong", [30, 36, 45])
def test_a_damaged_segment_stays_alone(wrong: int) -> None:
    stream = tcp_stream(100, 100, 100)
    damaged = stream[1][:wrong] + bytes([stream[1][wrong] ^ 1]) + stream[1][wrong + 1 :]
    assert writes(stream[0], damaged, stream[2]) == [[stream[0]], [damaged], [stream[2]]]


def test_a_datagram_without_checksum_stays_alone() -> None:
    plain = datagram(b"x" * 50)
    bare = plain[:26] + b"\0\0" + plain[28:]
    assert writes(bare, bare) == [[bare], [bare]]
    assert writes(plain, bare, plain) == [[plain], [bare], [plain]]


def test_what_has_no_ports_passes_by_itself() -> None:
    ping, stream = ip(b"\x08\0\0\0", ipv4.ICMP), tcp_stream(100, 100)
    assert sorted(writes(stream[0], ping, stream[1])) == sorted([[ping], stream])


def test_more_flows_than_there_is_room_for() -> None:
    streams = [tcp_stream(10, 10, 10, ports=(port, 80)) for port in range(40)]
    mixed = [one for row in zip(*streams, strict=True) for one in row]
    assert sorted(itertools.chain(*writes(*mixed))) == sorted(mixed)


segments = st.builds(
    Segment,
    payload=st.integers(0, 40).map(lambda n: b"p" * n),
    seq=st.sampled_from([0, 20, 40, 60]),
    ack=st.sampled_from([1, 1, 1, 2]),
    flags=st.sampled_from([ACK, ACK, ACK, ACK | PSH, ACK | FIN]),
    options=st.sampled_from([b"", OPTIONS]),
    ports=st.sampled_from([(1, 2), (1, 3)]),
    head=st.fixed_dictionaries({"fragment": st.sampled_from([0, 0x4000, 0x4000, 1])}),
).map(Segment.packet)
datagrams = st.builds(
    datagram, st.sampled_from([b"u" * 20, b"u" * 20, b"u" * 9, b""]), st.sampled_from([(1, 2), (1, 3)])
)


def flows(packets: list[bytes]) -> dict[bytes, list[bytes]]:
    """Packets by protocol, addresses and ports, without what cutting again may change: id and header checksum."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for one in packets:
        # With DF ids say nothing; without it merged ids are consecutive, so cutting gives the same.
        clean = one if not one[6] & 0x40 else one[:4] + b"\0\0" + one[6:10] + b"\0\0" + one[12:]
        found[one[9:10] + one[12:24]].append(clean)
    return found


@given(st.lists(segments | datagrams | st.just(ip(b"\x08\0\0\0", 1)), max_size=30), st.booleans(), st.booleans())
def test_every_flow_arrives_as_it_was_sent(packets: list[bytes], tcp: bool, udp: bool) -> None:
    out = [one for written in native.coalesce(packets, tcp, udp) for one in cut(written)]
    assert flows(out) == flows(packets)


# -- agreement with the pump in Python, and noise -----------------------------------------------------------

headers = st.builds(
    ip,
    st.binary(max_size=700),
    st.sampled_from([1, 6, 17, 47]),
    st.sampled_from(["10.5.1.2", "0.1.2.3", "127.0.0.1", "224.0.0.1", "255.255.255.255"]),
    st.sampled_from(["10.5.2.2", "239.1.1.1", "255.255.255.255"]),
    st.integers(1, 255),
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 0x4000, 0x2000, 0x0001]),
    st.integers(0, 255),
    st.sampled_from([b"", b"\1" * 4, b"\1" * 40]),
)


@given(headers, st.sampled_from([packet.NET_UNREACHABLE, packet.TIME_EXCEEDED, packet.FRAGMENTATION_NEEDED]))
def test_both_pumps_give_the_same_icmp_errors(offender: bytes, kind: tuple[int, int]) -> None:
    header = packet.parse(offender)
    assert header is not None
    mtu_bytes = 1400 if kind == packet.FRAGMENTATION_NEEDED else 0
    expected = packet.icmp_error(kind, offender, header, 0x0A050000, mtu_bytes)
    answered = packet.may_answer(offender, header)
    number = [packet.NET_UNREACHABLE, packet.FRAGMENTATION_NEEDED, packet.TIME_EXCEEDED].index(kind)
    assert native.icmp_error(number, offender, b"\x0a\5\0\0", 1400) == (expected if answered else None)


@given(headers)
def test_both_pumps_take_one_from_the_ttl(before: bytes) -> None:
    after = bytearray(before)
    packet.decrement_ttl(after)
    assert native.decrement_ttl(before) == bytes(after)


@given(
    st.tuples(st.sampled_from([0, 1, 2, 255]), st.sampled_from([0, 1, 3, 4, 5, 0x81]), *[st.integers(0, 0xFFFF)] * 4),
    headers | st.binary(max_size=100),
)
def test_noise_from_the_tun_is_cut_or_dropped(fields: tuple[int, ...], noise: bytes) -> None:
    for one in native.segment(struct.pack("=BBHHHH", *fields) + noise):
        assert len(one) <= 65535
        assert packet.parse(one) is not None or packet6.parse(one) is not None


@given(st.lists(headers | st.binary(max_size=100).filter(lambda one: one[:1] < b"\x60"), max_size=10))
def test_noise_from_the_wire_is_written_or_dropped(noise: list[bytes]) -> None:
    out = [one for written in native.coalesce(noise, True, True) for one in cut(written)]
    valid = [one[: int.from_bytes(one[2:4], "big")] for one in noise if packet.parse(one) is not None]
    assert flows(out) == flows(valid)
