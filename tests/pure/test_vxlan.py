from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import load_backend
from backends.api import ExternalInterface, Setting
from backends.dataplane.model import Address, FdbEntry, Link, Neighbour, Route, Vxlan
from backends.vxlan import VxlanBackend, vtep_mac
from subnet.config import parse_network_config
from subnet.errors import ConfigError, LeaseDataError
from subnet.model import Lease, LeaseAttrs, Subnets

pytestmark = pytest.mark.pure

V4, V6 = ip_address("192.0.2.1"), ip_address("2001:db8:1::1")
ETH0 = ExternalInterface("eth0", 2, 1500, V4, V6, V4, V6, frozenset({ip_network("192.0.2.0/24")}))  # type: ignore[arg-type]
OWN = Subnets(ip_network("10.5.1.0/24"))  # type: ignore[arg-type]


def _setting(backend: str = '{"Type":"vxlan"}', extra: str = "", interface: ExternalInterface = ETH0) -> Setting:
    config = parse_network_config(f'{{"Network":"10.5.0.0/16",{extra}"Backend":{backend}}}', "test")
    return Setting(config, interface, frozenset({ip_network("10.5.0.0/16")}))


DUAL = '"EnableIPv6":true,"IPv6Network":"fd05::/48",'


def _backend(*args: Any, **kw: Any) -> VxlanBackend:
    backend = load_backend(_setting(*args, **kw))
    assert isinstance(backend, VxlanBackend)
    return backend


def _peer(n: int, *, mac: str = "", public: str = "", revision: int = 0, data: Any = None, v6: bool = False) -> Lease:
    mac = mac or f"02:00:00:00:00:{n:02x}"
    body = {"VNI": 1, "VtepMAC": mac} if data is None else data
    return Lease(
        Subnets(ip_network(f"10.5.{n}.0/24"), ip_network(f"fd05:0:0:{n:x}::/64") if v6 else None),  # type: ignore[arg-type]
        LeaseAttrs(
            ip_address(public or f"192.0.2.{n}"),  # type: ignore[arg-type]
            ip_address(f"2001:db8:1::{n:x}") if v6 else None,  # type: ignore[arg-type]
            "vxlan",
            body,
            {"VNI": 1, "VtepMAC": f"02:66:00:00:00:{n:02x}"} if v6 else None,
        ),
        f"/coreos.com/network/subnets/10.5.{n}.0-24",
        revision=revision,
    )


def _never(_: object) -> bool:
    return False


def test_device_of_the_documented_example() -> None:
    (spec,) = _backend().links({}, binding=False)
    assert isinstance(spec.tunnel, Vxlan)
    assert (spec.name, spec.mtu_bytes, spec.tunnel.vni, spec.tunnel.port) == ("flannel.1", 1450, 1, 0)
    assert (spec.tunnel.local, spec.tunnel.lower_index, spec.tunnel.learning, spec.tunnel.gbp) == (V4, 2, False, False)


def test_I06_a_device_per_family_and_the_mtu_that_fits_both() -> None:
    backend = _backend(extra=DUAL)
    v4, v6 = backend.links({"flannel-v6.1": "02:00:00:00:00:99"}, binding=True)
    assert (v4.name, v4.mtu_bytes, v4.mac) == ("flannel.1", 1450, "")
    assert isinstance(v6.tunnel, Vxlan)
    assert (v6.name, v6.mtu_bytes, v6.mac, v6.tunnel.local) == ("flannel-v6.1", 1430, "02:00:00:00:00:99", V6)
    assert backend.mtu_bytes() == 1430


def test_I05_ipv6_network_inside_the_underlays_is_refused_with_both_named() -> None:
    inside = replace(ETH0, prefixes=frozenset({ip_network("fd05::/32"), ip_network("fe80::/64")}))
    with pytest.raises(ConfigError, match=r"fd05::/48.*fd05::/32.*eth0"):
        load_backend(_setting(extra=DUAL, interface=inside))


def test_V18_source_is_the_interfaces_address_even_behind_nat() -> None:
    behind_nat = ExternalInterface("eth0", 2, 1500, V4, None, ip_address("203.0.113.5"))  # type: ignore[arg-type]
    backend = _backend(interface=behind_nat)
    (spec,) = backend.links({}, binding=False)
    assert isinstance(spec.tunnel, Vxlan)
    assert spec.tunnel.local == V4
    links = {"flannel.1": Link("flannel.1", 5, "vxlan", "02:00:00:00:00:01", 1450, True)}
    assert backend.attrs(links).public_ip == ip_address("203.0.113.5")


def test_entries_of_a_peer_are_the_documented_three() -> None:
    desired = _backend().desired(OWN, [_peer(2)], _never)
    gateway = ip_address("10.5.2.0")
    assert desired.addresses == {Address("flannel.1", ip_interface("10.5.1.0/32"))}
    assert desired.neighbours == {Neighbour("flannel.1", gateway, "02:00:00:00:00:02")}
    assert desired.fdb == {FdbEntry("flannel.1", "02:00:00:00:00:02", ip_address("192.0.2.2"))}
    assert desired.routes == {Route(ip_network("10.5.2.0/24"), "flannel.1", gateway, onlink=True, protocol=3)}


def test_both_families_of_a_dual_stack_peer() -> None:
    own = Subnets(ip_network("10.5.1.0/24"), ip_network("fd05:0:0:1::/64"))  # type: ignore[arg-type]
    desired = _backend(extra=DUAL).desired(own, [_peer(2, v6=True), _peer(3)], _never)
    assert Address("flannel-v6.1", ip_interface("fd05:0:0:1::/128")) in desired.addresses
    assert Neighbour("flannel-v6.1", ip_address("fd05:0:0:2::"), "02:66:00:00:00:02") in desired.neighbours
    assert FdbEntry("flannel-v6.1", "02:66:00:00:00:02", ip_address("2001:db8:1::2")) in desired.fdb
    assert len(desired.routes) == 3
    assert desired.problems == ()


def test_direct_routing_uses_the_underlay_and_no_tunnel_entry() -> None:
    backend = _backend('{"Type":"vxlan","DirectRouting":true}')
    near, far = _peer(2), _peer(9, public="198.51.100.9")
    desired = backend.desired(OWN, [near, far], lambda address: address == ip_address("192.0.2.2"))
    assert Route(ip_network("10.5.2.0/24"), "eth0", ip_address("192.0.2.2"), protocol=142) in desired.routes
    assert {n.address for n in desired.neighbours} == {ip_address("10.5.9.0")}


def test_leases_of_other_types_are_left_alone() -> None:
    other = Lease(Subnets(ip_network("10.5.3.0/24")), LeaseAttrs(ip_address("192.0.2.3"), None, "host-gw"))  # type: ignore[arg-type]
    desired = _backend().desired(OWN, [other], _never)
    assert (desired.routes, desired.problems) == (frozenset(), ())


@pytest.mark.parametrize(
    "data",
    [{}, [], "x", {"VtepMAC": None}, {"VtepMAC": "02:00"}, {"VtepMAC": "01:00:5e:00:00:01"}, {"VtepMAC": 7}],
)
def test_unusable_data_costs_only_that_peer(data: Any) -> None:
    bad = _peer(2, data=data)
    desired = _backend().desired(OWN, [bad, _peer(3)], _never)
    assert {r.destination for r in desired.routes} == {ip_network("10.5.3.0/24")}
    ((_, text),) = desired.problems
    assert bad.key in text


@given(st.permutations([_peer(n, revision=n) for n in range(2, 9)]))
def test_V21_state_is_a_function_of_the_leases_not_of_their_order(peers: list[Lease]) -> None:
    backend = _backend()
    assert backend.desired(OWN, peers, _never) == backend.desired(OWN, sorted(peers, key=lambda p: p.key), _never)


@pytest.mark.parametrize(
    ("data", "mac"),
    [
        ({"VtepMAC": "C6:D2:32:6F:8F:44"}, "c6:d2:32:6f:8f:44"),
        ({"vtepmac": "c6-d2-32-6f-8f-44", "vni": 1}, "c6:d2:32:6f:8f:44"),
        ({"VNI": 99, "VtepMAC": "c6d2.326f.8f44"}, "c6:d2:32:6f:8f:44"),
    ],
)
def test_K05_legal_spellings_of_a_mac(data: Any, mac: str) -> None:
    assert vtep_mac(data) == mac


def test_own_lease_of_an_earlier_run_gives_the_mac_back() -> None:
    backend = _backend()
    attrs = LeaseAttrs(None, None, "vxlan", {"VNI": 1, "VtepMAC": "02:00:00:00:00:42"})
    assert backend.device_macs(attrs) == {"flannel.1": "02:00:00:00:00:42"}
    assert backend.device_macs(LeaseAttrs(backend_type="host-gw")) == {}


def test_K05_data_alone_give_the_mac_back_and_those_of_other_types_do_not() -> None:
    data = {"VNI": 1, "VtepMAC": "02:00:00:00:00:42"}
    assert _backend().device_macs(LeaseAttrs(backend_data=data)) == {"flannel.1": "02:00:00:00:00:42"}
    assert _backend().device_macs(LeaseAttrs(backend_type="host-gw", backend_data=data)) == {}


@pytest.mark.parametrize(
    ("backend", "mtu_bytes"),
    [
        ('{"Type":"vxlan","MTU":1400}', 1350),
        ('{"Type":"vxlan","MTU":9000}', 1450),
        ('{"Type":"vxlan","MTU":0}', 1450),
        ('{"Type":"vxlan","mtu":null}', 1450),
    ],
    ids=["V15-smaller", "V15-larger-than-the-underlay", "V15-zero", "V15-null"],
)
def test_mtu_option_is_the_underlays(backend: str, mtu_bytes: int) -> None:
    made = _backend(backend)
    assert made.mtu_bytes() == mtu_bytes
    assert made.links({}, binding=False)[0].mtu_bytes == mtu_bytes


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ('{"Type":"vxlan","MTU":100}', "MTU 100 is too small"),
        ('{"Type":"vxlan","MTU":"1400"}', "Backend.MTU"),
        ('{"Type":"vxlan","Port":70000}', "Backend.Port"),
        ('{"Type":"vxlan","Port":"x"}', "Backend.Port"),
        ('{"Type":"vxlan","VNI":16777216}', "Backend.VNI"),
        ('{"Type":"vxlan","VNI":10000000}', "flannel.10000000"),
        ('{"Type":"vxlan","VNI":1.5}', "Backend.VNI"),
        ('{"Type":"vxlan","GBP":1}', "Backend.GBP"),
        ('{"Type":"vxlam"}', "'vxlam' is unknown"),
        ('{"Type":"tencent-vpc"}', "'tencent-vpc' is not available"),
        ("{}", "'' is unknown"),
        ('{"Type":"../vxlan"}', "is unknown"),
    ],
    ids=["V15", "V15", "V19", "V19", "vni", "name", "vni-float", "gbp", "S02", "later", "empty", "path"],
)
def test_options_that_cannot_be_used_are_named(backend: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_backend(_setting(backend))


def test_vtep_mac_errors_are_lease_errors() -> None:
    with pytest.raises(LeaseDataError):
        vtep_mac({"VtepMAC": "zz"})
