from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Network

import pytest

from flanneld.ctl.lab.hosts import Host
from tests.support.drawn import CONFIG
from tests.support.echoes import all_answer
from tests.support.expected import device, direct_routes, rules
from tests.support.site import Network, Site, differs, lossless, peer_value, settle

pytestmark = pytest.mark.system

FIVE = CONFIG | {"SubnetMin": "10.5.1.0", "SubnetMax": "10.5.5.0"}


def stop(*hosts: Host) -> None:
    for host in hosts:
        host.daemon.signal(signal.SIGTERM)
    assert [h.daemon.wait_exit(2) for h in hosts] == [0] * len(hosts)


def all_is_consistent(network: Network) -> None:
    """Every host has a subnet of its own, and file, key and kernel agree."""
    subnets = [network.subnet(h) for h in network.hosts]
    assert len(set(subnets)) == len(network.hosts)
    assert {s.replace("/", "-") for s in subnets} == set(network.etcd.leases())
    for host in network.hosts:
        assert network.lease(host)["PublicIP"] == host.address
        assert network.lease(host)["BackendData"]["VtepMAC"] == device(host)["mac"]
    network.settled()


def test_E05_five_started_at_once_share_a_pool_of_five_and_restarts_lose_nothing(
    make_network: Callable[..., Network],
) -> None:
    network = make_network(FIVE)
    hosts = network.cluster(5)
    assert {network.subnet(h) for h in hosts} == {f"10.5.{n}.0/24" for n in range(1, 6)}
    all_is_consistent(network)
    a, b = hosts[:2]

    def kept() -> tuple[object, ...]:
        return network.etcd.leases(), network.etcd.lease_id(network.key(a)), device(a), network.subnet(a)

    before = kept()
    with lossless((a, b), (b, a)):
        a.daemon.restart()
        assert kept() == before
        a.daemon.kill()
        time.sleep(0.3)
        a.daemon.start()
        a.daemon.wait_ready()
        assert kept() == before
        network.settled()
    all_is_consistent(network)


def test_wishes_for_a_restart_in_place_that_pile_up_end_nobody(network: Network) -> None:
    a = network.host(ready=True)
    pid = a.daemon.pid
    a.daemon.notify.clear()
    for _ in range(50):
        a.daemon.signal(signal.SIGHUP)
        time.sleep(0.02)
    a.daemon.wait_ready()
    assert a.daemon.pid == pid
    network.settled()


def test_E05_subnet_of_an_old_file_is_not_taken_from_its_new_holder(make_network: Callable[..., Network]) -> None:
    network = make_network()
    a, b = network.host(ready=True), network.host()
    stop(a)
    assert network.etcd.delete(network.key(a))
    shutil.copy(a.daemon.subnet_file, b.daemon.subnet_file)
    old = network.subnet(a)
    network.start(b)
    assert network.subnet(b) == old
    network.start(a)
    assert network.subnet(a) != old
    all_is_consistent(network)


def test_S12_other_public_ip_after_a_restart(network: Network) -> None:
    a, b = network.host(ready=True), network.host(ready=True)
    stop(a)
    other = f"192.0.2.{150 + int(a.name[1:])}"
    a.namespace.ip(f"addr add {other}/24 dev eth0")
    a.daemon.start(f"--public-ip={other}")
    a.daemon.wait_ready()
    assert network.lease(a)["PublicIP"] == other
    leases = network.etcd.leases()
    assert sorted(v["PublicIP"] for v in leases.values()) == sorted([other, b.address])
    network.settled()
    assert network.key(a).rsplit("/", 1)[1] in leases


def test_C10_other_network_after_a_restart(network: Network) -> None:
    a = network.host("--ip-masq", ready=True)
    network.peer(7)
    network.settled()
    old_key, old = network.key(a), network.subnet(a)
    stop(a)
    network.forget("10.5.7.0-24")
    network.etcd.configure({"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}})
    network.etcd.forge("10.6.7.0-24", peer_value(7))
    network.start(a)
    network.settled()
    assert IPv4Network(network.subnet(a)).subnet_of(IPv4Network("10.6.0.0/16"))
    assert network.etcd.get(old_key) is None
    assert len(network.etcd.leases()) == 2
    assert a.subnet_env()["FLANNEL_NETWORK"] == "10.6.0.0/16"
    traces = [*rules(a), *(str(r) for r in a.namespace.routes()), *a.namespace.addresses("flannel.1")]
    settle("the old network is gone", lambda: [t for t in traces if "10.5." in t], 0)
    assert old.startswith("10.5.")


def test_C11_other_vni_then_other_backend_after_a_restart_leave_nothing_behind(network: Network) -> None:
    hosts = network.cluster(2)
    a, b = hosts
    network.etcd.configure(CONFIG | {"Backend": {"Type": "vxlan", "VNI": 42}})
    stop(*hosts)
    network.start(*hosts)
    for host in hosts:
        settle("only flannel.42", partial(differs, tunnels, host, "flannel.42"), 5)
    all_answer(hosts)
    assert a.pod.ping(b.pod)[0] == 3
    network.etcd.configure(CONFIG | {"Backend": {"Type": "host-gw"}})
    stop(*hosts)
    network.start(*hosts)
    for host, other in ((a, b), (b, a)):
        settle("no tunnel", partial(tunnels, host), 5)
        route = f"route {network.subnet(other)} via {other.address} dev eth0 proto 142"
        settle("direct route", partial(differs, direct_routes, host, route), 5)
    all_answer(hosts)
    assert a.pod.ping(b.pod)[0] == 3


def tunnels(host: Host) -> list[str]:
    return [name for name in host.namespace.links() if name.startswith("flannel")]


def test_E14_two_keys_of_one_host_become_one(network: Network) -> None:
    a, b = network.host(), network.host(ready=True)
    value = {"PublicIP": a.address}
    network.etcd.forge("10.5.160.0-24", value)
    network.etcd.forge("10.5.161.0-24", value)
    a.daemon.subnet_file.write_text("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.161.1/24\n")
    network.start(a)
    assert network.subnet(a) == "10.5.161.0/24"
    settle("one key", lambda: set(network.keys_of(a)) ^ {"10.5.161.0-24"}, 5)
    network.settled(hosts=[b])


def test_E07_reservation_is_used_and_stays_one(network: Network) -> None:
    a = network.host()
    key = f"{network.etcd.prefix}/subnets/10.5.177.0-24"
    network.etcd.forge("10.5.177.0-24", {"PublicIP": a.address}, ttl_s=0)
    for _ in range(2):
        network.start(a)
        assert network.subnet(a) == "10.5.177.0/24"
        assert network.lease(a)["BackendData"] == {"VNI": 1, "VtepMAC": device(a)["mac"]}
        assert network.etcd.lease_id(key) == 0
        assert network.keys_of(a) == ["10.5.177.0-24"]
        stop(a)


def test_V11_leftover_addresses_of_a_device(network: Network) -> None:
    a = network.host()
    a.namespace.ip(
        f"link add flannel.1 type vxlan id 1 dev eth0 local {a.address} dstport 8472 nolearning",
        "addr add 10.83.4.0/32 dev flannel.1",
        "addr add 192.168.1.125/24 dev flannel.1",
        "addr add 10.5.99.0/32 dev flannel.1",
        "link set flannel.1 up",
    )
    network.start(a)
    found = {address.partition("/")[0] for address in a.namespace.addresses("flannel.1") if ":" not in address}
    assert found == {"10.83.4.0", "192.168.1.125", network.subnet(a).partition("/")[0]}
    assert [line for line in a.daemon.log().splitlines() if " WARNING " in line and "192.168.1.125" in line]


OLD_DEVICES = {
    "V12-equal": ("id 1 dev eth0 local {own} dstport 8472 nolearning", (), {}, True),
    "V12-local": ("id 1 dev eth0 local 192.0.2.250 dstport 8472 nolearning", (), {}, False),
    "V12-lower-device": ("id 1 local {own} dstport 8472 nolearning", (), {}, False),
    "V12-gbp": ("id 1 dev eth0 local {own} dstport 8472 nolearning gbp", (), {}, False),
    "V12-learning": ("id 1 dev eth0 local {own} dstport 8472", (), {}, True),
    "V12-down": ("id 1 dev eth0 local {own} dstport 8472 nolearning", ("link set flannel.1 down",), {}, True),
    "V15-mtu": (
        "id 1 dev eth0 local {own} dstport 8472 nolearning",
        ("link set flannel.1 mtu 1450",),
        {"MTU": 1400},
        True,
    ),
    "V15-mtu-on-a-fresh-device": ("", (), {"MTU": 1400}, False),
    "V15-larger-than-the-underlay": ("", (), {"MTU": 9000}, False),
    "V19-port": ("id 1 dev eth0 local {own} dstport 8472 nolearning", (), {"Port": 8473}, False),
    "V19-port-0": ("id 1 dev eth0 local {own} dstport 8472 nolearning", (), {"Port": 0}, True),
}


def test_existing_devices_are_kept_mended_or_rebuilt(make_network: Callable[..., Network]) -> None:
    started: dict[str, tuple[Host, int, dict[str, int]]] = {}
    for name, (old, then, backend, _) in OLD_DEVICES.items():
        host = make_network(CONFIG | {"Backend": {"Type": "vxlan", **backend}}).host()
        if old:
            host.namespace.ip(
                f"link add flannel.1 type vxlan {old.format(own=host.address)}", "link set flannel.1 up", *then
            )
        started[name] = host, device(host).get("index", 0), backend
    waiting = list(started.values())
    for batch in (waiting[i : i + 4] for i in range(0, len(waiting), 4)):
        for host, _, _ in batch:
            host.daemon.start()
        for host, _, _ in batch:
            host.daemon.wait_ready()
    for name, (host, index, backend) in started.items():
        found = device(host)
        mtu = min(int(backend.get("MTU", 1500)), 1500) - 50
        assert found["up"], name
        assert (found["mtu"], host.subnet_env()["FLANNEL_MTU"]) == (mtu, str(mtu)), name
        assert found["vxlan local"] == host.address, name
        assert found["vxlan link"] == "eth0", name
        assert found["vxlan port"] == (backend.get("Port") or 8472), name
        assert not found["vxlan learning"], name
        assert not found.get("vxlan gbp"), name
        assert (found["index"] == index) == OLD_DEVICES[name][3], name
    host = started["V15-larger-than-the-underlay"][0]
    assert [line for line in host.daemon.log().splitlines() if " WARNING " in line and "9000" in line]


# -- the store loses everything ----------------------------------------------------------


def test_E15_wiped_while_stopped_everybody_gets_the_old_subnet_back(network: Network, site: Site) -> None:
    hosts = [network.host() for _ in range(3)]
    network.start(*hosts)
    before = {h: network.subnet(h) for h in hosts}
    stop(*hosts)
    site.wipe_etcd()
    network.etcd.configure(CONFIG)
    assert network.etcd.leases() == {}
    for host in reversed(hosts):
        network.start(host)
    assert {h: network.subnet(h) for h in hosts} == before
    all_is_consistent(network)


@pytest.mark.parametrize("away_s", [0.0, 6.0])
def test_E15_wiped_while_running_each_puts_its_record_back(network: Network, site: Site, away_s: float) -> None:
    hosts = network.cluster(2)
    before = network.etcd.leases()
    with lossless((hosts[0], hosts[1]), (hosts[1], hosts[0])):
        # After a while hosts do not come back to it at the same time.
        site.wipe_etcd(away_s)
        network.etcd.configure(CONFIG)
        settle("records", lambda: before if network.etcd.leases() != before else "", 15)
    all_is_consistent(network)
