"""Admission kept up to date: what ``leaseset.admit`` says of all leases, at the cost of a change.

Subnets are blocks that either contain one another or are apart. So a change
concerns only the leases inside the outermost block around it; in a healthy
cluster that is the one lease itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from subnet.leaseset import Checks, conclude
from subnet.model import FAMILIES, Family, IPNetwork, Lease, Subnets

_LENGTH_BITS = 8
"""Room for a prefix length in the number of a block."""


class _Blocks:
    """The leases of one family by the block they take, those fit for a peer by themselves.

    A block is one number: first address and prefix length.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._width = checks.pool.network.max_prefixlen
        self._at: dict[int, tuple[Lease, ...] | Lease] = {}
        """One lease, as a rule."""
        self._order: list[int] = []
        """Blocks in use."""

    def load(self, leases: Iterable[Lease]) -> None:
        """Take leases that are fit, and whose blocks differ, in place of what was there."""
        found = {_block(subnet): lease for lease in leases if (subnet := lease.subnets.of(self._checks.family))}
        self._at.update(found)
        self._order = sorted(found)

    def put(self, lease: Lease) -> None:
        block = self._block(lease)
        if block is None:
            return
        held = self._leases(block)
        if not held:
            insort(self._order, block)
        self._at[block] = (*held, lease) if held else lease

    def remove(self, lease: Lease) -> None:
        block = self._block(lease)
        if block is None or block not in self._at:
            return
        rest = tuple(other for other in self._leases(block) if other.subnets != lease.subnets)
        if rest:
            self._at[block] = rest
        else:
            del self._at[block]
            del self._order[bisect_left(self._order, block)]

    def around(self, lease: Lease) -> list[Lease]:
        """Return the leases whose fate may hang on this one's, itself included if it is fit."""
        block = self._block(lease)
        if block is None:
            return []
        first, length = self._outermost(block)
        end = first + (1 << (self._width - length)) << _LENGTH_BITS
        found: list[Lease] = []
        at = bisect_left(self._order, first << _LENGTH_BITS)
        while at < len(self._order) and self._order[at] < end:
            found += self._leases(self._order[at])
            at += 1
        return found

    def _leases(self, block: int) -> tuple[Lease, ...]:
        held = self._at.get(block, ())
        return held if isinstance(held, tuple) else (held,)

    def _block(self, lease: Lease) -> int | None:
        subnet = lease.subnets.of(self._checks.family)
        return None if subnet is None or self._checks.alone(lease) else _block(subnet)

    def _outermost(self, block: int) -> tuple[int, int]:
        first, length = block >> _LENGTH_BITS, block & (1 << _LENGTH_BITS) - 1
        for shorter in range(self._checks.pool.network.prefixlen, length):
            outer = first >> (self._width - shorter) << (self._width - shorter)
            if outer << _LENGTH_BITS | shorter in self._at:
                return outer, shorter
        return first, length


def _block(subnet: IPNetwork) -> int:
    return int(subnet.network_address) << _LENGTH_BITS | subnet.prefixlen


class PeerSet:
    """Leases in, peers and refusals out; ``take`` returns what changed since it was last called."""

    def __init__(self, checks: Sequence[Checks], own: Subnets | None) -> None:
        self._checks, self._own = checks, own
        self._families = frozenset(c.family for c in checks)
        self._leases: dict[Subnets, Lease] = {}
        self._blocks: dict[Family, _Blocks] = {c.family: _Blocks(c) for c in checks}
        self._faults: dict[Subnets, dict[Family, str]] = {}
        """What is wrong with leases, of those with which something is."""
        self.peers: dict[Subnets, Lease] = {}
        """The admitted leases, as ``take`` told them, by their lease's subnets."""
        self._touched: set[Subnets] = set()
        self.refused: dict[Subnets, tuple[Lease, str]] = {}
        """Leases that are no peers, or not in every family, with the reason."""

    def load(self, leases: Iterable[Lease]) -> None:
        """Replace everything."""
        self._touched |= self._leases.keys()
        self._leases = {lease.subnets: lease for lease in leases if lease.subnets != self._own}
        self._touched |= self._leases.keys()
        self._faults = {}
        everyone = tuple(self._leases.values())
        for checks in self._checks:
            blocks = self._blocks[checks.family] = _Blocks(checks)
            fit = [lease for lease in everyone if not checks.alone(lease)]
            if len(fit) == len(everyone) and checks.apart(fit):
                blocks.load(fit)
                continue
            for lease in fit:
                blocks.put(lease)
            self._judge(checks, everyone)

    def lease(self, subnets: Subnets) -> Lease | None:
        """Return the lease of these subnets, None if it is not there."""
        return self._leases.get(subnets)

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases but our own, in any order."""
        return tuple(self._leases.values())

    def put(self, lease: Lease) -> None:
        """Add a lease, or replace the one of the same subnets."""
        if lease.subnets == self._own:
            return
        self.remove(lease.subnets)
        self._leases[lease.subnets] = lease
        self._touched.add(lease.subnets)
        for checks in self._checks:
            blocks = self._blocks[checks.family]
            blocks.put(lease)
            self._judge(checks, blocks.around(lease) or [lease])

    def remove(self, subnets: Subnets) -> None:
        """Remove a lease; one that is not there is fine."""
        lease = self._leases.pop(subnets, None)
        if lease is None:
            return
        self._faults.pop(subnets, None)
        self._touched.add(subnets)
        for checks in self._checks:
            blocks = self._blocks[checks.family]
            blocks.remove(lease)
            self._judge(checks, blocks.around(lease))

    def take(self) -> dict[Subnets, Lease | None]:
        """Return the peers that are new or different, None for those that are gone, by their lease's subnets."""
        changes: dict[Subnets, Lease | None] = {}
        for subnets in self._touched:
            lease = self._leases.get(subnets)
            peer, why = (None, "") if lease is None else self._admitted(lease)
            if lease is not None and why:
                self.refused[subnets] = lease, why
            else:
                self.refused.pop(subnets, None)
            known = self.peers.get(subnets)
            if peer is known or peer == known:
                continue
            changes[subnets] = peer
            if peer is None:
                del self.peers[subnets]
            else:
                self.peers[subnets] = peer
        self._touched.clear()
        return changes

    def _admitted(self, lease: Lease) -> tuple[Lease | None, str]:
        subnets, faults = lease.subnets, self._faults.get(lease.subnets, {})
        verdicts: dict[Family, IPNetwork | str] = {}
        for family in FAMILIES:
            subnet = subnets.of(family)
            if subnet is not None and family in self._families:
                verdicts[family] = faults.get(family, subnet)
            elif subnet is not None:
                faults = faults or {family: ""}
        return conclude(lease, verdicts) if faults else (lease, "")

    def _judge(self, checks: Checks, group: Sequence[Lease]) -> None:
        for index, verdict in checks.judge(group):
            subnets, fault = group[index].subnets, verdict if isinstance(verdict, str) else ""
            faults = self._faults.get(subnets, {})
            if faults.get(checks.family, "") == fault:
                continue
            self._touched.add(subnets)
            if fault:
                self._faults[subnets] = {**faults, checks.family: fault}
            else:
                del faults[checks.family]
                if not faults:
                    del self._faults[subnets]
