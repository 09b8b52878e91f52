"""Peers whose lease has gone, and may be back at once."""

from __future__ import annotations

from subnet.model import FAMILIES, IPAddress, IPNetwork, Lease, Subnets

GRACE_S = 0.5
"""How long a peer outlives its lease.

A node whose key was deleted under it writes the key again as soon as its watch
tells it, which takes some tens of milliseconds: what others send to it need not
be lost meanwhile. Whoever waits for the entries of a node that left does not
notice half a second.
"""
RETURN_S = 15.0
"""The same where the store began anew, without its data or with older ones: in this time each node that lives is
connected again, be it one of the last, and has put its record back."""


class Parting:
    """The peers in their grace. Pure: the caller brings the time, in seconds."""

    def __init__(self) -> None:
        self._until: dict[Subnets, tuple[float, frozenset[IPAddress | IPNetwork]]] = {}
        self._at: dict[IPAddress | IPNetwork, Subnets] = {}
        """Who announced an address or held a network."""

    def __contains__(self, subnets: object) -> bool:
        return subnets in self._until

    def begin(self, lease: Lease, now: float, grace_s: float = GRACE_S) -> None:
        """The lease has gone."""
        self._end(lease.subnets)
        marks = _marks(lease)
        self._until[lease.subnets] = now + grace_s, marks
        self._at.update(dict.fromkeys(marks, lease.subnets))

    def came(self, lease: Lease) -> tuple[Subnets, ...]:
        """A lease was written. Return those that it takes the place of: of the same node, or with a network of its own.

        Their grace ends, as does that of the lease itself: it is back.
        """
        if not self._until:
            return ()
        self._end(lease.subnets)
        replaced = tuple({self._at[mark] for mark in _marks(lease) if mark in self._at})
        for subnets in replaced:
            self._end(subnets)
        return replaced

    def over(self, now: float) -> tuple[Subnets, ...]:
        """Return those whose grace is over; each is returned once."""
        ended = tuple(subnets for subnets, (until, _) in self._until.items() if until <= now)
        for subnets in ended:
            self._end(subnets)
        return ended

    def clear(self) -> None:
        """Forget all."""
        self._until.clear()
        self._at.clear()

    @property
    def next_at(self) -> float | None:
        """When the next grace ends."""
        return min((until for until, _ in self._until.values()), default=None)

    def _end(self, subnets: Subnets) -> None:
        _, marks = self._until.pop(subnets, (0.0, frozenset()))
        for mark in marks:
            if self._at.get(mark) == subnets:
                del self._at[mark]


def _marks(lease: Lease) -> frozenset[IPAddress | IPNetwork]:
    """Return what belongs to one node at a time: the addresses that it announces, its networks."""
    found = (*map(lease.attrs.public, FAMILIES), lease.subnets.v4, lease.subnets.v6)
    return frozenset(mark for mark in found if mark is not None)
