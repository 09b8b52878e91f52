"""Backend ``ipip``: packets in packets, without any header between (RFC 2003, RFC 2473)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import IPv6Address, ip_interface

from backends.api import OnLink, Setting
from backends.dataplane.model import (
    PROTO_FLANNEL,
    Address,
    DesiredState,
    Encap,
    Ip6Tunnel,
    Ipip,
    Link,
    LinkSpec,
    Route,
)
from subnet.errors import ConfigError
from subnet.model import Family, Lease, LeaseAttrs, Subnets
from subnet.options import OptionReader

TYPE = "ipip"
DEVICE: Mapping[Family, str] = {4: "flannel.ipip", 6: "flannel-v6.ipip"}
OVERHEAD_BYTES: Mapping[Family, int] = {4: 20, 6: 40}
"""The outer header."""
MINIMUM_BYTES: Mapping[Family, int] = {4: 68, 6: 1280}
"""The least MTU that the kernel lets IPv4 and IPv6 work with (RFC 791, RFC 8200 s5)."""


class IpipBackend:
    """One tunnel device per family, one route per peer. Source: upstream pkg/backend/ipip/ipip.go.

    Upstream carries IPv4 only. IPv6 travels in IPv6 between nodes that announce
    a public IPv6 address, which upstream's never do with this backend.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._families = setting, setting.config.families
        self._direct_routing = OptionReader(setting.config.backend).boolean("DirectRouting", False)
        interface = setting.interface
        for family in self._families:
            if interface.local(family) is None:
                raise ConfigError(f"{interface.name} has no IPv{family} address, which the config enables")
            if self._device_mtu_bytes(family) < MINIMUM_BYTES[family]:
                raise ConfigError(f"MTU {interface.mtu_bytes} of {interface.name} is too small for IPv{family} tunnels")

    def _device_mtu_bytes(self, family: Family) -> int:
        return self._setting.interface.mtu_bytes - OVERHEAD_BYTES[family]

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """``flannel.ipip`` from the interface's own address to anywhere, and ``flannel-v6.ipip``.

        A device without local address would lose its packets to ``tunl0``, the
        kernel's fallback for everything that no other device claims.
        """
        tunnel: Mapping[Family, Ipip | Ip6Tunnel] = {4: Ipip(self._setting.interface.v4), 6: Ip6Tunnel()}
        return tuple(
            LinkSpec(DEVICE[family], family, tunnel[family], self._device_mtu_bytes(family))
            for family in self._families
        )

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """These devices have no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The announced addresses."""
        return self._setting.interface.attrs(self._families, TYPE)

    def mtu_bytes(self) -> int:
        """The smallest of the devices' MTUs."""
        return min(self._device_mtu_bytes(family) for family in self._families)

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Per peer and family a route into the tunnel, or through the peer itself if it is direct."""
        addresses: set[Address] = set()
        routes: set[Route] = set()
        problems: list[tuple[str, str]] = []
        for family in self._families:
            subnet = own.of(family)
            if subnet is not None:
                addresses.add(Address(DEVICE[family], ip_interface((subnet.network_address, subnet.max_prefixlen))))
        for lease in peers:
            if lease.attrs.backend_type != TYPE:
                continue
            for family in self._families:
                route = self._route(lease, family, on_link)
                if route is not None:
                    routes.add(route)
                elif family == 4 and lease.subnets.v4 is not None:
                    problems.append((lease.key, f"lease {lease.key}: no public IPv4 address"))
        return DesiredState(
            frozenset(DEVICE[family] for family in self._families),
            self._setting.interface.name,
            self._setting.networks,
            frozenset(addresses),
            routes=frozenset(routes),
            problems=tuple(problems),
        )

    def _route(self, lease: Lease, family: Family, on_link: OnLink) -> Route | None:
        """Return the route to a peer, None if it cannot be reached in this family.

        Tunnelled IPv4 names the peer as gateway. IPv6 cannot: the kernel refuses
        an on-link gateway that another device's network holds, so the outer
        header is the route's own.
        """
        subnet, remote = lease.subnets.of(family), lease.attrs.public(family)
        interface = self._setting.interface
        if subnet is None or remote is None:
            return None
        if self._direct_routing and on_link(remote):
            return Route(subnet, interface.name, remote, onlink=True, protocol=PROTO_FLANNEL)
        if isinstance(remote, IPv6Address):
            return Route(subnet, DEVICE[6], encap=Encap(interface.v6 or IPv6Address(0), remote))
        return Route(subnet, DEVICE[4], remote, onlink=True)


BACKEND = IpipBackend
