"""The leases known from a snapshot and the changes after it, and which of them may become peers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network
from itertools import pairwise

from subnet.iptext import as_subnets, span_of
from subnet.manager import LeasesChanged, LeasesListed
from subnet.model import FAMILIES, Family, IPAddress, IPNetwork, Lease, NetworkConfig, Pool, Subnets

LONGEST_PEER_V4, LONGEST_PEER_V6 = 30, 126
"""Longest plausible subnets of a node, as prefix lengths: the longest that a config allows."""


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

    def listed(self, event: LeasesListed) -> bool:
        """Replace everything. Return whether the revision is lower than before: the store began anew."""
        anew = event.revision < self._revision
        self._leases = {lease.subnets: lease for lease in event.leases}
        self._revision = event.revision
        self._sorted = None
        self.synced, self.complete = True, event.complete
        return anew

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, subnets: object) -> bool:
        return subnets in self._leases

    def changed(self, event: LeasesChanged) -> bool:
        """Apply changes in their order; those that the last list already holds are passed over.

        Returns whether they were applied.
        """
        # A batch of the list's own revision is applied: its outcome is in the list, so it changes nothing.
        if not self.synced or event.revision < self._revision:
            return False
        for change in event.changes:
            if isinstance(change, Lease):
                self._leases[change.subnets] = change
            else:
                self._leases.pop(change, None)
        self._revision = event.revision
        self._sorted = None
        return True

    def __iter__(self) -> Iterator[Lease]:
        """Return the leases in any order."""
        return iter(self._leases.values())

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


def checks_for(
    config: NetworkConfig,
    own: Subnets | None,
    own_public: frozenset[IPAddress],
    underlay: Collection[IPNetwork],
) -> tuple[Checks, ...]:
    """Return the checks of every enabled family. See ``admit`` for the parameters."""
    found: list[Checks] = []
    for family in config.families:
        pool = config.pool(family)
        if pool is not None:
            found.append(Checks(family, pool, None if own is None else own.of(family), own_public, underlay))
    return tuple(found)


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
    (an underlay wider than the pod network is fine). Of two peers that overlap,
    the one written first (lower revision) is admitted.
    """
    others = sorted((lease for lease in leases if lease.subnets != own), key=_order)
    verdicts: list[dict[Family, IPNetwork | str]] = [{} for _ in others]
    for checks in checks_for(config, own, own_public, underlay):
        for index, verdict in checks.judge(others):
            verdicts[index][checks.family] = verdict
    judged = [conclude(lease, found) for lease, found in zip(others, verdicts, strict=True)]
    return Admission(
        tuple(peer for peer, _ in judged if peer is not None),
        tuple((lease, why) for lease, (_, why) in zip(others, judged, strict=True) if why),
    )


def conclude(lease: Lease, verdicts: Mapping[Family, IPNetwork | str]) -> tuple[Lease | None, str]:
    """Return the peer that is left of a lease after its families were judged, and what was refused."""
    good = [verdict for verdict in verdicts.values() if not isinstance(verdict, str)]
    reasons = [verdict for verdict in verdicts.values() if isinstance(verdict, str)]
    if not verdicts:
        reasons.append(f"{lease.subnets}: has no subnet of an enabled address family")
    if not good:
        return None, "; ".join(reasons)
    subnets = as_subnets(good)
    return lease if subnets == lease.subnets else replace(lease, subnets=subnets), "; ".join(reasons)


_NO_HOST: Mapping[Family, tuple[IPNetwork, ...]] = {
    4: tuple(map(IPv4Network, ("0.0.0.0/32", "127.0.0.0/8", "224.0.0.0/4", "255.255.255.255/32"))),
    6: tuple(map(IPv6Network, ("::/128", "::1/128", "ff00::/8"))),
}
"""Unspecified, loopback, multicast, broadcast: addresses that no peer can have."""


class Checks:
    """The checks of one address family.

    Networks are compared as ranges of integers: thousands of leases are judged
    at a start, and ``ipaddress`` takes its time.
    """

    def __init__(
        self,
        family: Family,
        pool: Pool,
        own: IPNetwork | None,
        own_public: frozenset[IPAddress],
        underlay: Iterable[IPNetwork],
    ) -> None:
        self.family, self.pool = family, pool
        self._own = own
        self._own_public = frozenset(int(address) for address in own_public if address.version == family)
        self._underlay = [(network, span_of(network)) for network in underlay if network.version == family]
        self._network_range = span_of(pool.network)
        self._own_range = None if own is None else span_of(own)
        self._no_host = [span_of(network) for network in _NO_HOST[family]]

    def alone(self, lease: Lease) -> str:
        """Return what is wrong with a lease whatever the others say; empty if nothing is."""
        subnet = lease.subnets.of(self.family)
        if subnet is None:
            return ""
        return self._against_subnet(subnet) or self._against_public(lease.attrs.public(self.family))

    def apart(self, leases: Sequence[Lease]) -> bool:
        """Whether no two of these leases overlap, whatever else is wrong with them."""
        ranges = sorted(span_of(subnet) for lease in leases if (subnet := lease.subnets.of(self.family)) is not None)
        return all(left[1] < right[0] for left, right in pairwise(ranges))

    def judge(self, leases: Sequence[Lease]) -> Iterator[tuple[int, IPNetwork | str]]:
        """Yield, per index of a lease with a subnet of this family, that subnet or the reason against it."""
        by_age = sorted(enumerate(leases), key=lambda item: (item[1].revision, item[1].key, item[0]))
        taken = _Taken()
        for index, lease in by_age:
            subnet = lease.subnets.of(self.family)
            if subnet is None:
                continue
            reason = self.alone(lease)
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
        first, last = span_of(subnet)
        if not self._network_range[0] <= first <= last <= self._network_range[1]:
            return f"is not inside the pod network {network}"
        if not shortest <= subnet.prefixlen <= longest:
            return f"has an implausible length, a node's is {shortest} to {longest} bits"
        if self._own_range is not None and first <= self._own_range[1] and self._own_range[0] <= last:
            return f"overlaps our own subnet {self._own}"
        for link, (start, end) in self._underlay:
            if first <= start and end <= last:
                return f"covers {link} of the external interface"
        return ""

    def _against_public(self, address: IPAddress | None) -> str:
        if address is None:
            return f"its node announces no public IPv{self.family} address"
        value = int(address)
        for first, last in self._no_host:
            if first <= value <= last:
                return f"the public address {address} is not that of a host"
        if value in self._own_public:
            return f"the public address {address} is our own"
        if self._network_range[0] <= value <= self._network_range[1]:
            return f"the public address {address} is inside the pod network {self.pool.network}"
        return ""


@dataclass(slots=True)
class _Taken:
    """Disjoint address ranges in ascending order, each with its holder."""

    _starts: list[int] = field(default_factory=list)
    _holders: list[tuple[int, Lease]] = field(default_factory=list)

    def add(self, network: IPNetwork, holder: Lease) -> Lease | None:
        """Take the network's range; if it is taken in part, change nothing and return a holder."""
        first, last = span_of(network)
        at = bisect_right(self._starts, last)
        if at > 0 and self._holders[at - 1][0] >= first:
            return self._holders[at - 1][1]
        self._starts.insert(at, first)
        self._holders.insert(at, (last, holder))
        return None


def _order(lease: Lease) -> tuple[int, ...]:
    order: list[int] = []
    for family in FAMILIES:
        network = lease.subnets.of(family)
        order += (-1, 0) if network is None else (int(network.network_address), network.prefixlen)
    return tuple(order)
