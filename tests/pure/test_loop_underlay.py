from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from backends.dataplane.model import Vxlan
from backends.dataplane.ports import LinkSeen, Overflow
from subnet.manager import LeasesListed, StoreState
from tests.support.owner import CONFIG, OWN, Node, config_seen, peer

pytestmark = pytest.mark.pure


def test_V01_lost_device_comes_back_with_its_mac_and_all_peers(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
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
    mine = replace(peer(1, mac="02:00:00:00:00:aa"), subnets=OWN)
    node.play(StoreState(True), config_seen(CONFIG), LeasesListed((mine,), 5))
    assert node.kernel.held["flannel.1"].mac == "02:00:00:00:00:aa"


def test_V02_waits_while_the_underlay_is_away(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
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
    node = Node(tmp_path).started(peer(2))
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
    node = Node(tmp_path).started(peer(2))
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


def test_lost_address_that_does_not_come_back_is_waited_for_without_spinning(tmp_path: Path) -> None:
    node = Node(tmp_path).started(peer(2))
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
