from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.udp.carrier import native_available
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll
from tests.support.drawn import drawn
from tests.support.echoes import all_answer
from tests.support.overlay import stream

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

ROOT = Path(__file__).parents[2]
WITHOUT_NATIVE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
sys.modules["backends.udp._pump"] = None
from flanneld.__main__ import run
sys.exit(run())
"""
PYTHON_PUMP = (sys.executable, "-c", WITHOUT_NATIVE, str(ROOT))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts as they come, and a third with the pump in Python. The config names no backend."""
    with Lab(2, config=drawn({"Network": "10.5.0.0/16"}), start=False) as built:
        built.add_host(command=PYTHON_PUMP)
        built.start()
        yield built


def transfer(source: Host, target: Host, size: int) -> None:
    family, kind = socket.AF_INET, socket.SOCK_STREAM
    server, client = target.pod.namespace.open_socket(family, kind), source.pod.namespace.open_socket(family, kind)
    stream(server, client, (target.pod.address(), 5001), size)


def test_C08_a_config_without_backend_gives_tuns_and_full_packets(lab: Lab) -> None:
    all_answer(lab.hosts)
    for host in lab.hosts:
        base = host.subnet_env()["FLANNEL_SUBNET"].replace(".1/24", ".0/32")
        assert host.subnet_env()["FLANNEL_MTU"] == "1472"
        link = host.namespace.link("flannel0")
        assert link is not None
        assert (link["linkinfo"]["info_kind"], link["mtu"]) == ("tun", 1472)
        inet = [line for line in host.namespace.addresses("flannel0") if ":" not in line]
        assert inet == [base]
        (route,) = [r for r in host.namespace.routes() if r.get("dev") == "flannel0"]
        assert (route["dst"], route.get("scope", "global"), route["protocol"]) == ("10.5.0.0/16", "global", "boot")
    assert {value.get("BackendType") for value in lab.etcd.leases().values()} == {None}
    kinds = [("native pump" if native_available() else "pump in Python") in host.daemon.log() for host in lab.hosts]
    assert kinds[:2] == [True, True]
    assert "pump in Python (the native one was not built)" in lab.hosts[2].daemon.log()
    for source, target in lab.pairs():
        assert source.pod.ping(target.pod)[0] == 3


def test_bulk_data_arrives_intact_both_ways(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second, plain = lab.hosts
    size = (50 if native_available() else 5) << 20
    with ThreadPoolExecutor() as pool:
        for one in [pool.submit(transfer, first, second, size), pool.submit(transfer, second, first, size)]:
            one.result()
    transfer(first, plain, 5 << 20)
    transfer(plain, first, 5 << 20)


def test_a_deleted_tun_comes_back_with_its_traffic(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second = lab.hosts[:2]
    with Flow(first.pod.namespace, second.pod.namespace, second.pod.address()) as flow:
        poll("datagrams", flow.flowing, timeout_s=10)
        first.namespace.ip("link del flannel0")
        poll("the device", lambda: first.namespace.link("flannel0"), timeout_s=10)
        mark = flow.sent
        poll("more", lambda: flow.sent > mark + 50, timeout_s=10)
        poll("datagrams again", flow.flowing, timeout_s=10)
    first.namespace.ip("route del 10.5.0.0/16 dev flannel0")
    all_answer(lab.hosts)


def test_U05_a_subnet_nobody_leases_is_answered(lab: Lab) -> None:
    all_answer(lab.hosts)
    first = lab.hosts[0]
    said = first.pod.namespace.run("ping", "-c", "1", "-W", "5", "10.5.255.9", check=False)
    assert "Destination Net Unreachable" in said
    lab.etcd.forge("10.5.255.0-24", {"PublicIP": "192.0.2.200", "PublicIPv6": None})
    try:
        silent = ("ping", "-c", "1", "-W", "1", "10.5.255.9")
        poll("a lease", lambda: "Unreachable" not in first.pod.namespace.run(*silent, check=False), timeout_s=10)
    finally:
        lab.etcd.delete("/coreos.com/network/subnets/10.5.255.0-24")
    poll(
        "no lease",
        lambda: "Net Unreachable" in first.pod.namespace.run("ping", "-c", "1", "-W", "1", "10.5.255.9", check=False),
        timeout_s=10,
    )


def test_a_renumbered_host_is_followed(lab: Lab) -> None:
    all_answer(lab.hosts)
    second = lab.hosts[1]
    subnet = second.subnet_env()["FLANNEL_SUBNET"]
    second.namespace.ip("addr del 192.0.2.2/24 dev eth0", "addr add 192.0.2.102/24 dev eth0")
    second.namespace.ip("route replace default via 192.0.2.254")
    poll("the new address", lambda: "udp 192.0.2.102:8285" in second.daemon.log(), timeout_s=20)
    all_answer(lab.hosts)
    assert second.subnet_env()["FLANNEL_SUBNET"] == subnet


def test_the_end_of_the_process_is_the_end_of_the_tun(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second, plain = lab.hosts
    subnets = [host.subnet_env()["FLANNEL_SUBNET"] for host in lab.hosts]
    with Flow(second.pod.namespace, first.pod.namespace, first.pod.address()):
        for host in (first, plain):
            began = time.monotonic()
            assert host.daemon.stop() == 0
            assert time.monotonic() - began < 4
            assert host.namespace.link("flannel0") is None
        second.daemon.kill()
        poll("the end of the device", lambda: second.namespace.link("flannel0") is None, timeout_s=5)
    lab.start()
    assert [host.subnet_env()["FLANNEL_SUBNET"] for host in lab.hosts] == subnets
    all_answer(lab.hosts)


def test_U02_a_missing_device_node_is_waited_for_with_the_remedy_in_the_log() -> None:
    missing = "from backends.kernel import tun; from pathlib import Path; tun.NODE = Path('/nonexistent/tun')"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {missing}{WITHOUT_NATIVE}"
    with Lab(1, backend="udp", command=(sys.executable, "-c", code, str(ROOT)), start=False) as lab:
        (host,) = lab.hosts
        host.daemon.start()
        poll("the reason", lambda: "mknod /dev/net/tun c 10 200" in host.daemon.log(), timeout_s=20)
        assert host.daemon.pid is not None
        assert lab.etcd.leases() == {}
