"""Values every layer speaks of. Immutable; both address families take one path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Literal, TypeAlias

Family: TypeAlias = Literal[4, 6]
FAMILIES: tuple[Family, Family] = (4, 6)
IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network
Json: TypeAlias = Any
"""What a JSON decoder returns: dict, list, str, int, float, bool or None."""

LEASE_TTL_S = 86400
"""Life of a lease key in seconds, as every flannel node expects it."""


@dataclass(frozen=True, slots=True)
class Subnets:
    """The subnet a lease is about: one network per family in use, at least one.

    Two leases are about the same subnet when both members are equal.
    """

    v4: IPv4Network | None = None
    v6: IPv6Network | None = None
    _number: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Leases are looked up by it in thousands: ipaddress hashes slowly, and the number is there already.
        network = self.v4 or self.v6
        object.__setattr__(self, "_number", int(network.network_address) if network is not None else 0)

    def of(self, family: Family) -> IPNetwork | None:
        """Return the network of one family, None if the lease has none."""
        return self.v4 if family == 4 else self.v6

    def __hash__(self) -> int:
        return hash(self._number)

    def __str__(self) -> str:
        return " and ".join(str(n) for n in (self.v4, self.v6) if n is not None)


@dataclass(frozen=True, slots=True)
class LeaseAttrs:
    """What a node tells its peers.

    ``backend_data`` and ``backend_v6_data`` are decoded JSON of the backend's
    own shape, None when absent. ``backend_type`` is empty for udp and alloc.
    """

    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None
    backend_type: str = ""
    backend_data: Json = None
    backend_v6_data: Json = None

    def public(self, family: Family) -> IPAddress | None:
        """Return the announced address of one family."""
        return self.public_ip if family == 4 else self.public_ipv6

    def data(self, family: Family) -> Json:
        """Return the backend's data of one family."""
        return self.backend_data if family == 4 else self.backend_v6_data


@dataclass(frozen=True, slots=True)
class Lease:
    """A subnet and the node that holds it, as read from the datastore.

    ``key`` is the datastore's name of the entry, for messages.
    ``lease_id`` is the store's expiry handle, 0 for a reservation (no expiry).
    ``revision`` orders writes: the store's modification revision.
    """

    subnets: Subnets
    attrs: LeaseAttrs
    key: str = ""
    lease_id: int = 0
    revision: int = 0

    @property
    def reserved(self) -> bool:
        """Whether the entry never expires."""
        return self.lease_id == 0


@dataclass(frozen=True, slots=True)
class Pool:
    """Where subnets of one family come from. Lengths are prefix lengths in bits.

    ``first`` and ``last`` are whole subnets of ``subnet_len``, both usable.
    """

    network: IPNetwork
    subnet_len: int
    first: IPNetwork
    last: IPNetwork

    @property
    def size(self) -> int:
        """Return how many subnets there are."""
        step = 1 << (self.network.max_prefixlen - self.subnet_len)
        return (int(self.last.network_address) - int(self.first.network_address)) // step + 1

    def holds(self, subnet: IPNetwork | None) -> bool:
        """Whether the subnet could have been allocated from this pool."""
        return (
            subnet is not None
            and subnet.version == self.network.version
            and subnet.prefixlen == self.subnet_len
            and int(self.first.network_address) <= int(subnet.network_address) <= int(self.last.network_address)
        )


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """The ``Backend`` object: its lower-cased type and all its members, keys as written."""

    type: str
    options: Mapping[str, Json] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The cluster's network config. A family is enabled exactly if it has a pool.

    ``warnings`` are for people: unknown keys and the like, one sentence each.
    """

    ipv4: Pool | None
    ipv6: Pool | None
    backend: BackendConfig
    enable_nftables: bool = False
    warnings: tuple[str, ...] = ()

    def pool(self, family: Family) -> Pool | None:
        """Return the pool of one family, None if the family is off."""
        return self.ipv4 if family == 4 else self.ipv6

    @property
    def families(self) -> tuple[Family, ...]:
        """Return the enabled families, IPv4 first."""
        return tuple(f for f in FAMILIES if self.pool(f) is not None)
