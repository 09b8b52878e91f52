"""From what is there to what is wanted: pure, ordered, idempotent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from backends.dataplane.model import (
    OWN_LABEL,
    PROTO_BOOT,
    PROTO_FLANNEL,
    PROTO_KERNEL,
    Address,
    Change,
    DesiredState,
    FdbEntry,
    IpsecPolicy,
    KeptTun,
    KernelObject,
    Link,
    Neighbour,
    ObservedState,
    Route,
    WireguardPeer,
    blackhole,
)
from subnet.model import IPNetwork

_T = TypeVar("_T", bound=KernelObject)
TUN_NAME = re.compile(r"flannel\d+$")
TUNNEL_NAME = re.compile(r"flannel((-v6)?\.(\d+|ipip|fou)|-wg(-v6)?)$")


def _inside(network: IPNetwork, outer: Iterable[IPNetwork]) -> bool:
    return any(
        n.version == network.version and n.prefixlen < network.prefixlen and network.subnet_of(n)  # type: ignore[arg-type]
        for n in outer
    )


def _stale_address(address: Address, desired: DesiredState) -> bool:
    """Whether an unwanted address is an old one of ours; others are somebody's, and stay."""
    inside = any(address.interface.ip in network for network in desired.networks)
    if address.device not in desired.devices or address.scope == "link":
        return address.label == OWN_LABEL and inside
    return address.family == 6 or inside


def foreign_addresses(addresses: Iterable[Address], desired: DesiredState) -> tuple[Address, ...]:
    """Addresses outside the networks that somebody gave our devices (a DHCP client, say); they are left alone."""
    return tuple(
        _sorted(
            a for a in addresses if a.device in desired.devices and a.scope != "link" and not _stale_address(a, desired)
        )
    )


def owned_route(route: Route, desired: DesiredState) -> bool:
    """Whether an unwanted route is ours to remove.

    On our own devices: all but the kernel's own. On the external interface,
    strictly inside the cluster's networks: those with our protocol number, and
    gateway routes with protocol boot, which Go flannel leaves behind, unless
    somebody else carries the network. Without a device, in the same place:
    what ``blackhole`` makes.
    """
    if route == blackhole(route.destination):
        return _inside(route.destination, desired.networks)
    if route.type != "unicast" or route.protocol == PROTO_KERNEL:
        return False
    if route.device in desired.devices:
        return True
    if route.device != desired.underlay or not _inside(route.destination, desired.networks):
        return False
    left_by_go = desired.alone and route.protocol == PROTO_BOOT and route.gateway is not None
    return route.protocol == PROTO_FLANNEL or left_by_go


def owned_policy(policy: IpsecPolicy, desired: DesiredState) -> bool:
    """Whether an unwanted policy is ours to remove: its form is ours, and it leads into the cluster's networks."""
    return _inside(policy.source, desired.networks) or _inside(policy.destination, desired.networks)


def blocked_routes(observed: ObservedState, desired: DesiredState) -> dict[Route, Route]:
    """Wanted routes whose very destination is a network connected to another device, with that route.

    Replacing the kernel's connected route would cut off the local bridge.
    """
    connected = {r.key: r for r in observed.routes if r.protocol == PROTO_KERNEL and r.device not in desired.devices}
    return {route: connected[route.key] for route in desired.routes if route.key in connected}


def _surplus(observed: Iterable[_T], wanted: frozenset[_T], put: Iterable[_T]) -> Iterator[_T]:
    """Objects to delete: neither wanted nor replaced by a put on the same key."""
    replaced = {target.key for target in put}
    return (target for target in observed if target not in wanted and target.key not in replaced)


def _missing(wanted: frozenset[_T], observed: frozenset[_T], desired: DesiredState) -> frozenset[_T]:
    """Objects to put: not there and, where nothing may be replaced, nothing else in their place."""
    missing = wanted - observed
    if not desired.additive:
        return missing
    held = {one.key for one in observed}
    return frozenset(target for target in missing if target.key not in held)


def _missing_peers(observed: ObservedState, desired: DesiredState) -> frozenset[WireguardPeer]:
    """Peers to put: a put takes networks away from other peers, and so replaces them, too."""
    missing = _missing(desired.peers, observed.peers, desired)
    if not desired.additive:
        return missing
    held = {(peer.device, network) for peer in observed.peers for network in peer.allowed}
    return frozenset(p for p in missing if not any((p.device, network) in held for network in p.allowed))


def diff(observed: ObservedState, desired: DesiredState) -> tuple[Change, ...]:
    """Return the changes that turn ``observed`` into ``desired``.

    Additions go address, neighbour, FDB entry, peer, policy, route, so that a
    route never points at an unknown VTEP or peer, nor carries what is to be
    encrypted; removals follow in reverse order, after the additions, so that
    what moves is not interrupted. A put replaces what the kernel holds under
    the same key; where it cannot, that is removed first. An additive state only
    fills gaps.
    """
    wanted_routes = desired.routes - blocked_routes(observed, desired).keys()
    addresses = _missing(desired.addresses, observed.addresses, desired)
    neighbours = _missing(desired.neighbours, observed.neighbours, desired)
    fdb = _missing(desired.fdb, observed.fdb, desired)
    peers = _missing_peers(observed, desired)
    policies = _missing(desired.policies, observed.policies, desired)
    routes = _missing(wanted_routes, observed.routes, desired)
    puts: list[KernelObject] = [
        *_sorted(addresses),
        *_sorted(neighbours),
        *_sorted(fdb),
        *_sorted(peers),
        *_sorted(policies),
        *_sorted(routes),
    ]
    if desired.additive:
        return tuple(Change("put", target) for target in puts)

    wanted_neighbours = {n.key for n in desired.neighbours}
    deletes: list[KernelObject] = [
        *_sorted(r for r in _surplus(observed.routes, wanted_routes, routes) if owned_route(r, desired)),
        *_sorted(p for p in _surplus(observed.policies, desired.policies, policies) if owned_policy(p, desired)),
        *_sorted(p for p in _surplus(observed.peers, desired.peers, peers) if p.device in desired.devices),
        *_sorted(e for e in _surplus(observed.fdb, desired.fdb, fdb) if e.device in desired.devices),
        *_sorted(
            n
            for n in _surplus(observed.neighbours, desired.neighbours, neighbours)
            if n.device in desired.devices and n.key not in wanted_neighbours
        ),
        *_sorted(a for a in observed.addresses - desired.addresses if _stale_address(a, desired)),
    ]
    return (
        *(Change("delete", rival) for rival in _rivals(routes, observed)),
        *(Change("put", target) for target in puts),
        *(Change("delete", target) for target in deletes),
    )


def _rivals(routes: Iterable[Route], observed: ObservedState) -> list[Route]:
    """Routes in the place of a wanted on-link IPv6 route, through another device.

    The kernel lets them not be replaced: it looks for the gateway, which lies
    inside the destination, and finds it behind the other device (net/ipv6/route.c,
    ip6_route_check_nh_onlink).
    """
    wanted = {route.key: route.device for route in routes if route.family == 6 and route.onlink}
    if not wanted:
        return []
    return _sorted(r for r in observed.routes if r.key in wanted and r.device != wanted[r.key])


def _sorted(targets: Iterable[_T]) -> list[_T]:
    return sorted(targets, key=lambda target: target.key)


def _after(same_key: list[_T], target: _T, put: bool) -> list[_T]:
    rest = [other for other in same_key if other != target]
    return [target, *rest[1:]] if put else rest


def _applied(held: frozenset[_T], changes: Iterable[Change], kind: type[_T]) -> frozenset[_T]:
    by_key: dict[object, list[_T]] = {}
    for one in held:
        by_key.setdefault(one.key, []).append(one)
    for change in changes:
        target = change.target
        if isinstance(target, kind):
            by_key[target.key] = _after(by_key.get(target.key, []), target, change.verb == "put")
    return frozenset(target for targets in by_key.values() for target in targets)


def apply_changes(observed: ObservedState, changes: Sequence[Change]) -> ObservedState:
    """Return what the kernel holds after the changes: a put replaces one object of the same key."""
    if not changes:
        return observed
    return ObservedState(
        _applied(observed.addresses, changes, Address),
        _applied(observed.neighbours, changes, Neighbour),
        _applied(observed.fdb, changes, FdbEntry),
        _applied(observed.routes, changes, Route),
        _applied(observed.peers, changes, WireguardPeer),
        _applied(observed.policies, changes, IpsecPolicy),
    )


def leftover_links(links: Mapping[str, Link], addresses: Iterable[Address], desired: DesiredState) -> tuple[str, ...]:
    """Tunnel devices of an earlier configuration: named like ours, unwanted, with an address in our networks.

    The address tells them from the tunnels of another daemon on this host.
    """
    held = {a.device for a in addresses if any(a.interface.ip in network for network in desired.networks)}
    return tuple(
        sorted(
            name
            for name, link in links.items()
            if name not in desired.devices and _named_like_ours(link) and name in held
        )
    )


def _named_like_ours(link: Link) -> bool:
    if link.tunnel is None:
        return False
    return bool((TUN_NAME if isinstance(link.tunnel, KeptTun) else TUNNEL_NAME).match(link.name))
