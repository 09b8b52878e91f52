from __future__ import annotations

import logging
from ipaddress import ip_address, ip_network

import pytest

from backends.dataplane.model import DesiredState, FdbEntry, Neighbour, ObservedState, Route
from backends.dataplane.ports import ObjectSeen
from backends.dataplane.reconcile import MANY, Reconciler
from backends.dataplane.table import WantedTable
from subnet.clock import SystemClock
from subnet.report import Reporter
from tests.support.fake_kernel import FakeKernel

pytestmark = pytest.mark.pure

DEVICE = "flannel.1"
BASE = DesiredState(frozenset({DEVICE}), "eth0", frozenset({ip_network("10.5.0.0/16")}))
FEW, LOTS = 3, MANY


def _peer(n: int) -> list[Neighbour | FdbEntry | Route]:
    base, mac = ip_address(f"10.5.{n}.0"), f"02:00:00:00:00:{n:02x}"
    route = Route(ip_network(f"{base}/24"), DEVICE, base, onlink=True)
    return [Neighbour(DEVICE, base, mac), FdbEntry(DEVICE, mac, ip_address(f"192.0.2.{n}")), route]


def _table(count: int) -> WantedTable:
    table = WantedTable(BASE)
    for n in range(2, 2 + count):
        table.put_objects(f"peer {n}", (n, ""), _peer(n))
    return table


def _reconciler(kernel: FakeKernel) -> Reconciler:
    return Reconciler(kernel, Reporter(logging.getLogger("test"), SystemClock()))


def _held(kernel: FakeKernel) -> set[object]:
    state = kernel.state
    return {*state.neighbours, *state.fdb, *state.routes}


@pytest.mark.parametrize("count", [FEW, LOTS])
def test_few_and_many_entries_end_up_alike(count: int) -> None:
    kernel, table = FakeKernel(), _table(count)
    reconciler = _reconciler(kernel)
    outcome = reconciler.converge(table)
    assert (outcome.changed, outcome.problems, outcome.refused) == (3 * count, {}, False)
    assert _held(kernel) == {target for n in range(2, 2 + count) for target in _peer(n)}
    reconciler.doubt()
    assert reconciler.converge(table).changed == 0
    assert reconciler.converge(table).changed == 0


@pytest.mark.parametrize("count", [FEW, LOTS])
def test_refused_entry_is_named_and_tried_again_alone(count: int) -> None:
    kernel, table = FakeKernel(), _table(count)
    route = str(_peer(3)[2])
    kernel.refuse.add(route)
    reconciler = _reconciler(kernel)
    outcome = reconciler.converge(table)
    assert outcome.refused
    assert outcome.changed == 3 * count - 1
    assert list(outcome.problems) == [route]
    assert "invalid argument" in outcome.problems[route]
    kernel.refuse.clear()
    assert reconciler.converge(table).changed == 1
    assert len(_held(kernel)) == 3 * count


@pytest.mark.parametrize("count", [FEW, LOTS])
def test_what_is_in_the_place_of_a_wanted_entry_is_replaced_and_the_rest_of_the_device_goes(count: int) -> None:
    kernel, table = FakeKernel(), _table(count)
    moved = FdbEntry(DEVICE, "02:00:00:00:00:02", ip_address("192.0.2.200"))
    stray = Route(ip_network("10.5.250.0/24"), DEVICE, ip_address("10.5.250.0"), onlink=True)
    foreign = Route(ip_network("172.16.0.0/16"), "eth0", ip_address("192.0.2.254"))
    kernel.state = ObservedState(fdb=frozenset({moved}), routes=frozenset({stray, foreign}))
    _reconciler(kernel).converge(table)
    assert _held(kernel) == {foreign, *(target for n in range(2, 2 + count) for target in _peer(n))}


@pytest.mark.parametrize("count", [FEW, LOTS])
def test_peer_that_goes_takes_its_entries_along(count: int) -> None:
    kernel, table = FakeKernel(), _table(count)
    reconciler = _reconciler(kernel)
    reconciler.converge(table)
    observed = kernel.observations
    table.remove("peer 2")
    assert reconciler.converge(table).changed == 3
    assert kernel.observations == observed
    assert not _held(kernel) & set(_peer(2))


def test_notification_is_compared_with_the_record() -> None:
    kernel, table = FakeKernel(), _table(LOTS)
    reconciler = _reconciler(kernel)
    reconciler.know_devices({7: DEVICE})
    reconciler.converge(table)
    neighbour, fdb, route = _peer(2)
    for target in (neighbour, fdb, route):
        assert not reconciler.contradicted(ObjectSeen(target, 7, gone=False))
        assert reconciler.contradicted(ObjectSeen(target, 7, gone=True))
    other = FdbEntry(DEVICE, "02:00:00:00:00:02", ip_address("192.0.2.9"))
    assert reconciler.contradicted(ObjectSeen(other, 7, gone=False))
