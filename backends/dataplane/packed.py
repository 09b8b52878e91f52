"""Kernel objects in few bytes: what a node keeps of ten thousand peers.

A key is what the kernel replaces by, a value what else there is to an object.
Neighbours and FDB entries of the wanted devices, and routes of the shapes that
the wanted ones have, are bytes; everything else stays an object. Two objects
have equal keys and values exactly if they are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import TypeAlias, TypeVar

from backends.dataplane.model import (
    METRIC,
    Address,
    FdbEntry,
    IpsecPolicy,
    KernelObject,
    Neighbour,
    ObservedState,
    Route,
    WireguardPeer,
)
from subnet.model import IPAddress

Key: TypeAlias = bytes | tuple[object, ...]
Value: TypeAlias = bytes | KernelObject | tuple[KernelObject, ...]
"""A tuple holds several objects of one key: somebody's doing, and to be repaired."""
Entries: TypeAlias = dict[Key, Value]

NEIGHBOUR, FDB, ROUTE = b"N", b"F", b"R"
"""First byte of a packed key."""
MOST = 250
"""Devices, and shapes of routes, that have a number of one byte."""
_PREFIX_AT = {6: 5, 18: 17}
"""Where a packed route's prefix length stands, by the key's length without metric."""
_METRIC_BYTES = 4

_T = TypeVar("_T", bound=KernelObject)
Shape: TypeAlias = tuple[object, ...]
"""What routes of one shape share: all but destination, metric and gateway."""


def address_of(raw: bytes) -> IPAddress:
    """Return the address that four or sixteen bytes are."""
    return IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw)


def route_key(destination: bytes, prefix_length: int, metric: int | None = None) -> bytes:
    """Return the key of a route; ``metric`` None: the kernel's default for the family."""
    key = ROUTE + destination + bytes((prefix_length,))
    return key if metric is None else key + metric.to_bytes(_METRIC_BYTES, "big")


def shape_of(route: Route) -> Shape:
    """Return what a route shares with others of its shape."""
    like = route.device, route.onlink, route.protocol, route.type, route.source, route.encap, route.scope
    return *like, route.gateway is None


class Packer:
    """Turns objects into keys and values, and back. ``devices`` are those whose entries are packed."""

    def __init__(self, devices: Iterable[str] = ()) -> None:
        self._names = sorted(devices)[:MOST]
        self._numbers = {name: bytes((number,)) for number, name in enumerate(self._names)}
        self._routes: list[Route] = []
        self._shapes: dict[Shape, bytes] = {}

    def learn(self, route: Route) -> None:
        """Pack routes of this one's shape from now on. What was packed before stays as it is."""
        shape = shape_of(route)
        if shape not in self._shapes and len(self._routes) < MOST:
            self._shapes[shape] = bytes((len(self._routes),))
            self._routes.append(route)

    def learnt(self, target: KernelObject) -> tuple[Key, Value]:
        """Return key and value of an object, packed if at all possible; a route's shape is learnt."""
        if isinstance(target, Route) and shape_of(target) not in self._shapes:
            self.learn(target)
        return self.entry(target)

    def device(self, name: str) -> bytes | None:
        """Return what stands for a device behind the first byte of its entries' keys, None if it has no number."""
        return self._numbers.get(name)

    def shape(self, route: Route) -> bytes | None:
        """Return what stands before the gateway in the value of such a route, None if the shape is not known."""
        return self._shapes.get(shape_of(route))

    def number(self, device: str) -> int:
        """Return a device's number. Raises KeyError if it has none."""
        return self._numbers[device][0]

    def names(self) -> tuple[str, ...]:
        """Return the devices by their numbers."""
        return tuple(self._names)

    def like(self, value: bytes) -> Route:
        """Return a route of the shape that a packed route's value tells."""
        return self._routes[value[0]]

    def entry(self, target: KernelObject) -> tuple[Key, Value]:
        """Return key and value of an object."""
        if isinstance(target, Route):
            return self._route(target)
        number = self._numbers.get(target.device)
        if number is not None and isinstance(target, Neighbour):
            return NEIGHBOUR + number + target.address.packed, _mac(target.mac)
        if number is not None and isinstance(target, FdbEntry):
            return FDB + number + _mac(target.mac), target.remote.packed
        return (type(target), *target.key), target

    def _route(self, route: Route) -> tuple[Key, Value]:
        destination, metric = route.destination, route.metric
        if metric is not None and metric == METRIC[route.family]:
            metric = None
        key = route_key(destination.network_address.packed, destination.prefixlen, metric)
        shape = self._shapes.get(shape_of(route))
        if shape is None:
            return key, route
        return key, shape if route.gateway is None else shape + route.gateway.packed

    def key(self, target: KernelObject) -> Key:
        """Return what the kernel replaces by."""
        return self.entry(target)[0]

    def add(self, entries: Entries, target: KernelObject) -> None:
        """Add an object to entries."""
        key, value = self.entry(target)
        held = entries.get(key)
        entries[key] = value if held is None else (*self.targets(key, held), target)

    def pack(self, targets: Iterable[KernelObject]) -> Entries:
        """Return the entries of some objects."""
        entries: Entries = {}
        for target in targets:
            self.add(entries, target)
        return entries

    def targets(self, key: Key, value: Value) -> tuple[KernelObject, ...]:
        """Return the objects that a key and its value stand for."""
        if isinstance(value, tuple):
            return value
        if not isinstance(value, bytes):
            return (value,)
        if not isinstance(key, bytes):
            raise TypeError(f"{key!r} is no packed key")
        return (self._unpacked(key, value),)

    def _unpacked(self, key: bytes, value: bytes) -> KernelObject:
        kind = key[:1]
        if kind == NEIGHBOUR:
            return Neighbour(self._names[key[1]], address_of(key[2:]), value.hex(":"))
        if kind == FDB:
            return FdbEntry(self._names[key[1]], key[2:].hex(":"), address_of(value))
        like = self._routes[value[0]]
        short = key if len(key) in _PREFIX_AT else key[:-_METRIC_BYTES]
        at = _PREFIX_AT[len(short)]
        return Route(
            ip_network((key[1:at], key[at])),
            like.device,
            address_of(value[1:]) if len(value) > 1 else None,
            like.onlink,
            like.protocol,
            None if short is key else int.from_bytes(key[-_METRIC_BYTES:], "big"),
            like.type,
            like.source,
            like.encap,
            like.scope,
        )


def observed_state(packer: Packer, entries: Entries) -> ObservedState:
    """Return entries as objects."""
    targets = [target for key, value in entries.items() for target in packer.targets(key, value)]

    def of(kind: type[_T]) -> frozenset[_T]:
        return frozenset(target for target in targets if isinstance(target, kind))

    return ObservedState(of(Address), of(Neighbour), of(FdbEntry), of(Route), of(WireguardPeer), of(IpsecPolicy))


def packed_state(state: ObservedState, packer: Packer) -> Entries:
    """Return the entries of a state."""
    return packer.pack([*state.addresses, *state.neighbours, *state.fdb, *state.peers, *state.policies, *state.routes])


def _mac(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))
