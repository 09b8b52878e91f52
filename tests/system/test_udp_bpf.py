"""Whole daemons whose packets programs carry."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.support.systemd import booted, needs_systemd, settings
from tests.system.test_udp import PYTHON_PUMP
from tests.system.test_udp_fou import USER_COMMAND

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
DEVICE = "flannel0"


def config(path: str = "bpf", kind: str = "udp") -> dict[str, Any]:
    options = {"DataPath": path} if kind == "udp" else {}
    return {"Network": "10.5.0.0/16", "Backend": {"Type": kind, **options}}


def finish_packets(host: Host, whole: bool = True) -> None:
    host.namespace.call(lambda: set_tx_checksum("eth0", not whole))


def programs(host: Host) -> dict[str, list[int]]:
    """Return the numbers of the programs by place, as tc(8) shows them."""
    found = {}
    for place in (f"dev {DEVICE} egress", "dev eth0 ingress"):
        done = host.namespace.run("tc", "-j", "filter", "show", *place.split(), check=False)
        found[place] = [f["options"]["prog"]["id"] for f in json.loads(done or "[]") if "prog" in f.get("options", {})]
    return found


def whole(host: Host) -> bool:
    return [len(found) for found in programs(host).values()] == [1, 1]


@contextmanager
def both_ways(first: Host, second: Host) -> Iterator[tuple[Flow, Flow]]:
    with (
        Flow(first.pod.namespace, second.pod.namespace, second.pod.address()) as there,
        Flow(second.pod.namespace, first.pod.namespace, first.pod.address()) as back,
    ):
        poll("datagrams", lambda: there.flowing() and back.flowing(), WAIT_S)
        yield there, back
        marks = there.sent, back.sent
        poll("more", lambda: there.sent > marks[0] + 50 and back.sent > marks[1] + 50, WAIT_S)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts with programs and a third whose daemon carries by itself.

    The first one's descriptors are kept; the second has no native pump.
    """
    with Lab(1, config=config(), start=False) as built:
        built.hosts[0].daemon.keeps_descriptors = True
        built.add_host(command=PYTHON_PUMP)
        built.add_host(command=USER_COMMAND)
        for host in built.hosts:
            finish_packets(host)
        built.start()
        yield built


def test_device_route_and_lease_are_those_of_every_data_path(lab: Lab) -> None:
    all_answer(lab.hosts)
    for host in lab.hosts[:2]:
        assert host.subnet_env()["FLANNEL_MTU"] == "1472"
        link = host.namespace.link(DEVICE)
        assert link is not None
        assert link["mtu"] == 1472
        base = host.subnet_env()["FLANNEL_SUBNET"].replace(".1/24", ".0/32")
        assert [line for line in host.namespace.addresses(DEVICE) if ":" not in line] == [base]
        assert [route["dst"] for route in host.namespace.routes() if route["dev"] == DEVICE] == ["10.5.0.0/16"]
        assert whole(host)
    assert {value.get("BackendType") for value in lab.etcd.leases().values()} == {None}
    assert programs(lab.hosts[2]) == {f"dev {DEVICE} egress": [], "dev eth0 ingress": []}


def test_bulk_data_arrives_intact_between_programs_and_pumps(lab: Lab) -> None:
    all_answer(lab.hosts)
    for source, target in lab.pairs():
        family, kind = socket.AF_INET, socket.SOCK_STREAM
        server, client = target.pod.namespace.open_socket(family, kind), source.pod.namespace.open_socket(family, kind)
        stream(server, client, (target.pod.address(), 5001), 8 << 20)


@pytest.mark.parametrize(
    "damage",
    [
        ("tc", "filter", "del", "dev", DEVICE, "egress"),
        ("tc", "filter", "del", "dev", "eth0", "ingress"),
        ("tc", "qdisc", "del", "dev", DEVICE, "clsact"),
        ("tc", "qdisc", "del", "dev", "eth0", "clsact"),
        ("ip", "link", "del", DEVICE),
    ],
    ids=["way out", "way in", "all of the way out", "all of the way in", "device"],
)
def test_damage_is_repaired_at_once(lab: Lab, damage: tuple[str, ...]) -> None:
    all_answer(lab.hosts)
    first, second = lab.hosts[:2]
    before = programs(first)
    first.run(*damage)
    poll("programs", lambda: whole(first), 5)
    assert programs(first) != before or damage[1] != "link"
    poll("an answer", lambda: first.pod.ping(second.pod, count=1)[0], 5)


def test_a_restart_and_a_crash_lose_nothing(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second = lab.hosts[:2]
    before = programs(first), programs(second)
    with both_ways(first, second) as flows:
        marks = [flow.sent for flow in flows]
        first.daemon.restart()
        second.daemon.kill()
        poll("more", lambda: min(flow.sent - mark for flow, mark in zip(flows, marks, strict=True)) > 300, WAIT_S)
        assert programs(second) == before[1]
        second.daemon.start()
        second.daemon.wait_ready()
    assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]
    assert all(whole(host) for host in (first, second))
    assert all(programs(host) != was for host, was in zip((first, second), before, strict=True))


def test_it_carries_while_the_daemon_is_stopped_and_the_store_away(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second = lab.hosts[:2]
    with both_ways(first, second) as flows:
        marks = [flow.sent for flow in flows]
        assert first.daemon.stop() == 0
        poll("more", lambda: min(flow.sent - mark for flow, mark in zip(flows, marks, strict=True)) > 300, WAIT_S)
        first.daemon.start()
        first.daemon.wait_ready()
    assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]


def test_a_peer_that_moves_is_followed(lab: Lab) -> None:
    all_answer(lab.hosts)
    first, second = lab.hosts[:2]
    (old,) = [a for a in second.namespace.addresses("eth0") if a.startswith(f"{second.address}/")]
    moved = old.replace(second.address, "192.0.2.77")
    second.namespace.ip(f"addr del {old} dev eth0", f"addr add {moved} dev eth0")
    try:
        poll("the lease", lambda: any(v.get("PublicIP") == "192.0.2.77" for v in lab.etcd.leases().values()), WAIT_S)
        poll("an answer", lambda: first.pod.ping(second.pod, count=1)[0], WAIT_S)
    finally:
        second.namespace.ip(f"addr del {moved} dev eth0", f"addr add {old} dev eth0")
    poll("an answer", lambda: first.pod.ping(second.pod, count=1)[0], WAIT_S)


@pytest.mark.parametrize("keeps", [False, True], ids=["nothing kept", "descriptors kept"])
def test_a_link_that_finishes_nothing_is_refused_and_what_was_left_goes_with_the_next_configuration(
    keeps: bool,
) -> None:
    with Lab(1, config=config(), start=False) as lab:
        (host,) = lab.hosts
        host.daemon.keeps_descriptors = keeps
        host.daemon.start()
        reason = "DataPath bpf on eth0: eth0 (veth) hands packets on with unfinished checksums"
        poll("the reason", lambda: reason in host.daemon.notify.status, WAIT_S)
        assert lab.etcd.leases() == {}
        assert host.namespace.link(DEVICE) is None
        finish_packets(host)
        host.daemon.wait_ready()
        for other in (config("user"), config(kind="vxlan")):
            poll("programs", lambda: whole(host), WAIT_S)
            assert host.daemon.stop() == 0
            assert whole(host)
            index = (host.namespace.link(DEVICE) or {})["ifindex"]
            lab.etcd.configure(other)
            host.daemon.start()
            host.daemon.wait_ready()
            poll("their end", lambda: programs(host) == {f"dev {DEVICE} egress": [], "dev eth0 ingress": []}, WAIT_S)
            assert "clsact" not in host.namespace.run("tc", "qdisc", "show")
            if other["Backend"]["Type"] == "udp":
                assert (host.namespace.link(DEVICE) or {})["ifindex"] == index
                assert host.daemon.stop() == 0
                assert (host.namespace.link(DEVICE) is not None) is keeps
            else:
                poll("the device's end", lambda: host.namespace.link(DEVICE) is None, WAIT_S)
                assert host.daemon.stop() == 0
            lab.etcd.configure(config())
            host.daemon.start()
            host.daemon.wait_ready()


def test_another_external_interface_leaves_nothing_at_the_first() -> None:
    with Lab(1, config=config(), start=False) as lab:
        (host,) = lab.hosts
        finish_packets(host)
        lab.start()
        poll("programs", lambda: whole(host), WAIT_S)
        assert host.daemon.stop() == 0
        host.namespace.ip("link add eth9 type veth peer name eth8", "link set eth9 up", "link set eth8 up")
        host.namespace.ip("addr add 198.51.100.1/24 dev eth9")
        host.namespace.call(lambda: set_tx_checksum("eth9", False))
        host.daemon.flags = tuple(flag for flag in host.daemon.flags if not flag.startswith("--iface"))
        host.daemon.start("--iface=eth9")
        host.daemon.wait_ready()
        poll("their end", lambda: not programs(host)["dev eth0 ingress"], WAIT_S)
        assert programs(host)[f"dev {DEVICE} egress"]
        assert "decap" in host.namespace.run("tc", "filter", "show", "dev", "eth9", "ingress")


@needs_systemd
def test_the_documented_drop_in_is_what_the_unit_lacks() -> None:
    with Lab(2, config=config(), start=False) as lab, booted(lab.hosts[0]) as service:
        first, second = lab.hosts
        for host in lab.hosts:
            finish_packets(host)
        service.configure(**settings(first, lab.etcd.url))
        service.systemctl("start", "--no-block", "flanneld")
        poll(
            "the reason",
            lambda: "not permitted; the process needs the capabilities" in service.shows("StatusText"),
            WAIT_S,
        )
        assert first.namespace.link(DEVICE) is None
        service.systemctl("stop", "flanneld")
        lines = (ROOT / "docs" / "backend-udp.md").read_text().split("    [Service]\n", 1)[1].splitlines()
        documented = [line.strip() for line in lines if line.startswith("    ")][:2]
        assert documented == ["CapabilityBoundingSet=CAP_BPF CAP_PERFMON", "SystemCallFilter=bpf"]
        service.configure("\n".join(["[Service]", *documented, ""]), **settings(first, lab.etcd.url))
        service.start()
        second.daemon.start()
        second.daemon.wait_ready()
        for host in lab.hosts:
            lab.add_pod(host)
        all_answer(lab.hosts)
        before = programs(first)
        with both_ways(first, second) as flows:
            marks = [flow.sent for flow in flows]
            service.systemctl("restart", "flanneld")
            service.systemctl("stop", "flanneld")
            assert whole(first)
            assert programs(first) != before
        assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]
