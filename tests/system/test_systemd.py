"""The shipped unit under a real systemd: its confinement, its notifications, its restarts."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.tools import poll
from tests.support.echoes import all_answer
from tests.support.systemd import Service, booted, needs_systemd, settings

pytestmark = [
    pytest.mark.system,
    needs_systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]


VARIANTS = {"nft": "iptables-nft", "legacy": "iptables-legacy"}


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(2, start=False) as built:
        yield built


def ready(lab: Lab, service: Service) -> None:
    """Start the service and the other host's daemon, and show that they carry packets."""
    service.start()
    other = lab.hosts[1]
    other.daemon.start()
    other.daemon.wait_ready()
    for host in lab.hosts:
        lab.add_pod(host)
    all_answer(lab.hosts)


def masquerades(service: Service) -> dict[str, int]:
    """Return the number of our rules by flavour."""
    host = service.host
    found = {name: host.run(f"{program}-save", check=False) for name, program in VARIANTS.items()}
    found["native"] = host.run("nft", "list", "ruleset", "ip")
    native = found["native"].partition("table ip flannel-ipv4")[2]
    return {"nft": found["nft"].count("flanneld masq"), "legacy": found["legacy"].count("flanneld masq")} | {
        "native": native.count("masquerade")
    }


@pytest.mark.parametrize("flavour", ["nft", "legacy", "native"])
def test_the_confinement_leaves_room_for_rules_of_each_flavour(lab: Lab, flavour: str) -> None:
    first = lab.hosts[0]
    lab.etcd.configure({**lab.config, "EnableNFTables": flavour == "native"})
    if flavour == "legacy":
        first.run("iptables-legacy", "-w", "-N", "KUBE-FORWARD")
    with booted(first) as service:
        service.configure(**settings(first, lab.etcd.url, FLANNELD_IP_MASQ="true"))
        ready(lab, service)
        assert service.shows("StatusText").startswith("subnet 10.5.")
        assert {name for name, number in masquerades(service).items() if number} == {flavour}
        assert "ERROR" not in service.log()
        service.systemctl("stop", "flanneld")
        assert (service.shows("Result"), service.shows("ExecMainStatus")) == ("success", "0")
        assert first.subnet_env()["FLANNEL_SUBNET"]
        all_answer(lab.hosts)  # what is in the kernel goes on without a daemon


def test_udp_loses_nothing_by_a_restart_and_keeps_its_device_over_a_crash() -> None:
    with Lab(2, backend="udp", start=False) as lab, booted(lab.hosts[0]) as service:
        first, second = lab.hosts
        service.configure("[Service]\nRestartSec=100ms\n", **settings(first, lab.etcd.url))
        ready(lab, service)
        device = first.namespace.link("flannel0")
        with (
            Flow(first.pod.namespace, second.pod.namespace, second.pod.address()) as there,
            Flow(second.pod.namespace, first.pod.namespace, first.pod.address()) as back,
        ):
            flows = (there, back)
            poll("datagrams", lambda: there.flowing() and back.flowing(), timeout_s=10)
            marks, pid = [flow.sent for flow in flows], service.pid
            service.systemctl("restart", "flanneld")
            assert service.pid != pid
            ends = [flow.sent + 50 for flow in flows]
            poll("more", lambda: all(flow.sent > end for flow, end in zip(flows, ends, strict=True)), timeout_s=10)
        assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]
        assert service.shows("NFileDescriptorStore") == "2"
        assert "device flannel0 taken over" in service.log()
        os.kill(service.pid, signal.SIGKILL)
        poll("another run", lambda: service.shows("NRestarts") == "1" and active(service), timeout_s=20)
        assert (first.namespace.link("flannel0") or {})["ifindex"] == (device or {})["ifindex"]
        all_answer(lab.hosts)


def active(service: Service) -> bool:
    return service.shows("ActiveState") == "active"


def test_reload_is_a_restart_in_place(lab: Lab) -> None:
    with booted(lab.hosts[0]) as service:
        service.configure(**settings(lab.hosts[0], lab.etcd.url))
        ready(lab, service)
        pid, runs = service.pid, service.log().count(" INFO loop: ready")
        service.systemctl("reload", "flanneld")
        poll("ready again", lambda: service.log().count(" INFO loop: ready") > runs, timeout_s=20)
        poll("STATUS", lambda: service.shows("StatusText").startswith("subnet "), timeout_s=10)
        assert (service.pid, service.shows("NRestarts")) == (pid, "0")
        all_answer(lab.hosts)


def test_the_watchdog_ends_a_daemon_that_hangs(lab: Lab) -> None:
    with booted(lab.hosts[0]) as service:
        service.configure("[Service]\nWatchdogSec=2\nRestartSec=100ms\n", **settings(lab.hosts[0], lab.etcd.url))
        ready(lab, service)
        subnet = lab.hosts[0].subnet_env()["FLANNEL_SUBNET"]
        time.sleep(5)  # more than two periods in which nothing may happen
        assert service.shows("NRestarts") == "0"
        os.kill(service.pid, signal.SIGSTOP)
        poll("another run", lambda: service.shows("NRestarts") == "1" and active(service), timeout_s=30)
        assert lab.hosts[0].subnet_env()["FLANNEL_SUBNET"] == subnet
        all_answer(lab.hosts)


def test_a_wrong_flag_is_not_tried_again(lab: Lab) -> None:
    with booted(lab.hosts[0]) as service:
        wrong = settings(lab.hosts[0], lab.etcd.url, FLANNEL_OPTIONS="--no-such-flag")
        service.configure("[Service]\nRestartSec=100ms\n", **wrong)
        service.systemctl("start", "flanneld", check=False)
        poll("failure", lambda: service.shows("ActiveState") == "failed", timeout_s=10)
        time.sleep(1)
        assert (service.shows("ExecMainStatus"), service.shows("NRestarts")) == ("2", "0")
        assert "no-such-flag" in service.log()


def test_waiting_for_the_store_is_told_and_can_be_ended(lab: Lab) -> None:
    with booted(lab.hosts[0]) as service:
        service.configure(**settings(lab.hosts[0], "http://192.0.2.254:1"))
        service.systemctl("start", "--no-block", "flanneld")
        poll("the reason", lambda: "192.0.2.254:1" in service.shows("StatusText"), timeout_s=15)
        assert service.shows("ActiveState") == "activating"
        service.systemctl("stop", "flanneld")
        assert service.shows("Result") == "success"


@pytest.mark.skipif(shutil.which("wireguard-go") is None, reason="needs wireguard-go")
def test_wireguard_go_outlives_a_restart_with_the_documented_drop_in() -> None:
    with Lab(2, backend="wireguard", start=False) as lab, booted(lab.hosts[0]) as service:
        first, second = lab.hosts
        service.configure("[Service]\nKillMode=process\n", **settings(first, lab.etcd.url))
        ready(lab, service)
        with Flow(second.pod.namespace, first.pod.namespace, first.pod.address()) as flow:
            poll("datagrams", flow.flowing, timeout_s=10)
            mark, pid = flow.sent, service.pid
            service.systemctl("restart", "flanneld")
            assert service.pid != pid
            end = flow.sent + 50
            poll("more", lambda: flow.sent > end, timeout_s=10)
        assert flow.lost(mark) == 0
