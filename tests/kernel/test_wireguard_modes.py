from __future__ import annotations

import itertools
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

import pytest

from backends import wgkeys
from backends.api import ExternalInterface, Setting
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.diff import diff
from backends.dataplane.model import Endpoint
from backends.kernel.netlink import NetlinkKernel
from backends.wireguard import WireguardBackend
from subnet.config import parse_network_config
from subnet.model import Lease, LeaseAttrs, Subnets
from tests.support.netns import MakeNamespace, Namespace, veth

pytestmark = [pytest.mark.kernel, pytest.mark.vm]

NETWORKS = {
    "v4": '"Network":"10.5.0.0/16"',
    "v6": '"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48"',
    "dual": '"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"',
}
POSSIBLE = [
    *itertools.product(("v4",), ("separate", "auto", "ipv4")),
    *itertools.product(("v6",), ("separate", "auto", "ipv6")),
    *itertools.product(("dual",), ("separate", "auto", "ipv4", "ipv6")),
]


@dataclass
class Node:
    """A host with the backend on it, without daemon and datastore."""

    namespace: Namespace
    number: int
    kernel: NetlinkKernel
    backend: WireguardBackend
    subnets: Subnets
    attrs: LeaseAttrs

    @classmethod
    def of(cls, namespace: Namespace, number: int, families: str, mode: str) -> Node:
        config = parse_network_config(
            f'{{{NETWORKS[families]},"Backend":{{"Type":"wireguard","Mode":"{mode}"}}}}', "test"
        )
        v4 = ip_address(f"192.0.2.{number}") if families != "v6" else None
        v6 = ip_address(f"2001:db8:1::{number}") if families != "v4" else None
        subnets = Subnets(
            ip_network(f"10.5.{number}.0/24") if v4 else None,  # type: ignore[arg-type]
            ip_network(f"fd05:0:0:{number}::/64") if v6 else None,  # type: ignore[arg-type]
        )
        with namespace.inside():
            kernel = NetlinkKernel()
            interface = ExternalInterface("eth0", kernel.links()["eth0"].index, 1500, v4, v6, v4, v6)  # type: ignore[arg-type]
            setting = Setting(config, interface, frozenset({ip_network("10.5.0.0/16"), ip_network("fd05::/48")}))
            backend = WireguardBackend(setting, wgkeys.clamped(number.to_bytes(32, "big")))
            attrs = backend.attrs(DeviceKeeper(kernel).ensure(backend.links({}, binding=False)))
        return cls(namespace, number, kernel, backend, subnets, attrs)

    @property
    def lease(self) -> Lease:
        return Lease(self.subnets, self.attrs, f"n{self.number}", revision=self.number)

    def converge(self, *peers: Node) -> int:
        desired = self.backend.desired(self.subnets, [peer.lease for peer in peers], lambda _: False)
        assert desired.problems == ()
        with self.namespace.inside():
            changes = diff(self.kernel.observe(desired.devices), desired)
            assert self.kernel.apply(changes) == []
        return len(changes)

    def endpoints(self) -> set[Endpoint | None]:
        devices = {spec.name for spec in self.backend.links({}, binding=False)}
        with self.namespace.inside():
            return {peer.endpoint for peer in self.kernel.observe(devices).peers}

    def reaches(self, other: Node) -> list[bool]:
        targets = [net.network_address for net in (other.subnets.v4, other.subnets.v6) if net is not None]
        pings = [self.namespace.run("ping", "-c1", "-W5", "-M", "do", "-s1372", str(t), check=False) for t in targets]
        return [" 0% packet loss" in text for text in pings]


@pytest.fixture
def hosts(make_namespace: MakeNamespace) -> list[Namespace]:
    a, b = make_namespace("a"), make_namespace("b")
    veth(a, b)
    for number, space in enumerate((a, b), 1):
        space.ip(f"addr add 192.0.2.{number}/24 dev eth0")
        space.ip(f"addr add 2001:db8:1::{number}/64 dev eth0 nodad")
    return [a, b]


@pytest.mark.parametrize(("families", "mode"), POSSIBLE)
def test_W05_hosts_reach_each_other_with_full_packets(hosts: list[Namespace], families: str, mode: str) -> None:
    first, second = (Node.of(space, number, families, mode) for number, space in enumerate(hosts, 1))
    try:
        assert first.converge(second) > 0
        assert second.converge(first) > 0
        assert first.converge(second) == 0
        reached = first.reaches(second) + second.reaches(first)
        assert reached == [True] * len(reached)
        used = {endpoint.address.version for endpoint in first.endpoints() if endpoint is not None}
        both = {"separate": {4, 6}, "auto": {4}, "ipv4": {4}, "ipv6": {6}}
        assert used == {"v4": {4}, "v6": {6}, "dual": both[mode]}[families]
        assert first.converge(second) == 0
    finally:
        first.kernel.close()
        second.kernel.close()
