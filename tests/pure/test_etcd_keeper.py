from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest

from subnet.config import parse_network_config
from subnet.errors import DatastoreError, Unavailable
from subnet.etcd.keeper import Keeper
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import Put, Snapshot
from subnet.manager import LeaseRequest, OwnLease, StoreEvent
from subnet.model import IPNetwork, Lease, LeaseAttrs, Subnets
from tests.support.fake_etcd import FakeEtcd

pytestmark = pytest.mark.pure

SUBNETS = "/coreos.com/network/subnets/"
WRITES = {"txn", "grant", "revoke"}
DAY_S = 86400


def attrs(ip: str = "192.0.2.1", mac: str = "02:00:00:00:00:01") -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(ip), None, "vxlan", {"VNI": 1, "VtepMAC": mac})


def value(ip: str, mac: str = "02:00:00:00:00:01") -> bytes:
    record = {"PublicIP": ip, "PublicIPv6": None, "BackendType": "vxlan", "BackendData": {"VNI": 1, "VtepMAC": mac}}
    return json.dumps(record, separators=(",", ":")).encode()


def request(network: str = "10.5.0.0/16", **changes: object) -> LeaseRequest:
    config = parse_network_config(json.dumps({"Network": network, "Backend": {"Type": "vxlan"}}), "test")
    return replace(LeaseRequest(attrs(), config), **changes)  # type: ignore[arg-type]


def first(subnets: Sequence[IPNetwork]) -> IPNetwork:
    return subnets[0]


class Node:
    def __init__(self, etcd: FakeEtcd, **settings: object) -> None:
        self.etcd, self.posted = etcd, list[StoreEvent]()
        given = EtcdSettings(("http://fake",), **settings)  # type: ignore[arg-type]
        self.keeper = Keeper(
            etcd, given, self.posted.append, etcd.clock, threading.Event(), pick=first, uniform=lambda low, _: low
        )

    def own(self) -> OwnLease:
        last = self.posted[-1]
        assert isinstance(last, OwnLease)
        return last

    def lease(self) -> Lease:
        lease = self.own().lease
        assert lease is not None
        return lease

    def settle(self, want: LeaseRequest | None = None) -> float | None:
        """Step as the thread would, until nothing is due within a second."""
        if want is not None:
            self.keeper.want(want)
        due = self.keeper.step()
        for _ in range(50):
            if due is None or due >= 1:
                return due
            due = self.keeper.step()
        raise AssertionError("does not settle")

    def noticed(self) -> float | None:
        self.keeper.changed(tuple(self.etcd.history[-1:]))
        return self.settle()


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
def node(etcd: FakeEtcd) -> Node:
    return Node(etcd)


def test_creates_a_lease_for_a_day(etcd: FakeEtcd, node: Node) -> None:
    due = node.settle(request())
    lease = node.lease()
    kv = etcd.keys[SUBNETS + "10.5.1.0-24"]
    assert (lease.key, lease.revision, lease.lease_id) == (kv.key, kv.mod_revision, kv.lease_id)
    assert kv.value == value("192.0.2.1")
    assert etcd.leases[kv.lease_id][0] == DAY_S
    assert due == pytest.approx(DAY_S - 3600)


def test_a_change_of_the_own_key_while_it_is_being_taken_is_looked_at(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    again = Node(etcd)
    renew = etcd.keepalive_once

    def taken_meanwhile(lease_id: int) -> int:
        etcd.put(SUBNETS + "10.5.1.0-24", value("192.0.2.7"))
        again.keeper.changed(tuple(etcd.history[-1:]))
        return renew(lease_id)

    etcd.keepalive_once = taken_meanwhile  # type: ignore[method-assign]
    thread = threading.Thread(target=again.keeper.run, daemon=True)
    thread.start()
    again.keeper.want(request())
    deadline = time.monotonic() + 5
    while not (again.posted and str(again.lease().subnets) == "10.5.2.0/24") and time.monotonic() < deadline:
        time.sleep(0.01)
    etcd.closed = True
    again.keeper.wake()
    thread.join(5)
    assert str(again.lease().subnets) == "10.5.2.0/24"


def listing(etcd: FakeEtcd) -> Snapshot:
    return etcd.snapshot("/coreos.com/network/config", SUBNETS)


def test_what_was_just_listed_is_not_fetched_again(etcd: FakeEtcd, node: Node) -> None:
    etcd.put(SUBNETS + "10.5.1.0-24", value("192.0.2.7"))
    node.keeper.listed(listing(etcd))
    etcd.calls.clear()
    node.settle(request())
    assert str(node.lease().subnets) == "10.5.2.0/24"
    assert etcd.calls[0] == "revision"
    assert "snapshot" not in etcd.calls


def test_a_listing_that_is_behind_is_fetched_again(etcd: FakeEtcd, node: Node) -> None:
    node.keeper.listed(listing(etcd))
    etcd.put(SUBNETS + "10.5.1.0-24", value("192.0.2.7"))
    etcd.calls.clear()
    node.settle(request())
    assert str(node.lease().subnets) == "10.5.2.0/24"
    assert etcd.calls[:2] == ["revision", "snapshot"]


def test_a_lost_lease_is_sought_in_the_present_state(etcd: FakeEtcd, node: Node) -> None:
    node.keeper.listed(listing(etcd))
    node.settle(request())
    own = SUBNETS + "10.5.1.0-24"
    etcd.put(own, value("192.0.2.7"))
    node.keeper.changed(tuple(etcd.history[-1:]))
    etcd.calls.clear()
    node.settle(request())
    assert str(node.lease().subnets) == "10.5.2.0/24"
    assert "snapshot" in etcd.calls


def test_wanting_the_same_again_is_free(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    etcd.calls.clear()
    node.settle(request())
    assert etcd.calls == []
    assert len(node.posted) == 1


def test_restart_writes_nothing_and_renews(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    before = etcd.keys[SUBNETS + "10.5.1.0-24"]
    etcd.clock.advance(3600)
    etcd.calls.clear()
    again = Node(etcd)
    again.settle(request())
    assert etcd.keys == {before.key: before}
    assert not WRITES & set(etcd.calls)
    assert etcd.leases[before.lease_id][1] == etcd.clock.at + DAY_S


def test_E09_renews_the_same_lease_object_at_the_margin(etcd: FakeEtcd, node: Node) -> None:
    due = node.settle(request())
    assert due is not None
    lease_id = node.lease().lease_id
    etcd.calls.clear()
    etcd.clock.advance(due - 1)
    assert node.settle() == pytest.approx(1)
    assert etcd.calls == []
    etcd.clock.advance(1)
    assert node.settle() == pytest.approx(DAY_S - 3600)
    assert etcd.calls == ["keepalive"]
    assert etcd.leases[lease_id][1] == etcd.clock.at + DAY_S
    assert len(node.posted) == 1


def test_E09_lease_of_30_seconds_is_exchanged_for_a_full_one(etcd: FakeEtcd) -> None:
    etcd.put(SUBNETS + "10.5.9.0-24", value("192.0.2.1"), ttl_s=30)
    old = etcd.keys[SUBNETS + "10.5.9.0-24"].lease_id
    node = Node(etcd, renew_margin_s=3600.0)
    due = node.settle(request())
    assert node.lease().subnets.v4 is not None
    assert node.lease().key == SUBNETS + "10.5.9.0-24"
    assert old not in etcd.leases, "superseded"
    assert due == pytest.approx(DAY_S - 3600)
    assert etcd.keys[SUBNETS + "10.5.9.0-24"].value == value("192.0.2.1")


def test_failing_renewal_is_retried_until_it_works(
    etcd: FakeEtcd, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    due = node.settle(request())
    assert due is not None
    etcd.clock.advance(due)
    etcd.failure = DatastoreError("out of space (NOSPACE alarm)")
    for _ in range(40):
        due = node.keeper.step()
        assert due is not None
        assert 0 < due <= 30
        etcd.clock.advance(due)
    assert sum("NOSPACE" in r.getMessage() for r in caplog.records) < 30
    etcd.failure = None
    assert node.settle() == pytest.approx(DAY_S - 3600)
    assert len(node.posted) == 1


def test_expiry_during_an_outage_is_said_and_mended(
    etcd: FakeEtcd, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.settle(request())
    lease = node.lease()
    etcd.failure = Unavailable("http://fake: connection refused")
    etcd.clock.advance(DAY_S + 1)
    for _ in range(2):
        node.keeper.step()
    assert any(r.levelno == logging.ERROR and "expired" in r.getMessage() for r in caplog.records)
    assert node.lease() == lease
    etcd.failure = None
    node.keeper.reconnected()
    node.settle()
    assert node.lease().subnets == lease.subnets
    assert node.lease().lease_id != lease.lease_id
    assert etcd.keys[lease.key].value == value("192.0.2.1")


def test_E08_deleted_key_is_created_again_with_the_same_value(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    lease, before = node.lease(), etcd.keys[SUBNETS + "10.5.1.0-24"]
    etcd.put(SUBNETS + "10.5.2.0-24", value("192.0.2.2"), ttl_s=DAY_S)
    etcd.delete(lease.key)
    node.noticed()
    assert node.lease().subnets == lease.subnets
    assert etcd.keys[lease.key].value == before.value
    assert before.lease_id not in etcd.leases
    assert all(isinstance(e, OwnLease) and e.lease for e in node.posted)


def test_E08_key_taken_by_another_node_is_left_to_it(
    etcd: FakeEtcd, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.settle(request())
    lost = node.lease()
    etcd.put(lost.key, value("192.0.2.9", "02:00:00:00:00:09"), ttl_s=DAY_S)
    node.noticed()
    assert node.lease().subnets != lost.subnets
    assert etcd.keys[lost.key].value == value("192.0.2.9", "02:00:00:00:00:09")
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "192.0.2.1" in errors[0]
    assert "192.0.2.9" in errors[0]


@pytest.mark.parametrize("how", ["deleted", "taken"])
def test_E08_exit_when_told_to(etcd: FakeEtcd, how: str) -> None:
    node = Node(etcd, on_lease_lost="exit")
    node.settle(request())
    key = node.lease().key
    if how == "deleted":
        etcd.delete(key)
    else:
        etcd.put(key, value("192.0.2.9"))
    etcd.calls.clear()
    node.noticed()
    assert node.own().lease is None
    assert node.own().fatal
    assert key in node.own().problem
    assert not WRITES & set(etcd.calls)


def test_two_live_nodes_with_one_public_ip_do_not_fight(
    etcd: FakeEtcd, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.settle(request())
    key = node.lease().key
    other = value("192.0.2.1", "02:00:00:00:00:ee")
    etcd.put(key, other)
    node.noticed()
    assert etcd.keys[key].value == value("192.0.2.1"), "one rewrite is answered"
    etcd.clock.advance(5)
    etcd.put(key, other)
    due = node.noticed()
    assert etcd.keys[key].value == other, "the second one is left"
    assert due == pytest.approx(10)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "02:00:00:00:00:01" in errors[0]
    assert "02:00:00:00:00:ee" in errors[0]
    writes = 0
    for _ in range(60):
        etcd.clock.advance(10)
        node.settle()
        if etcd.keys[key].value != other:
            writes += 1
            etcd.put(key, other)
            node.noticed()
    assert 3 <= writes <= 8
    assert node.lease().key == key


def test_damaged_own_record_is_written_again(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    key = node.lease().key
    for damage in (b"broken", b"{}"):
        etcd.clock.advance(1000)
        etcd.put(key, damage, ttl_s=DAY_S)
        node.noticed()
        assert etcd.keys[key].value == value("192.0.2.1")


def test_E07_reservation_stays_without_lease_and_is_not_renewed(etcd: FakeEtcd, node: Node) -> None:
    etcd.put(SUBNETS + "10.5.77.0-24", b'{"PublicIP":"192.0.2.1"}')
    assert node.settle(request()) is None
    assert node.lease().reserved
    assert etcd.keys[SUBNETS + "10.5.77.0-24"].lease_id == 0
    assert etcd.keys[SUBNETS + "10.5.77.0-24"].value == value("192.0.2.1")
    assert etcd.leases == {}
    etcd.calls.clear()
    etcd.clock.advance(30 * DAY_S)
    Node(etcd).settle(request())
    assert not WRITES & set(etcd.calls)


def test_E07_lease_and_reservation_convert_into_each_other_while_running(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    key = node.lease().key
    etcd.put(key, value("192.0.2.1"))
    assert node.noticed() is None
    assert node.lease().reserved
    assert etcd.leases == {}, "the old lease object is revoked"
    etcd.put(key, value("192.0.2.1"), ttl_s=DAY_S)
    assert node.noticed() == pytest.approx(DAY_S - 3600)
    assert node.lease().lease_id == etcd.keys[key].lease_id != 0


def test_E14_second_key_goes_once_the_first_is_held(etcd: FakeEtcd, node: Node) -> None:
    for n in (42, 43):
        etcd.put(SUBNETS + f"10.5.{n}.0-24", value("192.0.2.1", "02:00:00:00:00:99"), ttl_s=3600)
    node.settle(request(previous=Subnets(IPv4Network("10.5.43.0/24"))))
    assert set(etcd.keys) == {SUBNETS + "10.5.43.0-24"}
    assert len(etcd.leases) == 1


def test_changed_mac_and_address_go_into_the_same_key(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    lease = node.lease()
    node.settle(request(attrs=attrs("192.0.2.31", "02:00:00:00:00:02")))
    assert node.lease().key == lease.key
    assert node.lease().lease_id == lease.lease_id
    assert {k: kv.value for k, kv in etcd.keys.items()} == {lease.key: value("192.0.2.31", "02:00:00:00:00:02")}


def test_C10_new_network_means_new_subnet_and_the_old_key_goes(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    old = node.lease()
    node.settle(request("10.6.0.0/16"))
    assert list(etcd.keys) == [SUBNETS + "10.6.1.0-24"]
    assert old.lease_id not in etcd.leases


def test_enabling_ipv6_keeps_the_v4_half_and_swaps_the_keys_in_one_transaction(etcd: FakeEtcd, node: Node) -> None:
    node.settle(request())
    document = {"Network": "10.5.0.0/16", "EnableIPv6": True, "IPv6Network": "fd05::/48", "Backend": {"Type": "vxlan"}}
    node.settle(request(config=parse_network_config(json.dumps(document), "test")))
    assert list(etcd.keys) == [SUBNETS + "10.5.1.0-24&fd05:0:0:1::-64"]
    gone, created = etcd.history[-2:]
    assert gone.revision == created.revision
    assert gone.kv is None


def test_lost_race_is_searched_anew_and_its_grant_revoked(etcd: FakeEtcd) -> None:
    class Rival(FakeEtcd):
        races = 3

        def txn(self, expect: Mapping[str, int], put: Put | None = None, delete: Sequence[str] = ()) -> int:
            if self.races and put is not None:
                self.races -= 1
                self.put(put.key, value(f"192.0.2.{10 + self.races}"), ttl_s=DAY_S)
            return super().txn(expect, put, delete)

    rival = Rival()
    node = Node(rival)
    node.settle(request())
    assert node.lease().key == SUBNETS + "10.5.4.0-24"
    assert len(rival.keys) == len(rival.leases) == 4


def test_C05_full_pool_is_waited_for(etcd: FakeEtcd, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    config = parse_network_config('{"Network":"10.5.0.0/28","Backend":{"Type":"vxlan"}}', "test")
    for n in (4, 8, 12):
        etcd.put(SUBNETS + f"10.5.0.{n}-30", value(f"192.0.2.{n}"), ttl_s=DAY_S)
    due = node.settle(request(config=config))
    assert due is not None
    assert 1 <= due <= 30
    assert node.own().lease is None
    assert node.own().problem
    for _ in range(5):
        node.keeper.step()
    assert len(node.posted) == 1
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    etcd.delete(SUBNETS + "10.5.0.8-30")
    node.noticed()
    assert node.lease().key == SUBNETS + "10.5.0.8-30"


def test_broken_record_in_the_wanted_place_is_not_overwritten(etcd: FakeEtcd, node: Node) -> None:
    etcd.put(SUBNETS + "10.5.1.0-24", b"broken")
    node.settle(request(previous=Subnets(IPv4Network("10.5.1.0/24"))))
    assert node.lease().key == SUBNETS + "10.5.2.0-24"
    assert etcd.keys[SUBNETS + "10.5.1.0-24"].value == b"broken"


def test_unreachable_store_at_first_is_told_with_its_reason(etcd: FakeEtcd, node: Node) -> None:
    etcd.failure = Unavailable("http://fake: connection refused")
    node.keeper.want(request())
    node.keeper.step()
    assert node.posted == [], "the first failure may be a connection that was closed while idle"
    node.keeper.step()
    assert node.own() == OwnLease(None, "http://fake: connection refused")
    etcd.failure = None
    node.settle()
    assert node.lease().key == SUBNETS + "10.5.1.0-24"


def test_shared_lease_object_of_an_operator_is_left_alone(etcd: FakeEtcd, node: Node) -> None:
    etcd.put(SUBNETS + "10.5.8.0-24", value("192.0.2.1"), ttl_s=DAY_S)
    shared = etcd.keys[SUBNETS + "10.5.8.0-24"].lease_id
    etcd.txn({}, Put("/elsewhere", b"x", shared))
    node.settle(request())
    assert etcd.keys[SUBNETS + "10.5.8.0-24"].lease_id != shared
    assert "/elsewhere" in etcd.keys
