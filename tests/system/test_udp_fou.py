from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.kernel.ethtool import set_tx_checksum
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll
from tests.support.echoes import all_answer
from tests.support.overlay import stream

pytestmark = [
    pytest.mark.system,
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

WAIT_S = 120.0
"""The guest is an emulated machine."""
READY_S = 300.0
DEVICE = "flannel.fou"
ROOT = Path(__file__).parents[2]
USER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import backends.udp
backends.udp.data_path = lambda _: "user"
from flanneld.__main__ import run
sys.exit(run())
"""
"""A daemon that carries packets itself, as one of another kind or version would under the same config."""
USER_COMMAND = (sys.executable, "-c", USER, str(ROOT))


def config(path: str = "fou") -> dict[str, Any]:
    return {"Network": "10.5.0.0/16", "Backend": {"Type": "udp", "DataPath": path}}


def finish_packets(host: Host, whole: bool = True) -> None:
    host.namespace.call(lambda: set_tx_checksum("eth0", not whole))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts whose kernels carry, and a third whose daemon does."""
    with Lab(2, config=config(), start=False, ready_timeout_s=READY_S) as built:
        built.add_host(command=USER_COMMAND)
        for host in built.hosts:
            finish_packets(host)
        built.start()
        yield built


def transfer(source: Host, target: Host, size: int) -> None:
    family, kind = socket.AF_INET, socket.SOCK_STREAM
    server, client = target.pod.namespace.open_socket(family, kind), source.pod.namespace.open_socket(family, kind)
    stream(server, client, (target.pod.address(), 5001), size)


def test_device_route_and_lease_are_the_documented_ones(lab: Lab) -> None:
    all_answer(lab.hosts)
    for host, other in zip(lab.hosts[:2], reversed(lab.hosts[:2]), strict=True):
        assert host.subnet_env()["FLANNEL_MTU"] == "1472"
        link = host.namespace.link(DEVICE)
        assert link is not None
        data = link["linkinfo"]["info_data"]
        assert (link["linkinfo"]["info_kind"], data["local"], data["remote"]) == ("ipip", host.address, "any")
        assert (data["encap"]["type"], data["encap"]["sport"], data["encap"]["dport"]) == ("fou", 8285, 8285)
        assert (link["mtu"], data["pmtudisc"]) == (1472, False)
        base = host.subnet_env()["FLANNEL_SUBNET"].replace(".1/24", ".0/32")
        assert [line for line in host.namespace.addresses(DEVICE) if ":" not in line] == [base]
        (route,) = [r for r in host.namespace.routes() if r["dst"] == str(other.gateways()[0].network)]
        assert (route["dev"], route["gateway"], route["flags"]) == (DEVICE, other.address, ["onlink"])
    assert {value.get("BackendType") for value in lab.etcd.leases().values()} == {None}
    assert lab.hosts[2].namespace.link("flannel0") is not None


def test_bulk_data_arrives_intact_between_kernel_and_pump(lab: Lab) -> None:
    all_answer(lab.hosts)
    for source, target in lab.pairs():
        transfer(source, target, 1 << 20)


def test_damage_is_repaired_and_a_restart_interrupts_nothing(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second = lab.hosts[:2]
    first.namespace.ip(f"link del {DEVICE}")
    all_answer(lab.hosts)
    first.run("ip", "fou", "del", "port", "8285", "local", first.address)
    first.namespace.ip(f"link set {DEVICE} down")  # a notification; a port has none, and is looked at each resync
    all_answer(lab.hosts)
    with Flow(first.pod.namespace, second.pod.namespace, second.pod.address(), rate_per_s=20) as flow:
        poll("datagrams", flow.flowing, WAIT_S)
        mark = flow.sent
        first.daemon.restart(timeout_s=READY_S)
        second.daemon.kill()
        poll("more", lambda: flow.sent > mark + 20, WAIT_S)
        second.daemon.start()
        second.daemon.wait_ready(READY_S)
    assert flow.lost(mark) == 0


def test_a_link_that_finishes_nothing_is_refused_until_it_does() -> None:
    with Lab(1, config=config(), start=False) as lab:
        (host,) = lab.hosts
        host.daemon.start()
        reason = "DataPath fou on eth0: eth0 (veth) hands packets on with unfinished checksums"
        poll("the reason", lambda: reason in host.daemon.notify.status, READY_S)
        assert lab.etcd.leases() == {}
        finish_packets(host)
        host.daemon.wait_ready(READY_S)
        assert host.daemon.stop() == 0
        assert host.namespace.link(DEVICE) is not None
        lab.etcd.configure(config("user"))
        host.daemon.start()
        host.daemon.wait_ready(READY_S)
        poll("the end of the kernel's device", lambda: host.namespace.link(DEVICE) is None, WAIT_S)
        assert host.run("ip", "-j", "fou", "show").strip() in ("", "[]")
