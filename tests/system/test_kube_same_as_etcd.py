"""For equal leases the kernel holds the same, whoever keeps them: an API server or etcd."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from tests.support.kube import PREFIX, node_annotations
from tests.support.kube_lab import cidrs, kube_lab
from tests.support.kube_node import DUAL
from tests.support.site import settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

FLAGS = ("--ip-masq", "--ip-blackhole-route")
PEERS = (2, 3)
OWN_MACS = "02:00:00:00:01:01", "02:00:00:06:01:01"
BACKENDS: dict[str, dict[str, Any]] = {
    "vxlan": {"Type": "vxlan"},
    "vxlan with direct routes": {"Type": "vxlan", "DirectRouting": True},
    "host-gw": {"Type": "host-gw"},
}
PASSING = ("ifindex", "link_index", "index", "min_mtu", "max_mtu", "promiscuity", "allmulti", "group", "expires")
"""What ip(8) says of the moment or of the machine."""


def macs(number: int) -> tuple[str, str]:
    return f"02:00:00:00:00:{number:02x}", f"02:00:00:06:00:{number:02x}"


def addresses(number: int) -> tuple[str, str]:
    # The second peer is not on the hosts' segment.
    return (f"192.0.2.{number}", f"2001:db8:1::{number}") if number == 2 else ("198.51.100.3", "2001:db8:2::3")


def lease(number: int, kind: str) -> tuple[str, dict[str, Any]]:
    v4, v6 = addresses(number)
    value: dict[str, Any] = {"PublicIP": v4, "PublicIPv6": v6, "BackendType": kind}
    if kind == "vxlan":
        value |= {
            key: {"VNI": 1, "VtepMAC": mac}
            for key, mac in zip(("BackendData", "BackendV6Data"), macs(number), strict=True)
        }
    return "&".join(cidr.replace("/", "-") for cidr in cidrs(number, DUAL)), value


def state(host: Host) -> dict[str, Any]:
    """Everything that a daemon makes on a host, as tools show it."""
    namespace = host.namespace
    devices = sorted(name for name in namespace.links() if name.startswith("flannel"))
    rows: dict[str, Any] = {"devices": [lasting(namespace.link(name)) for name in devices]}
    for name in devices:
        rows[f"addresses of {name}"] = namespace.addresses(name)
        rows[f"entries of {name}"] = sorted(
            json.dumps(lasting(entry), sort_keys=True)
            for entry in (*namespace.fdb(name), *namespace.neighbours(name, 4), *namespace.neighbours(name, 6))
        )
    for family in (4, 6):
        shown = namespace.show(f"-{family} route show table all")
        found = [lasting(route) for route in shown if (route.get("dev"), route.get("protocol")) != ("eth0", "kernel")]
        rows[f"routes, IPv{family}"] = sorted(json.dumps(route, sort_keys=True) for route in found)
        rows[f"rules, IPv{family}"] = namespace.iptables_save(family)
    rows["subnet.env"] = host.daemon.subnet_file.read_text()
    return rows


def lasting(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {key: lasting(value) for key, value in entry.items() if key not in PASSING}
    return [lasting(value) for value in entry] if isinstance(entry, list) else entry


def programmed(host: Host) -> str:
    routes = host.run("ip", "route") + host.run("ip", "-6", "route")
    return "" if "10.5.2.0" in routes and "fd05:0:0:2::" in routes else routes


def with_etcd(backend: dict[str, Any]) -> dict[str, Any]:
    ranges = {"SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0"}
    ranges |= {"IPv6SubnetMin": "fd05:0:0:1::", "IPv6SubnetMax": "fd05:0:0:1::"}
    with Lab(1, family="dual", config={**DUAL, **ranges, "Backend": backend}, flags=FLAGS, start=False) as lab:
        for number in PEERS:
            lab.etcd.forge(*lease(number, backend["Type"]))
        (host,) = lab.hosts
        if backend["Type"] == "vxlan":
            # The lease that an earlier run left tells the MACs.
            own = {"PublicIP": "192.0.2.1", "PublicIPv6": "2001:db8:1::1", "BackendType": "vxlan"}
            data = [{"VNI": 1, "VtepMAC": mac} for mac in OWN_MACS]
            key = "&".join(cidr.replace("/", "-") for cidr in cidrs(1, DUAL))
            lab.etcd.forge(key, {**own, "BackendData": data[0], "BackendV6Data": data[1]})
        return run(host)


def with_kube(backend: dict[str, Any]) -> dict[str, Any]:
    with kube_lab(1, {**DUAL, "Backend": backend}, flags=FLAGS) as (lab, api):
        for number in PEERS:
            told = node_annotations(*interleaved(number, backend["Type"]), backend=backend["Type"])
            api.node(f"p{number}", cidrs(number, DUAL), told)
        (host,) = lab.hosts
        if backend["Type"] == "vxlan":
            data = [json.dumps({"VNI": 1, "VtepMAC": mac}) for mac in OWN_MACS]
            api.change(host.name, {PREFIX + "backend-data": data[0], PREFIX + "backend-v6-data": data[1]})
        return run(host)


def interleaved(number: int, kind: str) -> tuple[str, str, str, str]:
    (v4, v6), (mac4, mac6) = addresses(number), macs(number) if kind == "vxlan" else ("", "")
    return v4, mac4, v6, mac6


def run(host: Host) -> dict[str, Any]:
    host.daemon.start()
    host.daemon.wait_ready()
    settle("peers", lambda: programmed(host), 10)
    found = state(host)
    host.daemon.stop()
    return found


@pytest.mark.parametrize("kind", BACKENDS)
def test_kernel_holds_the_same(kind: str) -> None:
    backend = BACKENDS[kind]
    etcd, kube = with_etcd(backend), with_kube(backend)
    assert len(etcd["routes, IPv4"]) >= 5
    if backend["Type"] == "vxlan":
        assert [link["address"] for link in etcd["devices"]] == [OWN_MACS[1], OWN_MACS[0]]
    for what in etcd.keys() | kube.keys():
        assert kube.get(what) == etcd.get(what), what
