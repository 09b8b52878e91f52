from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from backends.dataplane.model import Wireguard
from backends.dataplane.ports import LinkSeen
from subnet.manager import LeasesChanged, LeasesListed, StoreState
from subnet.model import Lease
from tests.support.owner import Node, config_seen, peer

pytestmark = pytest.mark.pure

WIREGUARD = '{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"%s}}'


def _wireguard_peer(n: int, key: int, revision: int = 1) -> Lease:
    data = {"PublicKey": _key(key), "Port": 51820}
    return replace(
        peer(n, revision=revision), attrs=replace(peer(n).attrs, backend_type="wireguard", backend_data=data)
    )


def _wireguard_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *peers: Lease) -> Node:
    monkeypatch.setenv("WIREGUARD_KEY_FILE", str(tmp_path / "wgkey"))
    return Node(tmp_path).started(*peers, config=WIREGUARD % "")


def test_wireguard_tells_its_key_and_follows_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 2), _wireguard_peer(3, 3), peer(4))
    assert node.is_ready()
    device = node.kernel.held["flannel-wg"].tunnel
    assert isinstance(device, Wireguard)
    assert node.manager.requests[-1].attrs.backend_data == {"PublicKey": device.public_key, "Port": 51820}
    assert node.routes == {"10.5.0.0/16"}
    assert sorted(str(found.allowed[0]) for found in node.kernel.state.peers) == ["10.5.2.0/24", "10.5.3.0/24"]
    node.play(LeasesChanged((_wireguard_peer(2, 22, 7),), 7), LeasesChanged((peer(3).subnets,), 8), 1.0)
    (found,) = node.kernel.state.peers
    assert (found.public_key, str(found.allowed[0])) == (_key(22), "10.5.2.0/24")
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
    (found,) = (p for p in node.kernel.state.peers if p.public_key == _key(2))
    for silent, said, status in ((frozenset({found}), "does not answer", True), (frozenset(), "answers", False)):
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
    node.play(StoreState(True), config_seen(WIREGUARD % ""), LeasesListed((_wireguard_peer(2, 2),), 5))
    assert "is not base64" in node.health.reason
    key.unlink()
    node.play(11.0, lambda: [node.own()], node.rules_ok)
    assert node.is_ready()
    node.play(config_seen(WIREGUARD % ',"PersistentKeepaliveInterval":25'))
    assert [found.keepalive_s for found in node.kernel.state.peers] == [25]


def test_cached_wireguard_leases_take_nothing_from_a_peer_that_may_be_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _wireguard_node(tmp_path, monkeypatch, _wireguard_peer(2, 22))
    again = Node(tmp_path, node.kernel)
    cached = LeasesListed((_wireguard_peer(2, 2), _wireguard_peer(3, 3)), 0, complete=False)
    again.play(StoreState(False, "down"), config_seen(WIREGUARD % ""), cached, lambda: [again.own()], again.rules_ok)
    assert again.is_ready()
    held = {str(found.allowed[0]): found.public_key for found in node.kernel.state.peers}
    assert held == {"10.5.2.0/24": _key(22), "10.5.3.0/24": _key(3)}


def _key(number: int) -> str:
    return b64encode(bytes([number]) * 32).decode()
