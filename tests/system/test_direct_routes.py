"""Routes through the peers themselves: host-gw, and vxlan with DirectRouting (field reports H01 to H07)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4
from tests.support.damage import WITHIN_S
from tests.support.drawn import CONFIG
from tests.support.expected import Facts, direct_routes, held
from tests.support.site import Network, differs, lacks, peer_value, settle, stays

pytestmark = pytest.mark.system

HOST_GW = CONFIG | {"Backend": {"Type": "host-gw"}}
DIRECT = CONFIG | {"Backend": {"Type": "vxlan", "DirectRouting": True}}


@pytest.fixture
def network(make_network: Callable[..., Network]) -> Network:
    return make_network(HOST_GW)


def gateway_peer(network: Network, number: int, address: str = "") -> None:
    """Write the lease of a host-gw host that does not exist, with subnet 10.5.N.0/24."""
    value = {"PublicIP": address or f"192.0.2.{200 + number}", "PublicIPv6": None, "BackendType": "host-gw"}
    network.etcd.forge(f"10.5.{number}.0-24", value)


def through(number: int, address: str = "", protocol: str = "142") -> str:
    """Return the route to the former's subnet."""
    return f"route 10.5.{number}.0/24 via {address or f'192.0.2.{200 + number}'} dev eth0 proto {protocol}"


def test_H01_never_a_route_to_the_own_subnet(network: Network) -> None:
    gateway_peer(network, 2)
    a = network.host(ready=True)
    settle("the peer's route", partial(differs, direct_routes, a, through(2)), 5)
    a.daemon.restart()  # the own lease is in the first list now
    settle("the peer's route", partial(differs, direct_routes, a, through(2)), 5)
    rewritten = network.lease(a) | {"BackendData": {"Note": "by hand"}}
    network.raw(network.subnet(a).replace("/", "-"), json.dumps(rewritten))
    stays("the peer's route alone", partial(differs, direct_routes, a, through(2)), 2)


@contextmanager
def watched_routes(host: Host, path: Path) -> Iterator[Callable[[], str]]:
    """Collect what ``ip monitor route`` says meanwhile."""
    with path.open("wb") as output:
        monitor = host.namespace.spawn("ip", "monitor", "route", output=output)
    try:

        def hears() -> str:
            host.namespace.ip("route replace 203.0.113.0/24 dev lo table 78", "route del 203.0.113.0/24 table 78")
            return "" if "203.0.113.0" in path.read_text() else "nothing"

        settle("the monitor hears", hears, 10)
        yield path.read_text
    finally:
        monitor.kill()
        monitor.wait()


def test_H02_restart_leaves_right_routes_and_other_tables_and_mends_wrong_ones(
    network: Network, tmp_path: Path
) -> None:
    for number in (2, 3, 4):
        gateway_peer(network, number)
    a = network.host(ready=True)
    wanted = [through(number) for number in (2, 3, 4)]
    settle("routes", partial(differs, direct_routes, a, *wanted), 5)
    assert a.daemon.stop() == 0
    a.namespace.ip(
        f"route replace 10.5.3.0/24 via {SWITCH_V4} dev eth0",
        "route replace blackhole 10.5.4.0/24",
        f"route add 10.5.2.0/24 via {SWITCH_V4} dev eth0 table 77",
    )
    with watched_routes(a, tmp_path / "monitor") as said:
        network.start(a)
        settle("routes", partial(differs, direct_routes, a, *wanted), 5)
        assert "10.5.3.0/24" in said()
        assert "10.5.2.0/24" not in said()
    assert [r["gateway"] for r in a.namespace.show("route show table 77")] == [SWITCH_V4]
    assert not [line for line in a.daemon.log().splitlines() if " WARNING " in line or " ERROR " in line]


def test_H04_a_peer_that_is_not_on_link_is_pending_until_it_is(network: Network) -> None:
    gateway_peer(network, 2)
    gateway_peer(network, 3, "198.51.100.9")
    a = network.host(ready=True)
    settle("the other peer", partial(differs, direct_routes, a, through(2)), 5)
    settle("status", lacks(lambda: a.daemon.notify.status, "1 with problems"), 5)
    stays("the other peer alone", partial(differs, direct_routes, a, through(2)), 6)
    named = [line for line in a.daemon.log().splitlines() if "198.51.100.9" in line and " WARNING " in line]
    assert len(named) == 1
    a.namespace.ip("addr add 198.51.100.1/24 dev eth0")
    settle("both", partial(differs, direct_routes, a, through(2), through(3, "198.51.100.9")), 15)
    settle("status", lambda: [a.daemon.notify.status] if "problem" in a.daemon.notify.status else [], 5)


FOREIGN = ("172.16.9.0/24", "10.5.77.0/24")
"""Routes of the operator, one of them inside the cluster's network."""


@pytest.mark.parametrize("backend", ["host-gw", "vxlan"])
def test_H05_what_went_while_the_daemon_was_down_leaves_nothing(
    make_network: Callable[..., Network], backend: str
) -> None:
    network = make_network(HOST_GW if backend == "host-gw" else CONFIG)
    gone, moved, taken = 2, 3, 104  # A is to have the last one
    for last, number in enumerate((gone, moved, taken), 200):
        gateway_peer(network, number, f"192.0.2.{last}") if backend == "host-gw" else network.peer(number)
    a = network.host(ready=True)
    leases = [key for key in network.etcd.leases() if key != network.subnet(a).replace("/", "-")]
    settle(
        "entries",
        lambda: "" if len(of_peers(a, backend)) == len(leases) * (1 if backend == "host-gw" else 3) else "few",
        5,
    )
    assert a.daemon.stop() == 0

    foreign = [f"route {to} via {SWITCH_V4} dev eth0 proto static" for to in FOREIGN]
    a.namespace.ip(*(f"route add {to} via {SWITCH_V4} dev eth0 proto static" for to in FOREIGN))
    a.namespace.ip("link add cni0 type bridge", "link set cni0 mtu 1450 up", "addr add 10.5.104.1/24 dev cni0")
    network.etcd.delete(network.key(a))
    for number in (gone, moved, taken):
        network.forget(f"10.5.{number}.0-24")
    network.etcd.forge("10.5.104.0-24", {"PublicIP": a.address})
    if backend == "host-gw":
        gateway_peer(network, moved, "192.0.2.233")
        wanted = {through(moved, "192.0.2.233")}
    else:
        value = peer_value(33, PublicIP="198.51.100.33")
        network.etcd.forge("10.5.3.0-24", value)
        wanted = {
            "route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 proto boot onlink",
            "neigh 10.5.3.0 lladdr 02:00:00:00:00:21 dev flannel.1 PERMANENT",
            "fdb 02:00:00:00:00:21 dst 198.51.100.33 dev flannel.1 self permanent",
        }
    network.start(a)
    assert network.subnet(a) == "10.5.104.0/24"
    settle("entries", lambda: of_peers(a, backend) ^ wanted, 10)
    assert direct_routes(a) >= set(foreign)
    network.lab.add_pod(a)
    assert a.namespace.ping(a.pod.address(), count=1)[0] == 1


def of_peers(host: Host, backend: str) -> Facts:
    """Return the host's entries for peers."""
    if backend == "host-gw":
        return frozenset(fact for fact in direct_routes(host) if "proto 142" in fact)
    return frozenset(fact for fact in held(host) if not fact.startswith("addr "))


def test_H06_flushed_routes_are_back(network: Network) -> None:
    for number in (2, 3):
        gateway_peer(network, number)
    a = network.host(ready=True)
    routes = partial(differs, direct_routes, a, through(2), through(3))
    settle("routes", routes, 5)
    for protocol in ("142", "static"):
        a.namespace.ip(f"route flush proto {protocol}")
        settle("routes", routes, WITHIN_S)


def test_H07_peers_behind_a_vpn_or_another_gateway_are_tunnelled_until_they_are_direct(
    make_network: Callable[..., Network],
) -> None:
    network = make_network(DIRECT)
    vpn, gateway, near = 2, 3, 4
    for number in (vpn, gateway, near):
        network.etcd.forge(f"10.5.{number}.0-24", peer_value(number, PublicIP=f"192.0.2.{200 + number}"))
    a = network.host()
    detour = (
        f"route add 192.0.2.{200 + vpn}/32 dev tun0",
        f"route add 192.0.2.{200 + gateway}/32 via {SWITCH_V4} dev eth0 onlink",
    )
    a.namespace.ip("tuntap add tun0 mode tun", "link set tun0 up", *detour)
    network.start(a)
    ways = partial(tunnelled_and_direct, network, a)
    settle("ways", lambda: differ(ways(), ({vpn, gateway}, {near})), 5)
    a.namespace.ip(*(line.replace("route add", "route del") for line in detour))
    settle("ways", lambda: differ(ways(), (set(), {vpn, gateway, near})), 5)
    a.namespace.ip(*detour)
    settle("ways", lambda: differ(ways(), ({vpn, gateway}, {near})), 5)


def tunnelled_and_direct(network: Network, host: Host) -> tuple[set[int], set[int]]:
    """Return the peers whose three entries are complete, and those with a plain route and nothing else."""
    tunnel, direct = held(host), direct_routes(host)
    complete, plain = set(), set()
    for number in (2, 3, 4):
        mac = f"02:00:00:00:00:{number:02x}"
        entries = {
            f"route 10.5.{number}.0/24 via 10.5.{number}.0 dev flannel.1 proto boot onlink",
            f"neigh 10.5.{number}.0 lladdr {mac} dev flannel.1 PERMANENT",
            f"fdb {mac} dst 192.0.2.{200 + number} dev flannel.1 self permanent",
        }
        is_plain = through(number) in direct
        if entries <= tunnel and not is_plain:
            complete.add(number)
        elif is_plain and not entries & tunnel:
            plain.add(number)
    return complete, plain


def differ(have: object, want: object) -> object:
    return "" if have == want else have
