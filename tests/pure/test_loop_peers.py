from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from backends.dataplane.model import Route
from backends.dataplane.ports import ObjectSeen
from flanneld.inbox import KernelEvents
from subnet.manager import LeasesChanged, LeasesListed, StoreState
from subnet.model import Lease, Subnets
from tests.support.owner import CONFIG, OWN, Node, config_seen, peer

pytestmark = pytest.mark.pure


def test_lease_events_cost_no_observation(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
    before = node.kernel.observations
    two = LeasesChanged((peer(3, revision=6), peer(4, revision=7)), 7)
    node.play(two, LeasesChanged((peer(2).subnets,), 8), 1.0)
    assert node.routes == {"10.5.3.0/24", "10.5.4.0/24"}
    assert node.kernel.observations == before


def test_E03_H01_a_list_with_the_own_lease_neither_removes_it_nor_routes_to_it(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
    mine = Lease(OWN, node.manager.requests[-1].attrs, "/n/subnets/own", 7, 6)
    for revision in (8, 9):
        node.play(LeasesListed((mine, peer(2), peer(revision)), revision), 1.0)
        assert node.routes == {"10.5.2.0/24", f"10.5.{revision}.0/24"}
    assert [str(a.interface) for a in node.kernel.addresses() if a.device == "flannel.1"] == ["10.5.1.0/32"]


def test_V06_refused_entry_does_not_stop_others_nor_readiness(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.kernel.refuse.add("route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink")
    node.started(peer(2), peer(3))
    assert node.is_ready()
    assert node.routes == {"10.5.3.0/24"}
    assert "1 with problems" in node.notifier.said[-1]
    node.kernel.refuse.clear()
    node.play(11.0, 0.1)
    assert node.routes == {"10.5.2.0/24", "10.5.3.0/24"}


def test_H05_routes_of_dead_leases_go_and_that_of_the_subnet_which_is_ours_now(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2), peer(3), peer(4))
    node.kernel.state = replace(
        node.kernel.state,
        routes=node.kernel.state.routes | {Route(ip_network("172.16.9.0/24"), "eth0", ip_address("192.0.2.254"))},
    )
    again = Node(tmp_path, node.kernel)
    mine = Subnets(ip_network("10.5.4.0/24"))  # type: ignore[arg-type]
    again.started(peer(3), own=mine)
    assert again.routes == {"10.5.3.0/24", "172.16.9.0/24"}
    assert len(again.kernel.state.fdb) == len(again.kernel.state.neighbours) == 1


DIRECT = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","DirectRouting":true}}'


def _shown(node: Node) -> list[str]:
    return sorted(str(r) for r in node.kernel.state.routes)


def _foreign_route() -> KernelEvents:
    return KernelEvents((ObjectSeen(Route(ip_network("192.0.2.9/32"), ""), 99, False),))


def test_H07_direct_only_inside_a_prefix_and_by_the_kernels_word(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.kernel.ways[ip_address("192.0.2.3")] = ("tun0", None)
    node.kernel.ways[ip_address("192.0.2.4")] = ("eth0", ip_address("192.0.2.254"))
    far = replace(peer(5), attrs=replace(peer(5).attrs, public_ip=ip_address("198.51.100.5")))  # type: ignore[arg-type]
    node.started(peer(2), peer(3), peer(4), far, config=DIRECT)
    assert _shown(node) == [
        "route 10.5.2.0/24 via 192.0.2.2 dev eth0",
        "route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 onlink",
        "route 10.5.4.0/24 via 10.5.4.0 dev flannel.1 onlink",
        "route 10.5.5.0/24 via 10.5.5.0 dev flannel.1 onlink",
    ]


def test_H07_decided_anew_when_routes_change(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2), config=DIRECT)
    assert _shown(node) == ["route 10.5.2.0/24 via 192.0.2.2 dev eth0"]
    assert node.kernel.state.fdb == frozenset()
    node.kernel.ways[ip_address("192.0.2.2")] = ("tun0", None)
    node.play(_foreign_route())
    assert _shown(node) == ["route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink"]
    assert len(node.kernel.state.fdb) == 1
    node.kernel.ways.clear()
    node.play(_foreign_route())
    assert _shown(node) == ["route 10.5.2.0/24 via 192.0.2.2 dev eth0"]
    assert node.kernel.state.fdb == frozenset()


def test_hostile_leases_beside_good_ones(tmp_path: Path) -> None:
    bad = replace(peer(4), subnets=Subnets(ip_network("0.0.0.0/1")))  # type: ignore[arg-type]
    mine = replace(peer(5), attrs=replace(peer(5).attrs, public_ip=ip_address("192.0.2.1")))  # type: ignore[arg-type]
    node = Node(tmp_path).started(peer(2), bad, mine)
    assert node.routes == {"10.5.2.0/24"}
    assert "2 with problems" in node.notifier.said[-1]


def test_E08_a_peer_outlives_its_lease_for_a_moment(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2), peer(3))
    before = node.kernel.state
    gone = LeasesChanged((peer(2).subnets, peer(3).subnets), 6)
    node.play(gone, 0.4)
    assert node.kernel.state == before
    assert node.script.sleeps[-1] == pytest.approx(0.1)
    node.play(LeasesChanged((peer(2, revision=7),), 7), 0.2)
    assert node.routes == {"10.5.2.0/24"}
    assert node.kernel.state.neighbours < before.neighbours
    node.play(3.0)
    assert node.routes == {"10.5.2.0/24"}


def test_another_subnet_of_the_same_node_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
    moved = replace(peer(9, revision=7), attrs=peer(2).attrs)
    node.play(LeasesChanged((peer(2).subnets, moved), 7))
    assert node.routes == {"10.5.9.0/24"}
    assert {n.mac for n in node.kernel.state.neighbours} == {_mac(peer(2))}


def test_E15_a_peer_that_a_list_lacks_has_its_moment_too(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2), peer(3), peer(4))
    before = node.kernel.state
    node.play(LeasesChanged((peer(2).subnets,), 6), 0.2, LeasesListed((), 7), LeasesChanged((peer(3, revision=8),), 8))
    assert node.kernel.state == before
    node.play(0.3)
    assert node.routes == {"10.5.3.0/24", "10.5.4.0/24"}
    node.play(0.2)
    assert node.routes == {"10.5.3.0/24"}
    moved = replace(peer(9), attrs=peer(3).attrs)
    node.play(LeasesListed((moved,), 9))
    assert node.routes == {"10.5.9.0/24"}


def test_E15_in_a_store_that_began_anew_peers_have_time_to_come_back(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2), peer(3))
    before = node.kernel.state
    node.play(LeasesListed((), 2), 10.0)
    assert node.kernel.state == before
    node.play(LeasesChanged((peer(2, revision=3),), 3), LeasesListed((peer(2, revision=3),), 4), 4.0)
    assert node.kernel.state == before
    node.play(2.0)
    assert node.routes == {"10.5.2.0/24"}


def test_cached_leases_make_ready_fill_gaps_and_remove_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2, "02:00:00:00:00:22"), peer(3))
    held, link = node.kernel.state, node.kernel.held["flannel.1"]
    again = Node(tmp_path, node.kernel)
    degraded = StoreState(False, "started from cached state of then; datastore: down")
    mine = Lease(OWN, node.manager.requests[-1].attrs, "own", 7, 6)
    cached = LeasesListed((mine, peer(2), peer(4)), 0, complete=False)
    again.play(degraded, config_seen(CONFIG), cached, lambda: [again.own()], again.rules_ok)
    assert again.is_ready()
    assert again.notifier.said[-1] == "READY subnet 10.5.1.0/24, 2 other leases; " + degraded.problem
    assert again.health.reason == degraded.problem
    assert again.routes == {"10.5.2.0/24", "10.5.3.0/24", "10.5.4.0/24"}
    assert held.neighbours < node.kernel.state.neighbours
    assert held.fdb < node.kernel.state.fdb
    again.play(StoreState(True), config_seen(CONFIG), LeasesListed((mine, peer(2), peer(5)), 9))
    assert again.routes == {"10.5.2.0/24", "10.5.5.0/24"}
    assert {n.mac for n in node.kernel.state.neighbours} == {_mac(peer(2)), _mac(peer(5))}
    assert again.notifier.said[-1].endswith("2 other leases")
    assert again.health.reason == ""
    assert node.kernel.held["flannel.1"] == link


def test_cached_config_removes_no_device(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    again = Node(tmp_path, node.kernel)
    older = config_seen('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}')
    again.play(
        StoreState(False, "down"),
        older,
        LeasesListed((), 0, complete=False),
        lambda: [again.own()],
        again.rules_ok,
    )
    assert {"flannel.1", "flannel.2"} <= node.kernel.held.keys()
    again.play(LeasesListed((), 9))
    assert node.kernel.held.keys() == {"lo", "eth0", "flannel.2"}


def _mac(lease: Lease) -> str:
    return str(lease.attrs.backend_data["VtepMAC"])
