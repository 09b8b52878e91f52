from __future__ import annotations

import base64
import itertools
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from pyroute2 import WireGuard

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll

pytestmark = [pytest.mark.system, pytest.mark.vm]

WAIT_S = 120.0
"""The guest is an emulated machine."""
READY_S = 300.0
V4, V6 = "flannel-wg", "flannel-wg-v6"
PSK = base64.b64encode(b"a shared secret of 32 bytes, so.").decode()
MARKER = b"plain text that nobody may see"


Peers: TypeAlias = dict[str, tuple[str, ...]]


def config(families: str = "dual", **options: Any) -> dict[str, Any]:
    v4 = {"Network": "10.5.0.0/16"} if families != "v6" else {"EnableIPv4": False}
    v6 = {"EnableIPv6": True, "IPv6Network": "fd05::/48"} if families != "v4" else {}
    return v4 | v6 | {"Backend": {"Type": "wireguard", "PSK": PSK, **options}}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, family="dual", config=config(), flags=["--resync-period=5"], ready_timeout_s=READY_S) as built:
        yield built


def subnets(host: Host) -> list[str]:
    return [str(gateway.network) for gateway in host.gateways()]


def info(device: str) -> list[Any]:
    with WireGuard() as reader:
        return list(reader.info(device))


def peers(host: Host, device: str) -> Peers:
    """What another program's decoder says: public key to endpoint and allowed networks."""
    found: Peers = {}
    for message in host.namespace.call(partial(info, device)):
        for peer in message.get_attr("WGDEVICE_A_PEERS") or ():
            endpoint = peer.get_attr("WGPEER_A_ENDPOINT")
            networks = [str(entry["addr"]) for entry in peer.get_attr("WGPEER_A_ALLOWEDIPS") or ()]
            where = f"{endpoint['addr']} {endpoint['port']}" if endpoint else ""
            found[peer.get_attr("WGPEER_A_PUBLIC_KEY").decode()] = where, *sorted(networks)
    return found


def public_key(lab: Lab, host: Host) -> str:
    (value,) = (
        v for v in lab.etcd.leases().values() if v["PublicIP"] == host.address or v["PublicIPv6"] == host.address
    )
    return str((value.get("BackendData") or value["BackendV6Data"])["PublicKey"])


def wanted(lab: Lab, host: Host, family: int) -> Peers:
    found: Peers = {}
    for peer in lab.hosts:
        remote = peer.v4 if family == 4 else peer.v6
        if peer is not host and remote is not None:
            place = f"{remote.ip} {51820 if family == 4 else 51821}"
            found[public_key(lab, peer)] = place, subnets(peer)[family == 6]
    return found


def whole(lab: Lab, *hosts: Host) -> bool:
    """Whether devices, peers and routes of the hosts, of all if none is named, are as wanted."""
    for host in hosts or lab.hosts:
        for family, device, network in ((4, V4, "10.5.0.0/16"), (6, V6, "fd05::/48")):
            link = host.namespace.link(device) or {}
            routes = [r for r in host.namespace.routes(family) if r["dst"] == network]
            own = [network.split("/")[0] for network in subnets(host)][family == 6]
            if "UP" not in link.get("flags", ()) or link["mtu"] != 1420 or [r["dev"] for r in routes] != [device]:
                return False
            if f"{own}/{32 if family == 4 else 128}" not in host.namespace.addresses(device):
                return False
            if peers(host, device) != wanted(lab, host, family):
                return False
    return True


def answers(lab: Lab, *families: int) -> set[int]:
    pairs = itertools.product(itertools.permutations(lab.hosts, 2), families)
    return {a.pod.ping(b.pod, family, count=2)[0] for (a, b), family in pairs}


def test_hosts_are_set_up_as_documented(lab: Lab) -> None:
    poll("every peer", lambda: whole(lab), WAIT_S)
    for number, host in enumerate(lab.hosts, 1):
        assert host.subnet_env()["FLANNEL_MTU"] == "1420"
        key = Path(host.daemon.directory / "wgkey")
        assert key.stat().st_mode & 0o777 == 0o400
        (route,) = [r for r in host.namespace.routes(4) if r["dst"] == "10.5.0.0/16"]
        assert (route["scope"], route["protocol"], route.get("gateway")) == ("link", "boot", None)
        lease = lab.etcd.leases()["&".join(network.replace("/", "-") for network in subnets(host))]
        data = {"PublicKey": public_key(lab, host)}
        assert lease == {
            "PublicIP": f"192.0.2.{number}",
            "PublicIPv6": f"2001:db8:1::{number}",
            "BackendType": "wireguard",
            "BackendData": data | {"Port": 51820},
            "BackendV6Data": data | {"Port": 51821},
        }
        for secret in (PSK, key.read_text()):
            assert secret not in host.daemon.log(all_runs=True)
    assert len({public_key(lab, host) for host in lab.hosts}) == 3


def test_everybody_reaches_everybody_with_full_packets_and_nothing_shows(lab: Lab) -> None:
    capture = lab.directory / "capture"
    first, second = lab.hosts[:2]
    sniffer = lab.switch.spawn("tcpdump", "--immediate-mode", "-Uni", "br0", "-w", str(capture))
    try:
        poll("the capture", capture.exists, WAIT_S)
        poll("every answer", lambda: answers(lab, 4, 6) == {2}, WAIT_S)
        for family in (4, 6):
            words = ("ping", "-c", "2", "-p", MARKER[:16].hex(), second.pod.address(family))
            assert " 0% packet loss" in first.pod.namespace.run(*words)
    finally:
        sniffer.send_signal(signal.SIGINT)
        sniffer.wait(30)
    assert MARKER[:16] not in capture.read_bytes()
    inner = lab.switch.run("tcpdump", "-nr", str(capture), "icmp or net 10.5.0.0/16 or net fd05::/48")
    assert inner == ""
    between = "host 192.0.2.1 and host 192.0.2.2 or host 2001:db8:1::1 and host 2001:db8:1::2"
    outer = lab.switch.run("tcpdump", "-nr", str(capture), f"({between}) and not arp and not icmp6").splitlines()
    ports = [set(re.findall(r"\.(\d+)(?= >|: UDP)", line)) for line in outer]
    assert {frozenset(pair) for pair in ports} == {frozenset({"51820"}), frozenset({"51821"})}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_W07_a_restart_loses_nothing(lab: Lab, number: signal.Signals) -> None:
    first, second = lab.hosts[:2]
    source, destination = first.pod.namespace, second.pod.namespace
    with ExitStack() as running:
        flows = [Flow(source, destination, second.pod.address(f), rate_per_s=20, port=4000 + f) for f in (4, 6)]
        for flow in flows:
            running.enter_context(flow)
            poll("datagrams", flow.flowing, WAIT_S)
        marks = [flow.sent for flow in flows]
        first.daemon.signal(number)
        first.daemon.wait_exit(30)
        assert whole(lab, first)
        first.daemon.start()
        first.daemon.wait_ready(READY_S)
        poll("more", lambda: all(f.sent > mark + 20 for f, mark in zip(flows, marks, strict=True)), WAIT_S)
    assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]
    assert whole(lab, first)
    assert not re.search("created|corrected|added|removed", first.daemon.log())


DAMAGE = {
    "device": f"link del {V4}",
    "IPv6 device": f"link del {V6}",
    "device down": f"link set {V4} down",
    "MTU": f"link set {V4} mtu 1300",
    "route": "route del 10.5.0.0/16",
    "IPv6 route": "-6 route del fd05::/48",
    "address": f"addr flush dev {V4} scope global",
    "route of an earlier backend": "route add {v4} via 192.0.2.254 dev eth0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_repaired_on_notification(lab: Lab, damage: str) -> None:
    first, second = lab.hosts[:2]
    assert whole(lab, first)
    first.run("ip", *damage.format(v4=subnets(second)[0]).split())
    poll("repair", lambda: whole(lab, first), WAIT_S)
    poll("answers", lambda: [first.pod.ping(second.pod, f, count=1)[0] for f in (4, 6)] == [1, 1], WAIT_S)
    assert subnets(second)[0] not in first.run("ip", "-4", "route")


def spoil(public_key: str) -> None:
    with WireGuard() as writer:
        writer.set(V4, peer={"public_key": public_key, "remove": True})
        writer.set(V6, listen_port=50000, private_key=base64.b64encode(b"x" * 32).decode())
        writer.set(V4, peer={"public_key": base64.b64encode(b"y" * 32).decode(), "allowed_ips": ["10.5.0.0/17"]})


def test_peers_keys_and_ports_are_repaired_by_comparison(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    poll("every peer", lambda: whole(lab, first), WAIT_S)
    key, links = public_key(lab, first), [first.namespace.link(device) for device in (V4, V6)]
    first.namespace.call(partial(spoil, public_key(lab, second)))

    def repaired() -> bool:
        (device, *_) = first.namespace.call(partial(info, V6))
        settings = device.get_attr("WGDEVICE_A_PUBLIC_KEY").decode(), device.get_attr("WGDEVICE_A_LISTEN_PORT")
        return settings == (key, 51821) and whole(lab, first)

    poll("repair", repaired, WAIT_S)
    assert [first.namespace.link(device) for device in (V4, V6)] == links
    poll("answers", lambda: [first.pod.ping(second.pod, f, count=1)[0] for f in (4, 6)] == [1, 1], WAIT_S)


def test_W01_a_peer_with_a_new_key_replaces_the_old_one(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    key = second.daemon.directory / "wgkey"
    before = public_key(lab, second)
    second.daemon.stop()
    key.unlink()
    second.daemon.start()
    second.daemon.wait_ready(READY_S)
    poll("the new key", lambda: public_key(lab, second) != before and whole(lab), WAIT_S)
    assert before not in peers(first, V4)
    poll("answers", lambda: [first.pod.ping(second.pod, f, count=1)[0] for f in (4, 6)] == [1, 1], WAIT_S)


def test_leases_of_upstream_of_old_nodes_and_of_nobody(lab: Lab) -> None:
    first = lab.hosts[0]
    keys = [base64.b64encode(bytes([n]) * 32).decode() for n in range(4)]
    own = public_key(lab, first)

    def forge(number: int, public: str, data: dict[str, Any]) -> None:
        value = {"PublicIP": public, "PublicIPv6": None, "BackendType": "wireguard", "BackendData": data}
        lab.etcd.forge(f"10.5.{200 + number}.0-24", value)

    forge(1, "192.0.2.99", {"PublicKey": keys[1], "Port": 51999})
    forge(2, "192.0.2.99", {"publickey": keys[2]})
    forge(3, "192.0.2.98", {"PublicKey": "!"})
    forge(4, "192.0.2.97", {"PublicKey": own, "Port": 51820})
    forge(5, "192.0.2.96", {"PublicKey": keys[1], "Port": 51820})
    expected = wanted(lab, lab.hosts[0], 4) | {
        keys[1]: ("192.0.2.99 51999", "10.5.201.0/24"),
        keys[2]: ("192.0.2.99 51820", "10.5.202.0/24"),
    }
    poll("its peers", lambda: peers(first, V4) == expected, WAIT_S)
    log = first.daemon.log
    poll("reasons", lambda: all(text in log() for text in ("is not base64", "is our own", "an older lease")), WAIT_S)
    for number in range(1, 6):
        lab.etcd.delete(f"{lab.etcd.prefix}/subnets/10.5.{200 + number}.0-24")
    poll("their end", lambda: whole(lab, first), WAIT_S)


def test_options_that_can_change_under_way_are_followed_without_a_word_of_the_secret(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    other = base64.b64encode(b"another secret of 32 bytes, yes.").decode()
    lab.etcd.configure(config(PSK=other, PersistentKeepaliveInterval=25, MTU=1400))

    def followed(host: Host) -> bool:
        found = [
            (peer.get_attr("WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL"), peer.get_attr("WGPEER_A_PRESHARED_KEY").decode())
            for message in host.namespace.call(partial(info, V4))
            for peer in message.get_attr("WGDEVICE_A_PEERS") or ()
        ]
        return found == [(25, other)] * 2 and (host.namespace.link(V4) or {}).get("mtu") == 1320

    poll("the new options", lambda: all(followed(host) for host in lab.hosts), WAIT_S)
    poll("an answer", lambda: first.pod.namespace.ping(second.pod.address(), count=1)[0] == 1, WAIT_S)
    for secret in (PSK, other):
        assert not [host for host in lab.hosts if secret in host.daemon.log(all_runs=True)]


def gone(host: Host, device: str) -> bool:
    return host.namespace.link(device) is None


def test_B12_what_another_backend_left_is_removed() -> None:
    networks = {"Network": "10.5.0.0/16"}
    with Lab(1, config=networks | {"Backend": {"Type": "vxlan"}}, start=False) as lab:
        (host,) = lab.hosts
        data = {"PublicKey": base64.b64encode(b"k" * 32).decode(), "Port": 51820}
        lab.etcd.forge("10.5.200.0-24", {"PublicIP": "192.0.2.99", "BackendType": "wireguard", "BackendData": data})
        device = {"vxlan": "flannel.1", "wireguard": V4}
        for backend, other in (("vxlan", "wireguard"), ("wireguard", "vxlan"), ("vxlan", "wireguard")):
            host.run("ip", "route", "replace", "10.5.201.0/24", "via", "192.0.2.254", "dev", "eth0", "proto", "142")
            lab.etcd.configure(networks | {"Backend": {"Type": backend}})
            host.daemon.start()
            host.daemon.wait_ready(READY_S)
            poll("the end of the other", partial(gone, host, device[other]), WAIT_S)
            assert not gone(host, device[backend])
            routes = {route["dst"]: route["dev"] for route in host.namespace.routes() if "10.5." in route["dst"]}
            assert routes == ({"10.5.0.0/16": V4} if backend == "wireguard" else {})
            assert host.daemon.stop() == 0
