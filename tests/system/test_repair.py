from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4
from flanneld.ctl.lab.tools import run
from tests.support.drawn import CONFIG
from tests.support.expected import device, held, rules
from tests.support.site import Network, Site, flow, lossless, mtu_differs, settle, stays

pytestmark = pytest.mark.system

DEMAND_S = 1.0
"""Whatever others change in the kernel is put right within this time."""


@pytest.fixture(scope="module")
def built(site: Site) -> Iterator[Network]:
    network = site.network()
    network.cluster(3, "--ip-masq")
    yield network
    network.close()


@pytest.fixture
def trio(built: Network) -> Iterator[Network]:
    built.settled()
    before = built.etcd.leases()
    yield built
    built.settled()
    assert built.etcd.leases() == before


def everything(host: Host) -> tuple[dict[str, Any], frozenset[str], list[str], str]:
    """All that the daemon keeps on a host, but the device's index, which a rebuild changes."""
    attributes = {k: v for k, v in device(host).items() if k != "index"}
    return attributes, held(host), rules(host), host.daemon.subnet_file.read_text()


DISTURBANCES: dict[str, tuple[str, ...]] = {
    "link-down": ("ip link set flannel.1 down",),
    "V01-link-deleted": ("ip link del flannel.1",),
    "routes-flushed": ("ip route flush dev flannel.1",),
    "neighbours-flushed": ("ip neigh flush dev flannel.1 nud permanent",),
    "fdb-emptied": ("bridge fdb del {mac} dev flannel.1 dst {peer}",),
    "fdb-misdirected": ("bridge fdb replace {mac} dev flannel.1 dst 192.0.2.252 self permanent",),
    "neighbour-changed": ("ip neigh replace {base} lladdr 02:00:00:00:99:99 dev flannel.1 nud permanent",),
    "route-replaced": ("ip route replace {base}/24 dev eth0 via 192.0.2.254",),
    "address-removed": ("ip addr del {own}/32 dev flannel.1",),
    "forward-chain-flushed": ("iptables -w -F FLANNEL-FWD",),
    "forward-jump-removed": ("iptables -w -D FORWARD -m comment --comment flanneld\u00a0forward -j FLANNEL-FWD",),
    "masquerade-chain-flushed": ("iptables -w -t nat -F FLANNEL-POSTRTG",),
    "nat-table-flushed": ("iptables -w -t nat -F",),
    "stray-rule": ("iptables -w -I FLANNEL-FWD -j DROP",),
    "V04-mac-changed": ("ip link set flannel.1 address 02:00:00:00:77:77",),
    "V12-mtu-changed": ("ip link set flannel.1 mtu 1300",),
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_changes_by_others_are_undone_within_a_second_and_peers_unharmed(trio: Network, what: str) -> None:
    a, b, c = trio.hosts
    words = {
        "own": trio.subnet(a).partition("/")[0],
        "base": trio.subnet(b).partition("/")[0],
        "mac": device(b)["mac"],
        "peer": b.address,
    }
    settle("rules", lambda: "" if len(rules(a)) == 12 else rules(a), 10)
    before = everything(a)
    others = [held(h) for h in (b, c)]
    with lossless((b, c), (c, b)):
        for command in DISTURBANCES[what]:
            a.run(*(word.format(**words).replace("\u00a0", " ") for word in command.split(" ")))
        settle(what, lambda: "" if everything(a) == before else (before, everything(a)), DEMAND_S)
    assert [held(h) for h in (b, c)] == others
    assert a.pod.ping(b.pod, count=1)[0] == 1
    assert c.pod.ping(a.pod, count=1)[0] == 1


def test_lost_subnet_file_is_written_again(trio: Network) -> None:
    a = trio.hosts[0]
    text = a.daemon.subnet_file.read_text()
    a.daemon.subnet_file.unlink()
    settle("file", lambda: "" if a.daemon.subnet_file.exists() else "missing", 10)
    assert a.daemon.subnet_file.read_text() == text


def test_V01_V02_interface_deleted_and_back_without_address_then_with_it(make_network: Callable[..., Network]) -> None:
    network = make_network()
    a, b = network.cluster(2)
    mac, pid, subnet = device(a)["mac"], a.daemon.pid, network.subnet(a)
    adapter = device(a, "eth0")["mac"]
    lease_before = network.lease(a)
    with flow(b, a) as traffic:
        a.namespace.ip("link del eth0")
        settle("no device", lambda: device(a), 5)
        time.sleep(1)
        network.lab.plug(a.namespace, f"{a.name}-eth0", "eth0")
        a.namespace.ip(f"link set eth0 address {adapter}")
        time.sleep(2)
        assert a.daemon.pid == pid
        assert "eth0 has no IPv4 address" in a.daemon.notify.status
        a.namespace.ip(f"addr add {a.v4} dev eth0", f"route add default via {SWITCH_V4}")
        settle("device and entries", lambda: network.difference(a) or ("" if device(a)["mac"] == mac else "mac"), 10)
        settle("flow", lambda: "" if traffic.flowing(0.2) else "none", 10)
    assert a.daemon.pid == pid
    assert network.subnet(a) == subnet
    assert network.lease(a) == lease_before
    assert device(a)["vxlan link"] == "eth0"
    network.settled()


def test_V04_mac_fought_over_just_after_creation(make_network: Callable[..., Network]) -> None:
    network = make_network()
    b = network.host(ready=True)
    a = network.host()

    def meddle() -> None:
        settle("device", lambda: "" if a.namespace.link("flannel.1") else "none", 20, 0.005)
        for n in range(10):
            run(
                "ip", "-n", a.namespace.name, "link", "set", "flannel.1", "address", f"02:00:00:00:66:0{n}", check=False
            )
            time.sleep(0.05)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    a.daemon.start()
    meddler.join()
    a.daemon.wait_ready()
    settle("one MAC", lambda: {device(a)["mac"]} ^ {network.lease(a)["BackendData"]["VtepMAC"]}, 10)
    for host in (a, b):
        network.lab.add_pod(host)
    network.settled()
    assert b.pod.ping(a.pod)[0] == 3
    assert a.daemon.runs == 1


def test_V16_underlay_mtu_is_followed(trio: Network) -> None:
    a = trio.hosts[0]

    inode = a.daemon.subnet_file.stat().st_ino
    for underlay in (1400, 1500):
        written = writings(a)
        a.namespace.ip(f"link set eth0 mtu {underlay}")
        tunnel = underlay - 50
        settle("MTU", partial(mtu_differs, a, tunnel), 15)
        settle("log", partial(writings_differ, a, written + 1), 2)
        assert a.daemon.subnet_file.stat().st_ino != inode  # replaced, not rewritten
        inode = a.daemon.subnet_file.stat().st_ino


def writings_differ(host: Host, wanted: int) -> str:
    found = writings(host)
    return "" if found == wanted else f"{found}, not {wanted}"


def writings(host: Host) -> int:
    return host.daemon.log().count(f"wrote {host.daemon.subnet_file}")


def test_V16_explicit_mtu_wins(make_network: Callable[..., Network]) -> None:
    network = make_network(CONFIG | {"Backend": {"Type": "vxlan", "MTU": 1300}})
    a = network.host(ready=True)
    a.namespace.ip("link set eth0 mtu 1400")
    stays("MTU 1250", lambda: mtu_differs(a, 1250), 1.5)


# -- addresses of the host ------------------------------------------------------------------


def test_S11_changed_address_is_followed_and_a_flap_is_not(make_network: Callable[..., Network]) -> None:
    network = make_network()
    a, b = network.cluster(2)
    old, new = str(a.v4), f"192.0.2.{100 + int(a.name[1:])}"
    subnet, key = network.subnet(a), network.key(a)
    before = network.etcd.get(key), network.etcd.lease_id(key), device(a)
    a.namespace.ip(f"addr del {old} dev eth0")
    time.sleep(0.7)
    a.namespace.ip(f"addr add {old} dev eth0", f"route replace default via {SWITCH_V4}")
    stays("flap", lambda: (network.etcd.get(key), network.etcd.lease_id(key), device(a)) != before, 3)
    network.settled()

    # Otherwise the kernel drops the second address of a network together with the first.
    a.namespace.sysctl("net/ipv4/conf/eth0/promote_secondaries", "1")
    with flow(b, a) as there, flow(a, b) as back:
        a.namespace.ip(f"addr add {new}/24 dev eth0", f"addr del {old} dev eth0")
        time.sleep(0.5)
        a.namespace.ip(f"route replace default via {SWITCH_V4}")
        settle("lease", lambda: "" if network.lease(a).get("PublicIP") == new else network.lease(a), 15)
        settle("local address", lambda: "" if device(a).get("vxlan local") == new else device(a), 5)
        network.settled(5)
        settle("flow", lambda: "" if there.flowing(0.2) and back.flowing(0.2) else "none", 5)
    assert network.subnet(a) == subnet
    assert network.etcd.leases()[subnet.replace("/", "-")]["BackendData"]["VtepMAC"] == device(a)["mac"]
    assert len(network.etcd.leases()) == 2
    assert any(fact.startswith("fdb") and f"dst {new} " in fact for fact in held(b))


# -- others in the way ---------------------------------------------------------------------------


@pytest.mark.parametrize("mine", ["10.5.2.1/24", "10.5.0.1/16"])
def test_V10_local_bridge_with_an_overlapping_range(network: Network, mine: str) -> None:
    a = network.host()
    a.namespace.ip("link add docker0 type bridge", f"addr add {mine} dev docker0", "link set docker0 up")
    network.etcd.forge("10.5.109.0-24", {"PublicIP": a.address})  # the subnet that A is to have
    network.peer(2)
    network.peer(3)
    network.start(a)
    assert network.subnet(a) == "10.5.109.0/24"
    blocked = "10.5.2.0-24" if mine == "10.5.2.1/24" else ""
    settle("the other peers", lambda: peers_missing(network, a, blocked), 5)
    if blocked:
        warnings = [line for line in a.daemon.log().splitlines() if " WARNING " in line]
        assert [w for w in warnings if "docker0" in w and "10.5.2.0/24" in w]
        # The bridge keeps its own route.
        assert next(r for r in a.namespace.routes() if r["dst"] == "10.5.2.0/24")["dev"] == "docker0"
    a.namespace.ip("link del docker0")
    network.settled(30)


def peers_missing(network: Network, host: Host, blocked: str) -> list[str]:
    own = blocked.replace("-", "/")
    return [d for d in network.difference(host) if not (own and f"route {own}" in d)]


def test_V06_burst_of_1500_leases(network: Network) -> None:
    a = network.host(ready=True)
    own = network.subnet(a).replace("/", "-")
    leases = {}
    for n in range(1, 1501):
        subnet = f"10.5.{n >> 3}.{(n & 7) << 5}-27"
        mac = f"02:00:00:00:{n >> 8:02x}:{n & 255:02x}"
        leases[subnet] = {
            "PublicIP": f"198.18.{n >> 8}.{n & 255}",
            "PublicIPv6": None,
            "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": mac},
        }
    third = own.split(".")[2]
    leases = {k: v for k, v in leases.items() if k.split(".")[2] != third}
    began = time.monotonic()
    network.etcd.forge_many(leases)
    network.settled(30)
    assert time.monotonic() - began < 32
    assert not a.daemon.notify.status.startswith("not ready")


def test_disturbing_a_daemon_that_waits_for_the_store_is_repaired_too(network: Network) -> None:
    a = network.host(ready=True)
    network.peer(4)
    network.settled()
    before = everything(a)
    network.cut_from_etcd(a)
    a.namespace.ip("link del flannel.1")
    settle("state without etcd", lambda: "" if everything(a) == before else everything(a), DEMAND_S)


def test_traffic_goes_on_through_repairs_that_concern_others(trio: Network) -> None:
    a, b, _ = trio.hosts
    peer = trio.peer(200)
    trio.settled()
    try:
        with lossless((a, b), (b, a)):
            a.namespace.ip("route del 10.5.200.0/24", "neigh del 10.5.200.0 dev flannel.1")
            trio.settled(DEMAND_S)
    finally:
        trio.forget(peer)
