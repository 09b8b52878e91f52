"""What a backend is: pure functions from configuration and leases to wanted kernel state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, TypeAlias, runtime_checkable

from backends.dataplane.model import DesiredState, KernelObject, Link, LinkSpec
from backends.dataplane.ports import Kernel
from subnet.model import Family, IPAddress, IPNetwork, Json, Lease, LeaseAttrs, NetworkConfig, Subnets

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

    def attrs(
        self, families: Collection[Family], backend_type: str = "", data: Mapping[Family, Json] | None = None
    ) -> LeaseAttrs:
        """Return what a lease tells peers: the announced addresses of these families, and a backend's data of each."""
        told = data or {}
        return LeaseAttrs(
            self.public_v4 if 4 in families else None,
            self.public_v6 if 6 in families else None,
            backend_type,
            told.get(4),
            told.get(6),
        )

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


@dataclass(frozen=True, slots=True)
class PeerEntries:
    """What one peer adds to the wanted state. ``problems``: a topic and the reason, as in DesiredState."""

    targets: Collection[KernelObject]
    problems: tuple[tuple[str, str], ...] = ()


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


@runtime_checkable
class PeerwiseBackend(Backend, Protocol):
    """A backend that can tell a peer's entries without the state around them, which thousands of peers share."""

    def entries(self, peer: Lease, on_link: OnLink) -> PeerEntries:
        """Return what ``desired`` wants for this peer, the own addresses aside."""
        ...


CLOSE_WITHIN_S = 1.5
"""Time that a carrier gets to end; the process itself leaves within two seconds of a signal."""


class Carrier(Protocol):
    """What carries packets beside the kernel's entries: commands, a packet pump, a key daemon.

    Driven by one thread, which it must not hold up: work that takes time
    belongs to threads of its own. It lives longer than a backend value, which
    is made anew with every change of the setting. Subclasses inherit the
    answers of a carrier that is never waited for.
    """

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        """Bring up what is needed before the lease, or mend it; return the devices it holds. Raises KernelError."""
        return {}

    def unprepared(self) -> str:
        """Return why it is not known yet what peers must be told; empty: it is."""
        return ""

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """Carry between the own subnets and these peers from now on; called at every change, and now and then.

        Without ``complete`` the peers are remembered ones: what an earlier run
        knew, and the kernel still holds, may be newer.
        """
        ...

    def unready(self) -> str:
        """Return why, since ``carry``, packets do not flow yet; empty: they do."""
        return ""

    def problems(self) -> Mapping[str, str]:
        """Return the leases in trouble, by key, with the reason."""
        return {}

    def hooked(self) -> frozenset[int]:
        """Return the devices that programs of it belong to, by index."""
        return frozenset()

    def close(self) -> None:
        """End it, in at most CLOSE_WITHIN_S."""
        ...


@runtime_checkable
class CarryingBackend(Backend, Protocol):
    """A backend with a carrier. ``attrs`` is asked for once that is prepared."""

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        """Return the carrier to drive: ``earlier`` if it still fits, else a new one, with ``earlier`` closed.

        ``wake`` may be called from any thread: an answer of the carrier has changed.
        """
        ...


BackendFactory: TypeAlias = Callable[[Setting], Backend]
"""What a backend module exposes as ``BACKEND``; raises ConfigError for options that cannot be used."""
