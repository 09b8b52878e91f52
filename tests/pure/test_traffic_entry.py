from __future__ import annotations

import logging
import struct
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.traffic.converge import Converger
from flanneld.traffic.entry import decode, encode
from flanneld.traffic.nfnetlink import attributes, messages
from flanneld.traffic.render import rule_text
from flanneld.traffic.rules import Rule, TrafficPolicy
from flanneld.traffic.watch import subjects
from subnet.clock import SystemClock
from subnet.model import Family, IPNetwork
from subnet.report import Reporter
from tests.support.fake_firewall import FakeFirewall

pytestmark = pytest.mark.pure


def networks(family: Family) -> st.SearchStrategy[IPNetwork | None]:
    bits = 32 if family == 4 else 128
    base = "0.0.0.0" if family == 4 else "::"
    made = st.tuples(st.integers(0, 2**bits - 1), st.integers(1, bits))

    def network(number_and_length: tuple[int, int]) -> IPNetwork:
        number, length = number_and_length
        address = ip_network(base)[0] + number
        return ip_network((address, length), strict=False)

    return st.one_of(st.none(), made.map(network))


@st.composite
def family_and_rule(draw: st.DrawFn) -> tuple[Family, Rule]:
    family: Family = draw(st.sampled_from([4, 6]))
    source, destination = draw(networks(family)), draw(networks(family))
    target = draw(st.sampled_from(["ACCEPT", "RETURN", "MASQUERADE", "FLANNEL-FWD"]))
    return family, Rule(
        target,
        source=source,
        source_inverted=source is not None and draw(st.booleans()),
        destination=destination,
        destination_inverted=destination is not None and draw(st.booleans()),
        mark=draw(st.one_of(st.none(), st.integers(1, 2**32 - 1))),
        comment=draw(st.sampled_from(["", "flanneld masq", "x" * 255])),
        random_fully=target == "MASQUERADE" and draw(st.booleans()),
    )


@given(family_and_rule())
def test_an_entry_reads_as_the_rule_it_was_made_of(case: tuple[Family, Rule]) -> None:
    family, rule = case
    # For a name that is no extension libiptc puts a verdict in the place of the name.
    entry = encode(rule, family)
    if rule.target != "MASQUERADE":
        entry = entry.replace(rule.target.encode() + b"\0", bytes(len(rule.target) + 1))
    assert decode(entry, rule.target, family) == rule_text(rule)


def test_entry_bytes_of_ip_tables_h() -> None:
    rule = Rule("RETURN", source=ip_network("10.5.0.0/16"), source_inverted=True, mark=0x4000)
    entry = encode(rule, 4)
    assert entry[:16].hex() == "0a05000000000000ffff000000000000"
    assert entry[80:84] == bytes([0, 0, 0, 0x08])
    assert struct.unpack_from("=HH", entry, 88) == (112 + 48, 112 + 48 + 40)
    assert entry[112:118] == struct.pack("@H4s", 48, b"mark")
    assert struct.unpack_from("=BIIB", entry, 143) == (1, 0x4000, 0x4000, 0)
    assert entry[160:168] == struct.pack("@H6s", 40, b"RETURN")
    assert len(encode(rule, 6)) == 168 + 48 + 40


@pytest.mark.parametrize("at", [20, 60, 80, 82], ids=["interface", "mask", "protocol", "fragment"])
def test_an_entry_with_more_conditions_is_not_ours(at: int) -> None:
    entry = bytearray(encode(Rule("ACCEPT", source=ip_network("10.5.0.0/16")), 4))
    entry[at] = 1
    assert decode(bytes(entry), "ACCEPT", 4) == "-m opaque -j ACCEPT"


def test_counters_are_no_difference() -> None:
    entry = bytearray(encode(Rule("RETURN", mark=1), 4).replace(b"RETURN", bytes(6)))
    before = decode(bytes(entry), "RETURN", 4)
    entry[92:112] = bytes(range(20))
    assert decode(bytes(entry), "RETURN", 4) == before == "-m mark --mark 0x1/0x1 -j RETURN"


def attr(kind: int, text: str) -> bytes:
    value = text.encode() + b"\0"
    return (struct.pack("=HH", 4 + len(value), kind) + value).ljust((4 + len(value) + 3) & ~3, b"\0")


def nft(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 20 + len(body), 10 << 8 | kind, 0, 7, 0) + struct.pack("=BBH", 2, 0, 0) + body


NEW_RULE, DEL_RULE, DEL_CHAIN, DEL_TABLE, NEW_SET = 6, 8, 5, 2, 9


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (DEL_RULE, attr(1, "nat") + attr(2, "FLANNEL-POSTRTG"), True),
        (NEW_RULE, attr(1, "filter") + attr(2, "FORWARD"), True),
        (DEL_RULE, attr(1, "nat") + attr(2, "KUBE-SVC-X"), False),
        (DEL_RULE, attr(1, "mine") + attr(2, "FORWARD"), False),
        (DEL_CHAIN, attr(1, "filter") + attr(3, "FLANNEL-FWD"), True),
        (DEL_CHAIN, attr(1, "filter") + attr(3, "DOCKER"), False),
        (DEL_TABLE, attr(1, "nat"), True),
        (DEL_TABLE, attr(1, "mine"), False),
        (NEW_SET, attr(1, "nat"), False),
    ],
)
def test_only_changes_near_our_rules_are_answered(kind: int, body: bytes, expected: bool) -> None:
    datagram = nft(NEW_SET, attr(1, "x")) + nft(kind, body)
    said = [list(subjects(k, a)) for k, a in messages(datagram)]
    keeper = Converger(FakeFirewall(), Reporter(logging.getLogger("test"), SystemClock()))
    interested = [any(keeper.interested(TrafficPolicy(), *about) for about in abouts) for abouts in said]
    assert interested == [False, expected]


@given(st.binary(max_size=80))
def test_broken_datagrams_are_survived(data: bytes) -> None:
    for kind, attrs in messages(data):
        list(subjects(kind, attrs))
    assert all(isinstance(key, int) for key in attributes(data))
