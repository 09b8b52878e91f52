from __future__ import annotations

import json
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address

import pytest

from flanneld.ctl.lab.hosts import Host
from tests.support.drawn import CONFIG
from tests.support.expected import device, direct_routes, held, rules, wanted
from tests.support.site import Network, Site, compare, differs, settle

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def pair(site: Site) -> Iterator[Network]:
    network = site.network()
    network.cluster(2, "--ip-masq")
    yield network
    network.close()


def test_lease_key_and_value_are_upstreams_bytes(pair: Network) -> None:
    for host in pair.hosts:
        mac = device(host)["mac"]
        value = (
            f'{{"PublicIP":"{host.address}","PublicIPv6":null,"BackendType":"vxlan",'
            f'"BackendData":{{"VNI":1,"VtepMAC":"{mac}"}}}}'
        )
        assert pair.etcd.get(pair.key(host)) == value
        lease = pair.etcd.call("lease/timetolive", {"ID": pair.etcd.lease_id(pair.key(host))})
        assert int(lease["grantedTTL"]) == 86400
    known = {f"{pair.etcd.prefix}/config", *(pair.key(h) for h in pair.hosts)}
    assert set(pair.etcd.list(pair.etcd.prefix)) == known


def test_etcdctl_sees_the_same(pair: Network) -> None:
    host = pair.hosts[0]
    found = json.loads(pair.lab.switch.run("etcdctl", "get", "--prefix", f"{pair.etcd.prefix}/subnets/", "-w", "json"))
    assert len(found["kvs"]) == 2
    assert pair.lab.switch.run("etcdctl", "get", "--print-value-only", pair.key(host)).startswith(
        f'{{"PublicIP":"{host.address}",'
    )


def test_V14_device_attributes(pair: Network) -> None:
    for host in pair.hosts:
        found = device(host)
        exact = {
            "kind": "vxlan",
            "mtu": 1450,
            "up": True,
            "queue": 0,
            "vxlan id": 1,
            "vxlan local": host.address,
            "vxlan link": "eth0",
            "vxlan port": 8472,
            "vxlan learning": False,
            "vxlan ttl": 0,
            "vxlan udp_csum": True,
            "vxlan udp_zero_csum6_tx": False,
            "vxlan udp_zero_csum6_rx": False,
        }
        assert {k: found.get(k) for k in exact} == exact
        absent = ("proxy", "rsc", "l2miss", "l3miss", "gbp", "external", "group", "remote", "tos")
        assert [k for k in absent if found.get(f"vxlan {k}")] == []
        assert int(found["mac"][:2], 16) & 3 == 2  # unicast, locally administered
        assert host.namespace.sysctl("net/ipv6/conf/flannel.1/accept_ra") == "0"


def test_routes_neighbours_fdb_and_address(pair: Network) -> None:
    for host in pair.hosts:
        assert compare(wanted(pair.etcd.leases(), pair.subnet(host)), held(host)) == []
        assert direct_routes(host) == set()
        (address,) = host.namespace.show("-4 addr show dev flannel.1")
        assert address["addr_info"][0]["scope"] == "global"
        assert "broadcast" not in address["addr_info"][0]


def test_subnet_file(pair: Network) -> None:
    for host in pair.hosts:
        path = host.daemon.subnet_file
        first = pair.subnet(host).replace(".0/", ".1/")
        assert path.read_text() == (
            f"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET={first}\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert [p.name for p in path.parent.glob("subnet.env*")] == ["subnet.env"]


def test_traffic_rules(pair: Network) -> None:
    for host in pair.hosts:
        n, p = "10.5.0.0/16", pair.subnet(host)
        masq, forward = '-m comment --comment "flanneld masq"', '-m comment --comment "flanneld forward"'
        wanted_rules = {
            f"nat -A POSTROUTING {masq} -j FLANNEL-POSTRTG",
            f"nat -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 {masq} -j RETURN",
            f"nat -A FLANNEL-POSTRTG -s {p} -d {n} {masq} -j RETURN",
            f"nat -A FLANNEL-POSTRTG -s {n} -d {p} {masq} -j RETURN",
            f"nat -A FLANNEL-POSTRTG ! -s {n} -d {p} {masq} -j RETURN",
            f"nat -A FLANNEL-POSTRTG -s {n} ! -d 224.0.0.0/4 {masq} -j MASQUERADE --random-fully",
            f"nat -A FLANNEL-POSTRTG ! -s {n} -d {n} {masq} -j MASQUERADE --random-fully",
            f"filter -A FORWARD {forward} -j FLANNEL-FWD",
            f"filter -A FLANNEL-FWD -s {n} {forward} -j ACCEPT",
            f"filter -A FLANNEL-FWD -d {n} {forward} -j ACCEPT",
        }
        found = [r for r in rules(host) if " -A " in r]
        assert len(found) == len(wanted_rules)
        assert set(found) == wanted_rules
        chain = [r for r in found if r.startswith("nat -A FLANNEL-POSTRTG")]
        assert [r.rsplit(" -j ", 1)[1].split()[0] for r in chain] == ["RETURN"] * 4 + ["MASQUERADE"] * 2
        assert [r for r in chain if "! -s" in r] == [chain[3], chain[5]]


def test_packets_of_full_size_pass_both_ways(pair: Network) -> None:
    a, b = pair.hosts
    assert a.pod.ping(b.pod)[0] == 3
    assert b.pod.ping(a.pod)[0] == 3
    too_large = 1450 + 1 - 28
    assert a.pod.namespace.ping(b.pod.address(), payload_bytes=too_large, dont_fragment=True, count=1)[0] == 0


def test_V18_outer_source_is_the_chosen_interface_and_inner_source_the_tunnel_address(network: Network) -> None:
    a, b = network.host(), network.host()
    # eth0 keeps the default route; the tunnel has to use eth1.
    second = f"192.0.2.{200 + int(a.name[1:]) % 50}"
    network.lab.plug(a.namespace, f"{a.name}-eth1", "eth1")
    a.namespace.ip(f"addr add {second}/24 dev eth1")
    a.daemon.flags = (*(f for f in a.daemon.flags if f != "--iface=eth0"), "--iface=eth1")
    network.start(a, b)
    network.lab.add_pod(b)
    network.settled()
    assert network.lease(a)["PublicIP"] == second
    assert device(a)["vxlan link"] == "eth1"
    with capture(b) as raw:
        a.run("ping", "-c", "3", "-i", "0.2", "-W", "1", b.pod.address(), check=False)
        outer, inner = set(), set()
        for packet in received(raw):
            if packet[9] == socket.IPPROTO_UDP and struct.unpack_from("!H", packet, 22)[0] == 8472:
                outer.add(str(IPv4Address(packet[12:16])))
                # 20 IP, 8 UDP, 8 VXLAN, 14 Ethernet; then the inner IP header.
                inner.add(str(IPv4Address(packet[50 + 12 : 50 + 16])))
    assert outer == {second}
    assert inner == {network.subnet(a).partition("/")[0]}


def capture(host: Host) -> socket.socket:
    raw = host.namespace.call(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)))
    raw.bind(("eth0", 0x0800))
    raw.settimeout(0.5)
    return raw


def received(raw: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            yield raw.recv(65536)
        except TimeoutError:
            return


def test_host_gw_pair_has_plain_routes_and_no_device(make_network: Callable[..., Network]) -> None:
    network = make_network({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    a, b = network.host(), network.host()
    network.start(a, b)
    for host, other in ((a, b), (b, a)):
        route = f"route {network.subnet(other)} via {other.address} dev eth0 proto 142"
        settle("route", partial(differs, direct_routes, host, route), 10)
        assert [name for name in host.namespace.links() if name.startswith("flannel")] == []
        value = f'{{"PublicIP":"{host.address}","PublicIPv6":null,"BackendType":"host-gw"}}'
        assert network.etcd.get(network.key(host)) == value
        assert host.subnet_env()["FLANNEL_MTU"] == "1500"
        network.lab.add_pod(host)
    assert a.pod.ping(b.pod)[0] == 3


def test_E17_single_host_of_each_backend_is_ready(make_network: Callable[..., Network]) -> None:
    hosts = []
    for backend in ("vxlan", "host-gw", "alloc"):
        network = make_network(CONFIG | {"Backend": {"Type": backend}})
        hosts.append(network.host())
        hosts[-1].daemon.start()
    for host in hosts:
        host.daemon.wait_ready(10)
    tunnels = [[n for n in h.namespace.links() if n.startswith("flannel")] for h in hosts]
    assert tunnels == [["flannel.1"], [], []]
