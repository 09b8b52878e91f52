from __future__ import annotations

import random
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.allocate import CANDIDATES, Create, Reuse, choose_fresh, plan
from subnet.config import parse_network_config
from subnet.errors import NoFreeSubnet
from subnet.manager import LeaseRequest
from subnet.model import IPAddress, IPNetwork, Lease, LeaseAttrs, NetworkConfig, Pool, Subnets
from subnet.wire import parse_subnet_key

pytestmark = pytest.mark.pure

V4 = parse_network_config('{"Network":"10.5.0.0/16"}', "test")
DUAL = parse_network_config('{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"}', "test")
V6 = parse_network_config('{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48"}', "test")
US, US6 = IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")
THEM, THEM6 = IPv4Address("192.0.2.2"), IPv6Address("2001:db8::2")
FRESH4, FRESH6 = "10.5.1.0-24", "fd05:0:0:1::-64"


def first(free: Sequence[IPNetwork]) -> IPNetwork:
    return free[0]


def held(key: str, public: IPv4Address | None = US, public6: IPv6Address | None = None, lease_id: int = 7) -> Lease:
    return Lease(parse_subnet_key(key), LeaseAttrs(public, public6), key, lease_id)


def ask(
    config: NetworkConfig = V4, previous: str = "", local: Sequence[IPAddress] = (), us: IPv4Address = US
) -> LeaseRequest:
    attrs = LeaseAttrs(us if config.ipv4 else None, US6 if config.ipv6 else None)
    return LeaseRequest(attrs, config, parse_subnet_key(previous) if previous else None, frozenset(local))


def reuse(lease: Lease, *drop: Lease) -> Reuse:
    return Reuse(lease, lease.subnets, drop)


def create(key: str, *drop: Lease, reserved: bool = False) -> Create:
    return Create(parse_subnet_key(key), drop, reserved)


def test_fresh_subnet_when_nothing_is_known() -> None:
    assert plan(ask(), [], first) == create(FRESH4)
    assert plan(ask(DUAL), [], first) == create(f"{FRESH4}&{FRESH6}")
    assert plan(ask(V6), [], first) == create(f"0.0.0.0-0&{FRESH6}")


def test_nodes_that_start_at_once_get_both_subnets_for_themselves() -> None:
    draws = random.Random(7)
    outcomes = [plan(ask(DUAL), [], draws.choice) for _ in range(60)]
    keys = {outcome.subnets for outcome in outcomes}
    # Who wrote a key second draws again, so that different keys are what counts.
    assert len(keys) > 30
    assert len({key.v4 for key in keys}) == len({key.v6 for key in keys}) == len(keys)


def test_a_second_subnet_that_is_taken_is_drawn_by_itself() -> None:
    theirs = held("10.5.200.0-24&fd05:0:0:1::-64", THEM, THEM6)
    assert plan(ask(DUAL), [theirs], first) == create("10.5.1.0-24&fd05:0:0:2::-64")


def test_own_key_is_kept_whatever_its_backend_type() -> None:
    own = held("10.5.9.0-24")
    assert plan(ask(), [held("10.5.1.0-24", THEM), own], first) == reuse(own)


def test_E14_the_key_of_subnet_env_is_kept_and_the_other_dropped() -> None:
    one, two = held("10.5.9.0-24"), held("10.5.20.0-24")
    assert plan(ask(previous="10.5.20.0-24"), [one, two], first) == reuse(two, one)
    assert plan(ask(previous="10.5.9.0-24"), [one, two], first) == reuse(one, two)
    assert plan(ask(previous="10.5.30.0-24"), [two, one], first) == reuse(two, one)


def test_E14_reservation_before_key_order_but_after_subnet_env() -> None:
    plain, reserved = held("10.5.10.0-24"), held("10.5.20.0-24", lease_id=0)
    assert plan(ask(), [plain, reserved], first) == reuse(reserved, plain)
    assert plan(ask(previous="10.5.10.0-24"), [plain, reserved], first) == reuse(plain, reserved)


def test_E14_keys_that_do_not_fit_are_dropped_with_the_superfluous_ones() -> None:
    wrong_length, wrong_network = held("10.5.9.0-25"), held("10.6.9.0-24")
    dual, good, spare = held("10.5.11.0-24&fd05:0:0:b::-64"), held("10.5.10.0-24"), held("10.5.12.0-24")
    leases = [wrong_length, wrong_network, dual, good, spare]
    outcome = plan(ask(), leases, first)
    assert isinstance(outcome, Reuse)
    assert outcome.lease == good
    assert {lease.key for lease in outcome.drop} == {lease.key for lease in leases} - {good.key}


@pytest.mark.parametrize("key", ["10.6.9.0-24", "10.5.9.0-25", "10.5.0.0-24"])
def test_unfitting_key_is_replaced(key: str) -> None:
    old = held(key)
    assert plan(ask(), [old], first) == create(FRESH4, old)


def test_fresh_subnet_avoids_the_key_about_to_be_dropped() -> None:
    old = held("10.5.1.0-25")
    assert plan(ask(), [old], first) == create("10.5.2.0-24", old)
    assert create("10.5.2.0-24", old).replaces == ()


def test_key_about_to_be_dropped_does_not_exhaust_the_pool() -> None:
    config = parse_network_config('{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0","SubnetMax":"10.5.1.0"}', "test")
    old = held("10.5.1.0-25")
    outcome = plan(ask(config), [old], first)
    assert outcome == create("10.5.1.0-24", old)
    assert isinstance(outcome, Create)
    assert outcome.replaces == (old,)


def test_enabling_ipv6_keeps_the_ipv4_half() -> None:
    old = held("10.5.9.0-24")
    outcome = plan(ask(DUAL), [old, held("10.5.1.0-24&fd05:0:0:1::-64", THEM, THEM6)], first)
    assert outcome == create("10.5.9.0-24&fd05:0:0:9::-64", old)
    assert isinstance(outcome, Create)
    assert outcome.replaces == (old,)


def test_disabling_ipv6_keeps_the_ipv4_half() -> None:
    old = held("10.5.9.0-24&fd05:0:0:b::-64", US, US6)
    assert plan(ask(V4), [old], first) == create("10.5.9.0-24", old)


def test_enabling_ipv4_keeps_the_ipv6_half() -> None:
    old = held("0.0.0.0-0&fd05:0:0:b::-64", None, US6)
    assert plan(ask(DUAL), [old], first) == create("10.5.1.0-24&fd05:0:0:b::-64", old)


def test_changing_one_network_keeps_the_other_family() -> None:
    old = held("10.6.9.0-24&fd05:0:0:b::-64", US, US6)
    assert plan(ask(DUAL), [old], first) == create("10.5.1.0-24&fd05:0:0:b::-64", old)


def test_half_that_somebody_else_holds_is_not_kept() -> None:
    old = held("10.5.9.0-24")
    outcome = plan(ask(DUAL), [old, held("10.5.9.0-24&fd05:0:0:9::-64", THEM, THEM6)], first)
    assert outcome == create("10.5.1.0-24&fd05:0:0:1::-64", old)


def test_new_key_from_a_reservation_stays_reserved() -> None:
    old = held("10.5.77.0-24", lease_id=0)
    assert plan(ask(DUAL), [old], first) == create("10.5.77.0-24&fd05:0:0:4d::-64", old, reserved=True)
    elsewhere = held("10.6.77.0-24", lease_id=0)
    assert plan(ask(), [elsewhere], first) == create(FRESH4, elsewhere)


def test_ipv6_only_matches_the_ipv6_address() -> None:
    foreign = held("0.0.0.0-0&fd05:0:0:9::-64", None, THEM6)
    own = held("0.0.0.0-0&fd05:0:0:b::-64", None, US6)
    assert plan(ask(V6), [foreign, own], first) == reuse(own)
    assert plan(ask(V6), [foreign], first) == create(f"0.0.0.0-0&{FRESH6}")


def test_ipv4_address_decides_when_ipv4_is_enabled() -> None:
    lease = held("10.5.9.0-24&fd05:0:0:b::-64", THEM, US6)
    assert plan(ask(DUAL), [lease], first) == create("10.5.1.0-24&fd05:0:0:1::-64")
    lease = held("10.5.9.0-24&fd05:0:0:b::-64", US, THEM6)
    assert plan(ask(DUAL), [lease], first) == reuse(lease)


def test_a_lease_without_addresses_is_nobodys() -> None:
    request = LeaseRequest(LeaseAttrs(), V4)
    assert plan(request, [held("10.5.9.0-24", None)], first) == create(FRESH4)


@pytest.mark.parametrize(
    ("config", "previous", "expected"),
    [
        (V4, "10.5.30.0-24", "10.5.30.0-24"),
        (V4, "10.5.30.0-24&fd05:0:0:1e::-64", "10.5.30.0-24"),
        (V6, "0.0.0.0-0&fd05:0:0:1e::-64", "0.0.0.0-0&fd05:0:0:1e::-64"),
        (V6, "10.5.30.0-24&fd05:0:0:1e::-64", "0.0.0.0-0&fd05:0:0:1e::-64"),
        (DUAL, "10.5.30.0-24&fd05:0:0:1e::-64", "10.5.30.0-24&fd05:0:0:1e::-64"),
        (DUAL, "10.5.30.0-24", "10.5.30.0-24&fd05:0:0:1e::-64"),
        (V4, "10.6.30.0-24", "10.5.1.0-24"),
        (V4, "10.5.30.0-25", "10.5.1.0-24"),
        (V4, "0.0.0.0-0&fd05:0:0:1e::-64", "10.5.1.0-24"),
    ],
)
def test_E15_previous_subnet_is_taken_if_free_and_fitting(config: NetworkConfig, previous: str, expected: str) -> None:
    assert plan(ask(config, previous), [], first) == create(expected)


@pytest.mark.parametrize("key", ["10.5.30.0-24", "10.5.30.128-25", "10.5.0.0-18", "10.5.30.0-24&fd05:0:0:9::-64"])
def test_E05_previous_subnet_of_somebody_else_is_left_alone(key: str) -> None:
    config = parse_network_config('{"Network":"10.5.0.0/16","SubnetMin":"10.5.64.0"}', "test")
    for wanted in (config, V4):
        outcome = plan(ask(wanted, "10.5.30.0-24", local=[US]), [held(key, THEM, THEM6)], first)
        assert isinstance(outcome, Create)
        assert outcome.drop == ()
        assert outcome.subnets.v4 is not None
        assert not outcome.subnets.v4.overlaps(IPv4Network("10.5.30.0/24"))


def test_S12_previous_subnet_under_another_of_our_addresses_is_reused() -> None:
    new = IPv4Address("192.0.2.41")
    old, other = held("10.5.30.0-24"), held("10.5.40.0-24", THEM)
    assert plan(ask(previous="10.5.30.0-24", local=[US, new], us=new), [old, other], first) == reuse(old)


def test_S12_never_two_live_keys_of_one_host() -> None:
    new = IPv4Address("192.0.2.41")
    old, current = held("10.5.30.0-24"), held("10.5.20.0-24", new)
    outcome = plan(ask(previous="10.5.30.0-24", local=[US, new], us=new), [current, old], first)
    assert outcome == reuse(old, current)


def test_S12_a_foreign_looking_key_needs_both_subnet_and_address() -> None:
    new = IPv4Address("192.0.2.41")
    old = held("10.5.30.0-24")
    assert plan(ask(previous="10.5.30.0-24", local=[new], us=new), [old], first) == create(FRESH4)
    assert plan(ask(previous="10.5.31.0-24", local=[US, new], us=new), [old], first) == create("10.5.31.0-24")


def test_C05_exhausted_pool_says_size_and_use() -> None:
    config = parse_network_config('{"Network":"10.0.0.0/28"}', "test")
    leases = [held(f"10.0.0.{n}-30", THEM) for n in (4, 8, 12)]
    assert plan(ask(config), leases[:2], first) == create("10.0.0.12-30")
    with pytest.raises(NoFreeSubnet) as caught:
        plan(ask(config), leases, first)
    assert str(caught.value) == (
        "no free subnet in 10.0.0.0/28: 3 leases take all 3 subnets from 10.0.0.4/30 to 10.0.0.12/30"
    )


def test_at_most_a_hundred_candidates_in_order() -> None:
    seen: list[Sequence[IPNetwork]] = []

    def last(free: Sequence[IPNetwork]) -> IPNetwork:
        seen.append(free)
        return free[-1]

    assert V4.ipv4 is not None
    taken: list[IPNetwork] = [IPv4Network("10.5.3.0/24"), IPv4Network("10.5.8.0/22"), IPv6Network("::/0")]
    expected = [IPv4Network(f"10.5.{n}.0/24") for n in range(1, 256) if n not in (3, 8, 9, 10, 11)][:CANDIDATES]
    assert choose_fresh(V4.ipv4, taken, last) == expected[-1]
    assert seen == [expected]


def test_walk_ends_at_the_last_subnet_of_the_address_space() -> None:
    config = parse_network_config('{"Network":"255.255.255.0/24","SubnetLen":26}', "test")
    assert config.ipv4 is not None
    taken: list[IPNetwork] = [IPv4Network(f"255.255.255.{n}/26") for n in (64, 128)]
    assert choose_fresh(config.ipv4, taken, first) == IPv4Network("255.255.255.192/26")
    assert choose_fresh(config.ipv4, [*taken, IPv4Network("255.255.255.255/32")], first) is None


def test_full_large_pool_takes_one_pass() -> None:
    network = IPv4Network("10.0.0.0/8")
    pool = Pool(network, 24, IPv4Network("10.0.1.0/24"), IPv4Network("10.255.255.0/24"))
    taken = [IPv4Network((10 << 24 | n << 8, 24)) for n in range(1, 65536) if n != 65000]
    random.Random(5).shuffle(taken)
    assert choose_fresh(pool, taken, first) == IPv4Network("10.253.232.0/24")
    huge = Pool(IPv6Network("fd00::/8"), 120, IPv6Network("fd00::100/120"), IPv6Network("fdff::/120"))
    assert choose_fresh(huge, [IPv6Network("fd00::/9")], first) == IPv6Network("fd80::/120")


networks = st.builds(
    lambda value, length: IPv4Network((value, length), strict=False),
    st.integers(int(IPv4Address("10.0.0.0")), int(IPv4Address("10.0.1.255"))),
    st.integers(22, 32),
)


@given(st.lists(networks, max_size=40), st.integers(26, 30), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_fresh_subnet_never_overlaps_and_is_found_if_there_is_one(
    taken: list[IPNetwork], length: int, rng: random.Random
) -> None:
    network = IPv4Network("10.0.0.0/24")
    subnets = list(network.subnets(new_prefix=length))
    pool = Pool(network, length, subnets[1], subnets[-1])
    free = [subnet for subnet in subnets[1:] if not any(subnet.overlaps(other) for other in taken)]
    chosen = choose_fresh(pool, taken, rng.choice)
    assert chosen in free if free else chosen is None


leases_of_anyone = st.lists(
    st.builds(
        lambda n, length, public, lease_id: Lease(
            Subnets(IPv4Network((int(IPv4Address("10.0.0.0")) + n * 16, length), strict=False)),
            LeaseAttrs(public),
            f"{n:03}-{length}",
            lease_id,
        ),
        st.integers(0, 31),
        st.integers(26, 30),
        st.sampled_from([US, THEM, None]),
        st.integers(0, 1),
    ),
    max_size=12,
    unique_by=lambda lease: lease.subnets,
)


@given(leases_of_anyone, st.sampled_from(["", "10.0.0.32-28", "10.0.1.0-28"]), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_plan_fits_and_leaves_the_others_alone(leases: list[Lease], previous: str, rng: random.Random) -> None:
    config = parse_network_config('{"Network":"10.0.0.0/24","SubnetLen":28}', "test")
    assert config.ipv4 is not None
    theirs = [lease for lease in leases if lease.attrs.public_ip != US]
    try:
        outcome = plan(ask(config, previous), leases, rng.choice)
    except NoFreeSubnet:
        covered = [lease.subnets.v4 for lease in theirs if lease.subnets.v4]
        assert all(
            any(s.overlaps(c) for c in covered) for s in list(IPv4Network("10.0.0.0/24").subnets(new_prefix=28))[1:]
        )
        return
    assert config.ipv4.holds(outcome.subnets.v4)
    assert all(lease.attrs.public_ip == US for lease in outcome.drop)
    kept = [lease for lease in leases if lease.attrs.public_ip == US and lease not in outcome.drop]
    assert kept == ([outcome.lease] if isinstance(outcome, Reuse) else [])
    if isinstance(outcome, Create):
        new = outcome.subnets.v4
        assert new is not None
        assert not any(lease.subnets.v4 and lease.subnets.v4.overlaps(new) for lease in theirs)
