from __future__ import annotations

import itertools
import json
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.etcd.decide import FlipGuard, Verdict, as_own, identity, judge, own_value
from subnet.etcd.store import KeyValue
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.wire import decode_attrs, encode_attrs

pytestmark = pytest.mark.pure

KEY = "/coreos.com/network/subnets/10.5.1.0-24"


def attrs(ip: str, mac: str = "02:00:00:00:00:01") -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(ip), None, "vxlan", {"VNI": 1, "VtepMAC": mac})


OURS = attrs("192.0.2.1")
HELD = Lease(Subnets(IPv4Network("10.5.1.0/24")), OURS, KEY, 7, 10)


def found(value: LeaseAttrs | bytes, revision: int = 11, lease_id: int = 7) -> KeyValue:
    return KeyValue(KEY, value if isinstance(value, bytes) else encode_attrs(value), 1, revision, lease_id)


@pytest.mark.parametrize(
    ("now_there", "verdict"),
    [
        (None, Verdict.GONE),
        (found(OURS, 10), Verdict.KEPT),
        (found(OURS), Verdict.ADOPTED),
        (found(OURS, lease_id=0), Verdict.ADOPTED),
        (found(attrs("192.0.2.1", "02:00:00:00:00:ff")), Verdict.REWRITTEN),
        (found(b"broken"), Verdict.REWRITTEN),
        (found(b"{}"), Verdict.REWRITTEN),
        (found(attrs("192.0.2.9")), Verdict.TAKEN),
        # The store lost everything and counts anew.
        (found(attrs("192.0.2.9"), 10, lease_id=8), Verdict.TAKEN),
    ],
)
def test_E08_judge(now_there: KeyValue | None, verdict: Verdict) -> None:
    assert judge(HELD, now_there) is verdict


def test_judge_by_ipv6_address() -> None:
    ours = LeaseAttrs(None, IPv6Address("fd00::1"), "host-gw")
    held = replace(HELD, attrs=ours)
    assert judge(held, found(replace(ours, backend_type="vxlan"))) is Verdict.REWRITTEN
    assert judge(held, found(replace(ours, public_ipv6=IPv6Address("fd00::2")))) is Verdict.TAKEN


def test_own_key_is_own_whatever_address_it_announces_unless_another_node_has_it() -> None:
    wanted = attrs("192.0.2.31")
    for now_there in (found(OURS, 10), found(b"broken")):
        assert as_own([HELD], HELD, {KEY: now_there}, wanted)[0].attrs == wanted
    other = replace(HELD, attrs=attrs("192.0.2.9"))
    assert as_own([other], HELD, {KEY: found(other.attrs)}, wanted) == [other]
    assert as_own([HELD], None, {KEY: found(OURS, 10)}, wanted) == [HELD]


def test_D04_unknown_members_of_the_own_record_survive() -> None:
    before = b'{"PublicIP":"192.0.2.1","Site":"x"}'
    after = own_value(OURS, before)
    assert json.loads(after)["Site"] == "x"
    assert decode_attrs(after) == OURS
    assert own_value(OURS, after) == after
    assert own_value(OURS, b"broken") == own_value(OURS, None) == encode_attrs(OURS)


def test_value_that_says_the_same_is_left_byte_for_byte() -> None:
    before = b' {"publicip": "192.0.2.1", "BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:01","VNI":1}}'
    assert own_value(OURS, before) == before


def test_identity_names_address_and_mac() -> None:
    text = identity(OURS)
    assert "192.0.2.1" in text
    assert "02:00:00:00:00:01" in text
    assert "unreadable" in identity(None)


def test_flip_guard_answers_once_then_backs_off() -> None:
    guard = FlipGuard()
    now, holds = 0.0, []
    for _ in range(8):
        holds.append(guard.flipped(now))
        now += holds[-1] + 1
    assert holds == [0, 10, 20, 40, 80, 160, 300, 300]
    assert guard.flipped(now + 601) == 0


@given(st.lists(st.floats(0, 2000), max_size=60))
def test_flip_guard_writes_rarely_however_often_the_other_one_does(gaps: list[float]) -> None:
    guard = FlipGuard()
    now, writes = 0.0, []
    for gap in gaps:
        now += gap
        hold_s = guard.flipped(now)
        assert 0 <= hold_s <= 300
        if hold_s == 0:
            writes.append(now)
        now += hold_s
    assert all(later - earlier > 300 for earlier, later in itertools.pairwise(writes))
