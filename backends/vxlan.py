"""Backend ``vxlan``: one device per family, three static entries per peer (RFC 7348)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_interface

from backends.api import OnLink, PeerEntries, Setting
from backends.dataplane.model import (
    PROTO_FLANNEL,
    Address,
    DesiredState,
    FdbEntry,
    KernelObject,
    Link,
    LinkSpec,
    Neighbour,
    Route,
    Vxlan,
)
from subnet.errors import ConfigError, LeaseDataError
from subnet.model import Family, IPAddress, Json, Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.options import OptionReader
from subnet.wire import is_unicast_mac, parse_mac

log = logging.getLogger(__name__)

TYPE = "vxlan"
OVERHEAD_BYTES: Mapping[Family, int] = {4: 50, 6: 70}
"""Outer IP, UDP and VXLAN headers plus the inner Ethernet header (RFC 7348 s5)."""
MINIMUM_BYTES: Mapping[Family, int] = {4: 576, 6: 1280}
"""What every IPv4 host must take (RFC 1122 s3.3.2) and the least IPv6 works with (RFC 8200 s5)."""
NAME_LIMIT = 15
"""Characters of an interface name (IFNAMSIZ - 1)."""


def device_name(family: Family, vni: int) -> str:
    """Return ``flannel.<VNI>`` or ``flannel-v6.<VNI>``."""
    return f"flannel.{vni}" if family == 4 else f"flannel-v6.{vni}"


@dataclass(frozen=True, slots=True)
class VxlanOptions:
    """The ``Backend`` object. ``mtu_bytes`` is the underlay's MTU to reckon with; 0: the interface's."""

    vni: int = 1
    port: int = 0
    mtu_bytes: int = 0
    gbp: bool = False
    learning: bool = False
    direct_routing: bool = False

    @classmethod
    def of(cls, config: NetworkConfig) -> VxlanOptions:
        """Read and check the options. Raises ConfigError."""
        reader = OptionReader(config.backend)
        vni = reader.integer("VNI", 1, 0, (1 << 24) - 1)
        for family in config.families:
            if len(name := device_name(family, vni)) > NAME_LIMIT:
                raise ConfigError(f"Backend.VNI {vni}: device name {name} is longer than {NAME_LIMIT} characters")
        least = max((MINIMUM_BYTES[f] + OVERHEAD_BYTES[f] for f in config.families), default=0)
        mtu_bytes = reader.integer("MTU", 0, 0, 65535)
        if 0 < mtu_bytes < least:
            raise ConfigError(f"Backend.MTU {mtu_bytes} is too small: the underlay has to carry {least} bytes")
        return cls(
            vni,
            reader.integer("Port", 0, 0, 65535),
            mtu_bytes,
            reader.boolean("GBP", False),
            reader.boolean("Learning", False),
            reader.boolean("DirectRouting", False),
        )


class VxlanBackend:
    """Source: upstream pkg/backend/vxlan/vxlan.go, device.go, vxlan_network.go."""

    def __init__(self, setting: Setting) -> None:
        self._config, self._interface, self._networks = setting.config, setting.interface, setting.networks
        self._options = VxlanOptions.of(setting.config)
        self._devices = tuple((family, self._name(family)) for family in setting.config.families)
        for family in setting.config.families:
            if setting.interface.local(family) is None:
                raise ConfigError(f"{setting.interface.name} has no IPv{family} address, which the config enables")
            _refuse_overlap(setting, family)
        wish, underlay = self._options.mtu_bytes, setting.interface.mtu_bytes
        if wish > underlay:
            log.warning("Backend.MTU %d is more than %s carries; %d is used", wish, setting.interface.name, underlay)

    def _name(self, family: Family) -> str:
        return device_name(family, self._options.vni)

    def _device_mtu_bytes(self, family: Family) -> int:
        underlay = self._interface.mtu_bytes
        if self._options.mtu_bytes:
            underlay = min(underlay, self._options.mtu_bytes)
        return underlay - OVERHEAD_BYTES[family]

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """One device per enabled family, bound to the interface's own address.

        Not to the announced one: with a source the host does not own the
        kernel sends nothing at all.
        """
        options = self._options
        return tuple(
            LinkSpec(
                self._name(family),
                family,
                Vxlan(
                    options.vni,
                    options.port,
                    self._interface.local(family),
                    self._interface.index,
                    options.learning,
                    options.gbp,
                ),
                self._device_mtu_bytes(family),
                macs.get(self._name(family), ""),
                binding,
            )
            for family in self._config.families
        )

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """The VTEP MACs in a lease value, by device name; unusable ones are left out with a warning.

        Data without a type count: on a node object an operator may have kept no more of it.
        """
        found: dict[str, str] = {}
        for family in self._config.families:
            data = attrs.data(family)
            if attrs.backend_type not in (TYPE, "") or data is None:
                continue
            try:
                found[self._name(family)] = vtep_mac(data)
            except LeaseDataError as error:
                log.warning("the MAC that peers know cannot be kept: %s", error)
        return found

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """Announced addresses, VNI and the devices' MACs."""
        data: dict[Family, Json] = {
            family: {"VNI": self._options.vni, "VtepMAC": links[self._name(family)].mac}
            for family in self._config.families
        }
        return self._interface.attrs(data.keys(), TYPE, data)

    def mtu_bytes(self) -> int:
        """The smallest of the devices' MTUs, so that a container's packet fits every tunnel."""
        return min(self._device_mtu_bytes(family) for family in self._config.families)

    def entries(self, peer: Lease, on_link: OnLink) -> PeerEntries:
        """Per family: neighbour, FDB entry and on-link route, or a plain route if it is direct."""
        found: list[KernelObject] = []
        problems: list[tuple[str, str]] = []
        if peer.attrs.backend_type != TYPE:
            return PeerEntries(found)
        for family, device in self._devices:
            subnet = peer.subnets.of(family)
            if subnet is None:
                continue
            try:
                remote, mac = _vtep(peer, family)
            except LeaseDataError as error:
                problems.append((f"{peer.key} IPv{family}", f"lease {peer.key} skipped for IPv{family}: {error}"))
                continue
            if self._options.direct_routing and on_link(remote):
                found.append(Route(subnet, self._interface.name, remote, protocol=PROTO_FLANNEL))
                continue
            # The gateway is the peer's base address, whose neighbour entry names the VTEP.
            base = subnet.network_address
            found += (
                Neighbour(device, base, mac),
                FdbEntry(device, mac, remote),
                Route(subnet, device, base, onlink=True),
            )
        return PeerEntries(found, tuple(problems))

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """The devices' own addresses, and every peer's entries."""
        addresses: set[Address] = set()
        for family, device in self._devices:
            subnet = own.of(family)
            if subnet is not None:
                addresses.add(Address(device, ip_interface((subnet.network_address, subnet.max_prefixlen))))
        found = [self.entries(peer, on_link) for peer in peers]
        targets = [target for one in found for target in one.targets]
        return DesiredState(
            frozenset(self._name(family) for family in self._config.families),
            self._interface.name,
            self._networks,
            frozenset(addresses),
            frozenset(t for t in targets if isinstance(t, Neighbour)),
            frozenset(t for t in targets if isinstance(t, FdbEntry)),
            frozenset(t for t in targets if isinstance(t, Route)),
            tuple(problem for one in found for problem in one.problems),
        )


def _refuse_overlap(setting: Setting, family: Family) -> None:
    """IPv6 only: the kernel takes no on-link gateway that it finds behind another device."""
    pool = setting.config.pool(family)
    for prefix in setting.interface.prefixes:
        if family == 6 and pool is not None and prefix.version == 6 and prefix.overlaps(pool.network):
            raise ConfigError(
                f"IPv6Network {pool.network} overlaps {prefix} of {setting.interface.name}: "
                "the kernel would take no route into the tunnel"
            )


def vtep_mac(data: Json) -> str:
    """Return the VTEP MAC of a lease's backend data. Raises LeaseDataError when absent or malformed."""
    if not isinstance(data, dict):
        raise LeaseDataError(f"backend data is {data!r:.60}, not an object with VtepMAC")
    text = data.get("VtepMAC")
    if text is None:
        text = next((value for name, value in data.items() if name.lower() == "vtepmac"), None)
    if not isinstance(text, str):
        raise LeaseDataError(f"VtepMAC is {text!r:.60}")
    mac = parse_mac(text)
    if not is_unicast_mac(mac):
        raise LeaseDataError(f"VtepMAC {mac} is no unicast address")
    return mac


def _vtep(lease: Lease, family: Family) -> tuple[IPAddress, str]:
    remote = lease.attrs.public(family)
    if remote is None:
        raise LeaseDataError("no public address")
    return remote, vtep_mac(lease.attrs.data(family))


BACKEND = VxlanBackend
