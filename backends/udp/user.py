"""Data paths ``user`` and ``auto``: packets pass through the daemon, between TUN devices and UDP sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_interface

from backends.api import Carrier, OnLink, Setting
from backends.dataplane.model import Address, DesiredState, Link, LinkSpec, Route
from backends.dataplane.ports import Kernel
from backends.udp import options
from backends.udp.carrier import CarrierSpec, UdpCarrier
from subnet.model import Family, Lease, LeaseAttrs, Subnets


class UdpBackend:
    """One TUN device and one socket per family. Source: upstream pkg/backend/udp/udp_amd64.go, udp_network_amd64.go.

    Upstream carries IPv4 only. IPv6 travels in IPv6 between nodes that announce
    a public IPv6 address, which upstream's never do with this backend.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        port, unknown = options.port(setting), options.allow_unknown(setting)
        self._specs: dict[Family, CarrierSpec] = {}
        for family in setting.config.families:
            pool = setting.config.pool(family)
            if pool is not None:
                local, mtu_bytes = options.local(setting, family), options.mtu_bytes(setting, family)
                self._specs[family] = CarrierSpec(local, port, mtu_bytes, pool.network, unknown)
        self._carriers: dict[Family, UdpCarrier] = {}

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device but the carrier's own."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """A TUN has no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The announced addresses alone: upstream's leases of this backend name no type either."""
        return self._setting.interface.attrs(self._specs.keys())

    def mtu_bytes(self) -> int:
        """The smallest of the devices' MTUs."""
        return min(spec.mtu_bytes for spec in self._specs.values())

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        """Return the carrier; of an earlier one those families go on for which nothing changed."""
        held = _families(earlier)
        if earlier is not None and not held:
            earlier.close()
        for family, one in held.items():
            if one.spec != self._specs.get(family):
                one.discard()
        self._carriers = {
            family: held[family] if family in held and held[family].spec == spec else self._made(spec)
            for family, spec in self._specs.items()
        }
        if len(self._carriers) == 1:
            (only,) = self._carriers.values()
            return only
        if isinstance(earlier, BothFamilies) and earlier.carriers == self._carriers:
            return earlier
        return BothFamilies(self._carriers)

    def _made(self, spec: CarrierSpec) -> UdpCarrier:
        return UdpCarrier(spec)

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Per family the TUN's address, and one route for the whole network: the pump tells peers apart."""
        devices: set[str] = set()
        addresses: set[Address] = set()
        routes: set[Route] = set()
        for family, carrier in self._carriers.items():
            subnet = own.of(family)
            if subnet is not None:
                device = carrier.device
                devices.add(device)
                addresses.add(Address(device, ip_interface((subnet.network_address, subnet.max_prefixlen))))
                routes.add(Route(carrier.spec.network, device))
        return DesiredState(
            frozenset(devices),
            self._setting.interface.name,
            self._setting.networks,
            addresses=frozenset(addresses),
            routes=frozenset(routes),
            problems=options.foreign(peers),
        )


class BothFamilies(Carrier):
    """A carrier per family."""

    def __init__(self, carriers: Mapping[Family, UdpCarrier]) -> None:
        self.carriers = dict(carriers)

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        """Return the TUNs by name. Raises KernelError."""
        return {name: link for one in self.carriers.values() for name, link in one.ensure(kernel).items()}

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """Tell both pumps."""
        for one in self.carriers.values():
            one.carry(own, peers, complete)

    def hooked(self) -> frozenset[int]:
        """Return the devices that programs of either belong to, by index."""
        return frozenset().union(*(one.hooked() for one in self.carriers.values()))

    def close(self) -> None:
        """End both."""
        for one in self.carriers.values():
            one.close()


def _families(earlier: Carrier | None) -> dict[Family, UdpCarrier]:
    if isinstance(earlier, BothFamilies):
        return earlier.carriers
    return {earlier.spec.family: earlier} if isinstance(earlier, UdpCarrier) else {}
