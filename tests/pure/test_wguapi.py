from __future__ import annotations

import base64
from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dataplane.model import Change, Endpoint, Neighbour, Wireguard, WireguardPeer
from backends.kernel import wguapi
from backends.kernel.wgnl import PeerSeen
from tests.pure.test_wgnl import PEER

pytestmark = pytest.mark.pure

# The secret and public key of RFC 7748 s6.1.
PRIVATE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
CLAMPED = "70076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c6a"
PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
ONE, TWO, PSK = (f"{n:02x}" * 32 for n in (1, 2, 3))


def b64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()


# What the page of the protocol shows for `get`, with keys, endpoint and networks in the same places.
ANSWER = f"""\
private_key={CLAMPED}
listen_port=12912
protocol_version=1
public_key={ONE}
preshared_key={PSK}
allowed_ip=192.168.4.4/32
endpoint=[abcd:23::33%2]:51820
last_handshake_time_sec=1259
last_handshake_time_nsec=500000000
tx_bytes=38333
rx_bytes=2224
persistent_keepalive_interval=111
public_key={TWO}
preshared_key={"0" * 64}
allowed_ip=fd05:0:0:2::/64
allowed_ip=10.5.2.0/24
errno=0"""


def test_an_answer_is_read() -> None:
    answer = wguapi.parse(ANSWER)
    assert wguapi.device(answer) == Wireguard(12912, b64(CLAMPED))
    assert wguapi.device(answer).public_key == b64(PUBLIC)
    endpoint = Endpoint(ip_address("abcd:23::33"), 51820)
    first = WireguardPeer("wg0", b64(ONE), endpoint, (ip_network("192.168.4.4/32"),), 111, b64(PSK))
    networks = ip_network("10.5.2.0/24"), ip_network("fd05:0:0:2::/64")
    second = WireguardPeer("wg0", b64(TWO), None, networks)
    assert wguapi.peers(answer, "wg0") == [PeerSeen(first, 1259.5, 38333), PeerSeen(second, 0, 0)]


def test_a_device_without_key_and_peers_is_read() -> None:
    answer = wguapi.parse("listen_port=0\nerrno=0")
    assert (wguapi.device(answer), wguapi.peers(answer, "wg0")) == (Wireguard(0, ""), [])


@pytest.mark.parametrize(("text", "errno"), [("errno=0", 0), ("errno=-98", 98), ("errno=98", 98)])
def test_a_refusal_carries_the_number(text: str, errno: int) -> None:
    assert wguapi.parse(text).errno == errno


@pytest.mark.parametrize("text", ["", "errno", "listen_port=1", "hello\nerrno=0", "errno=x"])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"answer|invalid literal"):
        wguapi.parse(text)


def test_secrets_do_not_show() -> None:
    assert CLAMPED not in repr(wguapi.parse(ANSWER))


def test_a_device_is_set() -> None:
    wanted = Wireguard(51820, b64(CLAMPED))
    assert wguapi.set_device(wanted) == f"set=1\nprivate_key={CLAMPED}\nlisten_port=51820\n\n".encode()
    assert wguapi.set_device(replace(wanted, port=0)) == f"set=1\nprivate_key={CLAMPED}\n\n".encode()


def test_a_peer_is_put_and_deleted() -> None:
    networks = ip_network("10.5.2.0/24"), ip_network("fd05:0:0:2::/64")
    peer = WireguardPeer("wg0", b64(TWO), Endpoint(ip_address("2001:db8::2"), 51821), networks, 25)
    lines = [
        "set=1",
        f"public_key={TWO}",
        f"preshared_key={'0' * 64}",
        "endpoint=[2001:db8::2]:51821",
        "persistent_keepalive_interval=25",
        "replace_allowed_ips=true",
        "allowed_ip=10.5.2.0/24",
        "allowed_ip=fd05:0:0:2::/64",
        "",
        "",
    ]
    assert wguapi.set_peer(Change("put", peer)).decode().split("\n") == lines
    assert wguapi.set_peer(Change("put", peer), with_endpoint=False).decode().split("\n") == lines[:3] + lines[4:]
    assert wguapi.set_peer(Change("delete", peer)) == f"set=1\npublic_key={TWO}\nremove=true\n\n".encode()


def test_nothing_else_is_taken_for_a_peer() -> None:
    with pytest.raises(TypeError):
        wguapi.set_peer(Change("put", Neighbour("x", ip_address("10.5.2.0"), "02:00:00:00:00:02")))


@given(st.lists(PEER, unique_by=lambda peer: peer.public_key, max_size=4))
def test_peers_survive_the_way_through_the_text(peers: list[WireguardPeer]) -> None:
    said = []
    for peer in peers:
        lines = wguapi.set_peer(Change("put", peer)).decode().splitlines()
        said += [line for line in lines if line not in {"set=1", "", "replace_allowed_ips=true"}]
    answer = wguapi.parse("\n".join([*said, "errno=0"]))
    assert [seen.peer for seen in wguapi.peers(answer, "flannel-wg")] == peers
