from __future__ import annotations

import logging
import threading
from base64 import b64encode
from collections.abc import Callable, Collection
from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, ClassVar

import pytest

from backends.alloc import AllocBackend
from backends.api import Carrier
from backends.dataplane.model import Address, Link, Route, Vxlan, Wireguard
from backends.dataplane.ports import Kernel, LinkSeen, ObjectSeen, Overflow
from flanneld.extiface import Wish
from flanneld.healthz import Health
from flanneld.inbox import Event, KernelEvents, Wake
from flanneld.loop import Owner
from flanneld.plan import Plan
from flanneld.traffic.keeper import TrafficState
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.vtep_rules import VtepFilter
from subnet.config import parse_network_config
from subnet.manager import ConfigSeen, LeaseRequest, LeasesChanged, LeasesListed, OwnLease, StoreState, ThisNode
from subnet.model import Lease, LeaseAttrs, Subnets
from tests.support.clock import ManualClock
from tests.support.fake_kernel import FakeKernel

pytestmark = pytest.mark.pure

CONFIG = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'
OWN = Subnets(ip_network("10.5.1.0/24"))  # type: ignore[arg-type]


class FakeManager:
    def __init__(self) -> None:
        self.requests: list[LeaseRequest] = []
        self.reconnected = self.told_ready = 0

    def start(self, post: object) -> None: ...

    def want(self, request: LeaseRequest) -> None:
        self.requests.append(request)

    def ready(self) -> None:
        self.told_ready += 1

    def underlay_changed(self) -> None:
        self.reconnected += 1

    def close(self) -> None: ...


class FakeNotifier:
    watchdog_s = 0.0

    def __init__(self) -> None:
        self.said: list[str] = []

    def ready(self, status: str) -> None:
        self.said.append(f"READY {status}")

    def status(self, status: str) -> None:
        self.said.append(status)

    def alive(self) -> None: ...

    def stopping(self) -> None: ...


class Script:
    """An inbox that plays events, one batch a round, and then tells the loop to stop."""

    def __init__(self, stop: threading.Event, clock: ManualClock) -> None:
        self.batches: list[Callable[[], list[Event]]] = []
        self.sleeps: list[float] = []
        self._stop, self._clock = stop, clock

    def post(self, event: Event) -> None: ...

    def drain(self, timeout_s: float) -> list[Event]:
        self.sleeps.append(timeout_s)
        if not self.batches:
            self._stop.set()
            return []
        return self.batches.pop(0)()


class Node:
    """An owner on a fake host; ``play`` runs one round for each step."""

    def __init__(self, tmp_path: Path, kernel: FakeKernel | None = None, **plan: Any) -> None:
        self.clock, self.kernel, self.manager = ManualClock(), kernel or FakeKernel(), FakeManager()
        self.notifier, self.health = FakeNotifier(), Health(self.clock)
        self.stop = threading.Event()
        self.script = Script(self.stop, self.clock)
        self.policies: list[TrafficPolicy] = []
        self.filters: list[object] = []
        self.env = tmp_path / "subnet.env"
        self.owner = Owner(
            Plan(Wish(iface=("eth0",)), str(self.env), **plan),
            kernel=self.kernel,
            manager=self.manager,
            traffic_want=self.policies.append,
            filter_want=self.filters.append,
            inbox=self.script,  # type: ignore[arg-type]
            health=self.health,
            notifier=self.notifier,  # type: ignore[arg-type]
            clock=self.clock,
        )

    def play(self, *steps: Event | Callable[[], object] | float) -> Node:
        """Events arrive, calls happen, numbers are seconds that pass; a round follows each."""
        self.stop.clear()
        self.script.batches = [lambda step=step: self._do(step) for step in steps]  # type: ignore[misc]
        self.owner.run(self.stop)
        return self

    def _do(self, step: Event | Callable[[], object] | float) -> list[Event]:
        if isinstance(step, (int, float)):
            self.clock.pass_s(step)
            return []
        if callable(step):
            found = step()
            return found if isinstance(found, list) else []
        return [step]

    def rules_ok(self) -> list[Event]:
        return [TrafficState(self.policies[-1], True)]

    def kernel_says(self, *events: Any) -> KernelEvents:
        return KernelEvents(tuple(events))

    def started(self, *peers: Lease, own: Subnets = OWN, config: str = CONFIG) -> Node:
        return self.play(
            StoreState(True), _config(config), LeasesListed(peers, 5), lambda: [self.own(own)], self.rules_ok
        )

    def own(self, subnets: Subnets = OWN) -> OwnLease:
        return OwnLease(Lease(subnets, self.manager.requests[-1].attrs, "/n/subnets/own", 7, 6))

    def is_ready(self) -> bool:
        return self.health.ready

    @property
    def routes(self) -> set[str]:
        return {str(r.destination) for r in self.kernel.state.routes}


def _config(text: str) -> ConfigSeen:
    return ConfigSeen(parse_network_config(text, "/coreos.com/network/config"))


def _peer(n: int, mac: str = "", revision: int = 1) -> Lease:
    data = {"VNI": 1, "VtepMAC": mac or f"02:00:00:00:00:{n:02x}"}
    attrs = LeaseAttrs(ip_address(f"192.0.2.{n}"), None, "vxlan", data)  # type: ignore[arg-type]
    return Lease(Subnets(ip_network(f"10.5.{n}.0/24")), attrs, f"/n/subnets/10.5.{n}.0-24", 9, revision)  # type: ignore[arg-type]


def test_ready_means_everything_is_there(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), _config(CONFIG))
    assert not node.is_ready()
    assert node.kernel.creations == []
    node.play(LeasesListed((_peer(2), _peer(3)), 5))
    assert [spec.name for spec in node.kernel.creations] == ["flannel.1"]
    assert not node.env.exists()
    node.play(lambda: [node.own()])
    assert not node.is_ready()
    assert not node.env.exists()
    node.play(node.rules_ok)
    assert node.is_ready()
    assert node.routes == {"10.5.2.0/24", "10.5.3.0/24"}
    assert node.env.read_text() == (
        "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
    )
    assert node.notifier.said[-1].startswith("READY subnet 10.5.1.0/24, 2 other leases")


def test_the_manager_hears_when_traffic_flows(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), _config(CONFIG), LeasesListed((), 5), lambda: [node.own()])
    assert node.manager.told_ready == 0
    node.play(node.rules_ok)
    assert node.manager.told_ready > 0


def test_S08_a_nodes_own_public_address_is_stronger_than_the_flag_and_followed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(ThisNode(public_ip=IPv4Address("198.51.100.7"))).started()
    assert node.manager.requests[-1].attrs.public_ip == IPv4Address("198.51.100.7")
    node.play(ThisNode())
    assert node.manager.requests[-1].attrs.public_ip == IPv4Address("192.0.2.1")
    assert len(node.manager.requests) == 2


def test_K05_mac_that_the_store_says_peers_know_is_taken(tmp_path: Path) -> None:
    mac = "02:aa:00:00:00:01"
    told = LeaseAttrs(IPv4Address("203.0.113.9"), None, "vxlan", {"vni": 1, "VTEPMAC": mac.upper()})
    node = Node(tmp_path).play(ThisNode(told=told)).started(_peer(2))
    assert node.kernel.held["flannel.1"].mac == mac


def test_K05_mac_that_cannot_be_kept_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = LeaseAttrs(IPv4Address("192.0.2.1"), None, "vxlan", {"VNI": 1, "VtepMAC": "banana"})
    node = Node(tmp_path).play(ThisNode(told=told)).started()
    assert node.is_ready()
    assert "banana" in caplog.text


def test_reason_that_its_finder_logged_is_not_logged_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), _config(CONFIG), LeasesListed((), 5), OwnLease(None, "no pod CIDR yet"), 5, 5, 60)
    assert node.health.reason == "no pod CIDR yet"
    assert "no pod CIDR yet" not in caplog.text


def test_what_peers_are_told_is_the_device_as_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    attrs = node.manager.requests[-1].attrs
    assert attrs.public_ip == ip_address("192.0.2.1")
    assert attrs.backend_data == {"VNI": 1, "VtepMAC": node.kernel.held["flannel.1"].mac}
    assert len(node.manager.requests) == 1


def test_V01_lost_device_comes_back_with_its_mac_and_all_peers(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    before = node.kernel.held["flannel.1"]
    node.kernel.remove_device("flannel.1")
    node.play(node.kernel_says(LinkSeen("flannel.1", before.index, True)))
    after = node.kernel.held["flannel.1"]
    assert (after.mac, after.up) == (before.mac, True)
    assert after.index != before.index
    assert node.routes == {"10.5.2.0/24"}
    assert len(node.kernel.state.fdb) == len(node.kernel.state.neighbours) == 1
    assert len(node.manager.requests) == 1


def test_V01_mac_of_an_earlier_run_is_taken_from_the_lease(tmp_path: Path) -> None:
    node = Node(tmp_path)
    mine = replace(_peer(1, mac="02:00:00:00:00:aa"), subnets=OWN)
    node.play(StoreState(True), _config(CONFIG), LeasesListed((mine,), 5))
    assert node.kernel.held["flannel.1"].mac == "02:00:00:00:00:aa"


def test_V02_waits_while_the_underlay_is_away(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    eth0, tunnel = node.kernel.held["eth0"], node.kernel.held["flannel.1"]
    node.kernel.remove_device("flannel.1")
    node.kernel.remove_device("eth0")
    node.play(node.kernel_says(LinkSeen("flannel.1", tunnel.index, True), LinkSeen("eth0", eth0.index, True)))
    assert not node.is_ready()
    assert "eth0" in node.health.reason
    node.kernel.add_device("eth0")
    node.play(node.kernel_says(LinkSeen("eth0", 9, False)), 1.0)
    assert not node.is_ready()
    node.kernel.set_address("eth0", "192.0.2.1/24")
    node.play(node.kernel_says(Overflow()), 1.0)
    assert node.is_ready()
    assert node.kernel.held["flannel.1"].mac == tunnel.mac
    assert node.routes == {"10.5.2.0/24"}


def test_S11_changed_address_is_followed_after_settling(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    node.kernel.set_address("eth0", "192.0.2.31/24")
    node.play(node.kernel_says(Overflow()), 1.0)
    assert len(node.manager.requests) == 1
    node.play(1.1, 0.1)
    assert node.manager.requests[-1].attrs.public_ip == ip_address("192.0.2.31")
    vxlan = node.kernel.held["flannel.1"].tunnel
    assert isinstance(vxlan, Vxlan)
    assert vxlan.local == ip_address("192.0.2.31")
    assert node.manager.reconnected == 1
    assert node.routes == {"10.5.2.0/24"}


def test_S11_address_that_is_back_at_once_changes_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    index = node.kernel.held["flannel.1"].index
    node.kernel.set_address("eth0", "192.0.2.31/24")
    node.play(node.kernel_says(Overflow()), 1.0)
    node.kernel.set_address("eth0", "192.0.2.1/24")
    node.play(node.kernel_says(Overflow()), 3.0, 3.0)
    assert len(node.manager.requests) == 1
    assert node.kernel.held["flannel.1"].index == index


def test_V16_underlay_mtu_is_followed(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    node.kernel.held["eth0"] = replace(node.kernel.held["eth0"], mtu_bytes=1400)
    node.play(node.kernel_says(LinkSeen("eth0", node.kernel.held["eth0"].index, False)))
    assert node.kernel.held["flannel.1"].mtu_bytes == 1350
    assert "FLANNEL_MTU=1350\n" in node.env.read_text()


def test_lease_events_cost_no_observation(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    before = node.kernel.observations
    two = LeasesChanged((_peer(3, revision=6), _peer(4, revision=7)), 7)
    node.play(two, LeasesChanged((_peer(2).subnets,), 8), 1.0)
    assert node.routes == {"10.5.3.0/24", "10.5.4.0/24"}
    assert node.kernel.observations == before


def test_E03_H01_a_list_with_the_own_lease_neither_removes_it_nor_routes_to_it(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    mine = Lease(OWN, node.manager.requests[-1].attrs, "/n/subnets/own", 7, 6)
    for revision in (8, 9):
        node.play(LeasesListed((mine, _peer(2), _peer(revision)), revision), 1.0)
        assert node.routes == {"10.5.2.0/24", f"10.5.{revision}.0/24"}
    assert [str(a.interface) for a in node.kernel.addresses() if a.device == "flannel.1"] == ["10.5.1.0/32"]


def test_another_own_subnet_moves_everything(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    other = Subnets(ip_network("10.5.77.0/24"))  # type: ignore[arg-type]
    node.play(lambda: [node.own(other)], node.rules_ok)
    assert [str(a.interface) for a in node.kernel.addresses() if a.device == "flannel.1"] == ["10.5.77.0/32"]
    assert "FLANNEL_SUBNET=10.5.77.1/24" in node.env.read_text()
    assert node.policies[-1].v4 is not None
    assert str(node.policies[-1].v4.subnet) == "10.5.77.0/24"


def test_lost_lease_keeps_the_data_plane(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path).started(_peer(2))
    node.play(OwnLease(None, "no free subnet"))
    assert node.routes == {"10.5.2.0/24"}
    assert "the data plane stays as it is" in caplog.text


def test_lost_lease_ends_the_daemon_if_told_so(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    node.play(OwnLease(None, "own lease is gone", fatal=True))
    assert node.owner.exit_code == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}', "Backend.vni None -> 2"),
        ('{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}', "IPv4 network 10.5.0.0/16 -> 10.6.0.0/16"),
        ('{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}', "Backend.Type vxlan -> host-gw"),
    ],
    ids=["C11-vni", "C11-network", "C11-backend"],
)
def test_changes_that_need_a_restart_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, says: str
) -> None:
    node = Node(tmp_path).started(_peer(2))
    node.play(_config(change), 1.0, _config(change))
    assert caplog.text.count("restart needed") == 1
    assert says in caplog.text
    assert node.routes == {"10.5.2.0/24"}
    assert node.is_ready()


def test_C11_change_that_can_be_followed_is(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    node.play(_config('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":1400}}'))
    assert node.kernel.held["flannel.1"].mtu_bytes == 1350
    assert "FLANNEL_MTU=1350\n" in node.env.read_text()


def test_broken_config_keeps_the_one_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path).started(_peer(2))
    node.play(ConfigSeen(None, "config is broken"), 30.0)
    assert caplog.text.count("the earlier network config stays in force") == 1
    assert node.is_ready()


def test_C03_broken_config_before_the_start_is_waited_out(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), ConfigSeen(None, "/coreos.com/network/config: bad JSON"))
    assert "/coreos.com/network/config: bad JSON" in node.health.reason
    node.started()
    assert node.is_ready()


def test_S02_unknown_backend_is_waited_out_and_touches_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(
        StoreState(True), _config('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlam"}}'), LeasesListed((), 5), 1.0
    )
    assert "'vxlam' is unknown" in node.health.reason
    assert node.manager.requests == []
    assert set(node.kernel.held) == {"lo", "eth0"}
    node.started()
    assert node.is_ready()


def test_startup_timeout_ends_the_start_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path, startup_timeout_s=10)
    node.play(StoreState(False, "etcd refused"), 5.0, 5.1)
    assert node.owner.exit_code == 1
    assert "--startup-timeout=10" in caplog.text
    assert "etcd refused" in caplog.text


def test_reasons_that_are_over_within_a_second_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Node(tmp_path).started()
    assert "not ready" not in caplog.text
    caplog.clear()
    node = Node(tmp_path)
    node.play(StoreState(True), ConfigSeen(None, "no such key"), 1.1, 1.0, 1.0)
    assert caplog.text.count("not ready: waiting for the network config: no such key") == 1


def test_V06_refused_entry_does_not_stop_others_nor_readiness(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.kernel.refuse.add("route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink")
    node.started(_peer(2), _peer(3))
    assert node.is_ready()
    assert node.routes == {"10.5.3.0/24"}
    assert "1 with problems" in node.notifier.said[-1]
    node.kernel.refuse.clear()
    node.play(11.0, 0.1)
    assert node.routes == {"10.5.2.0/24", "10.5.3.0/24"}


def test_traffic_rules_in_trouble_keep_the_file_away_but_not_the_peers(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), _config(CONFIG), LeasesListed((_peer(2),), 5), lambda: [node.own()])
    node.play(lambda: [TrafficState(node.policies[-1], False, "no iptables here")])
    assert node.routes == {"10.5.2.0/24"}
    assert not node.env.exists()
    assert node.health.reason == "traffic rules: no iptables here"
    node.play(node.rules_ok)
    assert node.is_ready()
    assert node.env.exists()
    node.play(lambda: [TrafficState(node.policies[-1], False, "lock held")])
    assert not node.is_ready()


def test_N01_file_that_cannot_be_written_is_retried(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.env.mkdir()
    node.started()
    assert not node.is_ready()
    assert str(node.env) in node.health.reason
    node.env.rmdir()
    node.play(11.0)
    assert node.is_ready()


@pytest.mark.parametrize("damage", ["deleted", "overwritten"])
def test_file_is_kept_right(tmp_path: Path, damage: str) -> None:
    node = Node(tmp_path).started()
    good = node.env.read_text()
    if damage == "deleted":
        node.env.unlink()
    else:
        node.env.write_text("FLANNEL_NETWORK=1.2.3.0/24\n")
    node.play(0.1)
    assert node.env.read_text() == good


def test_earlier_run_is_remembered_for_lease_and_rules(tmp_path: Path) -> None:
    (tmp_path / "subnet.env").write_text("FLANNEL_NETWORK=10.9.0.0/16\nFLANNEL_SUBNET=10.9.4.1/24\n")
    node = Node(tmp_path).started()
    request = node.manager.requests[-1]
    assert request.previous == Subnets(ip_network("10.9.4.0/24"))  # type: ignore[arg-type]
    assert ip_address("192.0.2.1") in request.local_addresses
    (pair,) = node.policies[-1].previous
    assert (str(pair.network), str(pair.subnet)) == ("10.9.0.0/16", "10.9.4.0/24")


@pytest.mark.parametrize(
    ("bridge", "address"),
    [("docker0", "10.5.27.1/24"), ("cni0", "10.5.9.1/24"), ("cni0", "10.5.1.1/16")],
    ids=["N05", "N06", "N06-whole-network"],
)
def test_N05_N06_bridge_older_than_the_lease_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bridge: str, address: str
) -> None:
    node = Node(tmp_path)
    node.kernel.add_device(bridge)
    node.kernel.set_address(bridge, address)
    node.started(_peer(2))
    assert node.is_ready()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    for text in (warning, node.notifier.said[-1], node.health.reason):
        assert all(word in text for word in (bridge, address, "10.5.1.0/24"))
    node.kernel.set_address(bridge, "10.5.1.1/24")
    node.play(node.kernel_says(ObjectSeen(Address("", ip_interface("10.5.1.1/24")), 9, False)))
    assert node.health.reason == ""
    assert bridge not in node.notifier.said[-1]


def test_N05_bridge_that_comes_later_and_moved_subnet_are_noticed(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    node.kernel.add_device("docker0")
    node.kernel.set_address("docker0", "10.5.1.1/24")
    node.play(node.kernel_says(LinkSeen("docker0", 9, False)))
    assert node.health.reason == ""
    moved = Subnets(ip_network("10.5.77.0/24"))  # type: ignore[arg-type]
    node.play(lambda: [node.own(moved)], node.rules_ok)
    assert all(word in node.health.reason for word in ("docker0", "10.5.1.1/24", "10.5.77.0/24"))
    node.kernel.remove_device("docker0")
    node.play(node.kernel_says(LinkSeen("docker0", 9, True)))
    assert node.health.reason == ""


def test_N05_ready_follows_the_file(tmp_path: Path) -> None:
    node = Node(tmp_path)
    there: list[bool] = []
    node.notifier.ready = lambda status: there.append(node.env.exists())  # type: ignore[method-assign]
    node.env.mkdir()
    node.started()
    assert there == []
    node.env.rmdir()
    node.play(11.0)
    assert there[0]


def test_N03_file_has_the_gateway_and_status_the_network(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    assert "FLANNEL_SUBNET=10.5.1.1/24\n" in node.env.read_text()
    assert "subnet 10.5.1.0/24," in node.notifier.said[-1]


def test_idle_loop_sleeps_long(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    node.script.sleeps.clear()
    node.play()
    assert node.script.sleeps[-1] == pytest.approx(10.0)


def test_H05_routes_of_dead_leases_go_and_that_of_the_subnet_which_is_ours_now(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2), _peer(3), _peer(4))
    node.kernel.state = replace(
        node.kernel.state,
        routes=node.kernel.state.routes | {Route(ip_network("172.16.9.0/24"), "eth0", ip_address("192.0.2.254"))},
    )
    again = Node(tmp_path, node.kernel)
    mine = Subnets(ip_network("10.5.4.0/24"))  # type: ignore[arg-type]
    again.started(_peer(3), own=mine)
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
    far = replace(_peer(5), attrs=replace(_peer(5).attrs, public_ip=ip_address("198.51.100.5")))  # type: ignore[arg-type]
    node.started(_peer(2), _peer(3), _peer(4), far, config=DIRECT)
    assert _shown(node) == [
        "route 10.5.2.0/24 via 192.0.2.2 dev eth0",
        "route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 onlink",
        "route 10.5.4.0/24 via 10.5.4.0 dev flannel.1 onlink",
        "route 10.5.5.0/24 via 10.5.5.0 dev flannel.1 onlink",
    ]


def test_H07_decided_anew_when_routes_change(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2), config=DIRECT)
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
    bad = replace(_peer(4), subnets=Subnets(ip_network("0.0.0.0/1")))  # type: ignore[arg-type]
    mine = replace(_peer(5), attrs=replace(_peer(5).attrs, public_ip=ip_address("192.0.2.1")))  # type: ignore[arg-type]
    node = Node(tmp_path).started(_peer(2), bad, mine)
    assert node.routes == {"10.5.2.0/24"}
    assert "2 with problems" in node.notifier.said[-1]


def test_lost_address_that_does_not_come_back_is_waited_for_without_spinning(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    node.kernel.set_address("eth0", "169.254.0.1/32")
    node.kernel.state = replace(
        node.kernel.state, addresses=frozenset(a for a in node.kernel.state.addresses if a.device != "eth0")
    )
    node.play(node.kernel_says(Overflow()), 2.1)
    node.script.sleeps.clear()
    node.play(0.0, 0.0)
    assert "eth0 has no IPv4 address" in node.health.reason
    assert min(node.script.sleeps) > 0.05
    node.script.sleeps.clear()
    node.play(node.kernel_says(Overflow()), 0.0, 0.0)
    assert min(node.script.sleeps[1:]) > 0.05
    assert node.routes == {"10.5.2.0/24"}


def test_E08_a_peer_outlives_its_lease_for_a_moment(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2), _peer(3))
    before = node.kernel.state
    gone = LeasesChanged((_peer(2).subnets, _peer(3).subnets), 6)
    node.play(gone, 0.4)
    assert node.kernel.state == before
    assert node.script.sleeps[-1] == pytest.approx(0.1)
    node.play(LeasesChanged((_peer(2, revision=7),), 7), 0.2)
    assert node.routes == {"10.5.2.0/24"}
    assert node.kernel.state.neighbours < before.neighbours
    node.play(3.0)
    assert node.routes == {"10.5.2.0/24"}


def test_another_subnet_of_the_same_node_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2))
    moved = replace(_peer(9, revision=7), attrs=_peer(2).attrs)
    node.play(LeasesChanged((_peer(2).subnets, moved), 7))
    assert node.routes == {"10.5.9.0/24"}
    assert {n.mac for n in node.kernel.state.neighbours} == {_mac(_peer(2))}


def test_E15_a_peer_that_a_list_lacks_has_its_moment_too(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2), _peer(3), _peer(4))
    before = node.kernel.state
    node.play(
        LeasesChanged((_peer(2).subnets,), 6), 0.2, LeasesListed((), 7), LeasesChanged((_peer(3, revision=8),), 8)
    )
    assert node.kernel.state == before
    node.play(0.3)
    assert node.routes == {"10.5.3.0/24", "10.5.4.0/24"}
    node.play(0.2)
    assert node.routes == {"10.5.3.0/24"}
    moved = replace(_peer(9), attrs=_peer(3).attrs)
    node.play(LeasesListed((moved,), 9))
    assert node.routes == {"10.5.9.0/24"}


def test_cached_leases_make_ready_fill_gaps_and_remove_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path).started(_peer(2, "02:00:00:00:00:22"), _peer(3))
    held, link = node.kernel.state, node.kernel.held["flannel.1"]
    again = Node(tmp_path, node.kernel)
    degraded = StoreState(False, "started from cached state of then; datastore: down")
    mine = Lease(OWN, node.manager.requests[-1].attrs, "own", 7, 6)
    cached = LeasesListed((mine, _peer(2), _peer(4)), 0, complete=False)
    again.play(degraded, _config(CONFIG), cached, lambda: [again.own()], again.rules_ok)
    assert again.is_ready()
    assert again.notifier.said[-1] == "READY subnet 10.5.1.0/24, 2 other leases; " + degraded.problem
    assert again.health.reason == degraded.problem
    assert again.routes == {"10.5.2.0/24", "10.5.3.0/24", "10.5.4.0/24"}
    assert held.neighbours < node.kernel.state.neighbours
    assert held.fdb < node.kernel.state.fdb
    again.play(StoreState(True), _config(CONFIG), LeasesListed((mine, _peer(2), _peer(5)), 9))
    assert again.routes == {"10.5.2.0/24", "10.5.5.0/24"}
    assert {n.mac for n in node.kernel.state.neighbours} == {_mac(_peer(2)), _mac(_peer(5))}
    assert again.notifier.said[-1].endswith("2 other leases")
    assert again.health.reason == ""
    assert node.kernel.held["flannel.1"] == link


def test_cached_config_removes_no_device(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    again = Node(tmp_path, node.kernel)
    older = _config('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}')
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


class FakeCarrier(Carrier):
    """Answers what it is told to, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Subnets, set[str]]] = []
        self.missing, self.waiting = "PRE", "POST"
        self.trouble: dict[str, str] = {}
        self.ensured = self.closed = 0

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        self.ensured += 1
        return {}

    def unprepared(self) -> str:
        return self.missing

    def carry(self, own: Subnets, peers: Collection[Lease]) -> None:
        self.heard.append((own, {str(p.subnets) for p in peers}))

    def unready(self) -> str:
        return self.waiting

    def problems(self) -> dict[str, str]:
        return self.trouble

    def close(self) -> None:
        self.closed += 1


class FakeCarrying(AllocBackend):
    """A backend whose carrier is the one that the test holds."""

    held: ClassVar[FakeCarrier]

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        wake()
        return self.held


@pytest.fixture
def carrier(monkeypatch: pytest.MonkeyPatch) -> FakeCarrier:
    FakeCarrying.held = FakeCarrier()
    monkeypatch.setattr("flanneld.loop.load_backend", FakeCarrying)
    return FakeCarrying.held


def test_lease_is_asked_for_once_the_carrier_knows_what_peers_must_be_told(
    tmp_path: Path, carrier: FakeCarrier
) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), _config(CONFIG), LeasesListed((_peer(2),), 5))
    assert node.manager.requests == []
    assert node.health.reason == "PRE"
    carrier.missing = ""
    node.play(Wake())
    assert len(node.manager.requests) == 1
    assert carrier.heard == []


def test_ready_and_subnet_env_wait_for_the_carrier(tmp_path: Path, carrier: FakeCarrier) -> None:
    carrier.missing = ""
    node = Node(tmp_path).started(_peer(2), _peer(3))
    assert node.health.reason == "POST"
    assert not node.env.exists()
    assert carrier.heard == [(OWN, {"10.5.2.0/24", "10.5.3.0/24"})]
    carrier.waiting = ""
    node.play(Wake())
    assert node.is_ready()
    assert node.env.exists()
    assert len(carrier.heard) == 1


def test_carrier_hears_of_admitted_peers_when_they_change(tmp_path: Path, carrier: FakeCarrier) -> None:
    carrier.missing = carrier.waiting = ""
    node = Node(tmp_path).started(_peer(2))
    outside = replace(_peer(4), subnets=Subnets(ip_network("10.99.4.0/24")))  # type: ignore[arg-type]
    node.play(LeasesChanged((_peer(3), outside), 6), 1.0, LeasesChanged((_peer(2).subnets,), 7), 1.0)
    assert [peers for _, peers in carrier.heard] == [{"10.5.2.0/24"}, {"10.5.2.0/24", "10.5.3.0/24"}, {"10.5.3.0/24"}]


def test_troubles_of_the_carrier_are_counted_and_logged_once(
    tmp_path: Path, carrier: FakeCarrier, caplog: pytest.LogCaptureFixture
) -> None:
    carrier.missing = carrier.waiting = ""
    node = Node(tmp_path).started(_peer(2))
    carrier.trouble = {"/n/subnets/10.5.2.0-24": "SubnetAddCommand for 10.5.2.0/24 ended with exit code 2"}
    node.play(Wake(), Wake(), 1.0)
    assert node.notifier.said[-1].endswith("1 with problems")
    assert caplog.text.count("ended with exit code 2") == 1
    carrier.trouble = {}
    node.play(Wake())
    assert "problems" not in node.notifier.said[-1]


def test_carrier_is_closed_with_the_loop(tmp_path: Path, carrier: FakeCarrier) -> None:
    carrier.missing = carrier.waiting = ""
    node = Node(tmp_path)
    node.play(StoreState(True), _config(CONFIG), LeasesListed((), 5))
    assert (carrier.ensured, carrier.closed) == (1, 1)


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        ("vxlan", VtepFilter("eth0", 8472, frozenset({ip_address("192.0.2.2")}))),
        ("ipip", VtepFilter("eth0", 0, frozenset({ip_address("192.0.2.2")}), (4,))),
        ("host-gw", None),
    ],
)
def test_W09_known_hosts_may_send_what_the_backend_tunnels(
    tmp_path: Path, backend: str, wanted: VtepFilter | None
) -> None:
    node = Node(tmp_path, vtep_filter=True)
    node.started(_peer(2), config=CONFIG.replace("vxlan", backend))
    assert node.filters[-1] == wanted


WIREGUARD = '{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"%s}}'


def _wireguard_peer(n: int, key: int, revision: int = 1) -> Lease:
    data = {"PublicKey": _key(key), "Port": 51820}
    return replace(
        _peer(n, revision=revision), attrs=replace(_peer(n).attrs, backend_type="wireguard", backend_data=data)
    )


def _wireguard_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *peers: Lease) -> Node:
    monkeypatch.setenv("WIREGUARD_KEY_FILE", str(tmp_path / "wgkey"))
    return Node(tmp_path).started(*peers, config=WIREGUARD % "")


def test_wireguard_tells_its_key_and_follows_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 2), _wireguard_peer(3, 3), _peer(4))
    assert node.is_ready()
    device = node.kernel.held["flannel-wg"].tunnel
    assert isinstance(device, Wireguard)
    assert node.manager.requests[-1].attrs.backend_data == {"PublicKey": device.public_key, "Port": 51820}
    assert node.routes == {"10.5.0.0/16"}
    assert sorted(str(peer.allowed[0]) for peer in node.kernel.state.peers) == ["10.5.2.0/24", "10.5.3.0/24"]
    node.play(LeasesChanged((_wireguard_peer(2, 22, 7),), 7), LeasesChanged((_peer(3).subnets,), 8), 1.0)
    (peer,) = node.kernel.state.peers
    assert (peer.public_key, str(peer.allowed[0])) == (_key(22), "10.5.2.0/24")
    assert "FLANNEL_MTU=1420" in node.env.read_text()


def test_W07_lost_wireguard_device_comes_back_with_key_and_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 2))
    before, peers = node.kernel.held["flannel-wg"], node.kernel.state.peers
    node.kernel.remove_device("flannel-wg")
    assert not node.kernel.state.peers
    node.play(node.kernel_says(LinkSeen("flannel-wg", before.index, True)))
    assert node.kernel.held["flannel-wg"].tunnel == before.tunnel
    assert (node.kernel.state.peers, node.routes) == (peers, {"10.5.0.0/16"})
    assert len(node.manager.requests) == 1


def test_W07_a_restart_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 2))
    held, state = dict(node.kernel.held), node.kernel.state
    again = Node(tmp_path, node.kernel).started(_wireguard_peer(2, 2), config=WIREGUARD % "")
    assert again.is_ready()
    assert again.manager.requests[-1].attrs == node.manager.requests[-1].attrs
    assert (node.kernel.held, node.kernel.state) == (held, state)


def test_W06_the_same_peer_again_and_a_restart_with_the_route_in_place_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 2))
    state = node.kernel.state
    caplog.clear()
    caplog.set_level("INFO")
    node.play(*(LeasesChanged((_wireguard_peer(2, 2, revision),), revision) for revision in (7, 8, 9)), 61.0)
    again = Node(tmp_path, node.kernel).started(_wireguard_peer(2, 2, 9), config=WIREGUARD % "")
    assert again.is_ready()
    assert again.kernel.state == state
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "route" in text or "peer " in text or "exist" in text.lower()] == []


def test_a_peer_that_does_not_answer_is_told_of_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 2), _wireguard_peer(3, 3))
    (peer,) = (p for p in node.kernel.state.peers if p.public_key == _key(2))
    for silent, said, status in ((frozenset({peer}), "does not answer", True), (frozenset(), "answers", False)):
        caplog.clear()
        node.kernel.state = replace(node.kernel.state, silent=silent)
        node.play(61.0)
        (line,) = (record.getMessage() for record in caplog.records if "answer" in record.getMessage())
        assert f"for 10.5.2.0/24 {said}" in line
        assert ("1 with problems" in node.notifier.said[-1]) is status
    assert node.is_ready()


def test_a_keepalive_is_followed_and_a_spoilt_key_file_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "wgkey"
    key.write_text("spoilt")
    monkeypatch.setenv("WIREGUARD_KEY_FILE", str(key))
    node = Node(tmp_path)
    node.play(StoreState(True), _config(WIREGUARD % ""), LeasesListed((_wireguard_peer(2, 2),), 5))
    assert "is not base64" in node.health.reason
    key.unlink()
    node.play(11.0, lambda: [node.own()], node.rules_ok)
    assert node.is_ready()
    node.play(_config(WIREGUARD % ',"PersistentKeepaliveInterval":25'))
    assert [peer.keepalive_s for peer in node.kernel.state.peers] == [25]


def test_cached_wireguard_leases_take_nothing_from_a_peer_that_may_be_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 22))
    again = Node(tmp_path, node.kernel)
    cached = LeasesListed((_wireguard_peer(2, 2), _wireguard_peer(3, 3)), 0, complete=False)
    again.play(StoreState(False, "down"), _config(WIREGUARD % ""), cached, lambda: [again.own()], again.rules_ok)
    assert again.is_ready()
    held = {str(peer.allowed[0]): peer.public_key for peer in node.kernel.state.peers}
    assert held == {"10.5.2.0/24": _key(22), "10.5.3.0/24": _key(3)}


def _key(number: int) -> str:
    return b64encode(bytes([number]) * 32).decode()
