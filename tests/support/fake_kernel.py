"""A kernel in memory: it keeps what the contract of backends.dataplane.ports promises."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import sha256
from ipaddress import ip_interface, ip_network

from backends.dataplane.diff import apply_changes
from backends.dataplane.model import (
    Address,
    Change,
    Link,
    LinkSpec,
    ObservedState,
    Route,
    Vxlan,
    Wireguard,
    WireguardPeer,
)
from backends.dataplane.packed import Entries, Packer, packed_state
from backends.dataplane.ports import Failure, See
from subnet.errors import KernelError
from subnet.model import IPAddress


def public_key(wireguard: Wireguard) -> str:
    """Stands in for the one that a kernel derives: 32 bytes that only the private key gives."""
    return b64encode(sha256(wireguard.private_key.encode()).digest()).decode()


class FakeKernel:
    """One host with eth0; ``refuse`` holds objects that every put of fails."""

    def __init__(self, address: str = "192.0.2.1/24") -> None:
        self.held: dict[str, Link] = {}
        self.state = ObservedState()
        self.sysctls: dict[str, str] = {}
        self.refuse: set[str] = set()
        self.observations = 0
        self.creations: list[LinkSpec] = []
        self.ways: dict[IPAddress, tuple[str, IPAddress | None]] = {}
        self.programs: list[int] = []
        self._index = 1
        self.add_device("lo", loopback=True)
        self.add_device("eth0")
        self.set_address("eth0", address)

    def add_device(self, name: str, *, loopback: bool = False, mtu_bytes: int = 1500) -> None:
        self.held[name] = Link(name, self._index, "veth", "02:00:00:00:00:fe", mtu_bytes, True, loopback=loopback)
        self._index += 1

    def remove_device(self, name: str) -> None:
        del self.held[name]
        held = self.state
        self.state = ObservedState(
            frozenset(a for a in held.addresses if a.device != name),
            frozenset(n for n in held.neighbours if n.device != name),
            frozenset(e for e in held.fdb if e.device != name),
            frozenset(r for r in held.routes if r.device != name),
            frozenset(p for p in held.peers if p.device != name),
            held.policies,
        )

    def set_address(self, device: str, text: str) -> None:
        interface = ip_interface(text)
        others = frozenset(a for a in self.state.addresses if a.device != device)
        self.state = replace(self.state, addresses=others | {Address(device, interface)})

    # -- the contract -----------------------------------------------------

    def links(self) -> dict[str, Link]:
        return dict(self.held)

    def addresses(self) -> tuple[Address, ...]:
        return tuple(sorted(self.state.addresses, key=str))

    def default_routes(self) -> frozenset[Route]:
        return frozenset(route for route in self.state.routes if route.destination.prefixlen == 0)

    def observe(self, devices: Collection[str]) -> ObservedState:
        self.observations += 1
        return self.state

    def survey(self, devices: Collection[str], packer: Packer, see: See) -> frozenset[WireguardPeer]:
        state = self.observe(devices)
        see(packed_state(state, packer))
        return state.silent

    def put(self, entries: Entries, packer: Packer) -> list[Failure]:
        return self.apply([Change("put", t) for key, value in entries.items() for t in packer.targets(key, value)])

    def apply(self, changes: Sequence[Change]) -> list[Failure]:
        refused = [c for c in changes if c.verb == "put" and str(c.target) in self.refuse]
        self.state = apply_changes(self.state, [c for c in changes if c not in refused])
        return [Failure(c, KernelError("put", c.target, 22, "invalid argument")) for c in refused]

    def lookup(self, target: IPAddress) -> Route:
        device, gateway = self.ways.get(target, ("eth0", None))
        return Route(ip_network(target), device, gateway)

    def create_link(self, spec: LinkSpec) -> None:
        tunnel = spec.tunnel
        if isinstance(tunnel, Vxlan):
            lower, tunnel = tunnel.lower_index, replace(tunnel, port=tunnel.port or 8472)
        else:
            lower = self.held["lo"].index
        if lower not in {link.index for link in self.held.values()}:
            raise KernelError("create", f"device {spec.name}", 19, "no such device")
        self.creations.append(spec)
        self.held[spec.name] = Link(spec.name, self._index, tunnel.kind, spec.mac, spec.mtu_bytes, False, tunnel)
        self._index += 1

    def delete_link(self, name: str) -> None:
        if name in self.held:
            self.remove_device(name)

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
        link = self.held[name]
        tunnel = link.tunnel if wireguard is None else wireguard
        if isinstance(tunnel, Wireguard) and up:
            tunnel = replace(tunnel, port=tunnel.port or 40000)
        self.held[name] = replace(
            link,
            up=link.up if up is None else up,
            mtu_bytes=mtu_bytes or link.mtu_bytes,
            mac=mac or link.mac,
            tunnel=replace(tunnel, public_key=public_key(tunnel)) if isinstance(tunnel, Wireguard) else tunnel,
        )

    def sysctl(self, key: str) -> str | None:
        return self.sysctls.get(key)

    def set_sysctl(self, key: str, value: str) -> None:
        self.sysctls[key] = value

    def set_tx_checksum(self, name: str, enabled: bool) -> bool:
        return enabled

    def remove_programs(self, keep: Collection[int]) -> list[str]:
        gone = [index for index in self.programs if index not in keep]
        for index in gone:
            self.programs.remove(index)
        return [f"program at {index}" for index in gone]
