from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any

import pytest

from backends import load_backend
from backends.api import ExternalInterface, Setting
from backends.dataplane.model import Address, DesiredState, Endpoint, Link, Route, Wireguard, WireguardPeer
from backends.dataplane.table import WantedTable
from backends.wireguard import PeerData, WireguardBackend, WireguardOptions, outer_family
from subnet.config import parse_network_config
from subnet.errors import ConfigError, LeaseDataError
from subnet.model import Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.wire import encode_attrs

pytestmark = pytest.mark.pure

V4, V6 = ip_address("192.0.2.1"), ip_address("2001:db8:1::1")
ETH0 = ExternalInterface("eth0", 2, 1500, V4, V6, V4, V6)  # type: ignore[arg-type]
OWN = Subnets(ip_network("10.5.1.0/24"), ip_network("fd05:0:0:1::/64"))  # type: ignore[arg-type]
SECRET = base64.b64encode(b"s" * 32).decode()
PSK = base64.b64encode(b"q" * 32).decode()
FAMILIES = {
    "v4": '"Network":"10.5.0.0/16"',
    "v6": '"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48"',
    "dual": '"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"',
}
POSSIBLE = [
    *itertools.product(("v4",), ("separate", "auto", "ipv4")),
    *itertools.product(("v6",), ("separate", "auto", "ipv6")),
    *itertools.product(("dual",), ("separate", "auto", "ipv4", "ipv6")),
]


def key(number: int) -> str:
    return base64.b64encode(bytes([number]) * 32).decode()


def config(options: str = "", families: str = "dual") -> NetworkConfig:
    comma = "," if options else ""
    return parse_network_config(f'{{{FAMILIES[families]},"Backend":{{"Type":"wireguard"{comma}{options}}}}}', "test")


def backend(options: str = "", families: str = "dual", interface: ExternalInterface = ETH0) -> WireguardBackend:
    parsed = config(options, families)
    pools = frozenset(pool.network for pool in (parsed.ipv4, parsed.ipv6) if pool is not None)
    return WireguardBackend(Setting(parsed, interface, pools), SECRET)


def mode(name: str) -> str:
    return f'"Mode":"{name}"'


def links(wanted: WireguardBackend) -> dict[str, Link]:
    found = {}
    for index, spec in enumerate(wanted.links({}, binding=False), 10):
        assert isinstance(spec.tunnel, Wireguard)
        tunnel = replace(spec.tunnel, port=spec.tunnel.port or 40000, public_key=key(1))
        found[spec.name] = Link(spec.name, index, "wireguard", "", spec.mtu_bytes, True, tunnel)
    return found


def lease(
    n: int = 2,
    *,
    v4: str | None = "192.0.2.2",
    v6: str | None = "2001:db8:1::2",
    ports: tuple[int | None, int | None] = (51820, 51821),
    families: str = "dual",
) -> Lease:
    def data(port: int | None, number: int) -> Any:
        return {"PublicKey": key(number)} | ({} if port is None else {"Port": port})

    return Lease(
        Subnets(
            ip_network(f"10.5.{n}.0/24") if families != "v6" else None,  # type: ignore[arg-type]
            ip_network(f"fd05:0:0:{n:x}::/64") if families != "v4" else None,  # type: ignore[arg-type]
        ),
        LeaseAttrs(
            ip_address(v4) if v4 else None,  # type: ignore[arg-type]
            ip_address(v6) if v6 else None,  # type: ignore[arg-type]
            "wireguard",
            data(ports[0], n) if families != "v6" else None,
            data(ports[1], n) if families != "v4" else None,
        ),
        f"/n/subnets/{n}",
        revision=n,
    )


def desired(wanted: WireguardBackend, *leases: Lease) -> DesiredState:
    return wanted.desired(OWN, leases, lambda _: False)


def endpoints(state: DesiredState) -> dict[str, str]:
    return {peer.device: str(peer.endpoint) for peer in state.peers}


# -- options ------------------------------------------------------------------


def test_documented_defaults() -> None:
    assert WireguardOptions.of(config()) == WireguardOptions(51820, 51821, 0, "", 0, "separate")


def test_every_option_is_read() -> None:
    text = f'"listenport":1,"LISTENPORTV6":2,"MTU":1400,"PSK":"{PSK}","PersistentKeepaliveInterval":25,"Mode":"auto"'
    options = WireguardOptions.of(config(text))
    assert options == WireguardOptions(1, 2, 1400, PSK, 25, "auto")
    assert PSK not in repr(options)


@pytest.mark.parametrize(
    ("options", "families", "says"),
    [
        ('"ListenPort":65536', "v4", "ListenPort 65536: must be 0 to 65535"),
        ('"ListenPort":"51820"', "v4", "ListenPort .*whole number"),
        ('"ListenPortV6":-1', "v4", "ListenPortV6 -1"),
        ('"ListenPortV6":51820', "dual", "ListenPortV6 51820: is ListenPort, too"),
        ('"MTU":1.5', "v4", "MTU 1.5"),
        ('"MTU":1359', "dual", "MTU 1359 is too small: the underlay has to carry 1360 bytes"),
        ('"PersistentKeepaliveInterval":65536', "v4", "PersistentKeepaliveInterval 65536"),
        ('"PersistentKeepaliveInterval":true', "v4", "PersistentKeepaliveInterval true"),
        ('"Mode":"IPv4"', "v4", "Mode 'IPv4': must be one of separate, auto, ipv4, ipv6, in lower case"),
        ('"Mode":""', "v4", "Mode ''"),
        ('"Mode":4', "v4", "Mode 4: must be a string"),
        ('"Mode":"ipv6"', "v4", "Mode 'ipv6': the network config does not enable IPv6"),
        ('"Mode":"ipv4"', "v6", "Mode 'ipv4': the network config does not enable IPv4"),
        ('"PSK":"c2VjcmV0"', "v4", "PSK is base64 of 6 bytes, a key has 32"),
        ('"PSK":"my secret!"', "v4", "PSK is not base64"),
        ('"PSK":12345', "v4", r"PSK \(not shown\): must be a string"),
    ],
)
def test_a_bad_option_is_named_and_a_secret_is_not_shown(options: str, families: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"Backend.{says}") as caught:
        WireguardOptions.of(config(options, families))
    for secret in ("my secret!", "c2VjcmV0", "12345"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "families"),
    [
        ('"ListenPortV6":51820,"Mode":"auto"', "dual"),
        ('"ListenPort":0,"ListenPortV6":0', "dual"),
        ('"Mode":null', "v4"),
    ],
)
def test_what_looks_bad_and_is_not(options: str, families: str) -> None:
    WireguardOptions.of(config(options, families))


def test_an_interface_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="eth0 has no IPv6 address"):
        backend(interface=replace(ETH0, v6=None, public_v6=None))
    with pytest.raises(ConfigError, match="MTU 1350 of eth0 is too small: 1360 are needed"):
        backend(interface=replace(ETH0, mtu_bytes=1350))
    assert backend(families="v4", interface=replace(ETH0, mtu_bytes=1350)).mtu_bytes() == 1270


def test_the_key_file_is_made_when_the_backend_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flannel" / "wgkey"
    monkeypatch.setenv("WIREGUARD_KEY_FILE", str(path))
    setting = Setting(config(), ETH0, frozenset())
    (first, _) = load_backend(setting).links({}, binding=False)
    assert isinstance(first.tunnel, Wireguard)
    assert first.tunnel.private_key == path.read_text()
    assert path.read_text() not in repr(first)
    with pytest.raises(ConfigError, match="Mode"):
        load_backend(replace(setting, config=config(mode("none"))))
    path.chmod(0o600)
    path.write_text("spoilt")
    with pytest.raises(ConfigError, match=f"WireGuard key file {path} is not base64"):
        load_backend(setting)


# -- devices, lease, routes ---------------------------------------------------


@pytest.mark.parametrize(
    ("families", "name", "names"),
    [
        ("v4", "separate", [("flannel-wg", 51820)]),
        ("v6", "separate", [("flannel-wg-v6", 51821)]),
        ("dual", "separate", [("flannel-wg", 51820), ("flannel-wg-v6", 51821)]),
        ("v4", "auto", [("flannel-wg", 51820)]),
        ("v6", "auto", [("flannel-wg", 51820)]),
        ("dual", "auto", [("flannel-wg", 51820)]),
        ("dual", "ipv4", [("flannel-wg", 51820)]),
        ("dual", "ipv6", [("flannel-wg", 51820)]),
    ],
)
def test_devices(families: str, name: str, names: list[tuple[str, int]]) -> None:
    specs = backend(mode(name), families).links({}, binding=False)
    assert [(spec.name, spec.tunnel) for spec in specs] == [(n, Wireguard(port, SECRET)) for n, port in names]


@pytest.mark.parametrize(
    ("options", "underlay", "mtu"), [("", 1500, 1420), ("", 1420, 1340), ("", 9000, 8920), ('"MTU":1400', 1500, 1320)]
)
def test_W04_the_mtu_is_80_less_for_devices_and_containers(options: str, underlay: int, mtu: int) -> None:
    found = backend(options, families="v4", interface=replace(ETH0, mtu_bytes=underlay))
    assert found.mtu_bytes() == mtu
    assert [spec.mtu_bytes for spec in found.links({}, binding=False)] == [mtu]


GOLDEN_KEY = f'{{"PublicKey":"{key(1)}","Port":'


@pytest.mark.parametrize(
    ("families", "options", "text"),
    [
        (
            "v4",
            "",
            f'{{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"wireguard","BackendData":{GOLDEN_KEY}51820}}}}',
        ),
        (
            "dual",
            "",
            '{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8:1::1","BackendType":"wireguard",'
            f'"BackendData":{GOLDEN_KEY}51820}},"BackendV6Data":{GOLDEN_KEY}51821}}}}',
        ),
        (
            "dual",
            '"Mode":"ipv6"',
            '{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8:1::1","BackendType":"wireguard",'
            f'"BackendData":{GOLDEN_KEY}51820}},"BackendV6Data":{GOLDEN_KEY}51820}}}}',
        ),
        (
            "v6",
            '"ListenPortV6":0',
            '{"PublicIP":"0.0.0.0","PublicIPv6":"2001:db8:1::1","BackendType":"wireguard",'
            f'"BackendV6Data":{GOLDEN_KEY}40000}}}}',
        ),
    ],
)
def test_the_lease_tells_key_and_the_port_really_used(families: str, options: str, text: str) -> None:
    found = backend(options, families)
    assert encode_attrs(found.attrs(links(found))).decode() == text


@pytest.mark.parametrize(("families", "name"), POSSIBLE)
def test_addresses_and_a_route_to_each_whole_network(families: str, name: str) -> None:
    state = desired(backend(mode(name), families))
    v6 = "flannel-wg-v6" if name == "separate" else "flannel-wg"
    addresses, routes = set(), set()
    if families != "v6":
        addresses.add(Address("flannel-wg", ip_interface("10.5.1.0/32")))
        routes.add(Route(ip_network("10.5.0.0/16"), "flannel-wg", scope="link"))
    if families != "v4":
        addresses.add(Address(v6, ip_interface("fd05:0:0:1::/128")))
        routes.add(Route(ip_network("fd05::/48"), v6))
    assert state.addresses == addresses
    assert state.routes == routes
    assert not state.peers
    assert state.devices == {address.device for address in addresses}


# -- peers --------------------------------------------------------------------


def test_a_peer_per_family_and_device() -> None:
    state = desired(backend(f'"PSK":"{PSK}","PersistentKeepaliveInterval":25'), lease())
    v4, v6 = ip_address("192.0.2.2"), ip_address("2001:db8:1::2")
    assert state.peers == {
        WireguardPeer("flannel-wg", key(2), Endpoint(v4, 51820), (ip_network("10.5.2.0/24"),), 25, PSK),
        WireguardPeer("flannel-wg-v6", key(2), Endpoint(v6, 51821), (ip_network("fd05:0:0:2::/64"),), 25, PSK),
    }
    assert PSK not in f"{state}{[str(peer) for peer in state.peers]}"


@pytest.mark.parametrize("name", ["auto", "ipv4", "ipv6"])
def test_a_single_device_carries_both_families_of_a_peer(name: str) -> None:
    (peer,) = desired(backend(mode(name)), lease()).peers
    assert (peer.device, peer.allowed) == ("flannel-wg", (ip_network("10.5.2.0/24"), ip_network("fd05:0:0:2::/64")))


@pytest.mark.parametrize(("families", "name"), POSSIBLE)
def test_W05_every_mode_and_family_finds_an_endpoint(families: str, name: str) -> None:
    found = backend(mode(name), families)
    peer = lease(
        families=families,
        v4=None if families == "v6" else "192.0.2.2",
        v6=None if families == "v4" else "2001:db8:1::2",
    )
    state = desired(found, peer)
    assert not state.problems
    v4_port = "192.0.2.2:51820"
    expected: dict[tuple[str, str], dict[str, str]] = {
        ("v4", "separate"): {"flannel-wg": v4_port},
        ("v6", "separate"): {"flannel-wg-v6": "[2001:db8:1::2]:51821"},
        ("dual", "separate"): {"flannel-wg": v4_port, "flannel-wg-v6": "[2001:db8:1::2]:51821"},
        ("v6", "auto"): {"flannel-wg": "[2001:db8:1::2]:51820"},
        ("v6", "ipv6"): {"flannel-wg": "[2001:db8:1::2]:51820"},
        ("dual", "ipv6"): {"flannel-wg": "[2001:db8:1::2]:51820"},
    }
    assert endpoints(state) == expected.get((families, name), {"flannel-wg": v4_port})


OUTER = [
    # mode, peer's IPv4 and IPv6, own IPv4 and IPv6, family
    ("ipv4", "192.0.2.2", "2001:db8::2", "192.0.2.1", "2001:db8::1", 4),
    ("ipv6", "192.0.2.2", "2001:db8::2", "192.0.2.1", "2001:db8::1", 6),
    ("auto", "10.0.0.2", None, "10.0.0.1", "2001:db8::1", 4),
    ("auto", None, "fd00::2", "10.0.0.1", "fd00::1", 6),
    ("auto", "192.0.2.2", "2001:db8::2", "10.0.0.1", "2001:db8::1", 4),
    ("auto", "10.0.0.2", "2001:db8::2", "10.0.0.1", "2001:db8::1", 6),
    ("auto", "172.31.0.2", "2001:db8::2", "192.0.2.1", "2001:db8::1", 6),
    ("auto", "172.32.0.2", "2001:db8::2", "192.0.2.1", "2001:db8::1", 4),
    ("auto", "192.168.7.2", "fd00::2", "192.168.7.1", "2001:db8::1", 4),
    ("auto", "10.0.0.2", "2001:db8::2", "10.0.0.1", "fc00::1", 4),
    ("auto", "10.0.0.2", "2001:db8::2", "10.0.0.1", None, 4),
    ("auto", "192.0.2.2", "fd00::2", None, "fd00::1", 6),
]


@pytest.mark.parametrize(("name", "v4", "v6", "own_v4", "own_v6", "family"), OUTER)
def test_the_family_in_which_a_peer_is_reached(  # noqa: PLR0917
    name: str, v4: str | None, v6: str | None, own_v4: str | None, own_v6: str | None, family: int
) -> None:
    own = [ip_address(text) if text else None for text in (own_v4, own_v6)]
    interface = replace(ETH0, public_v4=own[0], public_v6=own[1])  # type: ignore[arg-type]
    assert outer_family(name, lease(v4=v4, v6=v6).attrs, interface) == family


@pytest.mark.parametrize(
    ("options", "ports", "expected"),
    [
        ('"ListenPort":1820', (51999, 51998), {"flannel-wg": 51999, "flannel-wg-v6": 51998}),
        ('"ListenPort":1820,"ListenPortV6":1821', (None, None), {"flannel-wg": 1820, "flannel-wg-v6": 1821}),
        ('"ListenPort":0,"ListenPortV6":0', (0, 0), {"flannel-wg": 51820, "flannel-wg-v6": 51821}),
        ('"Mode":"auto","ListenPort":1820', (51999, 51821), {"flannel-wg": 51999}),
        ('"Mode":"ipv6","ListenPort":1820', (51999, 51821), {"flannel-wg": 51999}),
        ('"Mode":"ipv6","ListenPort":1820', (None, None), {"flannel-wg": 1820}),
    ],
)
def test_W03_the_peers_own_port_is_used(
    options: str, ports: tuple[int | None, int | None], expected: dict[str, int]
) -> None:
    state = desired(backend(options), lease(ports=ports))
    assert {peer.device: peer.endpoint.port for peer in state.peers if peer.endpoint is not None} == expected


@pytest.mark.parametrize(("advertised", "used"), [(51821, 1820), (51900, 51900)])
def test_a_single_modes_port_without_ipv4_data(advertised: int, used: int) -> None:
    state = desired(
        backend('"Mode":"ipv6","ListenPort":1820', "v6"), lease(families="v6", v4=None, ports=(None, advertised))
    )
    assert endpoints(state) == {"flannel-wg": f"[2001:db8:1::2]:{used}"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "backend data is None"),
        ([], r"backend data is \[\]"),
        ({}, "PublicKey is None"),
        ({"PublicKey": 7}, "PublicKey is 7"),
        ({"PublicKey": "short"}, "PublicKey is not base64"),
        ({"PublicKey": base64.b64encode(b"x" * 31).decode()}, "PublicKey is base64 of 31 bytes"),
        ({"PublicKey": key(2), "Port": 65536}, "Port is 65536"),
        ({"PublicKey": key(2), "Port": "51820"}, "Port is '51820'"),
        ({"PublicKey": key(2), "Port": True}, "Port is True"),
    ],
)
def test_bad_data_of_a_lease_is_named(data: Any, says: str) -> None:
    with pytest.raises(LeaseDataError, match=says):
        PeerData.of(data)


@pytest.mark.parametrize("data", [{"PublicKey": key(2)}, {"publickey": key(2), "PORT": None, "x": 1}])
def test_old_and_strange_spellings_are_read(data: Any) -> None:
    assert PeerData.of(data) == PeerData(key(2), 0)


def test_a_lease_that_is_bad_in_one_family_works_in_the_other() -> None:
    peer = lease()
    state = desired(backend(), replace(peer, attrs=replace(peer.attrs, backend_v6_data={"PublicKey": "?"})))
    assert endpoints(state) == {"flannel-wg": "192.0.2.2:51820"}
    assert state.problems == (
        ("/n/subnets/2 for IPv6", "lease /n/subnets/2 skipped for IPv6: PublicKey is not base64"),
    )


def test_a_peer_that_cannot_be_reached_in_the_wanted_family_is_named() -> None:
    state = desired(backend(mode("ipv6")), lease(v6=None))
    assert state.peers == frozenset()
    assert state.problems == (("/n/subnets/2", "lease /n/subnets/2 skipped: no public IPv6 address"),)


def test_leases_of_other_backends_are_none_of_ours() -> None:
    peer = lease()
    state = desired(backend(), replace(peer, attrs=replace(peer.attrs, backend_type="vxlan")))
    assert (state.peers, state.problems) == (frozenset(), ())


def test_a_copied_key_is_named() -> None:
    found = backend(families="v4")
    found.attrs(links(found))
    state = desired(found, lease(1))
    assert state.peers == frozenset()
    assert [text for _, text in state.problems] == [
        f"lease /n/subnets/1 skipped for IPv4: PublicKey {key(1)} is our own; was the key file copied?"
    ]


def test_W02_two_peers_behind_one_address_are_two() -> None:
    state = desired(backend(families="v4"), lease(2, ports=(1, 1)), lease(3, ports=(2, 2)))
    assert {(peer.public_key, str(peer.endpoint)) for peer in state.peers} == {
        (key(2), "192.0.2.2:1"),
        (key(3), "192.0.2.2:2"),
    }


def test_of_two_leases_with_one_key_the_older_is_the_peer() -> None:
    found = backend(families="v4")
    older, younger = lease(2), replace(lease(3), attrs=lease(2).attrs)
    table = WantedTable(desired(found))
    table.put("younger", (younger.revision, younger.key), desired(found, younger))
    table.put("older", (older.revision, older.key), desired(found, older))
    assert {peer.allowed for peer in table.desired().peers} == {(ip_network("10.5.2.0/24"),)}
    assert table.problems == {"younger": f"younger skipped: PublicKey {key(2)} is the one of older, an older lease"}
    assert {str(route.destination) for route in table.desired().routes} == {"10.5.0.0/16"}
    table.remove("older")
    assert {peer.allowed for peer in table.desired().peers} == {(ip_network("10.5.3.0/24"),)}
    assert {str(route.destination) for route in table.desired().routes} == {"10.5.0.0/16"}
