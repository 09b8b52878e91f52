"""Next hop of a destination: address ranges that do not overlap, in ascending order. Pure."""

from __future__ import annotations

import struct
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from subnet.model import Family, IPAddress, IPNetwork

_Network = TypeVar("_Network", bound=IPNetwork)

REMEMBERED = 4096
_PACKED = struct.Struct("=III")


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses ``first`` to ``last``, both included, go to ``hop``. All are numbers, of 32 or 128 bits."""

    first: int
    last: int
    hop: int


def ranges(routes: Mapping[_Network, IPAddress]) -> tuple[Range, ...]:
    """Return the ranges that say the same as the routes, which are of one family. The longest prefix wins."""
    done: list[Range] = []
    # Prefixes are nested or disjoint: the stack holds those around the present address, innermost last.
    around: list[Range] = []
    at = 0
    for network in sorted(routes, key=lambda n: (int(n.network_address), n.prefixlen)):
        first, last = int(network.network_address), int(network.broadcast_address)
        at = _leave(around, done, at, first)
        if around and at < first:
            done.append(Range(at, first - 1, around[-1].hop))
        around.append(Range(first, last, int(routes[network])))
        at = first
    _leave(around, done, at, 1 << 128)
    return tuple(done)


def _leave(around: list[Range], done: list[Range], at: int, until: int) -> int:
    """Close the prefixes that end before ``until``; return the first address not yet dealt with."""
    while around and around[-1].last < until:
        inner = around.pop()
        if at <= inner.last:
            done.append(Range(at, inner.last, inner.hop))
            at = inner.last + 1
    return at


def pack(table: Sequence[Range], version: Family = 4) -> bytes:
    """Return the ranges as the native pump takes them.

    Three each: 32-bit numbers in native order, or IPv6 addresses as on the wire.
    """
    if version == 4:
        return b"".join(_PACKED.pack(r.first, r.last, r.hop) for r in table)
    return b"".join(number.to_bytes(16, "big") for r in table for number in (r.first, r.last, r.hop))


def pack_peers(peers: Iterable[int], version: Family = 4) -> bytes:
    """Return addresses as the native pump takes them: in ascending order, each as in ``pack``."""
    order: Literal["little", "big"] = sys.byteorder if version == 4 else "big"
    return b"".join(peer.to_bytes(4 if version == 4 else 16, order) for peer in sorted(peers))


class Table:
    """Ranges made ready for look-ups; remembers the latest answers."""

    def __init__(self, table: Sequence[Range] = ()) -> None:
        self._firsts = [r.first for r in table]
        self._lasts = [r.last for r in table]
        self._hops = [r.hop for r in table]
        self._known: dict[int, int] = {}

    def hop(self, destination: int) -> int:
        """Return the next hop, 0 if there is no route."""
        known = self._known.get(destination)
        if known is None:
            at = bisect_right(self._firsts, destination) - 1
            known = self._hops[at] if at >= 0 and destination <= self._lasts[at] else 0
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[destination] = known
        return known
