"""What a backend is: pure functions from configuration and leases to wanted kernel state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, TypeAlias, runtime_checkable

from backends.dataplane.model import DesiredState, Link, LinkSpec
from backends.dataplane.ports import Kernel
from subnet.model import Family, IPAddress, IPNetwork, Lease, LeaseAttrs, NetworkConfig, Subnets

OnLink: TypeAlias = Callable[[IPAddress], bool]
"""Whether an address is reached through the external interface without a gateway."""


@dataclass(frozen=True, slots=True)
class ExternalInterface:
    """The host interface that carries the overlay.

    ``v4`` and ``v6`` are its own addresses, ``public_v4`` and ``public_v6``
    what peers are told (they differ behind NAT). ``prefixes`` are the networks
    of its addresses.
    """

    name: str
    index: int
    mtu_bytes: int
    v4: IPv4Address | None = None
    v6: IPv6Address | None = None
    public_v4: IPv4Address | None = None
    public_v6: IPv6Address | None = None
    prefixes: frozenset[IPNetwork] = field(default_factory=frozenset)

    def local(self, family: Family) -> IPAddress | None:
        """Return the interface's own address of one family."""
        return self.v4 if family == 4 else self.v6

    def public(self, family: Family) -> IPAddress | None:
        """Return the announced address of one family."""
        return self.public_v4 if family == 4 else self.public_v6

    def __str__(self) -> str:
        parts = [f"{self.name} (index {self.index}, MTU {self.mtu_bytes})"]
        for local, public in ((self.v4, self.public_v4), (self.v6, self.public_v6)):
            if local is not None:
                parts.append(f"{local}" if local == public else f"{local} announced as {public}")
            elif public is not None:
                parts.append(f"announced as {public}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything a backend is built from.

    ``networks`` are the cluster's networks, present and of an earlier run.
    """

    config: NetworkConfig
    interface: ExternalInterface
    networks: frozenset[IPNetwork]


class Backend(Protocol):
    """A way to carry the overlay. No datastore and no kernel in sight."""

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """Return the devices to have.

        ``macs`` proposes a MAC per device name; ``binding`` says that peers
        were told these and an existing device has to take them.
        """
        ...

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """Return the MACs per device name that an earlier lease of ours told the peers."""
        ...

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """Return what peers must know, given the devices as they are."""
        ...

    def mtu_bytes(self) -> int:
        """Return the bytes left for a container's packet after encapsulation."""
        ...

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Return the wanted kernel state. Leases that cannot be used appear in its ``problems``."""
        ...


class Carrier(Protocol):
    """What carries packets beside the kernel's entries. Driven by one thread; lives longer than a backend value."""

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        """Bring everything up, or mend it; return the devices it holds, by name. Raises KernelError."""
        ...

    def carry(self, own: Subnets, peers: Collection[Lease]) -> None:
        """Take the peers that were admitted; called often, mostly with nothing new."""
        ...

    def close(self) -> None:
        """End it; its devices go."""
        ...


@runtime_checkable
class CarryingBackend(Backend, Protocol):
    """A backend that has a carrier. ``desired`` is called once the carrier is up."""

    def carrier(self, earlier: Carrier | None) -> Carrier:
        """Return the carrier to drive: ``earlier`` if it still fits, else a new one, with ``earlier`` closed."""
        ...


BackendFactory: TypeAlias = Callable[[Setting], Backend]
"""What a backend module exposes as ``BACKEND``; raises ConfigError for options that cannot be used."""
