from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address

import pytest

from subnet.model import Lease, LeaseAttrs
from subnet.parting import Parting
from subnet.wire import parse_subnet_key

pytestmark = pytest.mark.pure


def lease(number: int, host: int | None = None, v6_host: int | None = None) -> Lease:
    key = f"10.5.{number}.0-24"
    v6 = IPv6Address(f"2001:db8::{v6_host}") if v6_host else None
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number if host is None else host}"), v6)
    return Lease(parse_subnet_key(key), attrs, key, 7, 1)


def test_each_parts_once_its_grace_is_over_and_only_once() -> None:
    parting = Parting()
    parting.begin(lease(2), 10.0)
    parting.begin(lease(3), 10.2)
    assert parting.next_at == 10.5
    assert parting.over(10.49) == ()
    assert parting.over(10.5) == (lease(2).subnets,)
    assert parting.next_at == 10.7
    assert parting.over(99) == (lease(3).subnets,)
    assert parting.over(99) == ()
    assert parting.next_at is None


def test_E08_a_lease_that_is_back_does_not_part() -> None:
    parting = Parting()
    parting.begin(lease(2), 10.0)
    assert parting.came(lease(2)) == ()
    assert parting.next_at is None
    assert parting.over(99) == ()


def test_gone_back_and_gone_again_counts_from_the_last_time() -> None:
    parting = Parting()
    parting.begin(lease(2), 10.0)
    parting.begin(lease(3), 10.1)
    parting.begin(lease(2), 10.4)
    assert parting.over(10.6) == (lease(3).subnets,)
    assert parting.over(10.9) == (lease(2).subnets,)


@pytest.mark.parametrize("new", [lease(9, host=2), lease(9, host=8, v6_host=2)], ids=["v4", "v6"])
def test_another_subnet_of_the_same_node_ends_the_grace(new: Lease) -> None:
    parting = Parting()
    parting.begin(lease(2, v6_host=2), 10.0)
    parting.begin(lease(3), 10.0)
    assert parting.came(lease(4)) == ()
    assert parting.came(new) == (lease(2).subnets,)
    assert parting.came(new) == ()
    assert parting.over(99) == (lease(3).subnets,)


def test_a_network_in_other_hands_ends_the_grace() -> None:
    parting = Parting()
    both = replace(lease(2), subnets=parse_subnet_key("10.5.2.0-24&fd05:0:0:2::-64"))
    parting.begin(both, 10.0)
    assert parting.came(replace(lease(2, host=9), subnets=parse_subnet_key("10.5.9.0-24&fd05:0:0:2::-64"))) == (
        both.subnets,
    )
    assert parting.over(99) == ()


def test_a_long_grace_does_not_keep_short_ones_waiting() -> None:
    parting = Parting()
    parting.begin(lease(2), 10.0, 15.0)
    parting.begin(lease(3), 10.0, 0.5)
    assert parting.next_at == 10.5
    assert parting.over(10.5) == (lease(3).subnets,)
    assert parting.next_at == 25.0
    assert parting.over(25.0) == (lease(2).subnets,)


def test_nothing_is_left_of_what_was_cleared() -> None:
    parting = Parting()
    parting.begin(lease(2), 10.0)
    parting.clear()
    assert parting.next_at is None
    assert parting.came(lease(9, host=2)) == ()
    assert parting.over(99) == ()
