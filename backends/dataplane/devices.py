"""Devices: what to do about each one wanted, and doing it."""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from backends.dataplane.diff import leftover_links
from backends.dataplane.model import (
    DEFAULT_PORT,
    DesiredState,
    Ip6Tunnel,
    Ipip,
    Link,
    LinkSpec,
    Tunnel,
    Vxlan,
    Wireguard,
)
from backends.dataplane.ports import Kernel
from subnet.errors import KernelError
from subnet.model import IPNetwork

log = logging.getLogger(__name__)

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Mend:
    """Attributes that can be changed in place; None: fine as it is."""

    mtu_bytes: int | None = None
    mac: str | None = None
    learning: bool | None = None
    wireguard: Wireguard | None = None
    up: bool = False

    @property
    def needed(self) -> bool:
        """Whether anything differs."""
        return self != Mend()


def rebuild_reason(link: Link, spec: LinkSpec) -> str:
    """Return what an existing device differs in that only a new one cures; empty: it can be used.

    Source: upstream pkg/backend/vxlan/device.go, vxlanLinksIncompat, and pkg/backend/ipip/ipip.go.
    """
    match link.tunnel, spec.tunnel:
        case Vxlan() as have, Vxlan() as want:
            return _vxlan_differences(have, want)
        case Ipip() as have, Ipip() as want:
            return _ipip_differences(have, want)
        case Ip6Tunnel() as have, Ip6Tunnel() as want:
            return "" if have == want else "fixed outer addresses"
        case Wireguard(), Wireguard():
            return ""
        case _:
            return f"kind {link.kind or 'unknown'}"


def _vxlan_differences(have: Vxlan, want: Vxlan) -> str:
    differences = (
        (have.vni != want.vni, f"VNI {have.vni}"),
        (have.lower_index != want.lower_index, f"lower device index {have.lower_index}"),
        (have.local != want.local, f"local address {have.local}"),
        (_port(have) != _port(want), f"port {have.port}"),
        (have.gbp != want.gbp, f"GBP {have.gbp}"),
        (have.multicast, "a multicast group"),
        (have.l2miss, "l2miss"),
    )
    return ", ".join(text for differs, text in differences if differs)


def _ipip_differences(have: Ipip, want: Ipip) -> str:
    differences = (
        (have.local != want.local, f"local address {have.local or 'any'}"),
        (have.remote != want.remote, f"remote address {have.remote}"),
        (have.fou_port != want.fou_port, f"UDP port {have.fou_port}" if have.fou_port else "no UDP port"),
    )
    return ", ".join(text for differs, text in differences if differs)


def _foreign(link: Link, spec: LinkSpec) -> bool:
    """Whether somebody else's device has our name. A VXLAN device's name is ours alone; others are not taken away."""
    kind = link.tunnel.kind if link.tunnel is not None else link.kind
    return kind != spec.tunnel.kind and not isinstance(spec.tunnel, Vxlan)


def _port(vxlan: Vxlan) -> int:
    return vxlan.port or DEFAULT_PORT


def mend(link: Link, spec: LinkSpec) -> Mend:
    """Return what to change on a device that can be used."""
    have, want = link.tunnel, spec.tunnel
    learns = isinstance(have, Vxlan) and isinstance(want, Vxlan) and have.learning != want.learning
    return Mend(
        mtu_bytes=spec.mtu_bytes if link.mtu_bytes != spec.mtu_bytes else None,
        mac=spec.mac if spec.binding and spec.mac and link.mac != spec.mac else None,
        learning=want.learning if learns and isinstance(want, Vxlan) else None,
        wireguard=_wireguard_change(have, want),
        up=not link.up,
    )


def _wireguard_change(have: Tunnel | None, want: Tunnel) -> Wireguard | None:
    """Return what to set a device to whose key or port is another; peers and their sessions outlive that."""
    if not isinstance(have, Wireguard) or not isinstance(want, Wireguard):
        return None
    fits = have.private_key == want.private_key and want.port in (0, have.port)
    return None if fits else want


def random_mac(pick: Callable[[int], int] = secrets.randbits) -> str:
    """Return a unicast, locally administered MAC (IEEE 802 s8.2)."""
    octets = bytearray(pick(48).to_bytes(6, "big"))
    octets[0] = octets[0] & 0xFE | 0x02
    return octets.hex(":")


class DeviceKeeper:
    """Makes the wanted devices exist and stay as wanted."""

    def __init__(self, kernel: Kernel, *, tx_checksum: bool = True, new_mac: Callable[[], str] = random_mac) -> None:
        self._kernel, self._tx_checksum, self._new_mac = kernel, tx_checksum, new_mac
        self._checksum_refused: set[str] = set()
        self._hearing: set[str] = set()
        self._wanted = DesiredState(frozenset(), "", frozenset())
        """Of what leftovers are told by: the names of the devices, and the cluster's networks."""

    def ensure(self, specs: Sequence[LinkSpec], networks: AbstractSet[IPNetwork] = frozenset()) -> dict[str, Link]:
        """Return the devices by name, each as wanted and up. Raises KernelError naming the device.

        A device of an earlier configuration, with an address in ``networks``,
        goes at once if it keeps a new one from being made.
        """
        self._wanted = DesiredState(frozenset(spec.name for spec in specs), "", frozenset(networks))
        links = self._kernel.links()
        touched = [spec.name for spec in specs if self._try(spec, links)]
        if touched:
            links = self._kernel.links()
        missing = [spec.name for spec in specs if spec.name not in links]
        if missing:
            raise KernelError("find", f"device {missing[0]}", 0, "it was removed again at once")
        for spec in specs:
            self._settle(links[spec.name])
        return {spec.name: links[spec.name] for spec in specs}

    def _try(self, spec: LinkSpec, links: Mapping[str, Link]) -> bool:
        try:
            return self._ensure(spec, links)
        except KernelError as error:
            if error.errno == errno.EADDRINUSE and isinstance(spec.tunnel, Wireguard):
                reason = f"UDP port {spec.tunnel.port} is taken"
            elif error.errno == errno.EOPNOTSUPP:
                reason = f"the kernel has no devices of kind {spec.tunnel.kind}; is its module installed?"
            else:
                raise
            raise KernelError(error.operation, error.target, error.errno, f"{error.detail}: {reason}") from error

    def _ensure(self, spec: LinkSpec, links: Mapping[str, Link]) -> bool:
        link = links.get(spec.name)
        if link is None:
            self._create(spec, spec.mac, links)
            return True
        if _foreign(link, spec):
            text = (
                f"it is of kind {link.kind or 'unknown'}, not {spec.tunnel.kind}; remove it: ip link delete {link.name}"
            )
            raise KernelError("use", f"device {link.name}", 0, text)
        reason = rebuild_reason(link, spec)
        if reason:
            log.warning("device %s is rebuilt: it has %s", spec.name, reason)
            # Peers were told the old MAC; a tunnel that keeps it stays reachable.
            mac = spec.mac if spec.binding and spec.mac else link.mac if link.tunnel else spec.mac
            self._kernel.delete_link(spec.name)
            self._create(spec, mac, links)
            return True
        change = mend(link, spec)
        if not change.needed:
            return False
        if change.mac is not None:
            log.warning("device %s has MAC %s, peers know %s; restored", spec.name, link.mac, change.mac)
        log.info("device %s corrected: %s", spec.name, _describe(change))
        self._kernel.set_link(
            spec.name,
            up=True if change.up else None,
            mtu_bytes=change.mtu_bytes,
            mac=change.mac,
            learning=change.learning,
            wireguard=change.wireguard,
        )
        return True

    def _create(self, spec: LinkSpec, mac: str, links: Mapping[str, Link]) -> None:
        self._checksum_refused.discard(spec.name)
        made = replace(spec, mac=(mac or self._new_mac()) if isinstance(spec.tunnel, Vxlan) else "")
        try:
            self._kernel.create_link(made)
        except KernelError as error:
            rival = _rival(spec, links)
            if rival is None:
                raise
            link, text = rival
            if not leftover_links({link.name: link}, self._kernel.addresses(), self._wanted):
                raise KernelError(error.operation, error.target, error.errno, f"{error.detail}: {text}") from error
            log.info("device %s of an earlier configuration is removed: %s", link.name, text)
            self._kernel.delete_link(link.name)
            self._kernel.create_link(made)
        self._kernel.set_link(spec.name, up=True)
        address = f" mac {made.mac}" if made.mac else ""
        log.info("device %s created: %s mtu %d%s", spec.name, spec.tunnel, spec.mtu_bytes, address)

    def _settle(self, link: Link) -> None:
        """What a device forgets: that router advertisements stay unheard, and what the operator wants of checksums."""
        self._deafen(link.name)
        if self._tx_checksum or link.name in self._checksum_refused:
            return
        try:
            if self._kernel.set_tx_checksum(link.name, False):
                raise KernelError("switch off", f"TX checksum offload of {link.name}", 0, "the driver keeps it on")
        except KernelError as error:
            self._checksum_refused.add(link.name)
            log.warning("%s", error)

    def _deafen(self, name: str) -> None:
        """Ignore router advertisements: they would let a container redirect the host's traffic."""
        conf = f"net/ipv6/conf/{name}"
        accepted = self._kernel.sysctl(f"{conf}/accept_ra")
        if accepted in (None, "0"):
            return
        try:
            self._kernel.set_sysctl(f"{conf}/accept_ra", "0")
        except KernelError as error:
            if error.errno not in _READ_ONLY:
                raise
            # In a container /proc/sys is read-only. Of 1, a device that forwards hears nothing either (ip-sysctl.rst).
            heard = accepted == "2" or self._kernel.sysctl(f"{conf}/forwarding") != "1"
            if heard and name not in self._hearing:
                self._hearing.add(name)
                log.warning("%s: containers could redirect this host's IPv6 traffic by router advertisements", error)


def _rival(spec: LinkSpec, links: Mapping[str, Link]) -> tuple[Link, str] | None:
    """Return the device that keeps a new one from being made, with what both may not share."""
    for link in links.values():
        match link.tunnel, spec.tunnel:
            case Vxlan() as have, Vxlan() as want:
                same_family = have.local is None or (have.local.version == 4) == (spec.family == 4)
                if have.vni == want.vni and _port(have) == _port(want) and same_family:
                    return link, f"device {link.name} has VNI {want.vni} and the same port"
            case Ipip() as have, Ipip() as want:
                if (have.local, have.remote) == (want.local, want.remote):
                    return link, f"device {link.name} has the same local address"
            case Ip6Tunnel(external=True), Ip6Tunnel(external=True):
                return link, f"device {link.name} is external already, and there can be only one"
    return None


def _describe(change: Mend) -> str:
    parts = [
        f"mtu {change.mtu_bytes}" if change.mtu_bytes is not None else "",
        f"mac {change.mac}" if change.mac is not None else "",
        f"learning {'on' if change.learning else 'off'}" if change.learning is not None else "",
        f"private key, port {change.wireguard.port or 'any'}" if change.wireguard is not None else "",
        "up" if change.up else "",
    ]
    return ", ".join(part for part in parts if part)
