"""Backend ``host-gw``: a route per peer through its address on the shared segment."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backends.api import OnLink, Setting
from backends.dataplane.model import PROTO_FLANNEL, DesiredState, Link, LinkSpec, Route
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs, Subnets

TYPE = "host-gw"


class HostGatewayBackend:
    """Plain routes. Source: upstream pkg/backend/hostgw/hostgw.go, route_network.go."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        interface = setting.interface
        for family in setting.config.families:
            if interface.public(family) != interface.local(family):
                raise ConfigError(
                    f"Backend.Type {TYPE!r}: the announced address {interface.public(family)} is not the address "
                    f"{interface.local(family)} of {interface.name}; peers could not use it as a gateway"
                )

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """No device, no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The addresses that peers route through."""
        return self._setting.interface.attrs(self._setting.config.families, TYPE)

    def mtu_bytes(self) -> int:
        """The external interface's MTU."""
        return self._setting.interface.mtu_bytes

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """One route per peer and family, marked with our protocol number.

        The device belongs to the host, so the mark is what tells our routes
        from the operator's.
        """
        interface = self._setting.interface
        routes: set[Route] = set()
        problems: list[tuple[str, str]] = []
        for lease in peers:
            if lease.attrs.backend_type != TYPE:
                continue
            for family in self._setting.config.families:
                subnet, gateway = lease.subnets.of(family), lease.attrs.public(family)
                if subnet is None:
                    continue
                if gateway is None:
                    problems.append((lease.key, f"lease {lease.key}: no public IPv{family} address"))
                    continue
                routes.add(Route(subnet, interface.name, gateway, protocol=PROTO_FLANNEL))
        return DesiredState(
            frozenset(),
            interface.name,
            self._setting.networks,
            routes=frozenset(routes),
            problems=tuple(problems),
        )


BACKEND = HostGatewayBackend
