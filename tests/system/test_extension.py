from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.lab import FamilyChoice, network_config
from flanneld.ctl.lab.tools import poll
from tests.support.drawn import drawn
from tests.support.echoes import all_answer

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

# What the samples of upstream's documentation do, as idempotent commands.
VXLAN = {
    "ExtensionShell": True,
    "PreStartupCommand": (
        "ip link show flannel-vxlan >/dev/null 2>&1 || ip link add flannel-vxlan type vxlan id 5 dstport 8477;"
        " ip link set flannel-vxlan mtu 1450 && cat /sys/class/net/flannel-vxlan/address"
    ),
    "PostStartupCommand": 'ip addr replace "${SUBNET%/*}/32" dev flannel-vxlan && ip link set flannel-vxlan up',
    "SubnetAddCommand": (
        'read vtep && ip neigh replace "${SUBNET%/*}" lladdr "$vtep" dev flannel-vxlan nud permanent'
        ' && bridge fdb replace "$vtep" dev flannel-vxlan self dst "$PUBLIC_IP"'
        ' && ip route replace "$SUBNET" via "${SUBNET%/*}" dev flannel-vxlan onlink'
    ),
    "SubnetRemoveCommand": (
        'read vtep; ip route del "$SUBNET"; bridge fdb del "$vtep" dev flannel-vxlan self dst "$PUBLIC_IP";'
        ' ip neigh del "${SUBNET%/*}" dev flannel-vxlan'
    ),
    "ShutdownCommand": "ip link del flannel-vxlan",
}
HOST_GW = {
    "SubnetAddCommand": "ip route replace $SUBNET via $PUBLIC_IP",
    "SubnetRemoveCommand": 'ip route del "$SUBNET" via ${PUBLIC_IP}',
}


def config(options: dict[str, Any]) -> dict[str, Any]:
    return drawn({"Network": "10.5.0.0/16", "Backend": {"Type": "extension", **options}})


@pytest.fixture
def tunnels() -> Iterator[Lab]:
    with Lab(2, config=config(VXLAN)) as lab:
        yield lab


def peers_of(lab: Lab, index: int) -> dict[str, str]:
    routes = lab.hosts[index].namespace.routes()
    return {r["dst"]: r["gateway"] for r in routes if str(r.get("dst")).startswith("10.5.") and "gateway" in r}


def answered(tunnels: Lab) -> bool:
    """Whether each container reaches the other, by small packets: the MTU of containers leaves no room for VXLAN."""
    return all(s.pod.namespace.ping(t.pod.address(), count=1)[0] for s, t in tunnels.pairs())


def test_commands_build_a_vxlan_network(tunnels: Lab) -> None:
    first, second = tunnels.hosts
    value = next(v for v in tunnels.etcd.leases().values() if v["PublicIP"] == "192.0.2.1")
    link = first.namespace.link("flannel-vxlan")
    assert link is not None
    assert value == {
        "PublicIP": "192.0.2.1",
        "PublicIPv6": None,
        "BackendType": "extension",
        "BackendData": link["address"],
    }
    assert first.subnet_env()["FLANNEL_MTU"] == "1500"
    poll("answers", lambda: answered(tunnels), timeout_s=60)
    assert first.pod.namespace.ping(second.pod.address())[0] == 3
    assert second.pod.namespace.ping(first.pod.address(), payload_bytes=1450 - 28, dont_fragment=True)[0] == 3
    # The end: commands are told, within the time that a stop may take.
    began = time.monotonic()
    assert first.daemon.stop() == 0
    assert time.monotonic() - began < 2
    assert first.namespace.link("flannel-vxlan") is None


def test_restart_runs_every_addition_again_and_keeps_the_lease(tunnels: Lab) -> None:
    first, second = tunnels.hosts
    before = first.subnet_env()["FLANNEL_SUBNET"]
    first.daemon.kill()
    first.run("ip", "route", "flush", "dev", "flannel-vxlan", "via", second.pod.address().rsplit(".", 1)[0] + ".0")
    first.daemon.start()
    first.daemon.wait_ready()
    assert first.subnet_env()["FLANNEL_SUBNET"] == before
    poll("answers", lambda: answered(tunnels), timeout_s=60)
    assert first.pod.namespace.ping(second.pod.address())[0] == 3


def test_words_without_a_shell_and_routes_of_the_commands_stay() -> None:
    with Lab(2, config=config(HOST_GW), flags=["--resync-period=1"]) as lab:
        first, second = lab.hosts
        subnet = second.subnet_env()["FLANNEL_SUBNET"].replace(".1/", ".0/")
        poll("the route", lambda: peers_of(lab, 0) == {subnet: "192.0.2.2"}, timeout_s=10)
        all_answer(lab.hosts)
        assert first.pod.ping(second.pod)[0] == 3
        lab.etcd.forge("10.5.200.0-24", {"PublicIP": "192.0.2.99", "PublicIPv6": None, "BackendType": "extension"})
        poll("another", lambda: peers_of(lab, 0).get("10.5.200.0/24") == "192.0.2.99", timeout_s=10)
        time.sleep(1.5)  # a resync must not take them for leftovers of another backend
        assert set(peers_of(lab, 0)) == {subnet, "10.5.200.0/24"}
        lab.etcd.delete(f"{lab.etcd.prefix}/subnets/10.5.200.0-24")
        poll("its end", lambda: set(peers_of(lab, 0)) == {subnet}, timeout_s=10)


# A family that is off is told as the network of everything, which must not become a route.
HOST_GW_6 = {
    "ExtensionShell": True,
    "SubnetAddCommand": (
        '[ "$SUBNET" = 0.0.0.0/0 ] || ip route replace "$SUBNET" via "$PUBLIC_IP";'
        ' ip route replace "$IPV6SUBNET" via "$PUBLIC_IPV6"'
    ),
    "SubnetRemoveCommand": '[ "$SUBNET" = 0.0.0.0/0 ] || ip route del "$SUBNET"; ip route del "$IPV6SUBNET"',
}


@pytest.mark.parametrize("family", ["v6", "dual"])
def test_commands_are_told_of_ipv6(family: FamilyChoice) -> None:
    backend = {"Type": "extension", **HOST_GW_6}
    with Lab(2, config=network_config(family=family) | {"Backend": backend}, family=family) as lab:
        first, second = lab.hosts
        for address in second.pod.addresses:
            version = address.version
            poll("an answer", lambda: first.pod.ping(second.pod, version, count=1)[0] == 1, timeout_s=10)  # noqa: B023
        assert second.daemon.stop() == 0
        for key in lab.etcd.leases():
            if str(second.gateways()[-1].network).replace("/", "-") in key:
                lab.etcd.delete(f"{lab.etcd.prefix}/subnets/{key}")
        networks = {str(g.network) for g in second.gateways()}
        poll("its end", lambda: not networks & {r["dst"] for f in (4, 6) for r in first.namespace.routes(f)}, 10)


def test_peer_in_trouble_is_named_and_holds_nobody_up(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    broken = {
        "ExtensionShell": True,
        "CommandTimeout": 1,
        "SubnetAddCommand": f'[ "$PUBLIC_IP" != 192.0.2.98 ] || sleep 100; echo "$SUBNET" >>{marks}',
    }
    with Lab(1, config=config(broken), start=False) as lab:
        for n in (98, 99):
            value = {"PublicIP": f"192.0.2.{n}", "PublicIPv6": None, "BackendType": "extension"}
            lab.etcd.forge(f"10.5.{n}.0-24", value)
        lab.start()
        (host,) = lab.hosts
        assert "10.5.99.0/24" in marks.read_text().splitlines()
        assert "SubnetAddCommand for 10.5.98.0/24 was killed after 1 s" in host.daemon.log()
        poll("it in the status", lambda: "1 with problems" in host.daemon.notify.status, timeout_s=10)


def test_failing_start_is_waited_out(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with Lab(1, config=config({"PostStartupCommand": f"test -e {flag}"}), start=False) as lab:
        (host,) = lab.hosts
        host.daemon.start()
        poll(
            "the reason", lambda: "PostStartupCommand ended with exit code 1" in host.daemon.notify.status, timeout_s=20
        )
        assert host.subnet_env() == {}
        flag.touch()
        host.daemon.wait_ready()
        assert host.subnet_env()["FLANNEL_NETWORK"] == "10.5.0.0/16"
