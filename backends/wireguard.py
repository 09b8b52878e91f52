"""Backend ``wireguard``: encrypted tunnels, a device per family or one for both."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_interface

from backends import wgkeys
from backends.api import ExternalInterface, OnLink, Setting
from backends.dataplane.model import Address, DesiredState, Endpoint, Link, LinkSpec, Route, Wireguard, WireguardPeer
from subnet.errors import ConfigError, LeaseDataError
from subnet.model import Family, IPAddress, IPNetwork, Json, Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.options import OptionReader

log = logging.getLogger(__name__)

TYPE = "wireguard"
DEVICE: Mapping[Family, str] = {4: "flannel-wg", 6: "flannel-wg-v6"}
OVERHEAD_BYTES = 80
"""IPv6 and UDP headers, WireGuard's own 32, and room to spare; upstream's number for both families."""
MINIMUM_BYTES: Mapping[Family, int] = {4: 576, 6: 1280}
"""What every IPv4 host must take (RFC 1122 s3.3.2) and the least IPv6 works with (RFC 8200 s5)."""
PORT, PORT_V6 = 51820, 51821
MODES = ("separate", "auto", "ipv4", "ipv6")
_PRIVATE_V4 = tuple(IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_PRIVATE_V6 = IPv6Network("fc00::/7")
"""RFC 1918, RFC 4193."""


@dataclass(frozen=True, slots=True)
class WireguardOptions:
    """The ``Backend`` object. Port 0: the kernel's choice. ``mtu_bytes`` is the underlay's; 0: the interface's.

    ``mode``: ``separate`` has a device per family, each over its own kind of
    underlay. The others have one device, whose peers are reached over IPv4, over
    IPv6, or (``auto``) over what suits the addresses.
    """

    port: int = PORT
    port_v6: int = PORT_V6
    mtu_bytes: int = 0
    preshared_key: str = field(default="", repr=False)
    keepalive_s: int = 0
    mode: str = "separate"

    @classmethod
    def of(cls, config: NetworkConfig) -> WireguardOptions:
        """Read and check the options. Raises ConfigError."""
        reader = OptionReader(config.backend)
        mode = reader.text("Mode", "separate")
        if mode not in MODES:
            raise ConfigError(f"Backend.Mode {mode!r:.60}: must be one of {', '.join(MODES)}, in lower case")
        for family, name in ((4, "ipv4"), (6, "ipv6")):
            if mode == name and family not in config.families:
                raise ConfigError(f"Backend.Mode {mode!r}: the network config does not enable IPv{family}")
        options = cls(
            reader.integer("ListenPort", PORT, 0, 65535),
            reader.integer("ListenPortV6", PORT_V6, 0, 65535),
            reader.integer("MTU", 0, 0, 65535),
            _preshared_key(reader),
            reader.integer("PersistentKeepaliveInterval", 0, 0, 65535),
            mode,
        )
        if len(options.devices(config)) == 2 and options.port == options.port_v6 != 0:
            raise ConfigError(f"Backend.ListenPortV6 {options.port_v6}: is ListenPort, too; each device needs its own")
        if 0 < options.mtu_bytes < (least := least_underlay_bytes(config)):
            raise ConfigError(f"Backend.MTU {options.mtu_bytes} is too small: the underlay has to carry {least} bytes")
        return options

    @property
    def separate(self) -> bool:
        """Whether each family has a device of its own."""
        return self.mode == "separate"

    def devices(self, config: NetworkConfig) -> tuple[tuple[Family, int], ...]:
        """Return the family that names each device, and its port."""
        ports: Mapping[Family, int] = {4: self.port, 6: self.port_v6}
        if self.separate:
            return tuple((family, ports[family]) for family in config.families)
        return ((4, self.port),)


def least_underlay_bytes(config: NetworkConfig) -> int:
    """Return the smallest MTU of an underlay that leaves each family what it needs."""
    return max((MINIMUM_BYTES[family] + OVERHEAD_BYTES for family in config.families), default=0)


def _preshared_key(reader: OptionReader) -> str:
    text = reader.text("PSK")
    try:
        return wgkeys.parse_key(text) if text else ""
    except ValueError as error:
        raise ConfigError(f"Backend.PSK {error}") from None


def outer_family(mode: str, remote: LeaseAttrs, interface: ExternalInterface) -> Family:
    """Return the family in which a peer of a device for both is reached.

    Source: upstream pkg/backend/wireguard/wireguard_network.go, selectPublicEndpoint.
    """
    if mode in ("ipv4", "ipv6"):
        return 4 if mode == "ipv4" else 6
    v4, v6 = remote.public_ip, remote.public_ipv6
    if v4 is None or v6 is None:
        return 4 if v6 is None else 6
    if interface.public_v4 is None or interface.public_v6 is None:
        return 4 if interface.public_v6 is None else 6
    if not any(v4 in network for network in _PRIVATE_V4):
        return 4
    return 6 if v6 not in _PRIVATE_V6 and interface.public_v6 not in _PRIVATE_V6 else 4


@dataclass(frozen=True, slots=True)
class PeerData:
    """What a lease's backend data says. Port 0: it does not, as with nodes before v0.26.6."""

    public_key: str
    port: int

    @classmethod
    def of(cls, data: Json) -> PeerData:
        """Read backend data; names match in any case. Raises LeaseDataError."""
        if not isinstance(data, dict):
            raise LeaseDataError(f"backend data is {data!r:.60}, not an object with PublicKey")
        members = {name.lower(): value for name, value in data.items()}
        key, port = members.get("publickey"), members.get("port")
        if not isinstance(key, str):
            raise LeaseDataError(f"PublicKey is {key!r:.60}")
        if port is not None and (type(port) is not int or not 0 <= port <= 65535):
            raise LeaseDataError(f"Port is {port!r:.60}")
        try:
            return cls(wgkeys.parse_key(key), port or 0)
        except ValueError as error:
            raise LeaseDataError(f"PublicKey {error}") from error


class WireguardBackend:
    """Source: upstream pkg/backend/wireguard/wireguard.go, device.go, wireguard_network.go."""

    def __init__(self, setting: Setting, private_key: str) -> None:
        self._config, self._interface, self._networks = setting.config, setting.interface, setting.networks
        self._options = WireguardOptions.of(setting.config)
        self._private_key = private_key
        self._own_keys: frozenset[str] = frozenset()
        for family in setting.config.families:
            if setting.interface.public(family) is None:
                raise ConfigError(f"{setting.interface.name} has no IPv{family} address, which the config enables")
        underlay_bytes, least = setting.interface.mtu_bytes, least_underlay_bytes(setting.config)
        if underlay_bytes < least:
            raise ConfigError(f"MTU {underlay_bytes} of {setting.interface.name} is too small: {least} are needed")
        wish = self._options.mtu_bytes
        if wish > underlay_bytes:
            log.warning(
                "Backend.MTU %d is more than %s carries; %d is used", wish, setting.interface.name, underlay_bytes
            )

    def _name(self, family: Family) -> str:
        """Return the device that carries a family."""
        return DEVICE[family if self._options.separate else 4]

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """``flannel-wg`` and ``flannel-wg-v6``, or the first alone for both families."""
        return tuple(
            LinkSpec(DEVICE[family], family, Wireguard(port, self._private_key), self.mtu_bytes())
            for family, port in self._options.devices(self._config)
        )

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """These devices have no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """Announced addresses, the public key, and the ports that the devices really listen on."""
        data: dict[Family, Json] = {}
        for family in self._config.families:
            tunnel = links[self._name(family)].tunnel
            if isinstance(tunnel, Wireguard):
                data[family] = {"PublicKey": tunnel.public_key, "Port": tunnel.port}
        self._own_keys = frozenset(member["PublicKey"] for member in data.values())
        return self._interface.attrs(data.keys(), TYPE, data)

    def mtu_bytes(self) -> int:
        """What the underlay carries, less the overhead, the same for both families."""
        underlay = self._interface.mtu_bytes
        return (min(underlay, self._options.mtu_bytes) if self._options.mtu_bytes else underlay) - OVERHEAD_BYTES

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Addresses, a route to each whole network, and one peer per lease and device."""
        addresses: set[Address] = set()
        routes: set[Route] = set()
        found: set[WireguardPeer] = set()
        problems: list[tuple[str, str]] = []
        for family in self._config.families:
            pool, subnet, device = self._config.pool(family), own.of(family), self._name(family)
            if subnet is not None:
                addresses.add(Address(device, ip_interface((subnet.network_address, subnet.max_prefixlen))))
            if pool is not None:
                # In IPv4 upstream says that the whole network is on this link; IPv6 knows no such scopes.
                routes.add(Route(pool.network, device, scope="link" if family == 4 else "global"))
        for lease in peers:
            if lease.attrs.backend_type != TYPE:
                continue
            for family, networks in self._parts(lease):
                try:
                    found.add(self._peer(lease, family, networks))
                except LeaseDataError as error:
                    topic = f" for IPv{family}" if self._options.separate else ""
                    problems.append((f"{lease.key}{topic}", f"lease {lease.key} skipped{topic}: {error}"))
        return DesiredState(
            frozenset(self._name(family) for family in self._config.families),
            self._interface.name,
            self._networks,
            frozenset(addresses),
            routes=frozenset(routes),
            peers=frozenset(found),
            problems=tuple(problems),
        )

    def _parts(self, lease: Lease) -> Iterator[tuple[Family, tuple[IPNetwork, ...]]]:
        """Yield what each device carries of a lease: the family that names the device, and the networks."""
        held = [(family, subnet) for family in self._config.families if (subnet := lease.subnets.of(family))]
        if self._options.separate:
            yield from ((family, (subnet,)) for family, subnet in held)
        elif held:
            yield 4, tuple(subnet for _, subnet in held)

    def _peer(self, lease: Lease, family: Family, networks: tuple[IPNetwork, ...]) -> WireguardPeer:
        attrs, options = lease.attrs, self._options
        if options.separate:
            data, outer = PeerData.of(attrs.data(family)), family
        else:
            data, outer = self._data_of_both(attrs), outer_family(options.mode, attrs, self._interface)
        remote: IPAddress | None = attrs.public(outer)
        if remote is None:
            raise LeaseDataError(f"no public IPv{outer} address")
        if data.public_key in self._own_keys:
            raise LeaseDataError(f"PublicKey {data.public_key} is our own; was the key file copied?")
        port = data.port or (options.port or PORT if family == 4 else options.port_v6 or PORT_V6)
        return WireguardPeer(
            self._name(family),
            data.public_key,
            Endpoint(remote, port),
            networks,
            options.keepalive_s,
            options.preshared_key,
        )

    def _data_of_both(self, attrs: LeaseAttrs) -> PeerData:
        """Return the data that counts for one device: the key with IPv6's, the port with IPv4's.

        Upstream announces ListenPortV6 with the IPv6 data although nothing
        listens there; without IPv4 data its real port is the common ListenPort.
        """
        v4 = PeerData.of(attrs.backend_data) if attrs.backend_data is not None else None
        v6 = PeerData.of(attrs.backend_v6_data) if attrs.backend_v6_data is not None else None
        if v6 is None:
            return v4 if v4 is not None else PeerData.of(None)
        port = v4.port if v4 is not None else 0 if v6.port == self._options.port_v6 else v6.port
        return PeerData(v6.public_key, port)


def backend(setting: Setting) -> WireguardBackend:
    """Return the backend with this node's private key, which is made if there is none. Raises ConfigError."""
    WireguardOptions.of(setting.config)
    return WireguardBackend(setting, wgkeys.private_key(wgkeys.key_file()))


BACKEND = backend
