from __future__ import annotations

import time
from functools import partial

import pytest

from flanneld.ctl.lab.hosts import Host
from tests.support.drawn import CONFIG
from tests.support.expected import device, direct_routes, held
from tests.support.site import Network, differs, lacks, lossless, mtu_differs, settle, stays

pytestmark = pytest.mark.system


def vxlan(**options: object) -> dict[str, object]:
    return {**CONFIG, "Backend": {"Type": "vxlan", **options}}


def count(host: Host, words: str) -> int:
    return host.daemon.log().count(words)


def test_unusable_config_leaves_the_earlier_one_in_force(network: Network) -> None:
    a, b = network.cluster(2)
    before = device(a), a.subnet_env(), network.etcd.leases()
    with lossless((a, b), (b, a)):
        for broken, words in (
            ('{"Network": 10.5.0.0/16}', "line 1"),
            ('{"Network":"10.5.0.0/33"}', "10.5.0.0/33"),
            ('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlam"}}', "vxlam"),
            ('{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":100}}', "MTU 100"),
        ):
            network.etcd.put(f"{network.etcd.prefix}/config", broken)
            settle("log", lacks(a.daemon.log, words, "the earlier network config stays in force"), 5)
        assert network.etcd.delete(f"{network.etcd.prefix}/config")
        settle("log", lacks(a.daemon.log, "does not exist"), 5)
        # Peers are followed all the while.
        network.peer(206)
        network.settled()
        a.namespace.ip("link set flannel.1 mtu 1300")
        settle("MTU", lambda: "" if device(a) == before[0] else device(a), 2)
    assert a.subnet_env() == before[1]
    assert {k: v for k, v in network.etcd.leases().items() if k != "10.5.206.0-24"} == before[2]
    said = a.daemon.log().splitlines()
    assert len([line for line in said if "stays in force" in line]) == 5
    assert a.daemon.notify.ready
    network.etcd.configure(CONFIG)
    settle("log", lacks(a.daemon.log, "can be used again"), 5)


def test_C11_changes_that_can_be_followed_are_and_others_are_told_once(network: Network) -> None:
    a, b = network.cluster(2)
    with lossless((a, b), (b, a)):
        network.etcd.configure(vxlan(DirectRouting=True))
        for host, other in ((a, b), (b, a)):
            route = f"route {network.subnet(other)} via {other.address} dev eth0 proto 142"
            settle("direct route", partial(differs, direct_routes, host, route), 5)
            settle("no tunnel entries", partial(leftovers, host), 5)
        network.etcd.configure(vxlan())
        network.settled(5)
        assert direct_routes(a) == set()
    state = device(a), held(a), a.subnet_env(), network.etcd.leases()
    for number, (config, word) in enumerate(
        (
            (vxlan(VNI=42), "vni"),
            (vxlan(Port=8473), "port"),
            ({**CONFIG, "Backend": {"Type": "host-gw"}}, "host-gw"),
            ({"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}}, "10.6.0.0/16"),
        ),
        1,
    ):
        network.etcd.configure(config)
        settle("log", lambda number=number: count(a, "restart needed") != number, 5)  # type: ignore[misc]
        settle("STATUS", lacks(lambda: a.daemon.notify.status, "subnet ", "restart needed", word), 5)
    network.peer(210)
    settle("peers are followed", lambda: "" if any("10.5.210.0/24" in fact for fact in held(a)) else "not", 5)
    network.forget("10.5.210.0-24")
    settle("state", lambda: (device(a), held(a), a.subnet_env(), network.etcd.leases()) != state, 5)
    stays("told once", lambda: count(a, "restart needed") != 4, 1)
    network.etcd.configure(CONFIG)
    settle("STATUS", lambda: "restart" in a.daemon.notify.status, 5)


def leftovers(host: Host) -> list[str]:
    return [fact for fact in held(host) if not fact.startswith("addr ")]


def test_V15_mtu_of_the_config_is_followed_live(network: Network) -> None:
    a, b = network.cluster(2)
    index, key = device(a)["index"], network.etcd.get(network.key(a))
    with lossless((a, b), (b, a)):
        for underlay in (1400, 1500):
            network.etcd.configure(vxlan(MTU=underlay))
            mtu = underlay - 50
            for host in (a, b):
                settle("MTU", partial(mtu_differs, host, mtu), 5)
            time.sleep(0.3)
    assert device(a)["index"] == index
    assert network.etcd.get(network.key(a)) == key
    network.settled()


def test_subnet_range_that_leaves_ours_out_counts_from_the_next_start(network: Network) -> None:
    (a,) = network.cluster(1)
    before, leases = network.subnet(a), network.etcd.leases()
    network.etcd.configure({**CONFIG, "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.254.0"} | range_without(before))
    settle("STATUS", lacks(lambda: a.daemon.notify.status, "restart needed", before), 5)
    assert (network.subnet(a), network.etcd.leases()) == (before, leases)
    a.daemon.restart()
    assert network.subnet(a) != before
    assert network.keys_of(a) == [network.subnet(a).replace("/", "-")]


def range_without(subnet: str) -> dict[str, str]:
    third = int(subnet.split(".")[2])
    return {"SubnetMin": f"10.5.{third + 1}.0"} if third < 200 else {"SubnetMax": f"10.5.{third - 1}.0"}
