from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.udp.routes import Range, Table, pack, ranges

pytestmark = pytest.mark.pure

BASE = int(IPv4Address("10.5.0.0"))


@st.composite
def networks(draw: st.DrawFn) -> IPv4Network:
    length = draw(st.integers(16, 32))
    return IPv4Network((BASE | draw(st.integers(0, 0xFFFF)) >> (32 - length) << (32 - length), length))


tables = st.dictionaries(networks(), st.integers(1, 2**32 - 1).map(IPv4Address), max_size=12)


def longest_match(table: dict[IPv4Network, IPv4Address], destination: IPv4Address) -> int:
    covering = [network for network in table if destination in network]
    return int(table[max(covering, key=lambda n: n.prefixlen)]) if covering else 0


def probes(table: dict[IPv4Network, IPv4Address]) -> list[int]:
    edges = {0, 2**32 - 1}
    for network in table:
        first, last = int(network.network_address), int(network.broadcast_address)
        edges |= {max(first - 1, 0), first, last, min(last + 1, 2**32 - 1)}
    return sorted(edges)


@given(tables)
def test_the_longest_prefix_wins(table: dict[IPv4Network, IPv4Address]) -> None:
    lookup = Table(ranges(table))
    for destination in probes(table):
        assert lookup.hop(destination) == longest_match(table, IPv4Address(destination))


@given(tables)
def test_ranges_ascend_without_overlap(table: dict[IPv4Network, IPv4Address]) -> None:
    found = ranges(table)
    assert all(r.first <= r.last for r in found)
    assert all(a.last < b.first for a, b in pairwise(found))


def native_hops(packed: bytes, destinations: list[int]) -> list[int]:
    native = pytest.importorskip("backends.udp._pump")
    found = native.hops(4, packed, [one.to_bytes(4, "big") for one in destinations])
    return [int.from_bytes(one, "big") for one in found]


@given(tables, st.lists(st.integers(0, 0x1FFFF).map(lambda low: BASE - 0x8000 + low), max_size=20))
def test_the_native_table_agrees(table: dict[IPv4Network, IPv4Address], destinations: list[int]) -> None:
    found = ranges(table)
    lookup = Table(found)
    asked = destinations + probes(table)
    assert native_hops(pack(found), asked) == [lookup.hop(one) for one in asked]


def test_the_native_table_takes_the_whole_address_space() -> None:
    everything = pack([Range(0, 0, 1), Range(1, 2**32 - 2, 2), Range(2**32 - 1, 2**32 - 1, 3)])
    assert native_hops(everything, [0, 1, 2**31, 2**32 - 2, 2**32 - 1]) == [1, 2, 2, 2, 3]
    assert native_hops(pack([Range(0, 2**32 - 1, 9)]), [0, 2**32 - 1]) == [9, 9]
    assert native_hops(b"", [0, 5]) == [0, 0]


@pytest.mark.parametrize(
    "packed",
    [
        b"123",
        pack([Range(5, 4, 1)]),
        pack([Range(1, 5, 1), Range(5, 6, 1)]),
        pack([Range(7, 8, 1), Range(1, 2, 1)]),
        pack([Range(1, 2, 0)]),
    ],
)
def test_the_native_table_refuses_what_is_none(packed: bytes) -> None:
    with pytest.raises(ValueError, match="ranges"):
        native_hops(packed, [1])
