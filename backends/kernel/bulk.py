"""Neighbours, FDB entries and routes by the thousand: packed from templates, sent by the datagram."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from backends.dataplane.model import METRIC, PROTO_FLANNEL, Change, Route
from backends.dataplane.packed import FDB, NEIGHBOUR, ROUTE, Entries, Key, Packer, route_key
from backends.kernel import nexthops, rtnl
from backends.kernel.rtnl import (
    AF_BRIDGE,
    AF_INET,
    AF_INET6,
    ARPHRD_ETHER,
    NDA_DST,
    NDA_LLADDR,
    NLM_F_ACK,
    NTF_SELF,
    NUD_PERMANENT,
    PUT_FLAGS,
    RT_SCOPE_UNIVERSE,
    RT_TABLE_MAIN,
    RTA_DST,
    RTA_GATEWAY,
    RTA_NH_ID,
    RTA_OIF,
    RTM_NEWNEIGH,
    RTM_NEWROUTE,
    RTN_UNICAST,
    RTNH_F_ONLINK,
)
from backends.kernel.sockets import LARGE_BATCH, NetlinkSocket, Refusal

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["auto", "always", "never"]
"""Whether routes into tunnels name nexthop objects. ``auto``: if the first batch has at least MANY of them."""
MANY = 1000
COMPAT_MODE = Path("/proc/sys/net/ipv4/nexthop_compat_mode")

_FLAGS = PUT_FLAGS & ~NLM_F_ACK
_ENTRY = {4: struct.Struct("=IHHIIBBHiHBBHH4sHH6s2x"), 16: struct.Struct("=IHHIIBBHiHBBHH16sHH6s2x")}
"""Header, ndmsg, NDA_DST, NDA_LLADDR, by the bytes of the address."""
_GATEWAY_ROUTE = {4: struct.Struct("=IHHIIBBBBBBBBIHH4sHH4sHHI"), 16: struct.Struct("=IHHIIBBBBBBBBIHH16sHH16sHHI")}
"""Header, rtmsg, RTA_DST, RTA_GATEWAY, RTA_OIF."""
_NEXTHOP_ROUTE = struct.Struct("=IHHIIBBBBBBBBIHH4sHHI")
"""Header, rtmsg, RTA_DST, RTA_NH_ID."""
_FAMILY = {4: AF_INET, 16: AF_INET6}
GATEWAY_KEYS = frozenset({6, 18})
"""Lengths of the packed keys of routes without metric."""


def neighbour(index: int, address: bytes, mac: bytes) -> bytes:
    """Return the request that writes a neighbour."""
    form, width = _ENTRY[len(address)], len(address)
    return form.pack(
        *(form.size, RTM_NEWNEIGH, _FLAGS, 0, 0),
        *(_FAMILY[width], 0, 0, index, NUD_PERMANENT, 0, ARPHRD_ETHER),
        *(width + 4, NDA_DST, address, 10, NDA_LLADDR, mac),
    )


def fdb_entry(index: int, mac: bytes, remote: bytes) -> bytes:
    """Return the request that writes an FDB entry."""
    form = _ENTRY[len(remote)]
    return form.pack(
        *(form.size, RTM_NEWNEIGH, _FLAGS, 0, 0),
        *(AF_BRIDGE, 0, 0, index, NUD_PERMANENT, NTF_SELF, 0),
        *(len(remote) + 4, NDA_DST, remote, 10, NDA_LLADDR, mac),
    )


def gateway_route(index: int, destination: bytes, length: int, gateway: bytes, like: Route) -> bytes:
    """Return the request that writes a route with its gateway inside, of the shape of ``like``."""
    form, width = _GATEWAY_ROUTE[len(destination)], len(destination)
    return form.pack(
        *(form.size, RTM_NEWROUTE, _FLAGS, 0, 0),
        *(_FAMILY[width], length, 0, 0, RT_TABLE_MAIN, like.protocol, RT_SCOPE_UNIVERSE, RTN_UNICAST),
        RTNH_F_ONLINK if like.onlink else 0,
        *(width + 4, RTA_DST, destination, width + 4, RTA_GATEWAY, gateway, 8, RTA_OIF, index),
    )


def nexthop_route(destination: bytes, length: int, number: int, protocol: int) -> bytes:
    """Return the request that writes an IPv4 route through a nexthop object."""
    return _NEXTHOP_ROUTE.pack(
        *(_NEXTHOP_ROUTE.size, RTM_NEWROUTE, _FLAGS, 0, 0),
        *(AF_INET, length, 0, 0, RT_TABLE_MAIN, protocol, RT_SCOPE_UNIVERSE, RTN_UNICAST, 0),
        *(8, RTA_DST, destination, 8, RTA_NH_ID, number),
    )


def plain(like: Route) -> bool:
    """Whether a route has a gateway and nothing special."""
    special = like.encap or like.source or like.type != "unicast" or like.scope != "global"
    return like.gateway is not None and not special


def tunnelled(route: Route) -> bool:
    """Whether a route may name a nexthop object: IPv4, on-link, and into one of our own devices.

    On another device, where our protocol number marks it, the kernel takes the
    objects away, and the routes with them, when its carrier goes. IPv6 routes
    gain nothing.
    """
    own = route.onlink and route.protocol != PROTO_FLANNEL
    return plain(route) and own and route.family == 4 and route.metric is None


class _Writer:
    """Collects the requests of one batch, and which entry each is for, by its position."""

    def __init__(self, hops: nexthops.Nexthops, with_objects: bool) -> None:
        self._hops, self._with_objects = hops, with_objects
        self.messages: list[bytes] = []
        self.owners: list[int] = []
        self.idle: list[tuple[int, int]] = []
        """Nexthop objects that nothing uses once the entry at that position is written."""
        self.position = 0

    def clear(self) -> None:
        """Drop what was collected: it has been sent."""
        self.messages.clear()
        self.owners.clear()
        self.idle.clear()

    def add(self, message: bytes) -> None:
        """Add a request for the entry at ``position``."""
        self.messages.append(message)
        self.owners.append(self.position)

    def gateway_route(self, key: bytes, index: int, gateway: bytes, like: Route) -> None:
        """Add the route of a key without metric, through a nexthop object where it may have one."""
        destination, length = key[1:-1], key[-1]
        if not self._with_objects or not tunnelled(like):
            self.forget(key)
            self.add(gateway_route(index, destination, length, gateway, like))
            return
        hop = nexthops.hop_of(index, gateway)
        number, new, idle = self._hops.put(key, hop)
        if new:
            self.add(nexthops.create(number, hop))
        self.add(nexthop_route(destination, length, number, like.protocol))
        if idle:
            self.idle.append((self.position, idle))

    def forget(self, key: bytes) -> int:
        """Note that a route goes, or is written without object; return the object that it named, 0 for none."""
        number = self._hops.forget(key)
        if number:
            self.idle.append((self.position, number))
        return number

    def change(self, change: Change, index: int) -> None:
        """Add the request for one change."""
        route = change.target
        if not isinstance(route, Route):
            self.add(rtnl.unacknowledged(rtnl.encode(change, index, 0)))
            return
        key = key_of_route(route)
        if change.verb == "put" and plain(route) and route.gateway is not None and len(key) in GATEWAY_KEYS:
            self.gateway_route(key, index, route.gateway.packed, route)
            return
        number = self.forget(key)
        if number and change.verb == "delete":
            # The kernel does not find such a route by its gateway.
            self.add(nexthops.delete_route(key[1:-1], key[-1], number))
        else:
            self.add(rtnl.unacknowledged(rtnl.encode(change, index, 0)))


class Bulk:
    """Writes entries through a socket. Belongs to the thread that the socket belongs to."""

    def __init__(self, channel: NetlinkSocket, mode: Mode = "auto") -> None:
        self._channel, self._mode = channel, mode
        self._hops = nexthops.Nexthops()
        self._with_objects: bool | None = None
        """None: not decided yet."""
        self._doubtful = True
        """Whether it is not known, or no longer, what the kernel has of objects."""

    def load(self, used_by: Mapping[bytes, int]) -> None:
        """Take over which nexthop object each route names, by packed key; remove objects of ours that none does."""
        buffers = self._channel.buffers(nexthops.dump(), "nexthop objects")
        if not buffers or not _gateways_are_shown():
            self._with_objects = False
        unused = self._hops.load(nexthops.decode(buffers), used_by)
        self._doubtful = False
        self._channel.transact([nexthops.delete(number) for number in unused])
        if len(self._hops) and self._with_objects is None:
            # Those of an earlier run stay, and new ones join them.
            self._with_objects = self._mode != "never"

    def put(self, entries: Entries, packer: Packer, indexes: Mapping[str, int]) -> list[tuple[Key, int, str]]:
        """Write packed entries in their order; return those that were refused. ``indexes`` are by device."""
        at = [indexes.get(name, 0) for name in packer.names()]
        shapes = Counter(value[:1] for key, value in entries.items() if key[:1] == ROUTE and isinstance(value, bytes))
        likes = {shape: packer.like(shape) for shape in shapes}
        refused: list[Refusal] = []
        writer = self._writer(bool(shapes), sum(count for shape, count in shapes.items() if tunnelled(likes[shape])))
        for position, (key, value) in enumerate(entries.items()):
            if not isinstance(key, bytes) or not isinstance(value, bytes):
                raise TypeError(f"{key!r} is not packed")
            writer.position = position
            kind = key[:1]
            if kind == NEIGHBOUR:
                writer.add(neighbour(at[key[1]], key[2:], value))
            elif kind == FDB:
                writer.add(fdb_entry(at[key[1]], key[2:], value))
            elif len(key) in GATEWAY_KEYS and plain(like := likes[value[:1]]):
                writer.gateway_route(key, indexes.get(like.device, 0), value[1:], like)
            else:
                (route,) = packer.targets(key, value)
                writer.change(Change("put", route), indexes.get(route.device, 0))
            if len(writer.messages) >= LARGE_BATCH:
                refused += self._send(writer)
        refused += self._send(writer)
        keys = list(entries) if refused else []
        return [(keys[position], code, text) for position, code, text in refused]

    def request(self, changes: Sequence[tuple[Change, int]]) -> list[Refusal]:
        """Make changes, each with its device's index, in their order; return those that were refused."""
        routes = [(change.verb, change.target) for change, _ in changes if isinstance(change.target, Route)]
        writer = self._writer(bool(routes), sum(verb == "put" and tunnelled(route) for verb, route in routes))
        for position, (change, index) in enumerate(changes):
            writer.position = position
            writer.change(change, index)
        return self._send(writer)

    def _writer(self, routes: bool, tunnels: int) -> _Writer:
        """Decide once, when there are routes into tunnels to write for the first time, whether they name objects."""
        if routes and self._doubtful:
            self.load(nexthops.users(self._channel.buffers(rtnl.dump_routes(4), "IPv4 routes")))
        if tunnels and self._with_objects is None:
            self._with_objects = self._mode == "always" or (self._mode == "auto" and tunnels >= MANY)
            if self._with_objects:
                log.info("routes into tunnels name nexthop objects (numbers from %d)", nexthops.FIRST_ID)
        return _Writer(self._hops, bool(self._with_objects))

    def _send(self, writer: _Writer) -> list[Refusal]:
        """Send what the writer has collected, and empty it."""
        refused: dict[int, Refusal] = {}
        for at, code, text in self._channel.transact(writer.messages):
            position = writer.owners[at]
            # Of a nexthop object and its route the first tells why.
            refused.setdefault(position, (position, code, text))
        # An object goes last: the kernel would take the routes along.
        idle = [number for position, number in writer.idle if position not in refused]
        self._channel.transact([nexthops.delete(number) for number in idle])
        if refused and (len(self._hops) or writer.idle):
            self._doubtful = True
        writer.clear()
        return list(refused.values())


def key_of_route(route: Route) -> bytes:
    """Return a route's packed key."""
    metric = None if route.priority == METRIC[route.family] else route.metric
    return route_key(route.destination.network_address.packed, route.destination.prefixlen, metric)


def _gateways_are_shown() -> bool:
    """Whether routes that name objects still show gateway and device to everybody (net.ipv4.nexthop_compat_mode)."""
    try:
        return COMPAT_MODE.read_text().strip() == "1"
    except OSError:
        return False
