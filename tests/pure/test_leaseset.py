from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.config import parse_network_config
from subnet.leaseset import Admission, LeaseSet, admit
from subnet.manager import LeasesChanged, LeasesListed
from subnet.model import IPAddress, IPNetwork, Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.wire import parse_subnet_key

pytestmark = pytest.mark.pure

V4 = parse_network_config('{"Network":"10.5.0.0/16"}', "test")
DUAL = parse_network_config('{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"}', "test")
V6 = parse_network_config('{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48"}', "test")
KUBE = parse_network_config('{"Network":"10.5.0.0/16"}', "test", check_pools=False)


def lease(key: str, public: str | None = "192.0.2.2", public6: str | None = None, revision: int = 1) -> Lease:
    attrs = LeaseAttrs(IPv4Address(public) if public else None, IPv6Address(public6) if public6 else None)
    return Lease(parse_subnet_key(key), attrs, key, 7, revision)


def judged(
    leases: Iterable[Lease],
    config: NetworkConfig = V4,
    own: str = "10.5.1.0-24",
    own_public: Iterable[IPAddress] = (IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")),
    underlay: Collection[IPNetwork] = (IPv4Network("192.0.2.0/24"), IPv6Network("2001:db8::/64")),
) -> Admission:
    own_subnets = parse_subnet_key(own) if own else None
    return admit(leases, own=own_subnets, own_public=frozenset(own_public), config=config, underlay=underlay)


A, B, C = lease("10.5.2.0-24"), lease("10.5.10.0-24"), lease("10.5.2.0-24&fd05:0:0:2::-64")


def test_nothing_is_known_before_the_first_list() -> None:
    leases = LeaseSet()
    leases.changed(LeasesChanged((A,), 5))
    assert (leases.synced, leases.all()) == (False, ())
    leases.listed(LeasesListed((), 5))
    assert (leases.synced, leases.all()) == (True, ())


def test_changes_follow_the_list_in_order() -> None:
    leases = LeaseSet()
    leases.listed(LeasesListed((B, A), 5))
    assert leases.all() == (A, B)
    moved = replace(A, attrs=LeaseAttrs(IPv4Address("192.0.2.9")), revision=6)
    leases.changed(LeasesChanged((moved,), 6))
    assert leases.all() == (moved, B)
    leases.changed(LeasesChanged((A.subnets, B.subnets, B), 8))
    assert leases.all() == (B,)
    leases.changed(LeasesChanged((A.subnets,), 9))
    assert leases.all() == (B,)


def test_single_and_dual_stack_keys_are_different_entries() -> None:
    leases = LeaseSet()
    leases.listed(LeasesListed((A, C), 5))
    assert set(leases.all()) == {A, C}
    leases.changed(LeasesChanged((A.subnets,), 6))
    assert leases.all() == (C,)


def test_stale_changes_do_not_undo_a_list() -> None:
    leases = LeaseSet()
    leases.listed(LeasesListed((A,), 10))
    leases.changed(LeasesChanged((A.subnets, B), 9))
    assert leases.all() == (A,)


def test_E15_a_list_of_a_store_that_began_anew_counts() -> None:
    leases = LeaseSet()
    leases.listed(LeasesListed((A, B), 1000))
    leases.listed(LeasesListed((B,), 3))
    leases.changed(LeasesChanged((A,), 4))
    assert leases.all() == (A, B)


KEYS = ["10.5.2.0-24", "10.5.3.0-24", "10.5.2.0-24&fd05:0:0:2::-64", "0.0.0.0-0&fd05:0:0:3::-64"]
writes = st.builds(lambda key, host: lease(key, f"192.0.2.{host}"), st.sampled_from(KEYS), st.integers(1, 4))
removals = st.sampled_from(KEYS).map(parse_subnet_key)


steps = st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20))


@given(st.lists(writes | removals, max_size=20), st.integers(0, 20), st.lists(steps, max_size=8))
@settings(max_examples=100, deadline=None)
def test_V21_any_interleaving_of_lists_and_changes_ends_in_the_same_set(
    history: list[Lease | Subnets], first: int, course: list[tuple[bool, int, int]]
) -> None:
    states: list[dict[Subnets, Lease]] = [{}]
    for change in history:
        state = dict(states[-1])
        if isinstance(change, Lease):
            state[change.subnets] = change
        else:
            state.pop(change, None)
        states.append(state)
    end = len(history)

    leases = LeaseSet()
    seen = min(first, end)
    leases.listed(LeasesListed(tuple(states[seen].values()), seen))
    for relist, one, other in [*course, (False, 0, end)]:
        if relist:
            seen = max(seen, min(one, end))
            leases.listed(LeasesListed(tuple(reversed(states[seen].values())), seen))
        else:
            # A watch may repeat what is known already, but leaves no gap.
            start, upto = min(one, seen), min(max(one, other), end)
            leases.changed(LeasesChanged(tuple(history[start:upto]), upto))
            seen = max(seen, upto)
        assert set(leases.all()) == set(states[seen].values())

    fresh = LeaseSet()
    fresh.listed(LeasesListed(tuple(states[-1].values()), end))
    assert leases.all() == fresh.all()


def test_own_lease_is_neither_peer_nor_rejected() -> None:
    assert judged([lease("10.5.1.0-24", "192.0.2.1"), A]) == Admission((A,), ())


def test_peers_come_in_the_order_of_their_subnets() -> None:
    assert judged([B, A]).peers == (A, B)


@pytest.mark.parametrize(
    ("key", "public", "reason"),
    [
        ("10.6.2.0-24", "192.0.2.2", "10.6.2.0/24: is not inside the pod network 10.5.0.0/16"),
        ("10.0.0.0-8", "192.0.2.2", "10.0.0.0/8: is not inside the pod network"),
        ("10.4.0.0-15", "192.0.2.2", "10.4.0.0/15: is not inside the pod network"),
        ("128.0.0.0-1", "192.0.2.2", "128.0.0.0/1: is not inside the pod network"),
        ("10.5.0.0-16", "192.0.2.2", "10.5.0.0/16: has an implausible length, a node's is 18 to 30 bits"),
        ("10.5.128.0-17", "192.0.2.2", "10.5.128.0/17: has an implausible length"),
        ("10.5.2.0-31", "192.0.2.2", "10.5.2.0/31: has an implausible length"),
        ("10.5.1.128-25", "192.0.2.2", "10.5.1.128/25: overlaps our own subnet 10.5.1.0/24"),
        ("10.5.0.0-18", "192.0.2.2", "10.5.0.0/18: overlaps our own subnet 10.5.1.0/24"),
        ("10.5.2.0-24", None, "10.5.2.0/24: its node announces no public IPv4 address"),
        ("10.5.2.0-24", "0.0.0.0", "10.5.2.0/24: the public address 0.0.0.0 is not that of a host"),
        ("10.5.2.0-24", "127.0.0.1", "the public address 127.0.0.1 is not that of a host"),
        ("10.5.2.0-24", "224.0.0.5", "the public address 224.0.0.5 is not that of a host"),
        ("10.5.2.0-24", "255.255.255.255", "the public address 255.255.255.255 is not that of a host"),
        ("10.5.2.0-24", "192.0.2.1", "the public address 192.0.2.1 is our own"),
        ("10.5.2.0-24", "10.5.7.7", "the public address 10.5.7.7 is inside the pod network 10.5.0.0/16"),
    ],
)
def test_V21_hostile_and_odd_leases_are_rejected_one_by_one(key: str, public: str | None, reason: str) -> None:
    odd = lease(key, public, revision=0)
    admission = judged([B, odd])
    assert admission.peers == (B,)
    ((rejected, why),) = admission.rejected
    assert rejected == odd
    assert reason in why


@pytest.mark.parametrize(
    ("key", "public6", "reason"),
    [
        ("fd06:0:0:2::-64", "2001:db8::2", "is not inside the pod network fd05::/48"),
        ("fd05::-49", "2001:db8::2", "has an implausible length, a node's is 50 to 126 bits"),
        ("fd05:0:0:2::-127", "2001:db8::2", "has an implausible length"),
        ("fd05:0:0:2::-64", None, "announces no public IPv6 address"),
        ("fd05:0:0:2::-64", "::", "is not that of a host"),
        ("fd05:0:0:2::-64", "::1", "is not that of a host"),
        ("fd05:0:0:2::-64", "ff02::1", "is not that of a host"),
        ("fd05:0:0:2::-64", "2001:db8::1", "is our own"),
        ("fd05:0:0:2::-64", "fd05::9", "is inside the pod network"),
    ],
)
def test_ipv6_leases_pass_the_same_checks(key: str, public6: str | None, reason: str) -> None:
    odd = lease(f"0.0.0.0-0&{key}", None, public6)
    admission = judged([odd], V6, own="0.0.0.0-0&fd05:0:0:1::-64")
    assert admission.peers == ()
    assert reason in admission.rejected[0][1]


@pytest.mark.parametrize("public", ["169.254.9.9", "10.9.9.9", "203.0.113.5", "192.0.2.2"])
def test_private_link_local_and_nat_addresses_are_fine(public: str) -> None:
    assert judged([lease("10.5.2.0-24", public)]).rejected == ()


@pytest.mark.parametrize("key", ["10.5.0.0-18", "10.5.2.0-24", "10.5.2.0-26"])
def test_a_peer_never_covers_the_underlay(key: str) -> None:
    admission = judged([lease(key), B], own="10.5.77.0-24", underlay=[IPv4Network("10.5.2.0/26")])
    assert admission.peers == (B,)
    assert "covers 10.5.2.0/26 of the external interface" in admission.rejected[0][1]


def test_without_a_lease_of_our_own_the_other_checks_hold() -> None:
    assert judged([A, lease("10.6.1.0-24")], own="").peers == (A,)


def test_the_older_of_two_overlapping_peers_wins() -> None:
    old, young = lease("10.5.2.128-25", "192.0.2.3", revision=4), lease("10.5.2.0-24", "192.0.2.4", revision=9)
    admission = judged([young, old])
    assert admission.peers == (old,)
    assert admission.rejected == ((young, "10.5.2.0/24: overlaps 10.5.2.128/25 of 192.0.2.3, an older lease"),)
    assert judged([replace(young, revision=2), old]).peers == (replace(young, revision=2),)


def test_equal_age_is_decided_by_the_key() -> None:
    one, two = lease("10.5.2.0-24", "192.0.2.3"), lease("10.5.2.0-25", "192.0.2.4")
    assert judged([two, one]).peers == judged([one, two]).peers == (one,)


def test_a_rejected_lease_shuts_nobody_out() -> None:
    old = lease("10.5.2.0-24", "127.0.0.1", revision=1)
    young = lease("10.5.2.0-25", "192.0.2.4", revision=9)
    middle = [lease(f"10.5.{n}.0-{m}", "192.0.2.5", revision=n) for n, m in ((8, 23), (9, 24))]
    admission = judged([old, young, *middle])
    assert admission.peers == (young, middle[0])
    assert [rejected for rejected, _ in admission.rejected] == [old, middle[1]]


def test_K09_a_deficient_peer_keeps_the_family_it_has() -> None:
    v4_only = lease("10.5.2.0-24", "192.0.2.2")
    v6_only = lease("0.0.0.0-0&fd05:0:0:3::-64", None, "2001:db8::3")
    both = lease("10.5.4.0-24&fd05:0:0:4::-64", "192.0.2.4", "2001:db8::4")
    no_v6_address = lease("10.5.5.0-24&fd05:0:0:5::-64", "192.0.2.5")
    admission = judged([v4_only, v6_only, both, no_v6_address], DUAL, own="10.5.1.0-24&fd05:0:0:1::-64")
    half = replace(no_v6_address, subnets=Subnets(IPv4Network("10.5.5.0/24")))
    assert set(admission.peers) == {v4_only, v6_only, both, half}
    assert admission.rejected == ((no_v6_address, "fd05:0:0:5::/64: its node announces no public IPv6 address"),)


def test_K09_only_enabled_families_matter() -> None:
    dual = lease("10.5.2.0-24&2000::-3", "192.0.2.2", "::1")
    v6_only = lease("0.0.0.0-0&fd05:0:0:3::-64", None, "2001:db8::3")
    admission = judged([dual, v6_only])
    assert admission.peers == (replace(dual, subnets=Subnets(IPv4Network("10.5.2.0/24"))),)
    assert admission.rejected == ((v6_only, "fd05:0:0:3::/64: has no subnet of an enabled address family"),)


def test_a_lease_bad_in_both_families_is_rejected_once() -> None:
    bad = lease("10.6.2.0-24&fd06::-64", "192.0.2.2", "2001:db8::2")
    admission = judged([bad], DUAL)
    assert admission.peers == ()
    ((_, why),) = admission.rejected
    assert "10.6.2.0/24: " in why
    assert "; fd06::/64: " in why


def test_assigned_subnets_of_kubernetes_may_have_any_length_inside_the_network() -> None:
    peer = lease("10.5.128.0-17")
    assert judged([peer], KUBE, own="10.5.0.0-17").peers == (peer,)


subnets_4 = st.builds(
    lambda value, length: Subnets(IPv4Network((value, length), strict=False)),
    st.integers(int(IPv4Address("10.4.255.0")), int(IPv4Address("10.5.4.0"))),
    st.integers(15, 31),
)
any_leases = st.lists(
    st.builds(
        lambda subnets, host, revision: Lease(subnets, LeaseAttrs(IPv4Address(f"192.0.2.{host}")), "", 1, revision),
        subnets_4,
        st.integers(1, 9),
        st.integers(0, 3),
    ),
    max_size=15,
    unique_by=lambda item: item.subnets,
)


@given(any_leases, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_V21_admission_is_a_function_of_the_set_and_peers_are_disjoint(leases: list[Lease], rng: object) -> None:
    admission = judged(leases)
    assert judged(leases[::-1]) == admission
    ranges = [peer.subnets.v4 for peer in admission.peers if peer.subnets.v4]
    for index, one in enumerate(ranges):
        assert one.subnet_of(IPv4Network("10.5.0.0/16"))
        assert not one.overlaps(IPv4Network("10.5.1.0/24"))
        assert not any(one.overlaps(other) for other in ranges[index + 1 :])
    others = {item for item in leases if item.subnets != Subnets(IPv4Network("10.5.1.0/24"))}
    assert others == set(admission.peers) | {item for item, _ in admission.rejected}
    assert len(others) == len(admission.peers) + len(admission.rejected)


def test_ten_thousand_overlapping_leases_take_no_quadratic_time() -> None:
    config = parse_network_config('{"Network":"10.0.0.0/8"}', "test")
    base, attrs = int(IPv4Address("10.64.0.0")), LeaseAttrs(IPv4Address("192.0.2.2"))
    leases = [
        Lease(Subnets(IPv4Network((base + (n // 2) * 256, 24 + n % 2))), attrs, "", 1, 20_000 - n)
        for n in range(10_000)
    ]
    started = time.process_time()
    assert len(judged(leases, config).peers) == 5_000
    # About 0.3 s of CPU; comparing all pairs takes minutes.
    assert time.process_time() - started < 10
