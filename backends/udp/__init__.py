"""Backend ``udp``: packets pass through a process, one plain IPv4 packet per UDP datagram.

Slower than the kernel's own tunnels, but needs nothing of the kernel beyond
TUN, and is what upstream takes when a config names no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Interface, IPv4Network
from typing import Final

from backends.api import Carrier, OnLink, Setting
from backends.dataplane.model import Address, DesiredState, Link, LinkSpec, Route
from backends.udp.carrier import CarrierSpec, UdpCarrier, carried
from backends.udp.packet import OVERHEAD_BYTES
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.options import OptionReader

TYPE: Final = "udp"
DEFAULT_PORT: Final = 8285
DATA_PATHS: Final = ("auto", "user")
PLANNED_DATA_PATHS: Final = ("fou", "bpf")


class UdpBackend:
    """Source: upstream pkg/backend/udp/udp_amd64.go, udp_network_amd64.go, proxy_amd64.c."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        reader = OptionReader(setting.config.backend)
        pool, local = setting.config.ipv4, setting.interface.v4
        if pool is None or not isinstance(pool.network, IPv4Network):
            raise ConfigError("Backend.Type 'udp' carries IPv4 only, which the config does not enable")
        if local is None:
            raise ConfigError(f"{setting.interface.name} has no IPv4 address, which the config enables")
        _check_data_path(reader.text("DataPath", "auto"))
        port = reader.integer("Port", DEFAULT_PORT, 1, 65535)
        self._spec = CarrierSpec(local, port, self.mtu_bytes(), pool.network)
        self._carrier: UdpCarrier | None = None

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device but the carrier's own."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """A TUN has no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The announced address alone: upstream's leases of this backend name no type either."""
        return LeaseAttrs(self._setting.interface.public_v4)

    def mtu_bytes(self) -> int:
        """The external interface's MTU less the outer headers."""
        return self._setting.interface.mtu_bytes - OVERHEAD_BYTES

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
            problems=self._problems(peers),
        )

    def _problems(self, peers: Collection[Lease]) -> tuple[tuple[str, str], ...]:
        found = [
            (lease.key, f"lease {lease.key} skipped: its node runs backend {lease.attrs.backend_type!r}")
            for lease in peers
            if not carried(lease)
        ]
        if self._setting.config.ipv6 is not None:
            network = self._setting.config.ipv6.network
            found.append(("IPv6Network", f"backend udp carries IPv4 only: {network} is not connected"))
        return tuple(found)


def _check_data_path(text: str) -> None:
    name = text.lower()
    if name in PLANNED_DATA_PATHS:
        raise ConfigError(f"Backend.DataPath {text!r} is not available in this version; it has {', '.join(DATA_PATHS)}")
    if name not in DATA_PATHS:
        raise ConfigError(f"Backend.DataPath {text!r} is unknown; this version has {', '.join(DATA_PATHS)}")


BACKEND = UdpBackend
