from __future__ import annotations

import logging
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest

from subnet.etcd.layout import Layout
from subnet.etcd.records import Records, occupied
from subnet.etcd.store import KeyEvent, KeyValue
from subnet.model import Lease, Subnets
from subnet.report import Reporter
from tests.support.fake_etcd import ManualClock

pytestmark = pytest.mark.pure

LAYOUT = Layout("/coreos.com/network")


def kv(name: str, value: str, revision: int, created: int = 1) -> KeyValue:
    return KeyValue(LAYOUT.subnets + name, value.encode(), created, revision, 7)


def written(entry: KeyValue) -> KeyEvent:
    return KeyEvent(entry.key, entry, entry.mod_revision)


def removed(entry: KeyValue, revision: int) -> KeyEvent:
    return KeyEvent(entry.key, None, revision)


@pytest.fixture
def records() -> Records:
    return Records(LAYOUT, Reporter(logging.getLogger("test.records"), ManualClock()))


def subnets(number: int) -> Subnets:
    return Subnets(IPv4Network(f"10.5.{number}.0/24"))


GOOD = kv("10.5.1.0-24", '{"PublicIP":"192.0.2.1"}', 2)
BROKEN = kv("10.5.2.0-24", '{"PublicIP":', 3)


def test_unusable_entries_are_skipped_one_by_one_and_named(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    nonsense = kv("10.5.3.0-24/x", "{}", 4)
    leases = records.replace([GOOD, BROKEN, nonsense])
    assert [lease.subnets for lease in leases] == [subnets(1)]
    assert leases[0].attrs.public_ip == IPv4Address("192.0.2.1")
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 2
    assert BROKEN.key in warned[0]
    assert nonsense.key in warned[1]
    records.replace([GOOD, BROKEN, nonsense])
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 2


def test_changes_come_in_order_and_removals_name_the_subnets(records: Records) -> None:
    records.replace([GOOD])
    other = kv("10.5.4.0-24", '{"PublicIP":"192.0.2.4"}', 5)
    changes = records.change([written(other), removed(GOOD, 6), written(BROKEN), removed(BROKEN, 7)])
    assert [c.subnets if isinstance(c, Lease) else c for c in changes] == [subnets(4), subnets(1)]
    assert isinstance(changes[0], Lease)
    assert changes[1] == subnets(1)


def test_record_that_breaks_keeps_its_last_good_content(records: Records) -> None:
    records.replace([GOOD])
    broken = kv("10.5.1.0-24", "broken", 8)
    assert records.change([written(broken)]) == ()
    assert [lease.revision for lease in records.replace([broken])] == [2]


def test_record_of_a_new_owner_does_not_inherit_the_old_content(records: Records) -> None:
    records.replace([GOOD])
    assert records.replace([kv("10.5.1.0-24", "broken", 9, created=9)]) == ()
    records.replace([GOOD])
    records.change([removed(GOOD, 10), written(kv("10.5.1.0-24", "broken", 11, created=11))])
    assert records.replace([kv("10.5.1.0-24", "broken", 11, created=11)]) == ()


def test_a_lease_is_known_by_the_very_state_of_its_key(records: Records) -> None:
    (lease,) = records.replace([GOOD])
    assert records.lease(GOOD) == lease
    anew = kv("10.5.1.0-24", '{"PublicIP":"192.0.2.9"}', GOOD.mod_revision)
    assert records.lease(replace(anew, mod_revision=3)) is None
    assert records.lease(replace(anew, lease_id=8)) is None, "a store that lost everything counts anew"


def test_unusable_value_still_occupies_its_subnet() -> None:
    leases = occupied(LAYOUT, [GOOD, BROKEN, kv("nonsense", "{}", 4)])
    assert [lease.subnets for lease in leases] == [subnets(1), subnets(2)]
    assert leases[1].attrs.public_ip is None
