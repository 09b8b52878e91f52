"""Every backend that the machine's own kernel carries, on two segments joined by a router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_interface
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab import state as lab_state
from flanneld.ctl.lab.hosts import Host
from tests.support.site import settle

pytestmark = pytest.mark.system

V4: dict[str, Any] = {"Network": "10.5.0.0/16"}
V6: dict[str, Any] = {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": "fd05::/48"}
DUAL: dict[str, Any] = V4 | {"EnableIPv6": True, "IPv6Network": "fd05::/48"}
VXLAN, DIRECT, HOST_GW = {"Type": "vxlan"}, {"Type": "vxlan", "DirectRouting": True}, {"Type": "host-gw"}

CONFIGS: dict[str, dict[str, Any]] = {
    "vxlan-v4": V4 | {"Backend": VXLAN},
    "vxlan-dual": DUAL | {"Backend": VXLAN},
    "vxlan-v6": V6 | {"Backend": VXLAN},
    "direct-v4": V4 | {"Backend": DIRECT},
    "direct-dual": DUAL | {"Backend": DIRECT},
    "host-gw-v4": V4 | {"Backend": HOST_GW},
    "host-gw-dual": DUAL | {"Backend": HOST_GW},
    "host-gw-v6": V6 | {"Backend": HOST_GW},
}


def _family(config: Mapping[str, Any]) -> Any:
    return "dual" if "Network" in config and "EnableIPv6" in config else "v4" if "Network" in config else "v6"


class Segments:
    """h1 and h2 on the switch, h3 behind it on a segment of its own; the switch routes between them."""

    def __init__(self, lab: Lab, config: Mapping[str, Any]) -> None:
        self.lab, self.config = lab, config
        self.first, self.second, self.far = lab.hosts

    def build(self) -> None:
        self._router()
        self.lab.start()

    def _router(self) -> None:
        switch, far = self.lab.switch, self.far
        switch.ip("link add br1 address 02:00:00:00:01:fe type bridge", "link set br1 up")
        switch.ip("addr add 198.51.100.254/24 dev br1", "addr add 2001:db8:2::fe/64 dev br1 nodad")
        for key in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            switch.sysctl(f"net/{key}", "1")
        switch.ip("link set h3-eth0 master br1")
        far.namespace.ip("addr flush dev eth0 scope global")
        if far.v4:
            far.v4 = ip_interface("198.51.100.3/24")  # type: ignore[assignment]
            far.namespace.ip(f"addr add {far.v4} dev eth0", "route replace default via 198.51.100.254")
        if far.v6:
            far.v6 = ip_interface("2001:db8:2::3/64")  # type: ignore[assignment]
            far.namespace.ip(f"addr add {far.v6} dev eth0 nodad", "route replace default via 2001:db8:2::fe")

    @property
    def reachable(self) -> list[tuple[Host, Host]]:
        """Return the pairs that the backend can join: host-gw does not cross a router."""
        if self.config["Backend"] == HOST_GW:
            return [(self.first, self.second), (self.second, self.first)]
        return list(self.lab.pairs())

    def silent(self) -> list[str]:
        """Return the pairs and families of which full-size packets are not answered, both ways."""
        wrong = []
        for source, target in self.reachable:
            for address in target.pod.addresses:
                family = address.version
                answers, _ = source.pod.ping(target.pod, family, count=1)
                if answers != 1:
                    wrong.append(f"{source} to {target} IPv{family}")
        return wrong

    def lacking(self, host: Host) -> list[str]:
        """Return what the host's kernel lacks to reach the others."""
        peers = [other for source, other in self.reachable if source is host]
        leases = lab_state.peer_leases(self.lab.etcd.leases())
        wanted = [
            lease for lease in leases if any(lease.public_ip in {str(a.ip) for a in peer.addresses} for peer in peers)
        ]
        own = frozenset(g.network for g in host.gateways())
        return lab_state.missing(lab_state.observe(host), own, wanted)


@pytest.fixture(scope="module", params=list(CONFIGS.values()), ids=list(CONFIGS))
def segments(request: pytest.FixtureRequest) -> Iterator[Segments]:
    config = request.param
    with Lab(3, config=config, family=_family(config), start=False) as lab:
        segments = Segments(lab, config)
        segments.build()
        yield segments


def test_containers_reach_each_other_with_full_packets(segments: Segments) -> None:
    settle("answers", segments.silent, 20)
    for host in segments.lab.hosts:
        assert segments.lacking(host) == []


def _routes(host: Host, family: int) -> dict[str, str]:
    found = {}
    for route in host.namespace.routes(family):
        destination = str(route.get("dst", ""))
        if destination.startswith(("10.5.", "fd05:")) and route.get("dev") != "cni0" and "gateway" in route:
            found[destination] = f"via {route['gateway']} dev {route['dev']}"
    return found


def test_the_way_of_each_packet_is_that_of_the_backend(segments: Segments) -> None:
    backend = segments.config["Backend"]
    for family in {a.version for a in segments.first.addresses}:
        tunnel = "flannel.1" if family == 4 else "flannel-v6.1"
        near, far = (_gateway(peer, family) for peer in (segments.second, segments.far))
        public = str(next(a.ip for a in segments.second.addresses if a.version == family))
        routes = _routes(segments.first, family)
        if backend == VXLAN:
            assert routes == {near: f"via {_base(near)} dev {tunnel}", far: f"via {_base(far)} dev {tunnel}"}
        elif backend == DIRECT:
            assert routes == {near: f"via {public} dev eth0", far: f"via {_base(far)} dev {tunnel}"}
        else:
            assert routes == {near: f"via {public} dev eth0"}


def test_I01_a_family_that_is_off_is_not_named(segments: Segments) -> None:
    families = {address.version for address in segments.first.addresses}
    env = segments.first.subnet_env()
    assert ("FLANNEL_SUBNET" in env, "FLANNEL_IPV6_SUBNET" in env) == (4 in families, 6 in families)
    assert ("FLANNEL_NETWORK" in env, "FLANNEL_IPV6_NETWORK" in env) == (4 in families, 6 in families)


def test_H04_a_peer_behind_a_router_is_named_and_holds_up_nobody(segments: Segments) -> None:
    if segments.config["Backend"] != HOST_GW:
        pytest.skip("only host-gw needs a shared segment")
    log = segments.first.daemon.log()
    for address in segments.far.addresses:
        assert f"via {address.ip} dev eth0" in log
    assert segments.first.daemon.notify.status is not None
    assert "with problems" in segments.first.daemon.notify.status


def _gateway(host: Host, family: int) -> str:
    return str(next(g.network for g in host.gateways() if g.version == family))


def _base(subnet: str) -> str:
    return subnet.partition("/")[0]


Damage = Callable[[Segments], object]


def _each_tunnel(segments: Segments, command: str) -> None:
    for device in ("flannel.1", "flannel-v6.1"):
        if segments.first.namespace.link(device) is not None:
            segments.first.run(*command.format(device=device).split())


def _flush_routes(segments: Segments) -> None:
    for family in (4, 6):
        for destination in _routes(segments.first, family):
            segments.first.run("ip", f"-{family}", "route", "del", destination)


def _conflicting_routes(segments: Segments) -> None:
    for address in segments.second.addresses:
        family = address.version
        elsewhere = "192.0.2.254" if family == 4 else "2001:db8:1::fe"
        gateway = _gateway(segments.second, family)
        segments.first.run("ip", f"-{family}", "route", "replace", gateway, "via", elsewhere, "dev", "eth0")


def _bounce_underlay(segments: Segments) -> None:
    host = segments.first
    host.run("ip", "link", "set", "eth0", "down")
    host.run("ip", "link", "set", "eth0", "up")
    for address in host.addresses:
        gateway = "192.0.2.254" if address.version == 4 else "2001:db8:1::fe"
        host.run("ip", "addr", "replace", str(address), "dev", "eth0", *(["nodad"] if address.version == 6 else []))
        host.run("ip", f"-{address.version}", "route", "replace", "default", "via", gateway)


DAMAGE: dict[str, Damage] = {
    "device deleted": lambda s: _each_tunnel(s, "ip link del {device}"),
    "device down": lambda s: _each_tunnel(s, "ip link set {device} down"),
    "addresses flushed": lambda s: _each_tunnel(s, "ip addr flush dev {device} scope global"),
    "neighbours flushed": lambda s: _each_tunnel(s, "ip neigh flush dev {device} nud permanent"),
    "routes deleted": _flush_routes,
    "conflicting routes": _conflicting_routes,
    "V08-H06-underlay down and up": _bounce_underlay,
}


@pytest.mark.parametrize("damage", list(DAMAGE.values()), ids=list(DAMAGE))
def test_damage_is_repaired(segments: Segments, damage: Damage) -> None:
    settle("answers before", segments.silent, 20)
    damage(segments)
    settle("entries", lambda: segments.lacking(segments.first), 1.0)
    settle("answers", segments.silent, 5)
    assert segments.first.daemon.exit_code is None
