"""What the kernel holds, packed: neighbours, FDB entries and routes, from dumps to entries. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace

from backends.dataplane.model import FdbEntry, Neighbour, Route
from backends.dataplane.packed import FDB, NEIGHBOUR, ROUTE, Entries, Packer
from backends.kernel import nexthops, rtnl
from backends.kernel.layout import columns, run_of
from backends.kernel.rtnl import (
    NDA_CACHEINFO,
    NDA_DST,
    NDA_LLADDR,
    NDA_PROBES,
    RTA_CACHEINFO,
    RTA_DST,
    RTA_GATEWAY,
    RTA_NH_ID,
    RTM_NEWNEIGH,
    RTM_NEWROUTE,
    Header,
)

NDMSG_BYTES = RTMSG_BYTES = 12
LENGTH_AT = 17
"""Where a route message has the prefix length of its destination: the second byte behind the header."""
_U32 = struct.Struct("=I")
_NEIGHBOUR_COLUMNS, _NEIGHBOUR_IGNORED = (NDA_DST, NDA_LLADDR), (NDA_CACHEINFO, NDA_PROBES)
_ROUTE_COLUMNS, _ROUTE_IGNORED = (RTA_DST, RTA_NH_ID, RTA_GATEWAY), (RTA_CACHEINFO,)
_GATEWAY = ((RTA_DST, RTA_GATEWAY), (RTA_DST, RTA_NH_ID, RTA_GATEWAY))
"""The order in which the kernel writes them (fib_dump_info, rt6_fill_node)."""


def neighbours(packer: Packer, device: str, index: int, buffers: Iterable[bytes]) -> Entries:
    """Return one device's permanent neighbours and FDB entries; zero and multicast MACs are the kernel's own."""
    entries: Entries = {}
    for buffer in buffers:
        if _neighbour_run(entries, packer, device, index, buffer):
            continue
        for header in rtnl.messages(buffer):
            entry = _neighbour(buffer, header, index)
            if entry is not None:
                packer.add(entries, replace(entry, device=device))
    return entries


def _neighbour(buffer: bytes, header: Header, index: int) -> Neighbour | FdbEntry | None:
    decoded = rtnl.decode_neighbour(buffer, header) if header.kind == RTM_NEWNEIGH else None
    return decoded[1] if decoded is not None and decoded[0] == index and decoded[2] else None


def _neighbour_run(entries: Entries, packer: Packer, device: str, index: int, buffer: bytes) -> bool:
    """Add all entries of a buffer at once if they are alike; return whether that was possible."""
    number = packer.device(device)
    found = columns(buffer, NDMSG_BYTES, _NEIGHBOUR_COLUMNS, _NEIGHBOUR_IGNORED)
    if found is None or number is None or sorted(found[0]) != [NDA_DST, NDA_LLADDR]:
        return False
    first = _neighbour(buffer, next(rtnl.messages(buffer)), index)
    if first is None:
        return False
    kinds, rows = found
    firsts, seconds = zip(*rows, strict=True)
    addresses, macs = (firsts, seconds) if kinds[0] == NDA_DST else (seconds, firsts)
    if isinstance(first, Neighbour):
        prefix = NEIGHBOUR + number
        return _add_run(entries, [prefix + address for address in addresses], macs)
    if any(mac[0] & 1 or mac == bytes(6) for mac in macs):
        return False
    prefix = FDB + number
    return _add_run(entries, [prefix + mac for mac in macs], addresses)


def routes(packer: Packer, names: Mapping[int, str], buffers: Iterable[bytes], used_by: dict[bytes, int]) -> Entries:
    """Return the main table's routes; ``used_by`` gets which nexthop object each names, if it names one."""
    entries: Entries = {}
    for buffer in buffers:
        if _route_run(entries, packer, names, buffer, used_by):
            continue
        for header in rtnl.messages(buffer):
            decoded = rtnl.decode_route(buffer, header) if header.kind == RTM_NEWROUTE else None
            if decoded is not None:
                packer.add(entries, replace(decoded[1], device=names.get(decoded[0], "")))
        used_by.update(nexthops.users([buffer]))
    return entries


def _route_run(
    entries: Entries, packer: Packer, names: Mapping[int, str], buffer: bytes, used_by: dict[bytes, int]
) -> bool:
    """Add all routes of a buffer at once if they are alike and of a wanted shape; return whether that was possible."""
    found = columns(buffer, RTMSG_BYTES, _ROUTE_COLUMNS, _ROUTE_IGNORED)
    if found is None or found[0] not in _GATEWAY:
        return False
    decoded = rtnl.decode_route(buffer, next(rtnl.messages(buffer)))
    if decoded is None or decoded[1].metric is not None:
        return False
    route = replace(decoded[1], device=names.get(decoded[0], ""))
    shape = packer.shape(route)
    if shape is None:
        return False
    length = bytes((route.destination.prefixlen,))
    keys = [ROUTE + row[0] + length for row in found[1]]
    if not _add_run(entries, keys, [shape + row[-1] for row in found[1]]):
        return False
    if RTA_NH_ID in found[0]:
        used_by.update(zip(keys, (_U32.unpack(row[1])[0] for row in found[1]), strict=True))
    return True


def _add_run(entries: Entries, keys: list[bytes], values: Iterable[bytes]) -> bool:
    """Add entries unless one of the keys is there already, or twice."""
    run: Entries = dict(zip(keys, values, strict=True))
    if len(run) != len(keys) or not entries.keys().isdisjoint(run):
        return False
    entries.update(run)
    return True


def default_routes(names: Mapping[int, str], buffers: Iterable[bytes]) -> set[Route]:
    """Return the main table's default routes as objects."""
    found = set()
    for buffer in buffers:
        run = run_of(buffer)
        if run is not None and 0 not in buffer[LENGTH_AT : run.size : run.stride]:
            continue
        for header in rtnl.messages(buffer):
            if header.kind != RTM_NEWROUTE or buffer[header.start + 1]:
                continue
            decoded = rtnl.decode_route(buffer, header)
            if decoded is not None:
                found.add(replace(decoded[1], device=names.get(decoded[0], "")))
    return found
