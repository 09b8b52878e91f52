"""What each host's kernel holds for its peers, and what is missing there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, TypeAlias

from flanneld.ctl.lab.hosts import Host

Network: TypeAlias = IPv4Network | IPv6Network
Object: TypeAlias = Mapping[str, Any]

_TUNNELS = ("flannel", "flannel-")
_UNDERLAY, _PROTOCOL = "eth0", "142"


@dataclass(frozen=True, slots=True)
class PeerLease:
    """A lease of one family, as far as a peer's kernel shows it. ``mac`` is empty unless the backend is vxlan."""

    subnet: Network
    public_ip: str
    backend_type: str
    mac: str = ""


@dataclass(frozen=True, slots=True)
class HostState:
    """What one host holds: its tunnel devices with addresses, and routes, neighbours and FDB as ip(8) shows them."""

    devices: Mapping[str, Object] = field(default_factory=dict)
    addresses: Mapping[str, list[str]] = field(default_factory=dict)
    routes: tuple[Object, ...] = ()
    neighbours: tuple[Object, ...] = ()
    fdb: tuple[Object, ...] = ()


def peer_leases(leases: Mapping[str, Object]) -> list[PeerLease]:
    """Read lease values by key name (``10.5.52.0-24``, ``10.5.85.0-24&fd05:0:0:b::-64``), one entry per family."""
    found = []
    for key, value in leases.items():
        for part in key.split("&"):
            subnet = ip_network(part.replace("-", "/"))
            if subnet.version == 6:
                public, data = value.get("PublicIPv6"), value.get("BackendV6Data")
            else:
                public, data = value.get("PublicIP"), value.get("BackendData")
            if subnet.network_address.is_unspecified:
                continue  # the IPv4 half of an IPv6-only lease
            mac = data.get("VtepMAC", "") if isinstance(data, dict) else ""
            found.append(PeerLease(subnet, public or "", value.get("BackendType", ""), mac.lower()))
    return found


def observe(host: Host) -> HostState:
    """Read the state of a host."""
    namespace = host.namespace
    devices = {name: link for name, link in namespace.links().items() if name.startswith(_TUNNELS)}
    return HostState(
        devices=devices,
        addresses={name: namespace.addresses(name) for name in devices},
        routes=tuple(r for family in (4, 6) for r in namespace.routes(family) if _is_peer_route(r)),
        neighbours=tuple(n | {"dev": d} for d in devices for f in (4, 6) for n in namespace.neighbours(d, f)),
        fdb=tuple(e | {"dev": d} for d in devices for e in namespace.fdb(d)),
    )


def missing(state: HostState, own: frozenset[Network], leases: list[PeerLease]) -> list[str]:
    """Name what the host lacks to reach every other lease, one line each, as ip(8) and bridge(8) would write it."""
    lines = []
    for lease in leases:
        if lease.subnet in own:
            continue
        if not any(_covers(route, lease.subnet) for route in state.routes):
            lines.append(f"route {lease.subnet}")
        # With DirectRouting a peer of the same segment has a plain route and needs no tunnel entries.
        direct = any(_exact(r, lease.subnet) and r.get("gateway") == lease.public_ip for r in state.routes)
        if not lease.mac or direct:
            continue
        if not any(
            _mac(n) == lease.mac and n.get("dst") == str(lease.subnet.network_address) for n in state.neighbours
        ):
            lines.append(f"neigh {lease.subnet.network_address} lladdr {lease.mac}")
        if not any(_mac(e) == lease.mac and e.get("dst") == lease.public_ip for e in state.fdb):
            lines.append(f"fdb {lease.mac} dst {lease.public_ip}")
    return lines


def _is_peer_route(route: Object) -> bool:
    device, destination = route.get("dev", ""), str(route.get("dst", ""))
    if destination == "default" or destination.startswith(("fe80:", "ff00:")) or route.get("protocol") == "kernel":
        return device.startswith(_TUNNELS) and not destination.startswith(("fe80:", "ff00:"))
    peer = route.get("gateway") or route.get("protocol") == _PROTOCOL
    return bool(device.startswith(_TUNNELS) or (device == _UNDERLAY and peer))


def _covers(route: Object, subnet: Network) -> bool:
    network = _network(route)
    return network is not None and network.version == subnet.version and subnet.subnet_of(network)  # type: ignore[arg-type]


def _exact(route: Object, subnet: Network) -> bool:
    return _network(route) == subnet


def _network(route: Object) -> Network | None:
    return None if route["dst"] == "default" else ip_network(route["dst"], strict=False)


def _mac(entry: Object) -> str:
    return str(entry.get("lladdr") or entry.get("mac") or "").lower()
