from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.config import parse_network_config
from subnet.leaseset import admit, checks_for
from subnet.model import IPAddress, IPNetwork, Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.peers import PeerSet
from subnet.wire import parse_subnet_key, subnet_key

pytestmark = pytest.mark.pure

V4 = parse_network_config('{"Network":"10.5.0.0/16"}', "test")
DUAL = parse_network_config('{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"}', "test")
OWN = parse_subnet_key("10.5.1.0-24")
OWN_PUBLIC: frozenset[IPAddress] = frozenset({IPv4Address("192.0.2.1")})
UNDERLAY: tuple[IPNetwork, ...] = (IPv4Network("192.0.2.0/24"),)


def _peer_set(config: NetworkConfig) -> PeerSet:
    return PeerSet(checks_for(config, OWN, OWN_PUBLIC, UNDERLAY), OWN)


@st.composite
def leases(draw: st.DrawFn) -> Lease:
    length = draw(st.sampled_from([15, 18, 20, 23, 24, 24, 24, 26, 30, 31]))
    address = IPv4Address("10.5.0.0") + draw(st.integers(0, 7)) * 256
    v4 = IPv4Network((address, length), strict=False) if draw(st.integers(0, 9)) else None
    has_v6 = v4 is None or draw(st.booleans())
    v6_length = draw(st.sampled_from([52, 64, 64]))
    v6_address = IPv6Address("fd05::") + (draw(st.integers(0, 3)) << 64)
    v6 = IPv6Network((v6_address, v6_length), strict=False) if has_v6 else None
    host = draw(st.integers(1, 5))
    attrs = LeaseAttrs(
        IPv4Address(f"192.0.2.{host}"), IPv6Address(f"2001:db8::{host}") if draw(st.booleans()) else None
    )
    subnets = Subnets(v4, v6)
    return Lease(subnets, attrs, subnet_key(subnets), 7, draw(st.integers(1, 4)))


@pytest.mark.parametrize("config", [V4, DUAL], ids=["v4", "dual"])
@given(first=st.lists(leases(), max_size=6), changes=st.lists(leases() | st.integers(0, 20), max_size=12))
@settings(max_examples=150)
def test_V21_any_course_of_changes_ends_where_judging_all_at_once_does(
    config: NetworkConfig, first: list[Lease], changes: list[Lease | int]
) -> None:
    held = {lease.subnets: lease for lease in first}
    peers = _peer_set(config)
    peers.load(held.values())
    seen: dict[Subnets, Lease] = {}

    def follow() -> None:
        for subnets, peer in peers.take().items():
            assert seen.get(subnets) != peer
            if peer is None:
                del seen[subnets]
            else:
                seen[subnets] = peer

    for change in changes:
        if isinstance(change, Lease):
            held[change.subnets] = change
            peers.put(change)
        elif held:
            subnets = sorted(held, key=str)[change % len(held)]
            del held[subnets]
            peers.remove(subnets)
        if len(held) % 2:
            follow()
    follow()
    expected = admit(held.values(), own=OWN, own_public=OWN_PUBLIC, config=config, underlay=UNDERLAY)
    assert set(seen.values()) == set(expected.peers)
    assert {subnets: why for subnets, (_, why) in peers.refused.items()} == {
        lease.subnets: why for lease, why in expected.rejected
    }


def _lease(key: str, revision: int = 1, host: int = 2) -> Lease:
    return Lease(parse_subnet_key(key), LeaseAttrs(IPv4Address(f"192.0.2.{host}")), key, 7, revision)


def test_a_change_concerns_its_own_block_only() -> None:
    peers = _peer_set(V4)
    peers.load(_lease(f"10.5.{n}.0-24") for n in range(2, 250))
    assert len(peers.take()) == 248
    moved = _lease("10.5.7.0-24", revision=9, host=9)
    peers.put(moved)
    assert peers.take() == {moved.subnets: moved}
    peers.remove(moved.subnets)
    assert peers.take() == {moved.subnets: None}
    assert peers.take() == {}


def test_what_a_wide_lease_kept_out_comes_in_when_it_goes() -> None:
    peers = _peer_set(V4)
    wide, narrow = _lease("10.5.16.0-20", revision=1), _lease("10.5.18.0-24", revision=2)
    peers.load([wide, narrow])
    assert peers.take() == {wide.subnets: wide}
    assert "an older lease" in peers.refused[narrow.subnets][1]
    peers.remove(wide.subnets)
    assert peers.take() == {wide.subnets: None, narrow.subnets: narrow}
    assert peers.refused == {}


def test_own_subnet_is_neither_peer_nor_refused() -> None:
    peers = _peer_set(V4)
    peers.load([_lease("10.5.1.0-24")])
    peers.put(_lease("10.5.1.0-24", revision=3))
    assert (peers.take(), peers.refused) == ({}, {})


def test_loading_again_tells_the_difference_only() -> None:
    peers = _peer_set(V4)
    a, b, c = (_lease(f"10.5.{n}.0-24") for n in (2, 3, 4))
    peers.load([a, b])
    peers.take()
    peers.load([b, c])
    assert peers.take() == {a.subnets: None, c.subnets: c}
