"""The kernel of this network namespace, through rtnetlink.

What a start needs (links, addresses, look-ups, tunnel devices) is packed by
``linkmsg``, what grows with the number of peers (neighbours, FDB entries,
routes) by ``rtnl``; the latter is sent in batches. WireGuard devices are made
through pyroute2, which is loaded for them only.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from ipaddress import ip_network
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from backends.dataplane.model import (
    Address,
    Change,
    Ipip,
    IpsecPolicy,
    Link,
    LinkSpec,
    ObservedState,
    Route,
    Wireguard,
    WireguardPeer,
)
from backends.dataplane.packed import Entries, Packer, observed_state
from backends.dataplane.ports import Failure, See
from backends.kernel import ethtool, linkmsg, rtnl, survey, tcfilter
from backends.kernel.bulk import Bulk, Mode
from backends.kernel.sockets import BATCH, Encode, NetlinkSocket, Refusal, kernel_error
from backends.kernel.xfrm import read_policies, request_policies
from subnet.errors import KernelError
from subnet.model import FAMILIES, IPAddress

if TYPE_CHECKING:
    from backends.kernel.wireguard import WireguardDevices
    from backends.kernel.wireguard_go import WireguardGo

GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.EADDRNOTAVAIL})
TUN = "tun"

Send: TypeAlias = Callable[[Sequence[tuple[Change, int]]], list[Refusal]]
"""Makes a batch of changes, each with its device's index."""


class NetlinkKernel:
    """Adapter of the ``Kernel`` protocol. Belongs to the thread that makes it.

    ``wall_clock`` returns Unix time, in which handshakes of WireGuard are dated.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time, *, nexthop_objects: Mode = "auto") -> None:
        self._channel = NetlinkSocket(socket.NETLINK_ROUTE)
        self._bulk = Bulk(self._channel, nexthop_objects)
        self._wall_clock = wall_clock

    @cached_property
    def _wireguard(self) -> WireguardDevices:
        from backends.kernel.wireguard import WireguardDevices  # noqa: PLC0415 - most hosts have no such device

        return WireguardDevices(self._wall_clock)

    @cached_property
    def _wireguard_go(self) -> WireguardGo:
        from backends.kernel.wireguard_go import WireguardGo  # noqa: PLC0415 - as before

        return WireguardGo(self._wall_clock)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    @property
    def port_ids(self) -> frozenset[int]:
        """Return the netlink port ids whose changes are our own."""
        return frozenset({self._channel.port_id})

    def links(self) -> dict[str, Link]:
        """Return all devices by name."""
        return {link.name: self._with_settings(link) for link in self._bare_links()}

    def _bare_links(self) -> list[Link]:
        """What rtnetlink says of the devices, which is no more than the kind of a WireGuard device."""
        found = self._channel.dump(linkmsg.dump_links(), "links")
        return [linkmsg.decode_link(*one) for one in found if one[1].kind == rtnl.RTM_NEWLINK]

    def addresses(self) -> tuple[Address, ...]:
        """Return all addresses of all devices, in the kernel's order."""
        names = _names()
        found = self._channel.dump(linkmsg.dump_addresses(), "addresses")
        decoded = [linkmsg.decode_address(*one) for one in found if one[1].kind == rtnl.RTM_NEWADDR]
        return tuple(replace(one[1], device=names[one[0]]) for one in decoded if one is not None and one[0] in names)

    def default_routes(self) -> frozenset[Route]:
        """Return the main tables' default routes of both families."""
        names, found = _names(), set[Route]()
        for family in FAMILIES:
            buffers = self._channel.buffers(rtnl.dump_routes(family), f"IPv{family} routes")
            found |= survey.default_routes(names, buffers)
        return frozenset(found)

    def observe(self, devices: Collection[str]) -> ObservedState:
        """Return what ``survey`` does, as objects."""
        packer, entries = Packer(devices), Entries()
        silent = self.survey(devices, packer, entries.update)
        return replace(observed_state(packer, entries), silent=silent)

    def survey(self, devices: Collection[str], packer: Packer, see: See) -> frozenset[WireguardPeer]:
        """Show all addresses, routes and policies, and the neighbours, FDB entries and peers of ``devices``.

        Table by table: all at once would take memory that nothing else needs.
        """
        see(packer.pack([*self.addresses(), *read_policies()]))
        silent: frozenset[WireguardPeer] = frozenset()
        for device in devices:
            index = self._index(device)
            wireguard = self._wireguard_of(self._link_at(index, device))
            if wireguard is not None:
                listed, unheard = wireguard.peers(index, device)
                see(packer.pack(listed))
                silent |= unheard
                continue
            requests = [rtnl.dump_neighbours(family, index) for family in FAMILIES] + [rtnl.dump_fdb(index)]
            for request in requests:
                buffers = self._channel.buffers(request, f"neighbours of {device}")
                see(survey.neighbours(packer, device, index, buffers))
        names, used_by = _names(), dict[bytes, int]()
        for family in FAMILIES:
            buffers = self._channel.buffers(rtnl.dump_routes(family), f"IPv{family} routes")
            see(survey.routes(packer, names, buffers, used_by))
        self._bulk.load(used_by)
        return silent

    def put(self, entries: Entries, packer: Packer) -> list[Failure]:
        """Write many packed neighbours, FDB entries and routes, none of which is there, in their order."""
        indexes = {name: index for index, name in _names().items()}
        failures = []
        for key, code, text in self._bulk.put(entries, packer, indexes):
            change = Change("put", packer.targets(key, entries[key])[0])
            failures.append(Failure(change, kernel_error("put", change.target, code, text)))
        return failures

    def apply(self, changes: Sequence[Change]) -> list[Failure]:
        """Make the changes in order; a refused one does not stop the others."""
        failures: list[Failure] = []
        for send, group in groupby(changes, key=self._sender):
            if send is None:
                for change in group:
                    failures += self._change_address(change)
            else:
                failures += self._send(list(group), send)
        return failures

    def _sender(self, change: Change) -> Send | None:
        """Return what sends such changes in batches, None for addresses, which go one by one."""
        match change.target:
            case Address():
                return None
            case WireguardPeer(device=device):
                return (self._wireguard_go if self._wireguard_go.holds(device) else self._wireguard).request
            case IpsecPolicy():
                return request_policies
            case _:
                return self._bulk.request

    def _send(self, changes: Sequence[Change], send: Send) -> list[Failure]:
        failures: list[Failure] = []
        indexes = _indexes({change.target.device for change in changes})
        for start in range(0, len(changes), BATCH):
            requests: list[tuple[Change, int]] = []
            for change in changes[start : start + BATCH]:
                device = change.target.device
                if device and device not in indexes:
                    if change.verb == "put":
                        failures.append(Failure(change, kernel_error("put", change.target, errno.ENODEV)))
                    continue
                requests.append((change, indexes.get(device, 0)))
            for position, code, text in send(requests):
                change, _ = requests[position]
                if change.verb == "delete" and code in GONE:
                    continue
                failures.append(Failure(change, kernel_error(change.verb, change.target, code, text)))
        return failures

    def _change_address(self, change: Change) -> list[Failure]:
        address = change.target
        if not isinstance(address, Address):
            raise TypeError(f"{address} is no address")
        put = change.verb == "put"
        try:
            index = self._index(address.device)
            self._ask(change.verb, address, lambda sequence: linkmsg.address_change(put, index, address, sequence))
        except KernelError as error:
            expected = {errno.EEXIST} if put else GONE
            return [] if error.errno in expected else [Failure(change, error)]
        return []

    def lookup(self, target: IPAddress) -> Route:
        """Return the route a packet to ``target`` takes (RTM_GETROUTE), with its source address."""
        found = self._channel.first(linkmsg.get_route(target), target, "look up route to")
        if found is None:
            raise kernel_error("look up route to", target, errno.ENETUNREACH)
        way = linkmsg.decode_way(*found)
        return Route(ip_network(target), _names().get(way.index, ""), way.gateway, source=way.source)

    def create_link(self, spec: LinkSpec) -> None:
        """Create the device, down and without addresses."""
        if isinstance(spec.tunnel, Wireguard):
            self._create_wireguard(spec, spec.tunnel)
        else:
            self._ask("create", f"device {spec.name}", partial(linkmsg.link_create, spec))

    def _create_wireguard(self, spec: LinkSpec, tunnel: Wireguard) -> None:
        """Create the device, by ``wireguard-go`` where the kernel has none of that kind, and set it."""
        from backends.kernel import tunnels, wireguard_go  # noqa: PLC0415 - brings pyroute2 in, most starts do without

        try:
            tunnels.create(spec)
        except KernelError as error:
            program = wireguard_go.installed()
            if error.errno != errno.EOPNOTSUPP or program is None:
                raise
            self._wireguard_go.create(spec.name, program)
            self.set_link(spec.name, mtu_bytes=spec.mtu_bytes)
        self._set_wireguard(spec.name, tunnel)

    def delete_link(self, name: str) -> None:
        """Delete the device, and the UDP port at which its packets arrive, which the kernel keeps apart from it."""
        link = next((link for link in self._bare_links() if link.name == name), None)
        if link is None:
            return
        try:
            self._ask("delete", f"device {name}", lambda sequence: linkmsg.link_delete(link.index, sequence))
        except KernelError as error:
            if error.errno not in GONE:
                raise
        if isinstance(link.tunnel, Ipip) and link.tunnel.fou_port and link.tunnel.local is not None:
            from backends.kernel import fou  # noqa: PLC0415 - most hosts have no such device

            fou.remove(fou.FouPort(link.tunnel.local, link.tunnel.fou_port))

    def set_link(
        self,
        name: str,
        *,
        up: bool | None = None,
        mtu_bytes: int | None = None,
        mac: str | None = None,
        learning: bool | None = None,
        wireguard: Wireguard | None = None,
    ) -> None:
        """Change attributes of an existing device in place."""
        index = self._index(name)
        if wireguard is not None:
            # First: a device takes its port when it goes up.
            self._set_wireguard(name, wireguard)
        wishes = {"state": None if up is None else "up" if up else "down", "mtu": mtu_bytes, "address": mac}
        text = " ".join(f"{key} {value}" for key, value in wishes.items() if value is not None)
        if text:
            change = partial(linkmsg.link_change, index, up=up, mtu_bytes=mtu_bytes, mac=mac)
            self._ask(f"set {text} on", name, change)
        if learning is not None:
            # On its own: the kernel refuses a change of the kind's data together with others.
            self._ask("set learning on", name, lambda sequence: linkmsg.learning_change(index, sequence, learning))

    def sysctl(self, key: str) -> str | None:
        """Return a value below /proc/sys, None if the kernel has no such key."""
        with suppress(OSError):
            return Path("/proc/sys", key).read_text().strip()
        return None

    def set_sysctl(self, key: str, value: str) -> None:
        """Write a value below /proc/sys."""
        try:
            Path("/proc/sys", key).write_text(value)
        except OSError as cause:
            raise kernel_error("write", f"/proc/sys/{key}", cause.errno or 0) from cause

    def set_tx_checksum(self, name: str, enabled: bool) -> bool:
        """Switch transmit checksum offload (ethtool(8)); return the effective value."""
        try:
            return ethtool.set_tx_checksum(name, enabled)
        except OSError as cause:
            raise kernel_error("set tx-checksum-ip-generic on", name, cause.errno or 0) from cause

    def remove_programs(self, keep: Collection[int]) -> list[str]:
        """Remove our programs from devices other than those with these indexes; return what they were called."""
        unwanted = [one for one in tcfilter.attached() if one.hook.index not in keep]
        for one in unwanted:
            tcfilter.detach(one)
        return [str(one) for one in unwanted]

    def _wireguard_of(self, link: Link) -> WireguardDevices | WireguardGo | None:
        """Return what knows the peers of a device, None if it is none of WireGuard's."""
        if link.kind == Wireguard.kind:
            return self._wireguard
        return self._wireguard_go if link.kind == TUN and self._wireguard_go.holds(link.name) else None

    def _with_settings(self, link: Link) -> Link:
        wireguard = self._wireguard_of(link)
        return link if wireguard is None else replace(link, tunnel=wireguard.settings(link.index, link.name))

    def _set_wireguard(self, name: str, wanted: Wireguard) -> None:
        wireguard = self._wireguard_go if self._wireguard_go.holds(name) else self._wireguard
        wireguard.configure(self._index(name), name, wanted)

    def _link_at(self, index: int, name: str) -> Link:
        found = self._channel.first(linkmsg.dump_links(index), f"device {name}")
        if found is None:
            raise kernel_error("find device", name, errno.ENODEV)
        return linkmsg.decode_link(*found)

    def _index(self, name: str) -> int:
        try:
            return socket.if_nametoindex(name)
        except OSError as cause:
            raise kernel_error("find device", name, errno.ENODEV) from cause

    def _ask(self, operation: str, target: object, encode: Encode) -> None:
        """Make one request. Raises KernelError."""
        for _, code, text in self._channel.request([encode]):
            raise kernel_error(operation, target, code, text)


def _indexes(names: Iterable[str]) -> dict[str, int]:
    """Return the indexes of those of the devices that exist. A host may have hundreds of others: all are not listed."""
    found: dict[str, int] = {}
    for name in names:
        with suppress(OSError):
            found[name] = socket.if_nametoindex(name)
    return found


def _names() -> dict[int, str]:
    return dict(socket.if_nameindex())
