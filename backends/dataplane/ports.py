"""What the data plane asks of a kernel; fakes and the real adapter keep the same contract."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backends.dataplane.model import Address, Change, KernelObject, Link, LinkSpec, Route, Wireguard, WireguardPeer
from backends.dataplane.packed import Entries, Packer
from subnet.errors import KernelError
from subnet.model import IPAddress


@dataclass(frozen=True, slots=True)
class Failure:
    """A change that the kernel refused."""

    change: Change
    error: KernelError


See: TypeAlias = Callable[[Entries], None]
"""Takes a part of what the kernel holds, packed: all that has one of its keys. There are as many parts as dumps."""


class Kernel(Protocol):
    """The kernel of one network namespace. Used from one thread only.

    Every method raises KernelError, except that deleting what is gone and
    creating what is there already is success.
    """

    def links(self) -> dict[str, Link]:
        """Return all devices by name."""
        ...

    def addresses(self) -> tuple[Address, ...]:
        """Return all addresses of all devices, in the kernel's order."""
        ...

    def default_routes(self) -> frozenset[Route]:
        """Return the main tables' default routes of both families."""
        ...

    def survey(self, devices: Collection[str], packer: Packer, see: See) -> frozenset[WireguardPeer]:
        """Show all addresses, routes and tunnel policies, and the neighbours, FDB entries and peers of ``devices``.

        The endpoint of a live WireGuard peer that moved shows as it was last
        put. Returns the peers that are sent to and do not answer.
        """
        ...

    def put(self, entries: Entries, packer: Packer) -> list[Failure]:
        """Write many packed neighbours, FDB entries and routes, none of which is there, in their order."""
        ...

    def apply(self, changes: Sequence[Change]) -> list[Failure]:
        """Make the changes in order; a refused one does not stop the others."""
        ...

    def lookup(self, target: IPAddress) -> Route:
        """Return the route a packet to ``target`` takes (RTM_GETROUTE), with its source address."""
        ...

    def create_link(self, spec: LinkSpec) -> None:
        """Create the device, down and without addresses."""
        ...

    def delete_link(self, name: str) -> None:
        """Delete the device, with what the kernel keeps apart from it and would take packets for it further on."""
        ...

    def set_link(
        self,
        name: str,
        *,
        up: bool | None = None,
        mtu_bytes: int | None = None,
        mac: str | None = None,
        learning: bool | None = None,
        wireguard: Wireguard | None = None,
    ) -> None:
        """Change attributes of an existing device in place. The peers of a WireGuard device stay."""
        ...

    def sysctl(self, key: str) -> str | None:
        """Return a value below /proc/sys, None if the kernel has no such key."""
        ...

    def set_sysctl(self, key: str, value: str) -> None:
        """Write a value below /proc/sys."""
        ...

    def set_tx_checksum(self, name: str, enabled: bool) -> bool:
        """Switch transmit checksum offload (ethtool(8)); return the effective value."""
        ...

    def remove_programs(self, keep: Collection[int]) -> list[str]:
        """Remove our programs from devices other than those with these indexes; return what they were called."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """A device appeared, changed or (``gone``) disappeared."""

    name: str
    index: int
    gone: bool


@dataclass(frozen=True, slots=True)
class ObjectSeen:
    """A kernel object was written or (``gone``) removed.

    ``target.device`` is empty: notifications know devices by ``index`` only.
    """

    target: KernelObject
    index: int
    gone: bool


@dataclass(frozen=True, slots=True)
class HookSeen:
    """A program, or what programs are attached to, was removed from a device."""

    index: int


@dataclass(frozen=True, slots=True)
class Overflow:
    """Notifications were lost: compare everything once."""


KernelEvent: TypeAlias = LinkSeen | ObjectSeen | HookSeen | Overflow
