"""The seam between a datastore and the daemon.

A manager owns its threads. It never touches the kernel: it posts events and
takes a declaration of the lease that this node wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, TypeAlias

from subnet.model import IPAddress, Lease, LeaseAttrs, NetworkConfig, Subnets


@dataclass(frozen=True, slots=True)
class ConfigSeen:
    """The network config as it is now: usable, or the reason why it is not.

    Posted when it is first read and whenever it changes. ``text`` is the JSON
    that a usable one was read from.
    """

    config: NetworkConfig | None
    problem: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class LeasesListed:
    """All leases at one revision; replaces whatever was known.

    The own one is among them where the store itself does not tell it from the
    others (see ThisNode).
    """

    leases: tuple[Lease, ...]
    revision: int
    complete: bool = True
    """False for a list from memory: it tells of leases that exist, not of what is gone."""


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """Leases written and subnets removed since the last event, in the store's order.

    A member of ``changes`` is a Lease (written) or a Subnets (removed).
    """

    changes: tuple[Lease | Subnets, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class OwnLease:
    """The lease this node holds now; None with a reason while it holds none.

    ``fatal``: the daemon was told to exit when its lease is lost, and it is.
    """

    lease: Lease | None
    problem: str = ""
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class StoreState:
    """Whether the datastore answers; ``problem`` names endpoint and reason when it does not."""

    reachable: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ThisNode:
    """What the store says about this very node, where it knows nodes; posted before the config and the leases.

    ``public_ip`` and ``public_ipv6`` are addresses that operators want
    announced: stronger than the flags of these names. ``told`` is what peers
    know of an earlier run, None if nothing.
    """

    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None
    told: LeaseAttrs | None = None


StoreEvent: TypeAlias = ConfigSeen | LeasesListed | LeasesChanged | OwnLease | StoreState | ThisNode
Post: TypeAlias = Callable[[StoreEvent], None]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What this node wants to hold.

    ``previous`` is the subnet of an earlier run (subnet.env).
    ``local_addresses`` are the addresses of this host: an entry that names one
    of them is provably our own.
    """

    attrs: LeaseAttrs
    config: NetworkConfig
    previous: Subnets | None = None
    local_addresses: frozenset[IPAddress] = field(default_factory=frozenset)


class SubnetManager(Protocol):
    """A datastore of leases, seen from the daemon. All methods return at once."""

    def start(self, post: Post) -> None:
        """Begin reading; results arrive through ``post``, called from the manager's threads."""
        ...

    def want(self, request: LeaseRequest) -> None:
        """Declare the wanted lease; acquires, updates or keeps it. Repeating it is free."""
        ...

    def ready(self) -> None:
        """Tell that this node carries traffic, for whoever waits for that. Repeating it is free."""
        ...

    def underlay_changed(self) -> None:
        """Tell that the host has another address: connections from the old one are dead, and silent."""
        ...

    def close(self) -> None:
        """Cancel calls in flight and end the threads, within a second. The lease stays."""
        ...
