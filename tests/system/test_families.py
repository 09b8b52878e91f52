"""IPv6 alone and beside IPv4: start, leases, MTU, rules and files (field reports I01 to I08)."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4, SWITCH_V6, FamilyChoice, network_config
from flanneld.ctl.lab.netns import Namespace
from tests.support.kube import KubeApi
from tests.support.netns import listen_in
from tests.support.segments import undelivered
from tests.support.site import lacks, settle, stays

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

PORT = 4040
ONLY_V6: dict[str, Any] = {"EnableIPv4": False, "EnableIPv6": True}


@pytest.fixture(scope="module")
def dual() -> Iterator[Lab]:
    with Lab(2, family="dual", host_flags={1: ["--ip-masq"], 2: ["--ip-masq", "--ip-masq-exclude=::/0"]}) as lab:
        yield lab


@pytest.mark.parametrize("store", ["etcd", "Kubernetes"])
def test_I01_a_host_without_any_ipv4_address_waits_for_its_network_and_starts(store: str, tmp_path: Path) -> None:
    whole = ONLY_V6 | {"IPv6Network": "fd00:42:1::/56", "Backend": {"Type": "vxlan"}}
    lacking = {key: value for key, value in whole.items() if key != "IPv6Network"}
    with Lab(1, family="v6", config=lacking, start=False) as lab:
        (host,) = lab.hosts
        if store == "etcd":
            host.daemon.start()
            settle("the reason", lacks(lambda: host.daemon.notify.status, "not ready", "IPv6Network"), 10)
            lab.etcd.configure(whole)
            host.daemon.wait_ready(15)
        else:
            # Nothing but loopback has IPv4 there.
            with KubeApi(listen=lambda: listen_in(host.namespace.name, "127.0.0.1", 6443)) as api:
                api.node("h1", ["fd00:42:1:1::/64"])
                (tmp_path / "net-conf.json").write_text(json.dumps(whole))
                host.daemon.env["NODE_NAME"] = "h1"
                host.daemon.start(
                    "--kube-subnet-mgr",
                    f"--kube-api-url={api.url}",
                    f"--net-config-path={tmp_path / 'net-conf.json'}",
                )
                host.daemon.wait_ready()
                assert host.subnet_env()["FLANNEL_IPV6_SUBNET"] == "fd00:42:1:1::1/64"
        assert host.daemon.exit_code is None
        env = host.subnet_env()
        assert env["FLANNEL_IPV6_NETWORK"] == "fd00:42:1::/56"
        assert not {"FLANNEL_NETWORK", "FLANNEL_SUBNET"} & env.keys()
        assert _tunnels(host) == {"flannel-v6.1"}


def _masquerade(host: Host, tool: str) -> list[str]:
    return [line for line in host.run(tool, "-t", "nat").splitlines() if line.startswith("-A FLANNEL-POSTRTG")]


def test_I02_first_start_with_masquerade_brings_the_rules_of_both_families(dual: Lab) -> None:
    host = dual.hosts[0]
    assert len(_masquerade(host, "iptables-save")) == len(_masquerade(host, "ip6tables-save")) == 6


def test_I02_start_after_a_run_with_ipv4_only(dual: Lab) -> None:
    host = dual.hosts[0]
    host.daemon.stop()
    env = host.subnet_env()
    kept = "".join(f"{name}={value}\n" for name, value in env.items() if "IPV6" not in name)
    host.daemon.subnet_file.write_text(kept)
    host.daemon.start()
    host.daemon.wait_ready()
    assert host.subnet_env() == env
    assert len(_masquerade(host, "iptables-save")) == len(_masquerade(host, "ip6tables-save")) == 6


def test_I03_no_ipv6_rule_where_ipv6_is_off() -> None:
    with Lab(1, start=False, flags=["--ip-masq"]) as lab:
        (host,) = lab.hosts
        before = host.run("ip6tables-save")
        host.daemon.start()
        host.daemon.wait_ready()
        assert len(_masquerade(host, "iptables-save")) == 6
        rules = [line for line in host.run("ip6tables-save").splitlines() if line.startswith("-A")]
        assert rules == [line for line in before.splitlines() if line.startswith("-A")]


def test_I03_rules_at_rest_are_not_written(tmp_path: Path) -> None:
    with Lab(1, flags=["--ip-masq", "--iptables-resync=1"]) as lab:
        (host,) = lab.hosts
        path = tmp_path / "monitor"
        with path.open("wb") as output:
            monitor = host.namespace.spawn("nft", "monitor", output=output)
            try:

                def hears() -> str:
                    host.run("nft", "add table inet marker")
                    host.run("nft", "delete table inet marker")
                    return "" if "inet marker" in path.read_text() else "nothing"

                settle("the monitor hears", hears, 10)
                stays("no rule is written", lambda: _changes(path.read_text()), 5)
            finally:
                monitor.kill()
                monitor.wait()


def _changes(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(("add ", "delete ")) and "inet marker" not in line]


@pytest.mark.parametrize("family", ["v4", "v6", "dual"])
def test_alloc_takes_a_subnet_of_each_family_and_touches_nothing(family: FamilyChoice) -> None:
    with Lab(1, backend="alloc", family=family, start=False) as lab:
        (host,) = lab.hosts

        def kernel() -> tuple[list[str], list[list[dict[str, Any]]]]:
            return sorted(host.namespace.links()), [host.namespace.routes(f) for f in (4, 6)]

        before = kernel()
        host.daemon.start()
        host.daemon.wait_ready()
        assert kernel() == before
        v4, v6 = family != "v6", family != "v4"
        assert list(lab.etcd.leases().values()) == [
            {"PublicIP": "192.0.2.1" if v4 else "0.0.0.0", "PublicIPv6": "2001:db8:1::1" if v6 else None}
        ]
        env = host.subnet_env()
        assert ("FLANNEL_SUBNET" in env, "FLANNEL_IPV6_SUBNET" in env, env["FLANNEL_MTU"]) == (v4, v6, "1500")


def test_I06_one_mtu_fits_the_tunnels_of_both_families(dual: Lab) -> None:
    first, second = dual.hosts
    for host in dual.hosts:
        links = host.namespace.links()
        assert (links["flannel.1"]["mtu"], links["flannel-v6.1"]["mtu"]) == (1450, 1430)
        assert host.subnet_env()["FLANNEL_MTU"] == "1430"
    for family in (4, 6):
        settle("full packets", lambda: undelivered(first.pod, second.pod, family), 10)  # noqa: B023
    # A container that is told of 1430 bytes does not try 1450, which the IPv6 tunnel would lose.
    assert first.pod.namespace.ping(second.pod.address(6), payload_bytes=1450 - 48, dont_fragment=True, count=1)[0] == 0


def test_I07_both_subnets_are_kept_when_the_store_lost_everything() -> None:
    with Lab(1, family="dual", start=False) as lab:
        (host,) = lab.hosts
        host.daemon.start()
        host.daemon.wait_ready()
        before, env = lab.etcd.leases().keys(), host.subnet_env()
        host.daemon.stop()
        lab.etcd.kill()
        shutil.rmtree(lab.etcd.directory / "data")
        lab.etcd.start()
        lab.etcd.configure(lab.config)
        host.daemon.start()
        host.daemon.wait_ready()
        assert lab.etcd.leases().keys() == before
        assert host.subnet_env() == env


def test_I07_from_both_families_to_one_and_back_there_is_one_key_and_nothing_of_the_other() -> None:
    with Lab(1, family="dual", start=False) as lab:
        (host,) = lab.hosts
        steps: list[tuple[FamilyChoice, set[str]]] = [
            ("dual", {"flannel.1", "flannel-v6.1"}),
            ("v4", {"flannel.1"}),
            ("dual", {"flannel.1", "flannel-v6.1"}),
            ("v6", {"flannel-v6.1"}),
            ("dual", {"flannel.1", "flannel-v6.1"}),
        ]
        for family, tunnels in steps:
            lab.etcd.configure(network_config(family=family))
            host.daemon.start()
            host.daemon.wait_ready()
            subnets = [str(g.network).replace("/", "-") for g in host.gateways()]
            assert len(subnets) == len(tunnels)
            key = "&".join(subnets if family != "v6" else ["0.0.0.0-0", *subnets])
            settle("the key", lambda: lab.etcd.leases().keys() ^ {key}, 5)  # noqa: B023
            settle("devices", lambda: _tunnels(host) ^ tunnels, 5)  # noqa: B023
            host.daemon.stop()


def _tunnels(host: Host) -> set[str]:
    return {name for name in host.namespace.links() if name.startswith("flannel")}


def _source_seen(sender: Namespace, receiver: Namespace, target: str) -> str:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with (
        receiver.open_socket(family, socket.SOCK_DGRAM) as there,
        sender.open_socket(family, socket.SOCK_DGRAM) as here,
    ):
        there.bind((target, PORT))
        there.settimeout(0.5)
        for _ in range(20):
            here.sendto(b"who", (target, PORT))
            try:
                return str(there.recvfrom(16)[1][0])
            except TimeoutError:
                continue
    return ""


def test_I08_masquerade_can_be_switched_off_for_one_family(dual: Lab) -> None:
    host = dual.hosts[1]
    assert host.v6 is not None
    dual.switch.ip(f"-6 route replace fd05::/48 via {host.v6.ip}".removeprefix("-6 "))
    pod = host.pod
    settle("answers", lambda: "" if pod.namespace.ping(SWITCH_V6, count=1)[0] else "none", 10)
    assert _source_seen(pod.namespace, dual.switch, SWITCH_V4) == host.address
    assert _source_seen(pod.namespace, dual.switch, SWITCH_V6) == pod.address(6)
