"""Admission kept up to date: what ``leaseset.admit`` says of all leases, at the cost of a change.

Subnets are blocks that either contain one another or are apart. So a change
concerns only the leases inside the outermost block around it; in a healthy
cluster that is the one lease itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from subnet.leaseset import Checks, conclude
from subnet.model import Family, IPNetwork, Lease, Subnets


class _Blocks:
    """The leases of one family by the block they take, those fit for a peer by themselves."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._width = checks.pool.network.max_prefixlen
        self._at: dict[tuple[int, int], dict[Subnets, Lease]] = {}
        self._order: list[tuple[int, int]] = []
        """Blocks in use: first address and prefix length."""

    def load(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            block = self._block(lease)
            if block is not None:
                self._at.setdefault(block, {})[lease.subnets] = lease
        self._order = sorted(self._at)

    def put(self, lease: Lease) -> None:
        block = self._block(lease)
        if block is None:
            return
        if block not in self._at:
            self._at[block] = {}
            insort(self._order, block)
        self._at[block][lease.subnets] = lease

    def remove(self, lease: Lease) -> None:
        block = self._block(lease)
        if block is not None and self._at.get(block, {}).pop(lease.subnets, None) is not None and not self._at[block]:
            del self._at[block]
            del self._order[bisect_left(self._order, block)]

    def around(self, lease: Lease) -> list[Lease]:
        """Return the leases whose fate may hang on this one's, itself included if it is fit."""
        block = self._block(lease)
        if block is None:
            return []
        first, length = self._outermost(block)
        end = first + (1 << (self._width - length))
        found: list[Lease] = []
        at = bisect_left(self._order, (first, 0))
        while at < len(self._order) and self._order[at][0] < end:
            found += self._at[self._order[at]].values()
            at += 1
        return found

    def _block(self, lease: Lease) -> tuple[int, int] | None:
        subnet = lease.subnets.of(self._checks.family)
        if subnet is None or self._checks.alone(lease):
            return None
        return int(subnet.network_address), subnet.prefixlen

    def _outermost(self, block: tuple[int, int]) -> tuple[int, int]:
        first, length = block
        for shorter in range(self._checks.pool.network.prefixlen, length):
            outer = first >> (self._width - shorter) << (self._width - shorter), shorter
            if outer in self._at:
                return outer
        return block


class PeerSet:
    """Leases in, peers and refusals out; ``take`` returns what changed since it was last called."""

    def __init__(self, checks: Sequence[Checks], own: Subnets | None) -> None:
        self._checks, self._own = checks, own
        self._leases: dict[Subnets, Lease] = {}
        self._blocks: dict[Family, _Blocks] = {c.family: _Blocks(c) for c in checks}
        self._verdicts: dict[Subnets, dict[Family, IPNetwork | str]] = {}
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
        self._verdicts = {subnets: {} for subnets in self._leases}
        everyone = tuple(self._leases.values())
        for checks in self._checks:
            blocks = self._blocks[checks.family] = _Blocks(checks)
            blocks.load(everyone)
            self._judge(checks, everyone)

    def lease(self, subnets: Subnets) -> Lease | None:
        """Return the lease of these subnets, whether a peer's or not; None if there is none but our own."""
        return self._leases.get(subnets)

    def put(self, lease: Lease) -> None:
        """Add a lease, or replace the one of the same subnets."""
        if lease.subnets == self._own:
            return
        self.remove(lease.subnets)
        self._leases[lease.subnets] = lease
        self._verdicts[lease.subnets] = {}
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
        self._verdicts.pop(subnets, None)
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
            peer, why = (None, "") if lease is None else conclude(lease, self._verdicts[subnets])
            if lease is not None and why:
                self.refused[subnets] = lease, why
            else:
                self.refused.pop(subnets, None)
            if peer == self.peers.get(subnets):
                continue
            changes[subnets] = peer
            if peer is None:
                del self.peers[subnets]
            else:
                self.peers[subnets] = peer
        self._touched.clear()
        return changes

    def _judge(self, checks: Checks, group: Sequence[Lease]) -> None:
        for index, verdict in checks.judge(group):
            subnets = group[index].subnets
            if self._verdicts[subnets].get(checks.family) != verdict:
                self._verdicts[subnets][checks.family] = verdict
                self._touched.add(subnets)
