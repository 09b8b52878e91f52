from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll
from tests.support.echoes import all_answer
from tests.support.overlay import stream
from tests.system.test_udp import PYTHON_PUMP

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

FAMILIES = {"dual": (4, 6), "v6": (6,)}


@pytest.fixture(scope="module", params=FAMILIES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two hosts, the second with the pump in Python."""
    with Lab(1, backend="udp", family=request.param, start=False) as built:
        built.add_host(command=PYTHON_PUMP)
        built.start()
        yield built


def transfer(source: Host, target: Host, family: int, size: int) -> None:
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    server = target.pod.namespace.open_socket(kind, socket.SOCK_STREAM)
    client = source.pod.namespace.open_socket(kind, socket.SOCK_STREAM)
    stream(server, client, (target.pod.address(family), 5001), size)


def test_full_packets_and_bulk_data_pass_in_every_family(lab: Lab) -> None:
    for family in FAMILIES[lab.family]:
        all_answer(lab.hosts, family)
        for source, target in lab.pairs():
            transfer(source, target, family, 5 << 20)


def test_devices_and_leases_are_the_documented_ones(lab: Lab) -> None:
    families = FAMILIES[lab.family]
    for host in lab.hosts:
        assert host.subnet_env()["FLANNEL_MTU"] == "1452"
        for family, name, mtu_bytes in ((4, "flannel0", 1472), (6, "flannel-v6.0", 1452)):
            link = host.namespace.link(name)
            assert (link is not None) is (family in families)
            assert link is None or link["mtu"] == mtu_bytes
    for value in lab.etcd.leases().values():
        assert "BackendType" not in value
        assert (value["PublicIP"] != "0.0.0.0") is (4 in families)
        assert value["PublicIPv6"] in {"2001:db8:1::1", "2001:db8:1::2"}


def test_U05_a_subnet_nobody_leases_is_answered_in_ipv6(lab: Lab) -> None:
    said = lab.hosts[0].pod.namespace.run("ping", "-6", "-c", "1", "-W", "5", "fd05:0:0:ffff::9", check=False)
    assert "Destination unreachable: No route" in said


def test_a_deleted_tun_of_one_family_comes_back(lab: Lab) -> None:
    first, second = lab.hosts
    first.namespace.ip("link del flannel-v6.0")
    poll("the device", lambda: first.namespace.link("flannel-v6.0"), timeout_s=20)
    poll("answers", lambda: first.pod.ping(second.pod, 6, count=1)[0], timeout_s=20)
