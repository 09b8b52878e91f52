from __future__ import annotations

import logging
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import pytest

from backends.dataplane.model import Address
from backends.dataplane.ports import LinkSeen, ObjectSeen
from flanneld.traffic.keeper import TrafficState
from subnet.manager import LeasesListed, StoreState
from subnet.model import Subnets
from tests.support.owner import CONFIG, Node, config_seen, peer

pytestmark = pytest.mark.pure


def test_traffic_rules_in_trouble_keep_the_file_away_but_not_the_peers(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.play(StoreState(True), config_seen(CONFIG), LeasesListed((peer(2),), 5), lambda: [node.own()])
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
    node.started(peer(2))
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
