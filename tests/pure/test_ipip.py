from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface, ip_network
from typing import Any

import pytest

from backends import load_backend
from backends.api import ExternalInterface, Setting
from backends.dataplane.model import Address, Encap, Ip6Tunnel, Ipip, LinkSpec, Route
from backends.ipip import IpipBackend
from flanneld.liveconfig import restart_reason
from subnet.config import parse_network_config
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs, Subnets

pytestmark = pytest.mark.pure

V4, V6 = IPv4Address("192.0.2.1"), IPv6Address("2001:db8:1::1")
INTERFACE = ExternalInterface(
    "eth0",
    2,
    1500,
    V4,
    V6,
    IPv4Address("198.51.100.1"),
    IPv6Address("2001:db8:9::1"),
)
OWN = Subnets(ip_network("10.5.1.0/24"), ip_network("fd05:0:0:1::/64"))  # type: ignore[arg-type]
DUAL = '{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48","Backend":{"Type":"ipip"%s}}'
SINGLE = '{"Network":"10.5.0.0/16","Backend":{"Type":"ipip"%s}}'


def backend(text: str = SINGLE, options: str = "", interface: ExternalInterface = INTERFACE) -> IpipBackend:
    config = parse_network_config(text % options, "/k")
    networks = frozenset(pool.network for pool in (config.ipv4, config.ipv6) if pool)
    made = load_backend(Setting(config, interface, networks))
    assert isinstance(made, IpipBackend)
    return made


def peer(n: int, kind: str = "ipip", **attrs: Any) -> Lease:
    values = {"public_ip": ip_address(f"192.0.2.{n}"), "backend_type": kind, **attrs}
    v6 = ip_network(f"fd05:0:0:{n}::/64") if "public_ipv6" in attrs else None
    return Lease(Subnets(ip_network(f"10.5.{n}.0/24"), v6), LeaseAttrs(**values), f"/n/10.5.{n}.0-24")  # type: ignore[arg-type]


def never(_: object) -> bool:
    return False


def test_W08_device_is_bound_to_the_interface_address_and_20_bytes_smaller() -> None:
    assert backend().links({"flannel.ipip": "02:00:00:00:00:01"}, True) == (
        LinkSpec("flannel.ipip", 4, Ipip(V4), 1480),
    )
    assert backend().mtu_bytes() == 1480
    assert backend(interface=replace(INTERFACE, mtu_bytes=9000)).mtu_bytes() == 8980


def test_lease_is_upstreams() -> None:
    assert backend().attrs({}) == LeaseAttrs(IPv4Address("198.51.100.1"), None, "ipip")


def test_peer_is_the_gateway_inside_the_tunnel() -> None:
    state = backend().desired(OWN, [peer(2), peer(3, "vxlan"), peer(4)], never)
    assert state.addresses == {Address("flannel.ipip", ip_interface("10.5.1.0/32"))}
    assert state.routes == {
        Route(ip_network(f"10.5.{n}.0/24"), "flannel.ipip", ip_address(f"192.0.2.{n}"), onlink=True) for n in (2, 4)
    }
    assert (state.neighbours, state.fdb, state.problems) == (frozenset(), frozenset(), ())
    assert state.devices == {"flannel.ipip"}


def test_peer_without_address_is_named() -> None:
    state = backend().desired(OWN, [peer(2, public_ip=None), peer(3)], never)
    assert len(state.routes) == 1
    assert state.problems == (("/n/10.5.2.0-24", "lease /n/10.5.2.0-24: no public IPv4 address"),)


def test_direct_peers_are_reached_through_the_interface_only_if_asked_for() -> None:
    near = ip_address("192.0.2.2")
    routes = backend(options=',"DirectRouting":true').desired(OWN, [peer(2), peer(3)], lambda a: a == near).routes
    assert routes == {
        Route(ip_network("10.5.2.0/24"), "eth0", near, onlink=True, protocol=142),
        Route(ip_network("10.5.3.0/24"), "flannel.ipip", ip_address("192.0.2.3"), onlink=True),
    }
    assert {r.device for r in backend().desired(OWN, [peer(2)], lambda _: True).routes} == {"flannel.ipip"}


def test_ipv6_travels_in_ipv6_to_peers_that_announce_such_an_address() -> None:
    dual = backend(DUAL)
    assert dual.links({}, False) == (
        LinkSpec("flannel.ipip", 4, Ipip(V4), 1480),
        LinkSpec("flannel-v6.ipip", 6, Ip6Tunnel(), 1460),
    )
    assert dual.mtu_bytes() == 1460
    assert dual.attrs({}).public_ipv6 == IPv6Address("2001:db8:9::1")
    remote = IPv6Address("2001:db8:1::2")
    state = dual.desired(OWN, [peer(2, public_ipv6=remote), peer(3)], never)
    assert {r for r in state.routes if r.family == 6} == {
        Route(ip_network("fd05:0:0:2::/64"), "flannel-v6.ipip", encap=Encap(V6, remote))
    }
    assert len(state.routes) == 3
    assert Address("flannel-v6.ipip", ip_interface("fd05:0:0:1::/128")) in state.addresses
    assert state.problems == ()


def test_upstream_node_in_a_dual_stack_cluster_is_an_ipv4_peer() -> None:
    odd = replace(peer(2), subnets=Subnets(ip_network("10.5.2.0/24"), ip_network("fd05:0:0:2::/64")))  # type: ignore[arg-type]
    state = backend(DUAL).desired(OWN, [odd], never)
    assert {r.family for r in state.routes} == {4}
    assert state.problems == ()


def test_direct_ipv6_peer_is_its_own_gateway() -> None:
    remote = IPv6Address("2001:db8:1::2")
    state = backend(DUAL, ',"directrouting":true').desired(OWN, [peer(2, public_ipv6=remote)], lambda _: True)
    assert Route(ip_network("fd05:0:0:2::/64"), "eth0", remote, onlink=True, protocol=142) in state.routes


@pytest.mark.parametrize(
    ("text", "interface", "says"),
    [
        (SINGLE % ',"DirectRouting":"yes"', INTERFACE, "DirectRouting"),
        (SINGLE % "", replace(INTERFACE, v4=None), "no IPv4 address"),
        (DUAL % "", replace(INTERFACE, v6=None), "no IPv6 address"),
        (SINGLE % "", replace(INTERFACE, mtu_bytes=87), "MTU 87 of eth0 is too small"),
        (DUAL % "", replace(INTERFACE, mtu_bytes=1319), "MTU 1319 of eth0 is too small for IPv6"),
    ],
)
def test_what_cannot_work_is_refused(text: str, interface: ExternalInterface, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        backend(text + "%s", interface=interface)


def test_direct_routing_can_be_switched_while_running() -> None:
    off, on = (parse_network_config(SINGLE % option, "/k") for option in ("", ',"DirectRouting":true'))
    assert restart_reason(off, on, OWN) == ""
