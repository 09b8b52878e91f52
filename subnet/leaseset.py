"""The leases known from a snapshot and the changes after it, and which of them may become peers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address

from subnet.iptext import as_subnets
from subnet.manager import LeasesChanged, LeasesListed
from subnet.model import FAMILIES, Family, IPAddress, IPNetwork, Lease, NetworkConfig, Pool, Subnets

LONGEST_PEER_V4, LONGEST_PEER_V6 = 30, 126
"""Longest plausible subnets of a node, as prefix lengths: the longest that a config allows."""
_BROADCAST = IPv4Address("255.255.255.255")


class LeaseSet:
    """All leases, as of the last event. Not thread-safe: it belongs to the thread that applies events.

    Source: list and watch as in etcd's API guarantees; a later list replaces
    everything, and changes from before it are stale.
    """

    def __init__(self) -> None:
        self._leases: dict[Subnets, Lease] = {}
        self._revision = 0
        self._sorted: tuple[Lease, ...] | None = None
        self.synced = False
        """Whether a list has been seen."""
        self.complete = False
        """Whether it came from the datastore; before that the set says nothing about what is gone."""

    def listed(self, event: LeasesListed) -> None:
        """Replace everything. A lower revision than before means that the store began anew."""
        self._leases = {lease.subnets: lease for lease in event.leases}
        self._revision = event.revision
        self._sorted = None
        self.synced, self.complete = True, event.complete

    def changed(self, event: LeasesChanged) -> None:
        """Apply changes in their order; those that the last list already holds are passed over."""
        # A batch of the list's own revision is applied: its outcome is in the list, so it changes nothing.
        if not self.synced or event.revision < self._revision:
            return
        for change in event.changes:
            if isinstance(change, Lease):
                self._leases[change.subnets] = change
            else:
                self._leases.pop(change, None)
        self._revision = event.revision
        self._sorted = None

    def all(self) -> tuple[Lease, ...]:
        """Return the leases in the order of their subnets."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self._leases.values(), key=_order))
        return self._sorted


@dataclass(frozen=True, slots=True)
class Admission:
    """What becomes of the other nodes' leases, both in the order of their subnets.

    ``peers`` carry only subnets that passed every check, of enabled families.
    ``rejected`` tells for each lease what was refused and why; a lease that
    fails in one family only is in both.
    """

    peers: tuple[Lease, ...]
    rejected: tuple[tuple[Lease, str], ...]


def admit(
    leases: Iterable[Lease],
    *,
    own: Subnets | None,
    own_public: frozenset[IPAddress],
    config: NetworkConfig,
    underlay: Collection[IPNetwork],
) -> Admission:
    """Judge each lease before the kernel is told of it. Pure, independent of the leases' order.

    ``own_public`` are the addresses that this node announces, ``underlay`` the
    addresses and networks of its external interface, which no peer may cover
    (an underlay wider than the pod network is fine). Of two peers that overlap, the one
    written first (lower revision) is admitted.
    """
    others = sorted((lease for lease in leases if lease.subnets != own), key=_order)
    good: list[list[IPNetwork]] = [[] for _ in others]
    reasons: list[list[str]] = [[] for _ in others]
    for family in config.families:
        pool = config.pool(family)
        if pool is not None:
            checks = _Checks(family, pool, None if own is None else own.of(family), own_public, tuple(underlay))
            for index, verdict in checks.judge(others):
                if isinstance(verdict, str):
                    reasons[index].append(verdict)
                else:
                    good[index].append(verdict)
    for index, lease in enumerate(others):
        if not good[index] and not reasons[index]:
            reasons[index].append(f"{lease.subnets}: has no subnet of an enabled address family")
    return Admission(
        tuple(replace(lease, subnets=as_subnets(nets)) for lease, nets in zip(others, good, strict=True) if nets),
        tuple((lease, "; ".join(why)) for lease, why in zip(others, reasons, strict=True) if why),
    )


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks of one address family."""

    family: Family
    pool: Pool
    own: IPNetwork | None
    own_public: frozenset[IPAddress]
    underlay: tuple[IPNetwork, ...]

    def judge(self, leases: Sequence[Lease]) -> Iterator[tuple[int, IPNetwork | str]]:
        """Yield, per index of a lease with a subnet of this family, that subnet or the reason against it."""
        by_age = sorted(enumerate(leases), key=lambda item: (item[1].revision, item[1].key, item[0]))
        taken = _Taken()
        for index, lease in by_age:
            subnet = lease.subnets.of(self.family)
            if subnet is None:
                continue
            reason = self._against_subnet(subnet) or self._against_public(lease.attrs.public(self.family))
            if not reason and (holder := taken.add(subnet, lease)) is not None:
                reason = (
                    f"overlaps {holder.subnets.of(self.family)} of {holder.attrs.public(self.family)}, an older lease"
                )
            yield index, f"{subnet}: {reason}" if reason else subnet

    def _against_subnet(self, subnet: IPNetwork) -> str:
        network = self.pool.network
        # Where subnets are assigned from outside, the pool is the whole network and any part of it is plausible.
        shortest = min(network.prefixlen + 2, self.pool.subnet_len)
        longest = LONGEST_PEER_V4 if self.family == 4 else LONGEST_PEER_V6
        if not _inside(subnet, network):
            return f"is not inside the pod network {network}"
        if not shortest <= subnet.prefixlen <= longest:
            return f"has an implausible length, a node's is {shortest} to {longest} bits"
        if self.own is not None and subnet.overlaps(self.own):
            return f"overlaps our own subnet {self.own}"
        for link in self.underlay:
            if link.version == subnet.version and link.subnet_of(subnet):  # type: ignore[arg-type]
                return f"covers {link} of the external interface"
        return ""

    def _against_public(self, address: IPAddress | None) -> str:
        if address is None:
            return f"its node announces no public IPv{self.family} address"
        if address.is_unspecified or address.is_loopback or address.is_multicast or address == _BROADCAST:
            return f"the public address {address} is not that of a host"
        if address in self.own_public:
            return f"the public address {address} is our own"
        if address in self.pool.network:
            return f"the public address {address} is inside the pod network {self.pool.network}"
        return ""


@dataclass(slots=True)
class _Taken:
    """Disjoint address ranges in ascending order, each with its holder."""

    _starts: list[int] = field(default_factory=list)
    _holders: list[tuple[int, Lease]] = field(default_factory=list)

    def add(self, network: IPNetwork, holder: Lease) -> Lease | None:
        """Take the network's range; if it is taken in part, change nothing and return a holder."""
        start = int(network.network_address)
        end = start + network.num_addresses
        at = bisect_right(self._starts, end - 1)
        if at > 0 and self._holders[at - 1][0] > start:
            return self._holders[at - 1][1]
        self._starts.insert(at, start)
        self._holders.insert(at, (end, holder))
        return None


def _inside(subnet: IPNetwork, network: IPNetwork) -> bool:
    return subnet.prefixlen >= network.prefixlen and subnet.network_address in network


def _order(lease: Lease) -> tuple[int, ...]:
    order: list[int] = []
    for family in FAMILIES:
        network = lease.subnets.of(family)
        order += (-1, 0) if network is None else (int(network.network_address), network.prefixlen)
    return tuple(order)
