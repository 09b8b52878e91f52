from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Network

import pytest

from subnet.errors import AccessDenied, Conflict, DatastoreError, Unavailable
from subnet.kube.faults import Busy
from subnet.kube.keeper import Keeper
from subnet.kube.records import OwnNode, decode
from subnet.kube.settings import KubeSettings
from subnet.manager import OwnLease, StoreEvent, ThisNode
from subnet.model import Json, Subnets
from tests.support.clock import ManualClock
from tests.support.kube import PREFIX, KubeApi
from tests.support.kube_node import DUAL, request

pytestmark = pytest.mark.pure

MAC = "02:00:00:00:01:01"
NOW = "2026-03-03T00:00:00Z"


class Store:
    """A NodeStore for one writer, on nodes in memory."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.errors: list[DatastoreError] = []
        self.patches: list[Json] = []

    def patch_node(self, name: str, patch: Json) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        self.patches.append(patch)
        return json.dumps(self.api.patch(name, patch)).encode()

    def list_nodes(self, token: str, limit: int) -> bytes:
        raise NotImplementedError

    def watch_nodes(self, version: str, timeout_s: int) -> Iterator[bytes]:
        raise NotImplementedError

    def node(self, name: str) -> bytes:
        raise NotImplementedError

    def pod(self, namespace: str, name: str) -> bytes:
        raise NotImplementedError

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


class Node:
    def __init__(self, *cidrs: str, **settings: object) -> None:
        self.api, self.clock = KubeApi(), ManualClock()
        self.store = Store(self.api)
        if cidrs:
            self.api.node("n1", cidrs)
        self.posted: list[StoreEvent] = []
        given = KubeSettings(node_name="n1", **settings)  # type: ignore[arg-type]
        self.keeper = Keeper(
            self.store,
            given,
            self.posted.append,
            self.clock,
            threading.Event(),
            lambda: datetime(2026, 3, 3, tzinfo=UTC),
            lambda low, _: low,
        )

    def look(self, listed: bool = True) -> float | None:
        """Hand the node's object over, as the reader does, and take a step."""
        node = self.api.nodes.get("n1")
        self.keeper.saw(None if node is None else decode(json.dumps(node).encode(), OwnNode), listed)
        return self.keeper.step()

    def told(self) -> dict[str, str]:
        return self.api.told("n1")

    def all_own(self) -> list[OwnLease]:
        return [event for event in self.posted if isinstance(event, OwnLease)]

    def own(self) -> OwnLease:
        return self.all_own()[-1]


@pytest.fixture
def node() -> Node:
    return Node("10.5.1.0/24")


def ready(node: Node) -> None:
    node.keeper.want(request())
    node.look()
    node.keeper.ready()
    node.keeper.step()
    assert node.own().lease is not None


def test_publishes_and_holds(node: Node) -> None:
    assert node.look() is None
    assert node.store.patches == []
    node.keeper.want(request())
    assert node.keeper.step() is None
    assert node.told() == {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": f'{{"VNI":1,"VtepMAC":"{MAC}"}}',
        "public-ip": "192.0.2.1",
    }
    lease = node.own().lease
    assert lease is not None
    assert (lease.subnets, lease.key) == (Subnets(IPv4Network("10.5.1.0/24")), "n1")
    assert lease.attrs == request().attrs


def test_what_is_right_is_not_written_again(node: Node) -> None:
    ready(node)
    written = len(node.store.patches)
    again = Node()
    again.api.nodes = node.api.nodes
    again.keeper.want(request())
    again.look()
    assert again.own().lease is not None
    assert again.store.patches == []
    node.look()
    node.keeper.want(request())
    node.keeper.step()
    assert len(node.store.patches) == written


@pytest.mark.parametrize(
    ("cidrs", "config", "words"),
    [
        (["10.6.1.0/24"], None, ["10.6.1.0/24", "10.5.0.0/16"]),
        (["10.5.1.0/24", "fd99::/64"], DUAL, ["fd99::/64", "fd05::/48"]),
    ],
)
def test_C07_nothing_is_published_of_a_pod_cidr_outside(cidrs: list[str], config: object, words: list[str]) -> None:
    node = Node(*cidrs)
    node.keeper.want(request(config=config) if config else request())
    node.look()
    assert node.store.patches == []
    assert node.own().lease is None
    assert all(word in node.own().problem for word in words)


def test_K01_pod_cidr_is_waited_for_with_one_line_each_30_s(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    node.api.node("n1")
    node.keeper.want(request())
    with caplog.at_level(logging.INFO):
        for _ in range(95):
            node.look()
            node.clock.pass_s(1)
    assert len([r for r in caplog.records if "spec.podCIDRs" in r.getMessage()]) == 4
    assert len(node.all_own()) == 1
    node.api.change("n1", cidrs=["10.5.1.0/24"])
    node.look()
    assert node.own().lease is not None


def test_node_that_comes_late() -> None:
    node = Node()
    node.keeper.want(request())
    assert node.look() == 30
    assert "n1 does not exist" in node.own().problem
    node.api.node("n1", ["10.5.1.0/24"])
    node.look()
    assert node.own().lease is not None


def test_S09_K14_overwrites_are_followed_and_left_alone(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    ready(node)
    key = PREFIX + "public-ip-overwrite"
    with caplog.at_level(logging.INFO):
        for overwrite, published in (
            ("203.0.113.5", "203.0.113.5"),
            ("203.0.113.6", "203.0.113.6"),
            (None, "192.0.2.1"),
        ):
            node.clock.pass_s(1)
            node.api.change("n1", {key: overwrite})
            node.look()
            assert node.told()["public-ip"] == published
            assert node.told().get("public-ip-overwrite") == overwrite
    assert "public-ip-overwrite: 203.0.113.5 is published instead of 192.0.2.1" in caplog.text
    assert node.own().lease is not None
    assert node.own().lease.attrs.public_ip == IPv4Address("192.0.2.1")  # type: ignore[union-attr]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_S09_overwrite_set_beforehand_outlasts_restarts(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    key = PREFIX + "public-ip-overwrite"
    node.api.change("n1", {key: "203.0.113.5", PREFIX + "public-ip": "192.0.2.1"})
    for _ in range(2):
        again = Node()
        again.api.nodes = node.api.nodes
        caplog.clear()
        with caplog.at_level(logging.INFO):
            ready(again)
        assert (again.told()["public-ip"], again.told()["public-ip-overwrite"]) == ("203.0.113.5", "203.0.113.5")
        assert not [patch for patch in again.store.patches if key in json.dumps(patch)]
        assert "public-ip-overwrite: 203.0.113.5 is published instead of 192.0.2.1" in caplog.text


def test_overwrites_that_are_no_address_are_named_and_ignored(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.api.change("n1", {PREFIX + "public-ip-overwrite": "gateway"})
    ready(node)
    assert node.told()["public-ip"] == "192.0.2.1"
    assert "public-ip-overwrite" in caplog.text
    assert "gateway" in caplog.text


def test_lost_annotations_are_restored_but_not_in_a_tight_loop(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    ready(node)
    before = len(node.store.patches)
    for _ in range(1000):
        if node.told().get("public-ip") == "192.0.2.1":
            node.api.change("n1", {PREFIX + "public-ip": None, PREFIX + "backend-data": "{}"})
        node.look()
        node.clock.pass_s(0.05)
    assert 5 <= len(node.store.patches) - before <= 20
    node.clock.pass_s(10)
    node.look()
    assert node.told()["public-ip"] == "192.0.2.1"
    assert MAC in node.told()["backend-data"]
    assert "somebody changed or removed backend-data, public-ip" in caplog.text


def test_annotations_of_a_family_that_was_left_are_removed() -> None:
    node = Node("10.5.1.0/24", "fd05:0:0:1::/64")
    node.keeper.want(request(config=DUAL))
    node.look()
    assert node.told()["public-ipv6"] == "2001:db8::1"
    node.clock.pass_s(100)
    node.keeper.want(request())
    node.look()
    assert set(node.told()) == {"kube-subnet-manager", "backend-type", "backend-data", "public-ip"}


def test_new_attributes_are_published(node: Node) -> None:
    ready(node)
    node.clock.pass_s(100)
    node.keeper.want(request(mac="02:00:00:00:09:09"))
    node.look()
    assert "02:00:00:00:09:09" in node.told()["backend-data"]


def test_node_deleted_and_made_again_with_another_pod_cidr(node: Node) -> None:
    ready(node)
    node.api.delete("n1")
    node.look()
    assert node.own().lease is None
    node.clock.pass_s(5)
    node.api.node("n1", ["10.5.9.0/24"])
    node.look()
    assert node.own().lease is not None
    assert node.own().lease.subnets == Subnets(IPv4Network("10.5.9.0/24"))  # type: ignore[union-attr]
    assert node.told()["public-ip"] == "192.0.2.1"
    node.keeper.step()
    assert (node.api.condition("n1") or {}).get("status") == "False"


def test_condition_is_set_once_when_ready(node: Node) -> None:
    node.keeper.want(request())
    node.look()
    assert node.api.condition("n1") is None
    for _ in range(3):
        node.keeper.ready()
        node.look()
    assert node.api.condition("n1") == {
        "type": "NetworkUnavailable",
        "status": "False",
        "lastHeartbeatTime": NOW,
        "lastTransitionTime": NOW,
        "reason": "FlannelIsUp",
        "message": "Flannel is running on this node",
    }
    assert len(node.store.patches) == 2


def test_condition_of_others_is_left_alone_later_on(node: Node) -> None:
    ready(node)
    node.api.patch("n1", {"status": {"conditions": [{"type": "NetworkUnavailable", "status": "True"}]}})
    node.clock.pass_s(1000)
    node.look()
    assert (node.api.condition("n1") or {})["status"] == "True"


def test_condition_that_is_gone_comes_back(node: Node) -> None:
    ready(node)
    node.clock.pass_s(100)
    gone = json.loads(json.dumps(node.api.nodes["n1"]))
    gone["status"]["conditions"] = []
    node.api._update(gone)
    node.look()
    assert (node.api.condition("n1") or {})["status"] == "False"


def test_condition_may_be_switched_off() -> None:
    node = Node("10.5.1.0/24", set_network_condition=False)
    ready(node)
    assert node.api.condition("n1") is None


def test_failing_condition_is_tried_until_it_is_set(node: Node) -> None:
    ready_without = request()
    node.keeper.want(ready_without)
    node.look()
    node.keeper.ready()
    node.store.errors = [Conflict("409"), Unavailable("500"), Unavailable("504")]
    delay_s = node.keeper.step()
    for _ in range(3):
        assert delay_s is not None
        node.clock.pass_s(delay_s)
        delay_s = node.keeper.step()
    assert node.api.condition("n1") is not None
    assert delay_s is None
    assert [own.lease is not None for own in node.all_own()] == [True]


def test_K11_refused_patch_is_named_and_tried_each_30_s(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.store.errors = [AccessDenied("patch nodes/status n1 is forbidden to flannel")] * 2
    node.keeper.want(request())
    asked = 0
    for _ in range(59):
        left = len(node.store.errors)
        node.look()
        asked += left - len(node.store.errors)
        node.clock.pass_s(1)
    assert asked == 2
    assert "patch nodes/status n1 is forbidden to flannel" in caplog.text
    assert "forbidden" in node.own().problem
    node.clock.pass_s(2)
    node.look()
    assert node.own().lease is not None


def test_server_that_wants_to_be_left_alone(node: Node) -> None:
    node.store.errors = [Busy("429", 7.0)]
    node.keeper.want(request())
    assert node.look() == 7.0
    node.clock.pass_s(6)
    node.look()
    assert node.store.patches == []
    node.clock.pass_s(1)
    node.look()
    assert node.own().lease is not None


def test_older_versions_of_the_node_change_nothing(node: Node) -> None:
    old = decode(json.dumps(node.api.nodes["n1"]).encode(), OwnNode)
    ready(node)
    written = len(node.store.patches)
    node.keeper.saw(old)
    node.keeper.step()
    assert len(node.store.patches) == written


def test_S08_what_operators_want_is_told_before_the_lease(node: Node) -> None:
    node.api.change("n1", {PREFIX + "node-public-ip": "198.51.100.1"})
    node.look()
    assert node.posted == [ThisNode(public_ip=IPv4Address("198.51.100.1"))]
    node.api.change("n1", {PREFIX + "node-public-ip": None})
    node.look()
    assert node.posted[1:] == [ThisNode()]


def test_K05_the_mac_that_peers_know_is_told(node: Node) -> None:
    ready(node)
    again = Node()
    again.api.nodes = node.api.nodes
    again.look()
    told = next(event for event in again.posted if isinstance(event, ThisNode)).told
    assert told is not None
    assert told.backend_data == {"VNI": 1, "VtepMAC": MAC}


def test_K05_broken_backend_data_is_named_and_replaced(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.api.change("n1", {PREFIX + "kube-subnet-manager": "true", PREFIX + "backend-data": '{"VNI":1,'})
    ready(node)
    assert "backend-data" in caplog.text
    assert json.loads(node.told()["backend-data"]) == {"VNI": 1, "VtepMAC": MAC}
