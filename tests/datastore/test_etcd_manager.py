from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Network

import pytest

from subnet.manager import ConfigSeen, LeasesChanged, LeasesListed, OwnLease, StoreState
from subnet.model import Lease, Subnets
from tests.support.drawn import CONFIG
from tests.support.etcd import PREFIX, Etcd, Proxy, free_port, until
from tests.support.manager import Node, node, request

pytestmark = pytest.mark.datastore

KEY = f"{PREFIX}/config"
SUBNETS = f"{PREFIX}/subnets/"
DAY_S = 86400


@pytest.fixture
def etcd(etcd: Etcd) -> Etcd:
    etcd.config(CONFIG)
    return etcd


@pytest.fixture
def a(etcd: Etcd) -> Iterator[Node]:
    with node(etcd.url) as a:
        yield a


@pytest.fixture
def proxied(etcd: Etcd, proxy: Proxy) -> Iterator[Node]:
    with node(proxy.url) as a:
        yield a


def shown(lease: Lease) -> str:
    return f"{lease.subnets.v4}"


def loud(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]


def test_reads_config_and_leases_and_follows_them(etcd: Etcd, a: Node) -> None:
    etcd.put(f"{PREFIX}/subnets2/10.5.66.0-24", "not ours to read")
    etcd.peer(2)
    until(lambda: a.numbers() == {2}, what="first peer")
    etcd.put(SUBNETS + "10.5.3.0-24", "{broken")
    etcd.put(SUBNETS + "nonsense", "{}")
    etcd.peer(4)
    until(lambda: a.numbers() == {2, 4}, what="peer behind broken entries")
    etcd.delete(SUBNETS + "10.5.2.0-24")
    until(lambda: a.numbers() == {4}, what="removal")
    assert a.config is not None
    assert a.config.config is not None
    assert a.all(StoreState) == [StoreState(True)]
    assert len(a.all(LeasesListed)) == 1
    removal = a.all(LeasesChanged)[-1]
    assert removal.changes == (Subnets(IPv4Network("10.5.2.0/24")),)


def test_peer_that_expires_is_removed(etcd: Etcd, a: Node) -> None:
    etcd.peer(2, ttl_s=2)
    until(lambda: a.numbers() == {2}, what="peer")
    until(lambda: a.numbers() == set(), what="expiry")


def test_C09_missing_config_names_key_version_and_near_misses(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    etcd.delete(KEY)
    etcd.put(f"{KEY}/", "{}")
    etcd.put("coreos.com/network/config", "{}")
    with node(etcd.url) as a:
        until(lambda: a.config is not None, what="verdict on the config")
        assert a.config is not None
        assert a.config.config is None
        for word in (f"key {KEY} does not exist", "v3", f"'{KEY}/'", "'coreos.com/network/config'"):
            assert word in a.config.problem
        assert not [m for m in loud(caplog) if KEY in m]  # told by the owner, who knows what it means
        etcd.config(CONFIG)
        until(lambda: a.config is not None and a.config.config is not None, 3, "config")
        etcd.config({"Network": "10.5.0.0/33"})
        until(lambda: a.config is not None and "10.5.0.0/33" in a.config.problem, 3, "broken config")
        etcd.config({"Network": "10.6.0.0/16", "Backend": {"Type": "host-gw"}})
        until(lambda: a.config is not None and a.config.config is not None, 3, "config again")
        assert len(a.all(ConfigSeen)) == 4


@pytest.mark.parametrize("prefix", ["/coreos.com/network/", "//coreos.com//network"])
def test_prefix_may_be_untidy(etcd: Etcd, prefix: str) -> None:
    with node(etcd.url, prefix=prefix) as a:
        lease = a.acquire(request())
    assert lease.key.startswith(SUBNETS)


def test_lease_is_written_as_go_nodes_do_and_kept_over_a_restart(etcd: Etcd, a: Node) -> None:
    lease = a.acquire(request())
    record = etcd.record(lease.key)
    assert etcd.value(lease.key) == (
        '{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"vxlan",'
        '"BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:01:01"}}'
    )
    assert etcd.ttl(record["lease"])[0] == DAY_S
    a.manager.close()
    with node(etcd.url) as again:
        assert again.acquire(request()).subnets == lease.subnets
        again.manager.want(request())
    assert etcd.record(lease.key) == record


def test_superseded_lease_objects_are_revoked(etcd: Etcd, a: Node) -> None:
    before = etcd.lease_ids()
    etcd.put(SUBNETS + "10.5.109.0-24", '{"PublicIP":"192.0.2.1"}', ttl_s=30)
    lease = a.acquire(request())
    assert shown(lease) == "10.5.109.0/24"
    until(lambda: len(etcd.lease_ids() - before) == 1, what="one lease object")
    assert etcd.ttl(etcd.record(lease.key)["lease"])[0] == DAY_S


def test_E01_compaction_during_a_cut_costs_one_listing(
    etcd: Etcd, proxy: Proxy, proxied: Node, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.peer(2)
    proxied.acquire(request())
    until(lambda: proxied.numbers() == {2}, what="first peer")
    proxy.cut()
    for n in range(20):
        etcd.put("/x", str(n))
    etcd.peer(7)
    etcd.delete(SUBNETS + "10.5.2.0-24")
    etcd.compact()
    time.sleep(0.7)
    before = len(loud(caplog))
    proxy.open()
    until(lambda: proxied.numbers() == {7}, 10, "state after compaction")
    assert len(proxied.all(LeasesListed)) == 2
    assert len(loud(caplog)) - before <= 10
    proxy.cut(refuse=False)
    etcd.peer(8)
    until(lambda: proxied.numbers() == {7, 8}, 10, "peer after another cut")
    assert len(proxied.all(LeasesListed)) == 2, "the watch resumes behind what it has seen"


def test_E03_own_lease_survives_second_listing(etcd: Etcd, proxy: Proxy, proxied: Node) -> None:
    own = proxied.acquire(request())
    for n in (8, 9):
        proxy.cut()
        etcd.put("/x", str(n))
        etcd.compact()
        proxy.open()
        until(lambda n=n: len(proxied.all(LeasesListed)) == n - 6, 10, "listing")  # type: ignore[misc]
        etcd.peer(n)
        until(lambda n=n: n in proxied.numbers(), 3, "peer after listing")  # type: ignore[misc]
        assert own.subnets in proxied.leases
    assert proxied.own == own
    assert len(proxied.all(OwnLease)) == 1
    assert not any(own.subnets in e.changes for e in proxied.all(LeasesChanged))
    assert etcd.record(own.key)["version"] == 1


def test_E04_outage_is_quiet_and_cheap(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    own_etcd.config(CONFIG)
    with node(own_etcd.url) as a:
        own = a.acquire(request())
        own_etcd.stop()
        before, cpu = len(loud(caplog)), time.process_time()
        until(lambda: a.state is not None and not a.state.reachable, 10, "outage")
        assert a.state is not None
        assert f"{own_etcd.url}: connection refused" in a.state.problem
        time.sleep(4)
        assert time.process_time() - cpu < 1
        assert len(loud(caplog)) - before <= 2
        own_etcd.start()
        own_etcd.peer(5)
        until(lambda: a.numbers() == {5}, 10, "peer after the return")
        assert a.state == StoreState(True)
        assert a.own == own
        assert len(a.all(LeasesListed)) == 1


def test_E05_subnet_of_an_old_file_is_not_taken_from_its_new_holder(etcd: Etcd) -> None:
    with node(etcd.url) as a:
        old = a.acquire(request(1))
    etcd.delete(old.key)
    with node(etcd.url) as b, node(etcd.url) as a:
        assert b.acquire(request(2, previous=old.subnets)).subnets == old.subnets
        mine = a.acquire(request(1, previous=old.subnets))
    assert mine.subnets != old.subnets
    assert '"192.0.2.2"' in etcd.value(old.key)


@pytest.mark.parametrize("turn", range(3))
def test_E05_ten_at_once_get_ten_subnets(etcd: Etcd, turn: int) -> None:
    small = {"Network": "10.5.0.0/20", "SubnetLen": 24, "Backend": {"Type": "vxlan"}}
    etcd.config(small)
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(etcd.url)) for _ in range(10)]
        for number, each in enumerate(nodes, 1):
            each.manager.want(request(number, small))
        until(lambda: all(each.own for each in nodes), 30, "all leases")
        held = {number: each.own for number, each in enumerate(nodes, 1)}
    assert len({lease.subnets for lease in held.values() if lease}) == 10
    assert len(etcd.keys()) == 10
    for number, lease in held.items():
        assert lease is not None
        assert json.loads(etcd.value(lease.key))["PublicIP"] == f"192.0.2.{number}"


def test_E07_reservation_stays_a_reservation(etcd: Etcd, a: Node) -> None:
    key = SUBNETS + "10.5.177.0-24"
    etcd.put(key, '{"PublicIP":"192.0.2.1","Rack":"r1"}')
    lease = a.acquire(request())
    assert (lease.key, lease.lease_id) == (key, 0)
    written = etcd.record(key)
    assert (written["version"], written["lease"]) == (2, 0)
    assert json.loads(etcd.value(key))["Rack"] == "r1"
    a.manager.close()
    with node(etcd.url) as again:
        again.acquire(request())
        assert etcd.record(key) == written
        etcd.put(key, etcd.value(key), ttl_s=600)
        until(lambda: again.own is not None and not again.own.reserved, 5, "lease")
        until(lambda: etcd.ttl(etcd.record(key)["lease"])[0] == DAY_S, 5, "full TTL")
        etcd.put(key, etcd.value(key))
        until(lambda: again.own is not None and again.own.reserved, 5, "reservation again")
        time.sleep(0.3)
        assert etcd.record(key)["lease"] == 0


def test_E08_deleted_key_is_back_at_once(etcd: Etcd, a: Node) -> None:
    own = a.acquire(request())
    value = etcd.value(own.key)
    for _ in range(2):
        etcd.delete(own.key)
        until(lambda: etcd.record(own.key).get("lease"), 1, "key")
        assert etcd.value(own.key) == value
    etcd.delete(own.key)
    etcd.put(own.key, value)
    until(lambda: a.own is not None and a.own.revision == etcd.record(own.key)["mod_revision"], 5, "agreement")
    assert all(told.lease and told.lease.subnets == own.subnets for told in a.all(OwnLease))


def test_E08_key_taken_by_another_is_left_alone(etcd: Etcd, a: Node, caplog: pytest.LogCaptureFixture) -> None:
    own = a.acquire(request())
    theirs = etcd.value(own.key).replace("192.0.2.1", "192.0.2.99")
    etcd.put(own.key, theirs, ttl_s=600)
    until(lambda: a.own is not None and a.own.subnets != own.subnets, 5, "another subnet")
    assert etcd.value(own.key) == theirs
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("192.0.2.1 " in e and "192.0.2.99 " in e for e in errors)


def test_E08_exit_is_announced_when_told_so(etcd: Etcd) -> None:
    with node(etcd.url, on_lease_lost="exit") as a:
        own = a.acquire(request())
        etcd.delete(own.key)
        until(lambda: a.own is None, 5, "loss")
        assert a.all(OwnLease)[-1].fatal
        time.sleep(0.3)
        assert etcd.record(own.key) == {}


def test_two_live_nodes_with_one_public_ip_are_reported_and_do_not_fight(
    etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    with node(etcd.url) as a, node(etcd.url) as b:
        own = a.acquire(request(1))
        b.acquire(request(1, mac=0xEE))

        def errors() -> list[str]:
            return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]

        until(errors, 10, "alarm")
        assert any("02:00:00:00:01:01" in e and "02:00:00:00:01:ee" in e for e in errors())
        time.sleep(1)
        assert etcd.record(own.key)["version"] <= 5


def test_E14_two_keys_of_one_host_become_one(etcd: Etcd, a: Node) -> None:
    for n in (142, 143):
        etcd.put(SUBNETS + f"10.5.{n}.0-24", '{"PublicIP":"192.0.2.1"}', ttl_s=600)
    lease = a.acquire(request(previous=Subnets(IPv4Network("10.5.143.0/24"))))
    assert shown(lease) == "10.5.143.0/24"
    until(lambda: etcd.keys() == [lease.key], 5, "one key")


def test_E15_wiped_store_gets_every_record_back(own_etcd: Etcd) -> None:
    own_etcd.config(CONFIG)
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(own_etcd.url)) for _ in range(3)]
        before = [each.acquire(request(number)).key for number, each in enumerate(nodes, 1)]
        own_etcd.delete(SUBNETS, prefix=True)
        until(lambda: sorted(own_etcd.keys()) == sorted(before), 5, "records after deletion")
        for n in range(30):
            own_etcd.put("/x", str(n))
        own_etcd.stop()
        own_etcd.wipe()
        own_etcd.start()
        own_etcd.config(CONFIG)
        until(lambda: sorted(own_etcd.keys()) == sorted(before), 15, "records after the loss of all data")
        assert all(each.own and each.own.key in before for each in nodes)
        until(lambda: all(len(each.leases) == 3 for each in nodes), 10, "everyone sees everyone")


@pytest.mark.parametrize("beside", [(), (f"http://127.0.0.1:{free_port()}",)], ids=["alone", "beside a dead endpoint"])
def test_E16_idle_connection_closed_by_a_balancer_is_not_worth_a_word(
    etcd: Etcd, proxy: Proxy, beside: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with node(*beside, proxy.url) as a:
        a.acquire(request())
        before = len(loud(caplog))
        for n in (3, 4):
            proxy.cut(refuse=False)
            etcd.peer(n)
            until(lambda n=n: n in a.numbers(), 5, "peer after the cut")  # type: ignore[misc]
        assert loud(caplog)[before:] == []
        assert a.all(StoreState) == [StoreState(True)]


def test_C05_freed_subnet_is_taken_by_the_one_who_waits(etcd: Etcd, a: Node) -> None:
    tiny = {"Network": "10.5.0.0/28", "Backend": {"Type": "vxlan"}}
    etcd.config(tiny)
    for n in (4, 8, 12):
        etcd.put(SUBNETS + f"10.5.0.{n}-30", f'{{"PublicIP":"192.0.2.1{n}"}}', ttl_s=600)
    a.manager.want(request(1, tiny))
    until(lambda: a.all(OwnLease), 5, "word of the full pool")
    assert a.own is None
    etcd.delete(SUBNETS + "10.5.0.8-30")
    until(lambda: a.own is not None and shown(a.own) == "10.5.0.8/30", 2, "freed subnet")


def test_close_is_quick_while_nothing_answers() -> None:
    with node(f"http://127.0.0.1:{free_port()}", "http://192.0.2.1:2379") as a:
        a.manager.want(request())
        until(lambda: a.state is not None, 15, "word of the outage")
        began = time.monotonic()
        a.manager.close()
        assert time.monotonic() - began < 1.5
