from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.install_cni import install_plugin
from tests.support.netns import MakeNamespace, Namespace

PLUGINS = Path("/usr/lib/cni")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not (PLUGINS / "bridge").exists(), reason="needs the plugins of containernetworking-plugins"),
]


class Host:
    def __init__(self, namespace: Namespace, directory: Path) -> None:
        self.namespace, self.directory = namespace, directory
        install_plugin(directory)
        (directory / "subnet.env").write_text(
            "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\n"
            "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\n"
            "FLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n"
        )
        self.conf = {
            "name": "cbr0",
            "cniVersion": "0.3.1",
            "type": "flannel",
            "subnetFile": str(directory / "subnet.env"),
            "dataDir": str(directory / "state"),
            "ipam": {"dataDir": str(directory / "ipam")},
            "delegate": {"hairpinMode": True, "isDefaultGateway": True},
        }

    def call(self, command: str, pod: Namespace) -> dict[str, Any]:
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": pod.name,
            "CNI_NETNS": f"/run/netns/{pod.name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": f"{self.directory}:{PLUGINS}",
        }
        arguments = [f"{name}={text}" for name, text in variables.items()]
        out = self.namespace.run("env", *arguments, str(self.directory / "flannel"), text=json.dumps(self.conf))
        return json.loads(out) if out.strip() else {}


@pytest.fixture
def host(make_namespace: MakeNamespace, tmp_path: Path) -> Host:
    return Host(make_namespace("host"), tmp_path)


def test_two_pods_ping_and_go(host: Host, make_namespace: MakeNamespace) -> None:
    pods = [make_namespace(f"pod{number}") for number in (1, 2)]
    found = [host.call("ADD", pod) for pod in pods]
    addresses = [[entry["address"].split("/")[0] for entry in result["ips"]] for result in found]
    assert all(a.startswith("10.5.1.") and b.startswith("fd05:0:0:1:") for a, b in addresses)
    for address in (*addresses[1], "10.5.1.1"):
        pods[0].run("ping", "-c", "1", "-W", "3", address)
    link = pods[0].ip_json("link show dev eth0")[0]
    assert link["mtu"] == 1430
    assert "10.5.0.0/16 via 10.5.1.1" in pods[0].ip("route")
    assert "fd05::/48 via fd05:0:0:1::1" in pods[0].ip("-6 route")
    assert "hairpin on" in host.namespace.ip("-d link show type veth")

    assert sorted(os.listdir(host.directory / "state")) == sorted(pod.name for pod in pods)
    for _ in range(2):
        for pod in pods:
            host.call("DEL", pod)
    assert os.listdir(host.directory / "state") == []
    assert host.namespace.ip_json("link show type veth") == []
    held = [name for name in os.listdir(host.directory / "ipam" / "cbr0") if name.startswith(("10.", "fd05"))]
    assert held == []
