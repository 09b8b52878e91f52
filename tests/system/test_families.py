"""Rules and files per address family."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4, SWITCH_V6
from flanneld.ctl.lab.netns import Namespace
from tests.support.site import settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

PORT = 4040


@pytest.fixture(scope="module")
def dual() -> Iterator[Lab]:
    with Lab(2, family="dual", host_flags={1: ["--ip-masq"], 2: ["--ip-masq", "--ip-masq-exclude=::/0"]}) as lab:
        yield lab


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
