from __future__ import annotations

import base64
import json
from ipaddress import IPv4Network
from typing import Any

import pytest

from flanneld.liveconfig import restart_reason
from subnet.config import parse_network_config
from subnet.model import NetworkConfig, Subnets

pytestmark = pytest.mark.pure

OWN = Subnets(IPv4Network("10.5.74.0/24"))


def config(**members: Any) -> NetworkConfig:
    text = json.dumps({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}} | members)
    return parse_network_config(text.encode(), "config")


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"Backend": {"type": "vxlan", "mtu": 1400, "DirectRouting": True, "Learning": True}},
        {"SubnetMin": "10.5.74.0"},
        {"SubnetMax": "10.5.74.0"},
    ],
)
def test_followed_live(members: dict[str, Any]) -> None:
    assert restart_reason(config(), config(**members), OWN) == ""


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"Network": "10.6.0.0/16"}, "10.5.0.0/16 -> 10.6.0.0/16"),
        ({"Backend": {"Type": "host-gw"}}, "vxlan -> host-gw"),
        ({"Backend": {"Type": "vxlan", "VNI": 42}}, "vni None -> 42"),
        ({"Backend": {"Type": "vxlan", "Port": 8473}}, "port None -> 8473"),
        ({"EnableIPv6": True, "IPv6Network": "fd05::/48"}, "IPv6 network off -> fd05::/48"),
        ({"SubnetMin": "10.5.75.0"}, "10.5.75.0/24 to 10.5.255.0/24, ours is 10.5.74.0/24"),
        ({"SubnetLen": 25}, "ours is 10.5.74.0/24"),
        ({"SubnetMin": "10.5.9.0", "SubnetMax": "10.5.9.0"}, "10.5.9.0/24 alone"),
    ],
)
def test_C11_needs_a_restart(members: dict[str, Any], words: str) -> None:
    assert words in restart_reason(config(), config(**members), OWN)


def test_subnet_assigned_from_outside_is_not_measured_by_the_pool() -> None:
    assigned = Subnets(IPv4Network("10.5.74.0/26"))
    assert restart_reason(config(), config(SubnetMin="10.5.75.0"), assigned) == ""


def wireguard(**options: Any) -> NetworkConfig:
    return config(Backend={"Type": "wireguard"} | options)


def test_wireguards_secret_and_keepalive_are_followed_its_ports_are_not() -> None:
    psk = base64.b64encode(b"p" * 32).decode()
    assert restart_reason(wireguard(), wireguard(PSK=psk, PersistentKeepaliveInterval=25, mtu=1400), OWN) == ""
    assert restart_reason(wireguard(), wireguard(ListenPort=1), OWN) == "Backend.listenport None -> 1"


def test_a_secret_that_needs_a_restart_is_not_shown() -> None:
    before, after = (config(Backend={"Type": "ipsec", "PSK": secret * 96}) for secret in "ab")
    reason = restart_reason(before, after, OWN)
    assert reason == "Backend.psk (not shown) -> (not shown)"
