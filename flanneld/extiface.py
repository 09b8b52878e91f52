"""Choice of the external interface: pure, from what the host has.

Source: upstream main.go LookupExtIface, pkg/ipmatch/match.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address

from backends.api import ExternalInterface
from backends.dataplane.model import Address, Link, Route
from subnet.errors import InterfaceError, KernelError
from subnet.model import Family, IPAddress, IPNetwork


@dataclass(frozen=True, slots=True)
class HostView:
    """Devices, addresses and default routes of the host; ``lookup`` asks the kernel for a route."""

    links: Mapping[str, Link]
    addresses: Sequence[Address]
    routes: Sequence[Route]
    lookup: Callable[[IPAddress], Route]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the operator said about the interface; the fields are the flags of the same names."""

    iface: tuple[str, ...] = ()
    iface_regex: tuple[str, ...] = ()
    iface_can_reach: IPAddress | None = None
    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None

    def public(self, family: Family) -> IPAddress | None:
        """Return the address to announce, None for the interface's own."""
        return self.public_ip if family == 4 else self.public_ipv6


@dataclass(frozen=True, slots=True)
class _Choice:
    link: Link
    local: Mapping[Family, IPAddress] = field(default_factory=dict)
    """Addresses that the choice itself settled; the others follow from the candidates."""


def candidates(view: HostView, device: str, family: Family) -> list[Address]:
    """Return the addresses of a device fit for an overlay, best first.

    Global before link-local, permanent before dynamic, non-temporary before
    temporary (for IPv4 that bit means secondary), then the kernel's order.
    """
    fit = [
        a
        for a in view.addresses
        if a.device == device
        and a.family == family
        and not a.deprecated
        and not a.tentative
        and not a.interface.ip.is_loopback
        and not a.interface.ip.is_multicast
        and not a.interface.ip.is_unspecified
    ]
    return sorted(fit, key=lambda a: (a.interface.ip.is_link_local, a.dynamic, a.temporary))


def choose(wish: Wish, families: Sequence[Family], view: HostView) -> ExternalInterface:
    """Return the external interface for the enabled families.

    Raises InterfaceError, with the reason of every attempt and the list of
    what exists, when nothing fits now.
    """
    reasons: list[str] = []
    for attempt, text in _attempts(wish, families, view):
        try:
            return _complete(attempt(), wish, families, view)
        except InterfaceError as error:
            reasons.append(f"{text}: {error}")
    raise InterfaceError(f"no external interface: {'; '.join(reasons)}; the host has {inventory(view)}")


def inventory(view: HostView) -> str:
    """Return the host's interfaces with state and addresses, for people."""
    parts: list[str] = []
    for link in sorted(view.links.values(), key=lambda candidate: candidate.index):
        addresses = [str(a.interface) for a in view.addresses if a.device == link.name]
        parts.append(f"{link.name} ({'up' if link.up else 'down'}; {', '.join(addresses) or 'no address'})")
    return ", ".join(parts)


def still_there(interface: ExternalInterface, view: HostView) -> bool:
    """Whether a chosen interface is still the same device with the same addresses."""
    link = view.links.get(interface.name)
    held = {a.interface.ip for a in view.addresses if a.device == interface.name}
    return (
        link is not None
        and link.index == interface.index
        and all(own is None or own in held for own in (interface.v4, interface.v6))
    )


Attempt = Callable[[], _Choice]


def _attempts(wish: Wish, families: Sequence[Family], view: HostView) -> list[tuple[Attempt, str]]:
    """What to try, in the documented order: names and addresses, regexes, can-reach, else the default route."""
    tries: list[tuple[Attempt, str]] = [
        (partial(_by_name_or_address, text, wish, families, view), f"--iface={text}") for text in wish.iface
    ]
    tries += [(partial(_by_regex, text, families, view), f"--iface-regex={text}") for text in wish.iface_regex]
    if wish.iface_can_reach is not None:
        target = wish.iface_can_reach
        tries.append((partial(_by_reach, target, families, view), f"--iface-can-reach={target}"))
    if tries:
        return tries
    public = wish.public_ip or wish.public_ipv6
    if public is not None:
        flag = "--public-ip" if wish.public_ip is not None else "--public-ipv6"
        hint = f"{flag}={public} (an address of another host, such as a NAT gateway's, needs --iface beside it)"
        return [(partial(_by_name_or_address, str(public), wish, families, view), hint)]
    return [(partial(_by_default_route, families, view), "default route")]


def _link(name: str, view: HostView) -> Link:
    link = view.links.get(name)
    if link is None:
        raise InterfaceError(f"there is no interface {name!r}")
    return link


def _by_name_or_address(text: str, wish: Wish, families: Sequence[Family], view: HostView) -> _Choice:
    try:
        address = ip_address(text)
    except ValueError:
        return _Choice(_link(text, view))
    link = _owner(address, view)
    local: dict[Family, IPAddress] = {4 if address.version == 4 else 6: address}
    for family in families:
        public = wish.public(family)
        if family not in local and public is not None and _holds(link.name, public, view):
            local[family] = public
    return _Choice(link, local)


def _owner(address: IPAddress, view: HostView) -> Link:
    owners = sorted(
        (view.links[a.device] for a in view.addresses if a.interface.ip == address and a.device in view.links),
        key=lambda link: link.index,
    )
    if not owners:
        raise InterfaceError(f"no interface has address {address}")
    return owners[0]


def _holds(device: str, address: IPAddress, view: HostView) -> bool:
    return any(a.device == device and a.interface.ip == address for a in view.addresses)


def _by_regex(pattern: str, families: Sequence[Family], view: HostView) -> _Choice:
    """First an interface with a matching address of every enabled family, then one with a matching name."""
    expression = re.compile(pattern)
    links = sorted(view.links.values(), key=lambda link: link.index)
    for link in links:
        local: dict[Family, IPAddress] = {}
        for family in families:
            matching = [a for a in candidates(view, link.name, family) if expression.search(str(a.interface.ip))]
            if matching:
                local[family] = matching[0].interface.ip
        if local and len(local) == len(families):
            return _Choice(link, local)
    for link in links:
        if expression.search(link.name):
            return _Choice(link)
    raise InterfaceError("it matches no address and no name")


def _by_reach(target: IPAddress, families: Sequence[Family], view: HostView) -> _Choice:
    try:
        route = view.lookup(target)
    except KernelError as error:
        raise InterfaceError(f"{target} cannot be reached: {error.detail}") from error
    link = _link(route.device, view)
    family: Family = 4 if target.version == 4 else 6
    if route.source is not None and family == 4 and family in families:
        return _Choice(link, {family: route.source})
    return _Choice(link)


def _by_default_route(families: Sequence[Family], view: HostView) -> _Choice:
    """The interface of the best default route; with both families on, one interface must hold both."""
    devices: list[str] = []
    for family in families:
        routes = [
            r
            for r in view.routes
            if r.family == family and r.destination.prefixlen == 0 and r.type in ("unicast", "multipath")
        ]
        usable = [r for r in routes if r.device in view.links and view.links[r.device].up]
        if not usable:
            raise InterfaceError(f"there is no IPv{family} default route")
        usable.sort(key=lambda route: route.priority)
        devices.append(usable[0].device)
    if len(set(devices)) > 1:
        raise InterfaceError(f"the default routes use different interfaces: {', '.join(devices)}")
    return _Choice(_link(devices[0], view))


def _complete(choice: _Choice, wish: Wish, families: Sequence[Family], view: HostView) -> ExternalInterface:
    link = choice.link
    if link.mtu_bytes == 0:
        raise InterfaceError(f"{link.name} has MTU 0")
    local: dict[Family, IPAddress] = {}
    for family in families:
        own = choice.local.get(family)
        if own is None:
            fit = candidates(view, link.name, family)
            if not fit:
                raise InterfaceError(f"{link.name} has no IPv{family} address")
            own = fit[0].interface.ip
        local[family] = own
    prefixes: frozenset[IPNetwork] = frozenset(a.interface.network for a in view.addresses if a.device == link.name)
    v4, v6 = local.get(4), local.get(6)
    return ExternalInterface(
        name=link.name,
        index=link.index,
        mtu_bytes=link.mtu_bytes,
        v4=v4 if isinstance(v4, IPv4Address) else None,
        v6=v6 if isinstance(v6, IPv6Address) else None,
        public_v4=wish.public_ip or v4 if 4 in families and isinstance(v4, IPv4Address) else None,
        public_v6=wish.public_ipv6 or v6 if 6 in families and isinstance(v6, IPv6Address) else None,
        prefixes=prefixes,
    )
