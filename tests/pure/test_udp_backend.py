from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from types import SimpleNamespace
from typing import Any

import pytest

from backends import load_backend
from backends.api import CarryingBackend, ExternalInterface, Setting
from backends.dataplane.model import PROTO_BOOT, Address, Route
from backends.dataplane.table import WantedTable
from backends.udp import options as udp_options
from backends.udp.carrier import CarrierSpec, UdpCarrier
from backends.udp.user import BothFamilies, UdpBackend
from subnet.config import parse_network_config
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.wire import encode_attrs

pytestmark = pytest.mark.pure

NETWORK = IPv4Network("10.5.0.0/16")
OWN = Subnets(IPv4Network("10.5.1.0/24"))


def nothing() -> None:
    return None


def setting(options: str = "", more: str = "", **interface: object) -> Setting:
    text = f'{{"Network":"{NETWORK}"{more},"Backend":{{"Type":"udp"{options}}}}}'
    values = {"name": "eth0", "index": 2, "mtu_bytes": 1500, "v4": IPv4Address("192.0.2.1")} | interface
    external = ExternalInterface(**{"public_v4": values["v4"]} | values)  # type: ignore[arg-type]
    return Setting(parse_network_config(text, "test"), external, frozenset({NETWORK}))


def backend(options: str = "", more: str = "", **interface: object) -> UdpBackend:
    made = load_backend(setting(options, more, **interface))
    assert isinstance(made, UdpBackend)
    assert isinstance(made, CarryingBackend)
    return made


def lease(number: int, kind: str = "") -> Lease:
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number}"), None, kind)
    return Lease(Subnets(IPv4Network(f"10.5.{number}.0/24")), attrs, f"10.5.{number}.0-24", revision=number)


def test_C08_a_config_without_backend_gets_udp() -> None:
    config = parse_network_config(f'{{"Network":"{NETWORK}"}}', "test")
    made = load_backend(Setting(config, setting().interface, frozenset({NETWORK})))
    assert isinstance(made, UdpBackend)


def test_the_lease_is_upstreams_to_the_byte() -> None:
    attrs = backend(public_v4=IPv4Address("203.0.113.5")).attrs({})
    assert encode_attrs(attrs) == b'{"PublicIP":"203.0.113.5","PublicIPv6":null}'


@pytest.mark.parametrize(("mtu_bytes", "left"), [(1500, 1472), (9000, 8972)], ids=["usual", "U03"])
def test_outer_headers_are_subtracted(mtu_bytes: int, left: int) -> None:
    assert backend(mtu_bytes=mtu_bytes).mtu_bytes() == left


def spec_of(made: UdpBackend) -> CarrierSpec:
    found = made.carrier(None, nothing)
    assert isinstance(found, UdpCarrier)
    return found.spec


def test_the_carrier_is_made_of_the_interface_and_the_port() -> None:
    usual = CarrierSpec(IPv4Address("192.0.2.1"), 8285, 1472, NETWORK)
    assert spec_of(backend()) == usual
    assert spec_of(backend(public_v4=IPv4Address("203.0.113.5"))) == usual
    assert spec_of(backend(',"AllowUnknown":true')).allow_unknown
    assert spec_of(backend(',"port":9000,"DataPath":"User"')).port == 9000


def test_a_carrier_goes_on_while_what_it_is_made_of_stays() -> None:
    first = backend().carrier(None, nothing)
    assert backend(prefixes=frozenset({IPv4Network("192.0.2.0/24")})).carrier(first, nothing) is first
    closed: list[bool] = []
    first.discard = lambda: closed.append(True)  # type: ignore[attr-defined]
    second = backend(mtu_bytes=1400).carrier(first, nothing)
    assert second is not first
    assert closed == [True]


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        (',"Port":0', "", r"Backend\.Port 0: must be 1 to 65535"),
        (',"Port":65536', "", r"Backend\.Port 65536"),
        (',"Port":"8285"', "", r"Backend\.Port"),
        (',"DataPath":"kernel"', "", r"Backend\.DataPath 'kernel' is unknown"),
        (',"AllowUnknown":1', "", r"Backend\.AllowUnknown 1: must be"),
        (',"DataPath":1', "", r"Backend\.DataPath 1: must be a string"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: str, more: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        backend(options, more)


def test_ipv6_travels_in_ipv6_beside_ipv4_and_alone() -> None:
    v6: dict[str, Any] = {"v6": IPv6Address("2001:db8::1"), "public_v6": IPv6Address("2001:db8::1")}
    pool = ',"EnableIPv6":true,"IPv6Network":"fd05::/48"'
    both = backend(more=pool, **v6)
    assert both.attrs({}) == LeaseAttrs(IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1"))
    assert both.mtu_bytes() == 1452
    made = both.carrier(None, nothing)
    assert isinstance(made, BothFamilies)
    six = CarrierSpec(IPv6Address("2001:db8::1"), 8285, 1452, IPv6Network("fd05::/48"))
    four = CarrierSpec(IPv4Address("192.0.2.1"), 8285, 1472, NETWORK)
    assert {family: one.spec for family, one in made.carriers.items()} == {4: four, 6: six}
    assert backend(more=pool, **v6).carrier(made, nothing) is made
    alone = backend(more=pool + ',"EnableIPv4":false', **v6)
    assert alone.attrs({}) == LeaseAttrs(None, IPv6Address("2001:db8::1"))
    only = alone.carrier(None, nothing)
    assert isinstance(only, UdpCarrier)
    assert only.spec == six


def test_a_family_goes_on_while_the_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ',"EnableIPv6":true,"IPv6Network":"fd05::/48"'
    first = backend(more=pool, v6=IPv6Address("2001:db8::1")).carrier(None, nothing)
    assert isinstance(first, BothFamilies)
    closed: list[int] = []
    for family, one in first.carriers.items():
        monkeypatch.setattr(one, "discard", lambda family=family: closed.append(family))
    second = backend(more=pool, v6=IPv6Address("2001:db8::2")).carrier(first, nothing)
    assert isinstance(second, BothFamilies)
    assert closed == [6]
    assert second.carriers[4] is first.carriers[4]
    assert second.carriers[6].spec.local == IPv6Address("2001:db8::2")


def test_an_enabled_family_needs_an_address_and_room() -> None:
    pool = ',"EnableIPv6":true,"IPv6Network":"fd05::/48"'
    with pytest.raises(ConfigError, match="eth0 has no IPv6 address, which the config enables"):
        backend(more=pool)
    with pytest.raises(ConfigError, match="MTU 1300 of eth0 is too small for IPv6 tunnels"):
        backend(more=pool, v6=IPv6Address("2001:db8::1"), mtu_bytes=1300)


def test_each_family_has_its_address_and_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(more=',"EnableIPv6":true,"IPv6Network":"fd05::/48"', v6=IPv6Address("2001:db8::1"))
    carriers = made.carrier(None, nothing)
    assert isinstance(carriers, BothFamilies)
    for family, name in ((4, "flannel0"), (6, "flannel-v6.0")):
        monkeypatch.setattr(carriers.carriers[family], "_running", SimpleNamespace(tun=SimpleNamespace(name=name)))  # type: ignore[index]
    desired = made.desired(Subnets(OWN.v4, IPv6Network("fd05:0:0:1::/64")), (lease(2),), lambda _: True)
    assert desired.devices == {"flannel0", "flannel-v6.0"}
    assert desired.routes == {Route(NETWORK, "flannel0"), Route(IPv6Network("fd05::/48"), "flannel-v6.0")}
    assert desired.addresses == {
        Address("flannel0", IPv4Interface("10.5.1.0/32")),
        Address("flannel-v6.0", IPv6Interface("fd05:0:0:1::/128")),
    }
    assert desired.problems == ()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[UdpBackend], UdpBackend]:
    """Give a backend a carrier whose device is flannel0."""

    def give(made: UdpBackend) -> UdpBackend:
        found = made.carrier(None, nothing)
        monkeypatch.setattr(found, "_running", SimpleNamespace(tun=SimpleNamespace(name="flannel0")))
        return made

    return give


def test_one_address_and_one_route_whatever_the_peers(device: Callable[[UdpBackend], UdpBackend]) -> None:
    made = device(backend())
    address = Address("flannel0", IPv4Interface("10.5.1.0/32"))
    route = Route(NETWORK, "flannel0", protocol=PROTO_BOOT)
    for peers in ((), (lease(2),), (lease(2), lease(3))):
        desired = made.desired(OWN, peers, lambda _: True)
        assert desired.devices == {"flannel0"}
        assert (desired.addresses, desired.routes) == (frozenset({address}), frozenset({route}))
        assert not desired.neighbours | desired.fdb
        assert desired.problems == ()


def test_peers_share_the_route_and_do_not_take_it_along(device: Callable[[UdpBackend], UdpBackend]) -> None:
    made = device(backend())
    table = WantedTable(made.desired(OWN, (), lambda _: True))
    for number in (2, 3):
        one = lease(number)
        table.put(str(one.subnets), (one.revision, one.key), made.desired(OWN, (one,), lambda _: True))
    assert table.problems == {}
    table.remove(str(lease(2).subnets))
    table.remove(str(lease(3).subnets))
    assert table.desired().routes == {Route(NETWORK, "flannel0")}


def test_a_node_of_another_backend_is_reported_and_not_sent_to(device: Callable[[UdpBackend], UdpBackend]) -> None:
    made = device(backend())
    problems = dict(made.desired(OWN, (lease(2), lease(3, "vxlan")), lambda _: True).problems)
    assert problems == {"10.5.3.0-24": "lease 10.5.3.0-24 skipped: its node runs backend 'vxlan'"}
    assert udp_options.carried(lease(2))
    assert not udp_options.carried(lease(3, "vxlan"))
