"""Three nodes as the manifest runs them: what they publish, and containers made by the chain of CNI plugins."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flanneld.ctl.__main__ import main as flannelctl
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from tests.support.cni import PLUGINS, Runtime
from tests.support.kube import PREFIX, KubeApi
from tests.support.kube_lab import kube_lab
from tests.support.kube_node import CONFIG, DUAL
from tests.support.site import settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
    pytest.mark.skipif(not (PLUGINS / "portmap").exists(), reason="needs the plugins of containernetworking-plugins"),
]

HOSTS = 3
MANIFEST = Path(__file__).parents[2] / "deploy" / "kube-flannel.yml"
CONFIGS: dict[str, dict[str, Any]] = {
    "vxlan": CONFIG,
    "host-gw": {**CONFIG, "Backend": {"Type": "host-gw"}},
    "dual-stack": DUAL,
    "dual-stack host-gw": {**DUAL, "Backend": {"Type": "host-gw"}},
}


@dataclass
class Cluster:
    kind: str
    lab: Lab
    api: KubeApi
    plugins: Path
    conf: Path

    @property
    def families(self) -> tuple[int, ...]:
        return (4, 6) if self.kind.startswith("dual") else (4,)

    def runtime(self, host: Host) -> Runtime:
        return Runtime(host, self.conf, self.plugins)


@pytest.fixture(scope="module", params=CONFIGS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cni")
    objects = list(yaml.safe_load_all(MANIFEST.read_text()))
    given = directory / "cni-conf.json"
    given.write_text(next(made for made in objects if made["kind"] == "ConfigMap")["data"]["cni-conf.json"])
    installed = directory / "10-flannel.conflist"
    for args in ([str(given), str(installed)], ["--plugin", str(directory)]):
        with pytest.raises(SystemExit) as done:
            flannelctl(["install-cni", *args], prog_name="flannelctl")
        assert not done.value.code
    with kube_lab(HOSTS, CONFIGS[request.param], flags=["--ip-masq"]) as (lab, api):
        for host in lab.hosts:
            host.daemon.start()
        for host in lab.hosts:
            host.daemon.wait_ready()
        yield Cluster(request.param, lab, api, directory, installed)


def test_annotations_and_patches_are_upstreams_bytes(cluster: Cluster) -> None:
    for number, host in enumerate(cluster.lab.hosts, 1):
        data = {4: "null", 6: "null"}
        if "host-gw" not in cluster.kind:
            for family, device in ((4, "flannel.1"), (6, "flannel-v6.1")):
                link = host.namespace.link(device) or {}
                data[family] = f'{{"VNI":1,"VtepMAC":"{link.get("address")}"}}'
        wanted = {
            "kube-subnet-manager": "true",
            "backend-type": "host-gw" if "host-gw" in cluster.kind else "vxlan",
            "backend-data": data[4],
            "public-ip": f"192.0.2.{number}",
        }
        if 6 in cluster.families:
            wanted |= {"backend-v6-data": data[6], "public-ipv6": f"2001:db8:1::{number}"}
        assert cluster.api.told(host.name) == wanted
        patched = [patch["metadata"] for patch in cluster.api.patches(host.name) if "metadata" in patch]
        assert patched == [{"annotations": {PREFIX + name: text for name, text in wanted.items()}}]
        settle("condition", lambda h=host: not cluster.api.condition(h.name), 10)  # type: ignore[misc]
        (condition,) = [patch["status"] for patch in cluster.api.patches(host.name) if "status" in patch]
        (told,) = condition["conditions"]
        at = told.pop("lastHeartbeatTime")
        assert told == {
            "type": "NetworkUnavailable",
            "status": "False",
            "lastTransitionTime": at,
            "reason": "FlannelIsUp",
            "message": "Flannel is running on this node",
        }


def test_containers_of_the_cni_chain_reach_each_other(cluster: Cluster) -> None:
    hosts = cluster.lab.hosts
    namespaces = {host.name: cluster.lab.namespace(f"{host.name}c") for host in hosts}
    pods = {host.name: cluster.runtime(host).add(namespaces[host.name]) for host in hosts}
    for family in cluster.families:
        for source, target in itertools.permutations(pods.values(), 2):
            settle("answers", lambda s=source, t=target, f=family: not s.ping(t, f, count=1)[0], 10)  # type: ignore[misc]
            assert source.ping(target, family)[0] == 3
    for number, host in enumerate(hosts, 1):
        pod = pods[host.name]
        assert pod.address(4).startswith(f"10.5.{number}.")
        assert pod.mtu_bytes == int(host.subnet_env()["FLANNEL_MTU"])
    for host in hosts:
        cluster.runtime(host).delete(namespaces[host.name])
        assert host.namespace.show("link show type veth") == [host.namespace.link("eth0")]


def test_ports_of_a_host_lead_to_its_container(cluster: Cluster) -> None:
    here, there = cluster.lab.hosts[:2]
    namespace = cluster.lab.namespace(f"{here.name}s")
    mapped = {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
    pod = cluster.runtime(here).add(namespace, **mapped)
    with namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind((pod.address(4), 80))
        server.listen()
        with closing(there.namespace.connect(here.address, 8080)) as client:
            accepted, seen = server.accept()
            with accepted:
                accepted.sendall(b"hello")
                assert client.recv(16) == b"hello"
            assert seen[0] == there.address
    cluster.runtime(here).delete(namespace, **mapped)
    with pytest.raises(OSError, match="refused"):
        there.namespace.connect(here.address, 8080)
