"""Which subnet a node should hold, given every lease there is. Pure.

Source: upstream pkg/subnet/etcd/local_manager.go, tryAcquireLease and
allocateSubnet; unlike upstream it looks at all of the node's keys, at both
families, and keeps one family's subnet when the other one changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from subnet.errors import NoFreeSubnet
from subnet.iptext import as_subnets, network_at, span_of
from subnet.manager import LeaseRequest
from subnet.model import FAMILIES, Family, IPNetwork, Lease, NetworkConfig, Pool, Subnets

CANDIDATES = 100
"""How many free subnets are gathered before one is picked."""

Pick: TypeAlias = Callable[[Sequence[IPNetwork]], IPNetwork]
"""Chooses one of at least one subnet; random.choice in the daemon, so that nodes rarely collide."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Keep ``lease``'s key and its expiry or lack of one, rewrite its value, then delete ``drop``."""

    lease: Lease
    subnets: Subnets
    drop: tuple[Lease, ...] = ()


@dataclass(frozen=True, slots=True)
class Create:
    """Create a key for ``subnets`` and delete ``drop``.

    ``reserved``: a kept half comes from a reservation, so the new key must not expire either.
    """

    subnets: Subnets
    drop: tuple[Lease, ...] = ()
    reserved: bool = False

    @property
    def replaces(self) -> tuple[Lease, ...]:
        """Return those of ``drop`` to delete in the creating transaction, before the put.

        They overlap the new subnets; seeing both keys at once crashes Go nodes.
        The rest of ``drop`` goes once the new key is held.
        """
        return tuple(lease for lease in self.drop if _overlap(lease.subnets, self.subnets))


Plan: TypeAlias = Reuse | Create


def plan(request: LeaseRequest, leases: Sequence[Lease], pick: Pick) -> Plan:
    """Decide how the node gets its lease. ``leases`` are all that exist. Raises NoFreeSubnet.

    Of the node's own fitting keys the one in ``request.previous`` is kept,
    else a reservation, else the first. Without one, every family keeps the
    subnet that an own key or ``previous`` has for it, as long as nobody else
    holds it; what is missing is picked afresh.
    """
    own = sorted((lease for lease in leases if _is_own(lease, request)), key=lambda lease: _rank(lease, request))
    for lease in own:
        if _fits(lease.subnets, request.config):
            return Reuse(lease, lease.subnets, tuple(other for other in own if other is not lease))
    return _create(request, own, [lease for lease in leases if lease not in own], pick)


def choose_fresh(pool: Pool, taken: Iterable[IPNetwork], pick: Pick) -> IPNetwork | None:
    """Pick one of the first CANDIDATES subnets that overlap nothing taken; None if there are none."""
    base, step = int(pool.first.network_address), pool.first.num_addresses
    free: list[int] = []
    index = 0
    end = (pool.size, pool.size)
    for low, high in [*sorted(_occupied(pool, taken)), end]:
        free.extend(range(index, min(low, index + CANDIDATES - len(free))))
        if len(free) >= CANDIDATES:
            break
        index = max(index, high + 1)
    if not free:
        return None
    return pick([network_at(base + i * step, pool.subnet_len, pool.network.version) for i in free])


def _create(request: LeaseRequest, own: Sequence[Lease], foreign: Sequence[Lease], pick: Pick) -> Create:
    sources = [_Source(lease.subnets, lease.reserved) for lease in own]
    if request.previous is not None and not any(_overlap(lease.subnets, request.previous) for lease in foreign):
        sources.append(_Source(request.previous))
    chosen: list[IPNetwork] = []
    reserved = False
    for family in FAMILIES:
        pool = request.config.pool(family)
        if pool is None:
            continue
        taken = _networks(foreign, family)
        for source in sources:
            subnet = source.subnets.of(family)
            if subnet is not None and pool.holds(subnet) and not any(_meet(subnet, other) for other in taken):
                chosen.append(subnet)
                reserved |= source.reserved
                break
        else:
            wish = _twin(pool, request.config, chosen[0]) if chosen else None
            chosen.append(_fresh(pool, taken, _networks(own, family), _preferring(wish, pick)))
    return Create(as_subnets(chosen), tuple(own), reserved)


def _twin(pool: Pool, config: NetworkConfig, subnet: IPNetwork) -> IPNetwork | None:
    """Return the subnet that has the number in ``pool`` which another family's subnet has in its own.

    A key names both families' subnets. Nodes that start at once write different keys, which would not keep them
    from taking one subnet of the second family if that was drawn by itself.
    """
    other = config.pool(4 if subnet.version == 4 else 6)
    if other is None or not other.holds(subnet):
        return None
    distance = int(subnet.network_address) - int(other.first.network_address)
    number = distance >> subnet.max_prefixlen - subnet.prefixlen
    if number >= pool.size:
        return None
    at = int(pool.first.network_address) + (number << pool.first.max_prefixlen - pool.subnet_len)
    return network_at(at, pool.subnet_len, pool.network.version)


def _preferring(wish: IPNetwork | None, pick: Pick) -> Pick:
    return lambda free: wish if wish is not None and wish in free else pick(free)


@dataclass(frozen=True, slots=True)
class _Source:
    """Subnets that the node may keep, and whether they are reserved for it."""

    subnets: Subnets
    reserved: bool = False


def _fresh(pool: Pool, taken: Sequence[IPNetwork], dropped: Sequence[IPNetwork], pick: Pick) -> IPNetwork:
    # What the node is about to give up is avoided, but must not keep it from starting.
    subnet = choose_fresh(pool, [*taken, *dropped], pick) or choose_fresh(pool, taken, pick)
    if subnet is None:
        used = sum(1 for _ in _occupied(pool, taken))
        raise NoFreeSubnet(
            f"no free subnet in {pool.network}: {used} leases take all {pool.size} subnets "
            f"from {pool.first} to {pool.last}"
        )
    return subnet


def _occupied(pool: Pool, taken: Iterable[IPNetwork]) -> Iterator[tuple[int, int]]:
    """Yield, for each network that overlaps the pool, its first and last subnet by index."""
    base, step, size = int(pool.first.network_address), pool.first.num_addresses, pool.size
    for network in taken:
        if network.version == pool.network.version:
            first, last = span_of(network)
            low, high = (first - base) // step, (last - base) // step
            if high >= 0 and low < size:
                yield low, high


def _networks(leases: Iterable[Lease], family: Family) -> list[IPNetwork]:
    return [network for lease in leases if (network := lease.subnets.of(family)) is not None]


def _fits(subnets: Subnets, config: NetworkConfig) -> bool:
    halves = ((config.pool(family), subnets.of(family)) for family in FAMILIES)
    return all(subnet is None if pool is None else pool.holds(subnet) for pool, subnet in halves)


def _is_own(lease: Lease, request: LeaseRequest) -> bool:
    return _announces_us(lease, request) or _is_recalled(lease, request)


def _announces_us(lease: Lease, request: LeaseRequest) -> bool:
    """Whether the public address is ours. IPv6-only keys, and all keys for an IPv6-only node, go by IPv6."""
    ours, theirs = request.attrs, lease.attrs
    if request.config.ipv4 is not None and theirs.public_ip is not None:
        return theirs.public_ip == ours.public_ip
    return theirs.public_ipv6 is not None and theirs.public_ipv6 == ours.public_ipv6


def _is_recalled(lease: Lease, request: LeaseRequest) -> bool:
    """Whether this host held the subnet before, under another of its addresses."""
    if not _shared(lease.subnets, request.previous):
        return False
    return not request.local_addresses.isdisjoint({lease.attrs.public_ip, lease.attrs.public_ipv6})


def _rank(lease: Lease, request: LeaseRequest) -> tuple[int, bool, str]:
    return -_shared(lease.subnets, request.previous), not lease.reserved, lease.key


def _shared(one: Subnets, other: Subnets | None) -> int:
    """Return how alike two pairs are: 0 nothing in common, 1 one family's network, 2 everything."""
    if other is None:
        return 0
    if one == other:
        return 2
    return int(any(one.of(f) is not None and one.of(f) == other.of(f) for f in FAMILIES))


def _overlap(one: Subnets, other: Subnets) -> bool:
    pairs = ((one.of(family), other.of(family)) for family in FAMILIES)
    return any(a is not None and b is not None and _meet(a, b) for a, b in pairs)


def _meet(one: IPNetwork, other: IPNetwork) -> bool:
    """Whether two networks overlap."""
    if one.version != other.version:
        return False
    (first, last), (start, end) = span_of(one), span_of(other)
    return first <= end and start <= last
