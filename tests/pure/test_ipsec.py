from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_interface, ip_network
from typing import Any

import pytest

from backends.api import ExternalInterface, Setting
from backends.dataplane.model import Address, DesiredState, IpsecPolicy, Route
from backends.ipsec import IpsecBackend
from backends.ipsec.connections import Association, Connection, Terms, Watch, connections, peer_end, steps
from subnet.config import parse_network_config
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.wire import encode_attrs

pytestmark = pytest.mark.pure

PSK = "x" * 96
OWN = Subnets(ip_network("10.5.1.0/24"))  # type: ignore[arg-type]
ETH0 = ExternalInterface(
    "eth0",
    2,
    1500,
    IPv4Address("192.0.2.1"),
    None,
    IPv4Address("192.0.2.1"),
    None,
    frozenset({ip_network("192.0.2.0/24")}),
)
NETWORKS = frozenset({ip_network("10.5.0.0/16")})


def backend(options: str = "", networks: str = '"Network":"10.5.0.0/16"', interface: Any = ETH0) -> IpsecBackend:
    text = f'{{{networks},"Backend":{{"Type":"ipsec","PSK":"{PSK}"{options}}}}}'
    return IpsecBackend(Setting(parse_network_config(text, "test"), interface, NETWORKS))


def lease(number: int, kind: str = "ipsec", public: str | None = "") -> Lease:
    address = None if public is None else IPv4Address(public or f"192.0.2.{number}")
    subnets = Subnets(ip_network(f"10.5.{number}.0/24"))  # type: ignore[arg-type]
    return Lease(subnets, LeaseAttrs(address, None, kind), f"10.5.{number}.0-24", revision=number)


def desired(made: IpsecBackend, *peers: Lease) -> DesiredState:
    return made.desired(OWN, peers, lambda _: True)


def test_the_lease_is_upstreams() -> None:
    attrs = backend().attrs({})
    assert encode_attrs(attrs) == b'{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"ipsec"}'
    assert backend().links({}, binding=False) == ()


@pytest.mark.parametrize(("options", "mtu"), [("", 1423), (',"UDPEncap":true', 1415), (',"udpencap":false', 1423)])
def test_the_mtu_leaves_room_for_what_goes_around(options: str, mtu: int) -> None:
    assert backend(options).mtu_bytes() == mtu


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"Network":"10.5.0.0/16","Backend":{"Type":"ipsec"}}', "PSK has 0 characters; ipsec needs at least 96"),
        ('{"Network":"10.5.0.0/16","Backend":{"Type":"ipsec","PSK":"hushhush"}}', "PSK has 8 characters"),
        (
            f'{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48","Backend":{{"Type":"ipsec","PSK":"{PSK}"}}}}',
            "IPv4 only",
        ),
    ],
)
def test_options_that_cannot_be_used_are_named_without_the_secret(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        IpsecBackend(Setting(parse_network_config(text, "test"), ETH0, NETWORKS))
    assert "hushhush" not in str(caught.value)


def test_an_interface_without_address_is_named() -> None:
    with pytest.raises(ConfigError, match="eth0 has no IPv4 address"):
        backend(interface=replace(ETH0, v4=None))


def test_each_peer_has_three_policies_and_a_route_from_an_address_of_the_own_subnet() -> None:
    own, theirs = ip_network("10.5.1.0/24"), ip_network("10.5.2.0/24")
    here, there = ip_address("192.0.2.1"), ip_address("192.0.2.2")
    state = desired(backend(), lease(2), lease(3, "vxlan"))
    assert state.policies == {
        IpsecPolicy("out", own, theirs, here, there),
        IpsecPolicy("in", theirs, own, there, here),
        IpsecPolicy("fwd", theirs, own, there, here),
    }
    route = Route(theirs, "eth0", protocol=142, source=ip_address("10.5.1.0"), scope="link")
    assert state.routes == {route}
    assert state.addresses == {Address("lo", ip_interface("10.5.1.0/32"))}
    assert [address.label for address in state.addresses] == ["lo:flannel"]
    assert (state.devices, state.problems) == (frozenset(), ())


def test_a_lease_without_address_is_a_problem_and_alone_in_it() -> None:
    state = desired(backend(), lease(2), lease(3, public=None))
    assert [key for key, _ in state.problems] == ["10.5.3.0-24"]
    assert len(state.policies) == 3


def test_ipv6_that_is_not_carried_is_said() -> None:
    dual = backend(networks='"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"')
    assert [text for _, text in desired(dual).problems] == [
        "backend ipsec carries IPv4 only: fd05::/48 is not connected"
    ]


def test_behind_nat_packets_leave_from_the_interfaces_address() -> None:
    made = backend(interface=replace(ETH0, public_v4=IPv4Address("203.0.113.9")))
    assert str(made.attrs({}).public_ip) == "203.0.113.9"
    (out,) = (p for p in desired(made, lease(2)).policies if p.direction == "out")
    assert str(out.outer_source) == "192.0.2.1"


TERMS = Terms(IPv4Address("192.0.2.1"), IPv4Address("192.0.2.1"), PSK, encap=False)


def connection(number: int, terms: Terms = TERMS) -> Connection:
    return Connection(terms, OWN.v4, peer_end(lease(number)))  # type: ignore[arg-type]


def test_charon_is_told_what_upstream_tells_it_and_to_probe_peers() -> None:
    assert connection(2).message() == {
        "192.0.2.1-10.5.1.0/24-10.5.2.0/24-192.0.2.2": {
            "local_addrs": ["192.0.2.1"],
            "remote_addrs": ["192.0.2.2"],
            "proposals": ["aes256-sha256-modp4096"],
            "version": "2",
            "keyingtries": "0",
            "encap": "no",
            "dpd_delay": "30s",
            "local": {"auth": "psk"},
            "remote": {"auth": "psk"},
            "children": {
                "10.5.1.0/24-10.5.2.0/24": {
                    "local_ts": ["10.5.1.0/24"],
                    "remote_ts": ["10.5.2.0/24"],
                    "esp_proposals": ["aes128gcm16-sha256-prfsha256-ecp256"],
                    "mode": "tunnel",
                    "reqid": "11",
                    "rekey_time": "1h",
                    "start_action": "start",
                    "close_action": "trap",
                    "dpd_action": "restart",
                    "policies": "no",
                }
            },
        }
    }


def test_options_and_nat_reach_charon() -> None:
    terms = replace(TERMS, public=IPv4Address("203.0.113.9"), encap=True, proposal="aes256gcm16-ecp384")
    (said,) = connection(2, terms).message().values()
    assert (said["encap"], said["local"]) == ("yes", {"auth": "psk", "id": "203.0.113.9"})
    assert said["local_addrs"] == ["192.0.2.1"]
    assert said["children"]["10.5.1.0/24-10.5.2.0/24"]["esp_proposals"] == ["aes256gcm16-ecp384"]
    assert PSK not in repr(connection(2, terms))


def test_connections_follow_leases_of_this_backend_that_can_be_used() -> None:
    found = connections(TERMS, OWN.v4, [lease(2), lease(3, "udp"), lease(4, public=None)])
    assert list(found.values()) == [connection(2)]
    assert connections(TERMS, None, [lease(2)]) == {}


def test_steps_change_what_changed_and_load_again_what_an_earlier_run_left() -> None:
    two, three, four = (connection(number) for number in (2, 3, 4))
    wanted = {one.name: one for one in (two, three)}
    assert steps({two.name: two, four.name: four}, wanted) == steps({two.name: two, four.name: None}, wanted)
    todo = steps({two.name: two, four.name: four}, wanted)
    assert (todo.drop, todo.load) == ((four.name,), (three,))
    assert steps(wanted, wanted) == steps({}, {})
    assert set(steps({two.name: None, three.name: three}, wanted).load) == {two}


def test_a_connection_without_association_is_begun_again_and_told_of_after_a_while() -> None:
    watch, up, busy = Watch(), Association(False, True), Association(True, False)
    assert watch.see(["a", "b", "c"], {"a": up, "b": busy}, 0.0) == ("c",)
    assert watch.silent(19.0) == ()
    assert watch.see(["a", "b", "c"], {"a": up, "b": busy, "c": Association(False, False)}, 19.0) == ("c",)
    assert watch.silent(20.0) == ("b", "c")
    assert watch.see(["a", "b"], {"a": up, "b": up}, 21.0) == ()
    assert watch.silent(99.0) == ()
