"""Data paths ``user`` and ``auto``: packets pass through the daemon, between a TUN device and a UDP socket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Interface

from backends.api import Carrier, OnLink, Setting
from backends.dataplane.model import Address, DesiredState, Link, LinkSpec, Route
from backends.udp.carrier import CarrierSpec, UdpCarrier
from backends.udp.options import Common
from subnet.model import Lease, LeaseAttrs, Subnets


class UdpBackend:
    """Source: upstream pkg/backend/udp/udp_amd64.go, udp_network_amd64.go, proxy_amd64.c."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._common = setting, Common(setting)
        common = self._common
        self._spec = CarrierSpec(common.local, common.port, common.mtu_bytes, common.network)
        self._carrier: UdpCarrier | None = None

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device but the carrier's own."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """A TUN has no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """As with every data path: the announced address alone."""
        return self._common.attrs()

    def mtu_bytes(self) -> int:
        """The external interface's MTU less the outer headers."""
        return self._common.mtu_bytes

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        """Return the carrier; the earlier one goes on if nothing changed that it is made of."""
        if isinstance(earlier, UdpCarrier) and earlier.spec == self._spec:
            self._carrier = earlier
        else:
            if earlier is not None:
                earlier.close()
            self._carrier = UdpCarrier(self._spec)
        return self._carrier

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """The TUN's address, and one route for the whole network: the pump tells peers apart."""
        if self._carrier is None or own.v4 is None:
            return DesiredState(frozenset(), self._setting.interface.name, self._setting.networks)
        device = self._carrier.device
        address = Address(device, IPv4Interface((own.v4.network_address, own.v4.max_prefixlen)))
        return DesiredState(
            frozenset({device}),
            self._setting.interface.name,
            self._setting.networks,
            addresses=frozenset({address}),
            routes=frozenset({Route(self._spec.network, device)}),
            problems=self._common.problems(peers),
        )
