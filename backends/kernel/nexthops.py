"""Nexthop objects of our own: which stands for which gateway, and which routes use it. Pure.

A route with its gateway inside costs the kernel a comparison with every other
such route of its device (fib_create_info, net/ipv4/fib_semantics.c: all share
one hash bucket), ten thousand of them a second and a half. A route that names
a nexthop object does not. Source: linux/nexthop.h, ip-nexthop(8).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from backends.dataplane.packed import route_key
from backends.kernel.layout import columns
from backends.kernel.rtnl import (
    AF_INET,
    DUMP_FLAGS,
    NLM_F_CREATE,
    NLM_F_REQUEST,
    RT_SCOPE_NOWHERE,
    RT_TABLE_MAIN,
    RTA_DST,
    RTA_NH_ID,
    RTA_PRIORITY,
    RTM_DELROUTE,
    RTM_NEWROUTE,
    RTNH_F_ONLINK,
    Header,
    attribute,
    attributes,
    message,
    messages,
)

RTM_NEWNEXTHOP, RTM_DELNEXTHOP, RTM_GETNEXTHOP = 104, 105, 106
NHA_ID, NHA_OIF, NHA_GATEWAY = 1, 5, 6
PROTOCOL = 142
"""What nexthop objects of ours say who made them."""
FIRST_ID, LAST_ID = 1_420_000_000, 1_420_999_999
"""Numbers of ours; the kernel itself counts from 1."""

_NHMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")
_U32 = struct.Struct("=I")

Hop: TypeAlias = bytes
"""Index of the device, in the machine's order, and on-link gateway."""


def hop_of(index: int, gateway: bytes) -> Hop:
    """Return what an object stands for."""
    return _U32.pack(index) + gateway


class Nexthops:
    """What the kernel has of them, as far as told: each belongs to one route. Routes are told apart by packed keys."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._hops: dict[int, Hop] = {}
        self._foreign: frozenset[int] = frozenset()
        self._next = FIRST_ID

    def __len__(self) -> int:
        return len(self._hops)

    def load(self, found: Mapping[int, Hop], named: Mapping[bytes, int]) -> list[int]:
        """Take over what the kernel holds: objects, and the number that each route names.

        Returns the objects of ours that no route names. A hop is empty if the
        object is not of the kind that we make. Of several routes that name one
        object, which we do not make, it counts for none.
        """
        if found == self._hops and named == self._numbers:
            return []
        ours = {n: hop for n, hop in found.items() if hop and FIRST_ID <= n <= LAST_ID}
        users = Counter(named.values())
        self._numbers = {route: number for route, number in named.items() if number in ours and users[number] == 1}
        self._hops = {number: ours[number] for number in self._numbers.values()}
        unused = [number for number in ours if number not in users]
        self._foreign = frozenset(found.keys() - self._hops.keys() - set(unused))
        return unused

    def put(self, route: bytes, hop: Hop) -> tuple[int, bool, int]:
        """Note that a route uses a hop; returns the object's number, whether it is new, and the one that falls idle.

        The last is 0 if there is none; it may go once the route has been written.
        """
        before = self._numbers.get(route)
        if before is not None and self._hops[before] == hop:
            return before, False, 0
        number = self._numbers[route] = self._free()
        self._hops[number] = hop
        if before is not None:
            del self._hops[before]
        return number, True, before or 0

    def forget(self, route: bytes) -> int:
        """Note that a route goes, or names no object any more; returns what it named, which falls idle, or 0."""
        number = self._numbers.pop(route, 0)
        if number:
            del self._hops[number]
        return number

    def _free(self) -> int:
        while self._next in self._hops or self._next in self._foreign:
            self._next = self._next + 1 if self._next < LAST_ID else FIRST_ID
        return self._next


def create(number: int, hop: Hop) -> bytes:
    """Return the request for an object. An existing one of that number is never replaced."""
    body = _NHMSG.pack(AF_INET, 0, PROTOCOL, 0, RTNH_F_ONLINK) + attribute(NHA_ID, _U32.pack(number))
    body += attribute(NHA_OIF, hop[:4]) + attribute(NHA_GATEWAY, hop[4:])
    return message(RTM_NEWNEXTHOP, NLM_F_REQUEST | NLM_F_CREATE, 0, body)


def delete(number: int) -> bytes:
    """Return the request that removes an object. The kernel would remove the routes that use it, too."""
    body = _NHMSG.pack(0, 0, 0, 0, 0) + attribute(NHA_ID, _U32.pack(number))
    return message(RTM_DELNEXTHOP, NLM_F_REQUEST, 0, body)


def dump() -> bytes:
    """Ask for all objects."""
    return message(RTM_GETNEXTHOP, DUMP_FLAGS, 0, _NHMSG.pack(0, 0, 0, 0, 0))


def decode(buffers: Iterable[bytes]) -> dict[int, Hop]:
    """Return the objects of a dump by number, with an empty hop for those that are not of our kind."""
    found: dict[int, Hop] = {}
    for buffer in buffers:
        run = columns(buffer, _NHMSG.size, (NHA_ID, NHA_GATEWAY), ())
        if run is not None and run[0] == (NHA_ID, NHA_GATEWAY):
            first = _decode_one(buffer, next(messages(buffer)))
            if first is not None and first[1]:
                index = first[1][:4]
                found.update((_U32.unpack(number)[0], index + gateway) for number, gateway in run[1])
                continue
        decoded = [_decode_one(buffer, header) for header in messages(buffer) if header.kind == RTM_NEWNEXTHOP]
        found.update(one for one in decoded if one is not None)
    return found


def _decode_one(buffer: bytes, header: Header) -> tuple[int, Hop] | None:
    family, _, protocol, _, flags = _NHMSG.unpack_from(buffer, header.start)
    found = attributes(buffer, header.start + _NHMSG.size, header.end)
    if header.kind != RTM_NEWNEXTHOP or len(found.get(NHA_ID, b"")) != _U32.size:
        return None
    (number,) = _U32.unpack(found[NHA_ID])
    plain = found.keys() == {NHA_ID, NHA_OIF, NHA_GATEWAY} and len(found[NHA_GATEWAY]) == 4
    ours = plain and (family, protocol) == (AF_INET, PROTOCOL) and flags & RTNH_F_ONLINK
    return number, found[NHA_OIF] + found[NHA_GATEWAY] if ours else b""


def was_ours(buffer: bytes, header: Header) -> bool:
    """Whether a notification tells that an object of ours was removed or given another meaning."""
    if header.kind not in (RTM_NEWNEXTHOP, RTM_DELNEXTHOP):
        return False
    number = attributes(buffer, header.start + _NHMSG.size, header.end).get(NHA_ID, b"")
    return len(number) == _U32.size and FIRST_ID <= _U32.unpack(number)[0] <= LAST_ID


def delete_route(destination: bytes, length: int, number: int) -> bytes:
    """Return the request that deletes an IPv4 route that names an object."""
    body = _RTMSG.pack(AF_INET, length, 0, 0, RT_TABLE_MAIN, 0, RT_SCOPE_NOWHERE, 0, 0)
    body += attribute(RTA_DST, destination) + attribute(RTA_NH_ID, _U32.pack(number))
    return message(RTM_DELROUTE, NLM_F_REQUEST, 0, body)


def users(buffers: Iterable[bytes]) -> dict[bytes, int]:
    """Return which object each IPv4 route of a dump names, by the route's packed key; others are left out."""
    found = {}
    for buffer in buffers:
        for header in messages(buffer):
            if header.kind == RTM_NEWROUTE:
                length = _RTMSG.unpack_from(buffer, header.start)[1]
                parts = attributes(buffer, header.start + _RTMSG.size, header.end)
                number = number_of(parts)
                if number:
                    found[route_key(parts.get(RTA_DST, bytes(4)), length, _metric(parts))] = number
    return found


def number_of(parts: Mapping[int, bytes]) -> int:
    """Return the object that a route with these attributes names, 0 for none."""
    raw = parts.get(RTA_NH_ID, b"")
    return int(_U32.unpack(raw)[0]) if len(raw) == _U32.size else 0


def _metric(parts: Mapping[int, bytes]) -> int | None:
    return int(_U32.unpack(parts[RTA_PRIORITY])[0]) if RTA_PRIORITY in parts else None
