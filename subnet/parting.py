"""Peers whose lease has gone, and may be back at once."""

from __future__ import annotations

from subnet.model import FAMILIES, IPAddress, Lease, Subnets

GRACE_S = 0.5
"""How long a peer outlives its lease.

A node whose key was deleted under it writes the key again as soon as its watch
tells it, which takes some tens of milliseconds: what others send to it need not
be lost meanwhile. Whoever waits for the entries of a node that left does not
notice half a second.
"""


class Parting:
    """The peers in their grace. Pure: the caller brings the time, in seconds."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._until: dict[Subnets, tuple[float, frozenset[IPAddress]]] = {}
        """In the order of their ends, since all have the same grace."""
        self._at: dict[IPAddress, Subnets] = {}

    def __contains__(self, subnets: object) -> bool:
        return subnets in self._until

    def begin(self, lease: Lease, now: float) -> None:
        """The lease has gone."""
        self._end(lease.subnets)
        announced = _announced(lease)
        self._until[lease.subnets] = now + self._grace_s, announced
        self._at.update(dict.fromkeys(announced, lease.subnets))

    def came(self, lease: Lease) -> tuple[Subnets, ...]:
        """A lease was written. Return those that it takes the place of: other subnets of the same node.

        Their grace ends, as does that of the lease itself: it is back.
        """
        self._end(lease.subnets)
        replaced = tuple({self._at[address] for address in _announced(lease) if address in self._at})
        for subnets in replaced:
            self._end(subnets)
        return replaced

    def over(self, now: float) -> tuple[Subnets, ...]:
        """Return those whose grace is over; each is returned once."""
        ended: list[Subnets] = []
        for subnets, (until, _) in self._until.items():
            if until > now:
                break
            ended.append(subnets)
        for subnets in ended:
            self._end(subnets)
        return tuple(ended)

    def clear(self) -> None:
        """Forget all."""
        self._until.clear()
        self._at.clear()

    @property
    def next_at(self) -> float | None:
        """When the next grace ends."""
        return next((until for until, _ in self._until.values()), None)

    def _end(self, subnets: Subnets) -> None:
        _, announced = self._until.pop(subnets, (0.0, frozenset()))
        for address in announced:
            if self._at.get(address) == subnets:
                del self._at[address]


def _announced(lease: Lease) -> frozenset[IPAddress]:
    return frozenset(a for a in map(lease.attrs.public, FAMILIES) if a is not None)
