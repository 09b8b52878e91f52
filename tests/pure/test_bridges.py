from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_interface, ip_network

import pytest

from backends.dataplane.model import Address, Route
from backends.dataplane.ports import LinkSeen, ObjectSeen, Overflow
from flanneld.bridges import Bridges, misplaced
from subnet.model import IPNetwork, Subnets
from tests.support.clock import ManualClock
from tests.support.fake_kernel import FakeKernel

pytestmark = pytest.mark.pure

NETWORKS: frozenset[IPNetwork] = frozenset({IPv4Network("10.5.0.0/16"), IPv6Network("fd05::/48")})
OWN = Subnets(IPv4Network("10.5.19.0/24"), IPv6Network("fd05:0:0:19::/64"))


@pytest.mark.parametrize(
    ("device", "address", "wrong"),
    [
        ("docker0", "10.5.27.1/24", True),
        ("cni0", "10.5.9.1/24", True),
        ("cni0", "fd05:0:0:9::1/64", True),
        ("cni0", "10.5.19.1/16", True),
        ("docker0", "10.0.0.1/8", True),
        ("cni0", "10.5.19.1/24", False),
        ("docker0", "10.5.19.129/25", False),
        ("cni0", "fd05:0:0:19::1/64", False),
        ("cni0", "fe80::1/64", False),
        ("docker0", "172.17.0.1/16", False),
        ("br-1f2e", "10.5.27.1/24", False),
        ("flannel.1", "10.5.27.0/32", False),
    ],
)
def test_N05_N06_which_addresses_are_misplaced(device: str, address: str, wrong: bool) -> None:
    found = misplaced([Address(device, ip_interface(address))], NETWORKS, OWN)
    assert list(found) == ([device] if wrong else [])
    for text in found.values():
        assert device in text
        assert address in text
        assert str(OWN.v6 if ":" in address else OWN.v4) in text


def test_family_without_a_subnet_has_none_to_be_outside_of() -> None:
    assert misplaced([Address("cni0", ip_interface("fd05::1/64"))], NETWORKS, Subnets(OWN.v4)) == {}


class CountingKernel(FakeKernel):
    looks = 0

    def addresses(self) -> tuple[Address, ...]:
        self.looks += 1
        return super().addresses()


def test_containers_that_come_and_go_cost_no_look() -> None:
    kernel = CountingKernel()
    bridges = Bridges(kernel, ManualClock())
    bridges.look(NETWORKS, OWN)
    for quiet in (
        ObjectSeen(Address("", ip_interface("fe80::1/64")), 7, False),
        ObjectSeen(Route(ip_network("10.5.3.0/24"), ""), 7, False),
        LinkSeen("veth1234", 7, False),
    ):
        bridges.saw(quiet)
        bridges.look(NETWORKS, OWN)
    assert kernel.looks == 1
    for loud in (
        ObjectSeen(Address("", ip_interface("10.5.3.1/24")), 7, True),
        LinkSeen("cni0", 8, False),
        Overflow(),
    ):
        before = kernel.looks
        bridges.saw(loud)
        bridges.look(NETWORKS, OWN)
        assert kernel.looks == before + 1
