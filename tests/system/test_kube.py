from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll
from tests.support.echoes import all_answer
from tests.support.kube import PREFIX, KubeApi, node_annotations
from tests.support.kube_lab import API_PORT, api_on, config_file, run_in_kube_mode
from tests.support.kube_node import CONFIG, DUAL

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, family="dual", start=False) as built:
        yield built


@pytest.fixture(scope="module")
def api(lab: Lab) -> Iterator[KubeApi]:
    with api_on(lab) as api:
        for number in (1, 2):
            api.node(f"h{number}", [f"10.5.{number}.0/24", f"fd05:0:0:{number}::/64"])
        yield api


@pytest.fixture(scope="module")
def hosts(lab: Lab, api: KubeApi, tmp_path_factory: pytest.TempPathFactory) -> list[Host]:
    path = config_file(tmp_path_factory.mktemp("kube"), DUAL)
    for host in lab.hosts:
        run_in_kube_mode(host, api, path)
    lab.start()
    all_answer(lab.hosts, 4, 6)
    return lab.hosts


def test_containers_reach_each_other(lab: Lab, api: KubeApi, hosts: list[Host]) -> None:
    first, second = (host.pod for host in hosts)
    assert [host.subnet_env()["FLANNEL_SUBNET"] for host in hosts] == ["10.5.1.1/24", "10.5.2.1/24"]
    for family in (4, 6):
        assert first.ping(second, family)[0] == 3
    poll(
        "conditions",
        lambda: all((api.condition(host.name) or {}).get("status") == "False" for host in hosts),
        timeout_s=10,
    )


def test_server_that_is_gone_disturbs_nobody(lab: Lab, api: KubeApi, hosts: list[Host]) -> None:
    api.stop()
    try:
        time.sleep(1)
        assert hosts[0].pod.ping(hosts[1].pod, count=1)[0] == 1
        assert all(host.daemon.pid for host in hosts)
    finally:
        api.start()
    api.node("h9", ["10.5.9.0/24", "fd05:0:0:9::/64"], node_annotations("192.0.2.9", "02:00:00:00:00:09"))
    poll("route to a new node", lambda: "10.5.9.0" in hosts[0].run("ip", "route"), timeout_s=10)
    api.delete("h9")
    poll("route gone", lambda: "10.5.9.0" not in hosts[0].run("ip", "route"), timeout_s=10)


def test_K06_new_mac_of_a_peer_takes_the_place_of_the_old(lab: Lab, api: KubeApi, hosts: list[Host]) -> None:
    old, new = "02:00:00:00:00:09", "02:00:00:00:09:09"

    def entries(mac: str) -> tuple[bool, bool]:
        neighbours, fdb = (
            hosts[0].run(*tool, "show", "dev", "flannel.1") for tool in (("ip", "neigh"), ("bridge", "fdb"))
        )
        return mac in neighbours, f"{mac} dst 192.0.2.9" in fdb

    api.node("h9", ["10.5.9.0/24", "fd05:0:0:9::/64"], node_annotations("192.0.2.9", old))
    poll("entries", lambda: entries(old) == (True, True), timeout_s=10)
    api.change("h9", {PREFIX + "backend-data": json.dumps({"VNI": 1, "VtepMAC": new})})
    poll("new entries", lambda: (entries(new), entries(old)) == ((True, True), (False, False)), timeout_s=10)
    api.delete("h9")


def test_K10_start_without_a_server_leaves_the_data_plane_and_ends_with_it(
    lab: Lab, api: KubeApi, hosts: list[Host]
) -> None:
    host = hosts[1]
    host.daemon.stop()
    api.stop()
    try:
        host.daemon.start()
        poll("reason", lambda: "not ready: " in host.daemon.notify.status, timeout_s=10)
        assert hosts[0].pod.ping(host.pod, count=1)[0] == 1
        assert host.daemon.pid
        assert not host.daemon.notify.ready
    finally:
        api.start()
    host.daemon.wait_ready(15)
    assert hosts[0].pod.ping(host.pod, count=1)[0] == 1


def test_K05_mac_of_the_annotation_survives_the_device(lab: Lab, api: KubeApi, hosts: list[Host]) -> None:
    host = hosts[1]
    before = api.told(host.name)
    asked = len(api.requests)
    host.daemon.stop()
    host.run("ip", "link", "del", "flannel.1")
    host.run("ip", "link", "del", "flannel-v6.1")
    host.daemon.start()
    host.daemon.wait_ready()
    assert api.told(host.name) == before
    assert not [patch for patch in api.patches(host.name, asked) if "metadata" in patch]
    poll("answers", lambda: hosts[0].pod.ping(host.pod, count=1)[0], timeout_s=10)


def test_S08_annotation_chooses_the_interface_as_the_flag_does(lab: Lab, api: KubeApi, tmp_path: Path) -> None:
    host = lab.add_host(iface=None)
    host.namespace.ip("link add other type veth peer name other2", "link set other up", "link set other2 up")
    host.namespace.ip("addr add 198.51.100.7/24 dev other")
    api.node(host.name, ["10.5.3.0/24"], {PREFIX + "node-public-ip": "198.51.100.7"})
    run_in_kube_mode(host, api, config_file(tmp_path, CONFIG))
    host.daemon.start()
    host.daemon.wait_ready()
    assert api.told(host.name)["public-ip"] == "198.51.100.7"
    assert "local 198.51.100.7 dev other" in host.run("ip", "-d", "link", "show", "flannel.1")
    assert host.daemon.log().count("external interface:") == 1
    api.change(host.name, {PREFIX + "node-public-ip": None})
    poll("the default route's address", lambda: api.told(host.name)["public-ip"] == host.address, timeout_s=15)


@pytest.mark.parametrize("given", ["annotation", "flag"])
def test_S08_second_ipv6_address_by_annotation_or_flag_is_the_same(
    lab: Lab, api: KubeApi, tmp_path: Path, given: str
) -> None:
    host, number = lab.add_host(), {"annotation": 4, "flag": 5}[given]
    public = f"2001:db8::{number}:7"
    host.namespace.ip(f"addr add {public}/64 dev eth0 nodad")
    told = {PREFIX + "node-public-ipv6": public} if given == "annotation" else {}
    api.node(host.name, [f"10.5.{number}.0/24", f"fd05:0:0:{number}::/64"], told)
    run_in_kube_mode(host, api, config_file(tmp_path, DUAL))
    host.daemon.start(*([] if told else [f"--public-ipv6={public}"]))
    host.daemon.wait_ready()
    assert api.told(host.name)["public-ipv6"] == public
    assert api.told(host.name)["public-ip"] == host.address
    assert f"local {public} dev eth0" in host.run("ip", "-d", "link", "show", "flannel-v6.1")
    host.daemon.stop()


MANY = 5_001


@pytest.fixture
def crowd(lab: Lab) -> Iterator[KubeApi]:
    with api_on(lab, API_PORT + 1) as api:
        for number in range(1, MANY):
            high, low = divmod(number, 250)
            told = node_annotations(f"198.18.{high}.{low}", f"02:00:00:00:{high:02x}:{low:02x}")
            api.node(f"m{number:05}", [f"10.{high}.{low}.0/24"], told)
        yield api


def test_K02_K03_all_of_thousands_of_nodes_are_programmed(lab: Lab, crowd: KubeApi, tmp_path: Path) -> None:
    host = lab.add_host()
    crowd.node(host.name, ["10.200.0.0/24"])
    run_in_kube_mode(host, crowd, config_file(tmp_path, {"Network": "10.0.0.0/8", "Backend": {"Type": "vxlan"}}))
    host.daemon.env["EVENT_QUEUE_DEPTH"] = "10"
    host.daemon.start()
    host.daemon.wait_ready(90)
    for command in (["ip", "route", "show"], ["ip", "neigh", "show"], ["bridge", "fdb", "show"]):
        assert len(host.run(*command, "dev", "flannel.1").splitlines()) == MANY - 1
    for number in range(50):
        crowd.change(
            "m00001", {PREFIX + "backend-data": json.dumps({"VNI": 1, "VtepMAC": f"02:00:00:00:ff:{number:02x}"})}
        )
    poll("the last MAC", lambda: "02:00:00:00:ff:31" in host.run("ip", "neigh", "show", "10.0.1.0"), timeout_s=30)
    peak_kb = int(Path(f"/proc/{host.daemon.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    assert peak_kb < 300 * 1024
    host.daemon.kill()
