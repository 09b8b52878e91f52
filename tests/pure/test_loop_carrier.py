from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import ClassVar

import pytest

from backends.alloc import AllocBackend
from backends.api import Carrier
from backends.dataplane.model import Link
from backends.dataplane.ports import HookSeen, Kernel
from flanneld.inbox import Wake
from flanneld.traffic.vtep_rules import VtepFilter
from subnet.manager import LeasesChanged, LeasesListed, StoreState
from subnet.model import Lease, Subnets
from tests.support.owner import CONFIG, OWN, Node, config_seen, peer

pytestmark = pytest.mark.pure


class FakeCarrier(Carrier):
    """Answers what it is told to, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Subnets, set[str]]] = []
        self.missing, self.waiting = "PRE", "POST"
        self.trouble: dict[str, str] = {}
        self.ensured = self.closed = 0
        self.completes: list[bool] = []
        self.hooks: frozenset[int] = frozenset()

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        self.ensured += 1
        return {}

    def unprepared(self) -> str:
        return self.missing

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        self.heard.append((own, {str(p.subnets) for p in peers}))
        self.completes.append(complete)

    def unready(self) -> str:
        return self.waiting

    def problems(self) -> dict[str, str]:
        return self.trouble

    def hooked(self) -> frozenset[int]:
        return self.hooks

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
    node.play(StoreState(True), config_seen(CONFIG), LeasesListed((peer(2),), 5))
    assert node.manager.requests == []
    assert node.health.reason == "PRE"
    carrier.missing = ""
    node.play(Wake())
    assert len(node.manager.requests) == 1
    assert carrier.heard == []


def test_a_program_that_was_removed_from_a_device_is_put_back(tmp_path: Path, carrier: FakeCarrier) -> None:
    carrier.missing = carrier.waiting = ""
    carrier.hooks = frozenset({2, 7})
    node = Node(tmp_path).started(peer(2))
    before = carrier.ensured
    node.play(node.kernel_says(HookSeen(9)))
    assert carrier.ensured == before
    node.play(node.kernel_says(HookSeen(7)))
    assert carrier.ensured == before + 1


def test_programs_of_an_earlier_configuration_go_once_the_leases_are_known(
    tmp_path: Path, carrier: FakeCarrier
) -> None:
    carrier.missing = carrier.waiting = ""
    carrier.hooks = frozenset({7})
    node = Node(tmp_path)
    node.kernel.programs = [2, 7]
    cached = LeasesListed((peer(2),), 0, complete=False)
    node.play(StoreState(False, "down"), config_seen(CONFIG), cached, lambda: [node.own()], node.rules_ok)
    assert (node.kernel.programs, carrier.completes[-1]) == ([2, 7], False)
    node.play(StoreState(True), LeasesListed((peer(2),), 9))
    assert (node.kernel.programs, carrier.completes[-1]) == ([7], True)


def test_ready_and_subnet_env_wait_for_the_carrier(tmp_path: Path, carrier: FakeCarrier) -> None:
    carrier.missing = ""
    node = Node(tmp_path).started(peer(2), peer(3))
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
    node = Node(tmp_path).started(peer(2))
    outside = replace(peer(4), subnets=Subnets(ip_network("10.99.4.0/24")))  # type: ignore[arg-type]
    node.play(LeasesChanged((peer(3), outside), 6), 1.0, LeasesChanged((peer(2).subnets,), 7), 1.0)
    assert [peers for _, peers in carrier.heard] == [{"10.5.2.0/24"}, {"10.5.2.0/24", "10.5.3.0/24"}, {"10.5.3.0/24"}]


def test_troubles_of_the_carrier_are_counted_and_logged_once(
    tmp_path: Path, carrier: FakeCarrier, caplog: pytest.LogCaptureFixture
) -> None:
    carrier.missing = carrier.waiting = ""
    node = Node(tmp_path).started(peer(2))
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
    node.play(StoreState(True), config_seen(CONFIG), LeasesListed((), 5))
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
    node.started(peer(2), config=CONFIG.replace("vxlan", backend))
    assert node.filters[-1] == wanted
