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
from tests.support.kube import PREFIX, KubeApi, node_annotations
from tests.support.kube_node import CONFIG, DUAL
from tests.support.netns import listen_in

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

API_PORT = 6443


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, family="dual", start=False) as built:
        yield built


@pytest.fixture(scope="module")
def api(lab: Lab) -> Iterator[KubeApi]:
    with listen_in(lab.switch.name, "192.0.2.254", API_PORT) as listener, KubeApi(listener=listener) as api:
        for number in (1, 2):
            api.node(f"h{number}", [f"10.5.{number}.0/24", f"fd05:0:0:{number}::/64"])
        yield api


@pytest.fixture(scope="module")
def hosts(lab: Lab, api: KubeApi, tmp_path_factory: pytest.TempPathFactory) -> list[Host]:
    path = config_file(tmp_path_factory.mktemp("kube"), DUAL)
    for host in lab.hosts:
        run_in_kube_mode(host, api, path)
    lab.start()
    return lab.hosts


def config_file(directory: Path, config: object) -> Path:
    path = directory / "net-conf.json"
    path.write_text(json.dumps(config))
    return path


def run_in_kube_mode(host: Host, api: KubeApi, path: Path) -> None:
    daemon = host.daemon
    daemon.flags = (*daemon.flags, "--kube-subnet-mgr", f"--kube-api-url={api.url}", f"--net-config-path={path}")
    daemon.env["NODE_NAME"] = host.name
    daemon.env["EVENT_QUEUE_DEPTH"] = "5000"


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
