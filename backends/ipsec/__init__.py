"""Backend ``ipsec``: ESP tunnels between the hosts, whose keys strongSwan's charon negotiates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from backends.api import Carrier, OnLink, Setting
from backends.dataplane.model import (
    LOOPBACK,
    OWN_LABEL,
    PROTO_FLANNEL,
    Address,
    DesiredState,
    IpsecPolicy,
    Link,
    LinkSpec,
    Route,
)
from backends.ipsec.carrier import IpsecCarrier
from backends.ipsec.connections import ESP_PROPOSAL, TYPE, End, Terms, peer_end
from subnet.errors import ConfigError, LeaseDataError
from subnet.model import Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.options import OptionReader

OVERHEAD_BYTES, ENCAP_BYTES = 77, 8
"""Outer header, ESP and padding; the UDP header between them."""
LEAST_PSK = 96
"""Characters; upstream's number."""


@dataclass(frozen=True, slots=True)
class IpsecOptions:
    """The ``Backend`` object."""

    psk: str = field(repr=False)
    encap: bool
    proposal: str

    @classmethod
    def of(cls, config: NetworkConfig) -> IpsecOptions:
        """Read and check the options. Raises ConfigError, never with the secret."""
        reader = OptionReader(config.backend)
        psk = reader.text("PSK")
        if len(psk) < LEAST_PSK:
            raise ConfigError(f"Backend.PSK has {len(psk)} characters; ipsec needs at least {LEAST_PSK}")
        return cls(psk, reader.boolean("UDPEncap", False), reader.text("ESPProposal", ESP_PROPOSAL))


class IpsecBackend:
    """Source: upstream pkg/backend/ipsec/ipsec.go, ipsec_network.go, handle_xfrm.go, handle_charon.go."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._options = IpsecOptions.of(setting.config)
        pool, interface = setting.config.ipv4, setting.interface
        if pool is None or not isinstance(pool.network, IPv4Network):
            raise ConfigError("Backend.Type 'ipsec' carries IPv4 only, which the config does not enable")
        if interface.v4 is None or interface.public_v4 is None:
            raise ConfigError(f"{interface.name} has no IPv4 address, which the config enables")
        self._local: IPv4Address = interface.v4
        options = self._options
        self._terms = Terms(interface.v4, interface.public_v4, options.psk, options.encap, options.proposal)

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device: the kernel's policies catch packets on their way."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """No device, no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The announced address; what else peers need follows from the leases."""
        return LeaseAttrs(self._setting.interface.public_v4, None, TYPE)

    def mtu_bytes(self) -> int:
        """The external interface's MTU less the outer headers."""
        return self._setting.interface.mtu_bytes - OVERHEAD_BYTES - (ENCAP_BYTES if self._options.encap else 0)

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        """Return the carrier; the earlier one goes on if nothing changed that it is made of."""
        if isinstance(earlier, IpsecCarrier) and earlier.terms == self._terms:
            return earlier
        if earlier is not None:
            earlier.close()
        return IpsecCarrier(self._terms, wake)

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Policies and a route for each peer, and an address that the host itself is reached at.

        Upstream has neither: packets of the host leave with an address that no
        policy knows. From an address of the own subnet they go like those of
        containers, to upstream's nodes, too.
        """
        name, found = self._setting.interface.name, DesiredState(frozenset(), self._setting.interface.name, frozenset())
        if own.v4 is None:
            return found
        policies: set[IpsecPolicy] = set()
        routes: set[Route] = set()
        problems = list(self._problems())
        here = own.v4.network_address
        for lease in peers:
            if lease.attrs.backend_type != TYPE:
                continue
            try:
                peer = peer_end(lease)
            except LeaseDataError as error:
                problems.append((lease.key, f"lease {lease.key} skipped: {error}"))
                continue
            policies |= self._policies(own.v4, peer)
            routes.add(Route(peer.subnet, name, protocol=PROTO_FLANNEL, source=here, scope="link"))
        return DesiredState(
            frozenset(),
            name,
            self._setting.networks,
            addresses=frozenset({Address(LOOPBACK, IPv4Interface((here, 32)), label=OWN_LABEL)}),
            routes=frozenset(routes),
            policies=frozenset(policies),
            problems=tuple(problems),
        )

    def _policies(self, own: IPv4Network, peer: End) -> set[IpsecPolicy]:
        """Out, in and forward, as upstream's."""
        return {
            IpsecPolicy("out", own, peer.subnet, self._local, peer.address),
            IpsecPolicy("in", peer.subnet, own, peer.address, self._local),
            IpsecPolicy("fwd", peer.subnet, own, peer.address, self._local),
        }

    def _problems(self) -> list[tuple[str, str]]:
        v6 = self._setting.config.ipv6
        if v6 is None:
            return []
        return [("IPv6Network", f"backend ipsec carries IPv4 only: {v6.network} is not connected")]


BACKEND = IpsecBackend
