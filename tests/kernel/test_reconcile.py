from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from backends.dataplane.model import Address, DesiredState, FdbEntry, LinkSpec, Neighbour, Route, Vxlan
from backends.dataplane.ports import KernelEvent, LinkSeen
from backends.dataplane.reconcile import Reconciler
from backends.dataplane.table import WantedTable
from backends.kernel.monitor import Monitor
from backends.kernel.netlink import NetlinkKernel
from subnet.clock import SystemClock
from subnet.report import Reporter
from tests.support.netns import Namespace

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

DEVICE = "flannel.1"
WAIT_S = 5


class Site:
    """A namespace with a tunnel device, a reconciler and a monitor on it."""

    def __init__(self, namespace: Namespace) -> None:
        self.ip = namespace.ip
        self.run = namespace.run
        self.kernel = NetlinkKernel()
        self.events: queue.SimpleQueue[KernelEvent] = queue.SimpleQueue()
        self.monitor = Monitor(self.deliver, self.kernel.port_ids)
        lower = self.kernel.links()["eth0"].index
        vxlan = Vxlan(1, 0, ip_address("192.0.2.1"), lower)
        self.kernel.create_link(LinkSpec(DEVICE, 4, vxlan, 1450, "02:00:00:00:00:01"))
        self.kernel.set_link(DEVICE, up=True)
        self.reconciler = Reconciler(self.kernel, Reporter(logging.getLogger("test"), SystemClock()))
        links = self.kernel.links()
        self.reconciler.know_devices({links[DEVICE].index: DEVICE, lower: "eth0"})
        self.monitor.start()

    def deliver(self, events: object) -> None:
        for event in events:  # type: ignore[attr-defined]
            self.events.put(event)

    def close(self) -> None:
        self.monitor.close()
        self.kernel.close()

    def doubts(self, timeout_s: float = WAIT_S) -> bool:
        """Whether a notification contradicts the record within the time."""
        try:
            while True:
                if self.reconciler.contradicted(self.events.get(timeout=timeout_s)):
                    return True
        except queue.Empty:
            return False


@pytest.fixture
def site(namespace: Namespace) -> Iterator[Site]:
    namespace.ip("link add eth0 type veth peer name far0")
    namespace.ip("addr add 192.0.2.1/24 dev eth0")
    namespace.ip("link set eth0 up")
    namespace.ip("link set far0 up")
    with namespace.inside():
        site = Site(namespace)
        yield site
        site.close()


def _desired(*numbers: int) -> WantedTable:
    return WantedTable(_state(*numbers))


def _state(*numbers: int) -> DesiredState:
    return DesiredState(
        frozenset({DEVICE}),
        "eth0",
        frozenset({ip_network("10.5.0.0/16")}),
        frozenset({Address(DEVICE, ip_interface("10.5.1.0/32"))}),
        frozenset(Neighbour(DEVICE, ip_address(f"10.5.{n}.0"), f"02:00:00:00:00:{n:02x}") for n in numbers),
        frozenset(FdbEntry(DEVICE, f"02:00:00:00:00:{n:02x}", ip_address(f"192.0.2.{n}")) for n in numbers),
        frozenset(Route(ip_network(f"10.5.{n}.0/24"), DEVICE, ip_address(f"10.5.{n}.0"), onlink=True) for n in numbers),
    )


def test_convergence_is_idempotent(site: Site) -> None:
    first = site.reconciler.converge(_desired(2, 3))
    assert (first.changed, first.problems, first.refused) == (7, {}, False)
    assert site.reconciler.converge(_desired(2, 3)).changed == 0
    site.reconciler.doubt()
    assert site.reconciler.converge(_desired(2, 3)).changed == 0


def test_our_own_changes_do_not_wake_us_up(site: Site) -> None:
    site.reconciler.converge(_desired(2, 3))
    site.ip("link set far0 alias done")
    while True:  # the marker comes after everything that our changes caused
        event = site.events.get(timeout=WAIT_S)
        assert not site.reconciler.contradicted(event)
        if isinstance(event, LinkSeen) and event.name == "far0":
            break


DAMAGE: dict[str, Callable[[Site], object]] = {
    "neighbour": lambda site: site.ip(f"neigh del 10.5.2.0 dev {DEVICE}"),
    "neighbour with another MAC": lambda site: site.ip(
        f"neigh replace 10.5.2.0 lladdr 02:bb:00:00:00:01 dev {DEVICE} nud permanent"
    ),
    "neighbour no longer permanent": lambda site: site.ip(
        f"neigh change 10.5.2.0 lladdr 02:00:00:00:00:02 dev {DEVICE} nud stale"
    ),
    "fdb": lambda site: site.run(
        "bridge", "fdb", "del", "02:00:00:00:00:02", "dev", DEVICE, "dst", "192.0.2.2", "self"
    ),
    "fdb elsewhere": lambda site: site.run(
        "bridge", "fdb", "replace", "02:00:00:00:00:02", "dev", DEVICE, "dst", "192.0.2.9", "self", "permanent"
    ),
    "stray fdb": lambda site: site.run(
        "bridge", "fdb", "add", "02:ff:00:00:00:02", "dev", DEVICE, "dst", "192.0.2.9", "self", "permanent"
    ),
    "route": lambda site: site.ip("route del 10.5.2.0/24"),
    "route elsewhere": lambda site: site.ip("route replace 10.5.2.0/24 via 192.0.2.254 dev eth0"),
    "stray route": lambda site: site.ip(f"route add 10.5.99.0/24 dev {DEVICE}"),
    "address": lambda site: site.ip(f"addr del 10.5.1.0/32 dev {DEVICE}"),
    "stray address": lambda site: site.ip(f"addr add 10.5.98.0/32 dev {DEVICE}"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_noticed_and_repaired(site: Site, damage: Callable[[Site], object]) -> None:
    desired = _desired(2, 3)
    site.reconciler.converge(desired)
    damage(site)
    assert site.doubts()
    site.reconciler.doubt()
    outcome = site.reconciler.converge(desired)
    assert outcome.changed > 0
    site.reconciler.doubt()
    assert site.reconciler.converge(desired).changed == 0
    assert "10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink" in site.ip("route show")


def test_lost_nexthop_objects_are_noticed_and_made_anew(namespace: Namespace, site: Site) -> None:
    kernel = NetlinkKernel(nexthop_objects="always")
    reconciler = Reconciler(kernel, Reporter(logging.getLogger("test"), SystemClock()))
    links = kernel.links()
    reconciler.know_devices({links[DEVICE].index: DEVICE, links["eth0"].index: "eth0"})
    monitor = Monitor(site.deliver, kernel.port_ids)
    monitor.start()
    desired = _desired(2, 3)
    try:
        reconciler.converge(desired)
        objects = namespace.ip_json("nexthop show")
        if not objects:
            pytest.skip("the kernel has no nexthop objects")
        site.ip(f"nexthop del id {objects[0]['id']}")
        while not reconciler.contradicted(site.events.get(timeout=WAIT_S)):
            pass
        reconciler.doubt()
        assert reconciler.converge(desired).changed == 1
        assert len(namespace.ip_json("nexthop show")) == 2
    finally:
        monitor.close()
        kernel.close()


def test_what_others_do_elsewhere_is_no_doubt(site: Site) -> None:
    site.reconciler.converge(_desired(2))
    site.ip("route add 172.16.0.0/16 via 192.0.2.254 dev eth0")
    site.ip("neigh replace 192.0.2.77 lladdr 02:00:00:00:00:77 dev far0 nud permanent")
    site.ip("link set far0 alias done")
    while True:
        event = site.events.get(timeout=WAIT_S)
        assert not site.reconciler.contradicted(event)
        if isinstance(event, LinkSeen) and event.name == "far0":
            break


def test_V10_overlap_with_a_local_bridge_is_named_and_the_others_are_programmed(site: Site) -> None:
    site.ip("link add docker0 type bridge")
    site.ip("link set docker0 up")
    site.ip("addr add 10.5.2.1/24 dev docker0")
    outcome = site.reconciler.converge(_desired(2, 3))
    assert outcome.refused
    (text,) = outcome.problems.values()
    assert "10.5.2.0/24" in text
    assert "docker0" in text
    assert "10.5.3.0/24 via 10.5.3.0 dev flannel.1 onlink" in site.ip("route show")
    site.ip("link del docker0")
    site.reconciler.doubt()
    assert not site.reconciler.converge(_desired(2, 3)).refused
    assert "10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink" in site.ip("route show")


def test_V10_wider_bridge_network_that_makes_a_gateway_invalid_is_named(site: Site) -> None:
    site.ip("link add docker0 type bridge")
    site.ip("link set docker0 up")
    site.ip("addr add 10.5.2.0/31 dev docker0")
    outcome = site.reconciler.converge(_desired(2, 3))
    assert outcome.refused
    assert any("docker0" in text for text in outcome.problems.values())
    assert "10.5.3.0/24 via 10.5.3.0 dev flannel.1 onlink" in site.ip("route show")
