from __future__ import annotations

import logging
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path

import pytest

from subnet.manager import ConfigSeen, LeasesListed, OwnLease, StoreState, ThisNode
from subnet.model import LeaseAttrs, Subnets
from tests.support.owner import CONFIG, Node, config_seen, peer

pytestmark = pytest.mark.pure


def test_ready_means_everything_is_there(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), config_seen(CONFIG))
    assert not node.is_ready()
    assert node.kernel.creations == []
    node.play(LeasesListed((peer(2), peer(3)), 5))
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
    node.play(StoreState(True), config_seen(CONFIG), LeasesListed((), 5), lambda: [node.own()])
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
    node = Node(tmp_path).play(ThisNode(told=told)).started(peer(2))
    assert node.kernel.held["flannel.1"].mac == mac


def test_K05_mac_that_cannot_be_kept_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = LeaseAttrs(IPv4Address("192.0.2.1"), None, "vxlan", {"VNI": 1, "VtepMAC": "banana"})
    node = Node(tmp_path).play(ThisNode(told=told)).started()
    assert node.is_ready()
    assert "banana" in caplog.text


def test_reason_that_its_finder_logged_is_not_logged_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), config_seen(CONFIG), LeasesListed((), 5), OwnLease(None, "no pod CIDR yet"), 5, 5, 60)
    assert node.health.reason == "no pod CIDR yet"
    assert "no pod CIDR yet" not in caplog.text


def test_what_peers_are_told_is_the_device_as_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    attrs = node.manager.requests[-1].attrs
    assert attrs.public_ip == ip_address("192.0.2.1")
    assert attrs.backend_data == {"VNI": 1, "VtepMAC": node.kernel.held["flannel.1"].mac}
    assert len(node.manager.requests) == 1


def test_another_own_subnet_moves_everything(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
    other = Subnets(ip_network("10.5.77.0/24"))  # type: ignore[arg-type]
    node.play(lambda: [node.own(other)], node.rules_ok)
    assert [str(a.interface) for a in node.kernel.addresses() if a.device == "flannel.1"] == ["10.5.77.0/32"]
    assert "FLANNEL_SUBNET=10.5.77.1/24" in node.env.read_text()
    assert node.policies[-1].v4 is not None
    assert str(node.policies[-1].v4.subnet) == "10.5.77.0/24"


def test_the_start_is_over_once_nothing_happens_any_more(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), 1.0)
    assert node.settled_at == []  # not ready yet
    node.started(peer(2))
    assert node.script.sleeps[-1] == 1.0
    assert len(node.settled_at) == 1
    node.play(1.0)
    assert node.script.sleeps[-1] > 1.0
    assert len(node.settled_at) == 1


def test_lost_lease_keeps_the_data_plane(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path).started(peer(2))
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
    node = Node(tmp_path).started(peer(2))
    node.play(config_seen(change), 1.0, config_seen(change))
    assert caplog.text.count("restart needed") == 1
    assert says in caplog.text
    assert node.routes == {"10.5.2.0/24"}
    assert node.is_ready()


def test_C11_change_that_can_be_followed_is(tmp_path: Path) -> None:
    node = Node(tmp_path).started()
    node.play(config_seen('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":1400}}'))
    assert node.kernel.held["flannel.1"].mtu_bytes == 1350
    assert "FLANNEL_MTU=1350\n" in node.env.read_text()


def test_broken_config_keeps_the_one_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path).started(peer(2))
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
        StoreState(True), config_seen('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlam"}}'), LeasesListed((), 5), 1.0
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


def test_idle_loop_sleeps_long(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
    node.script.sleeps.clear()
    node.play()
    assert node.script.sleeps[-1] == pytest.approx(10.0)
