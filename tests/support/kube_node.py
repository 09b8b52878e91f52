"""A Kubernetes subnet manager and what it has told so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

from subnet.config import parse_network_config
from subnet.kube.manager import KubeManager, KubeSettings
from subnet.manager import LeaseRequest, ThisNode
from subnet.model import LeaseAttrs
from tests.support.kube import KubeApi
from tests.support.manager import Node

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}
DUAL = {**CONFIG, "EnableIPv6": True, "IPv6Network": "fd05::/48"}


def request(number: int = 1, config: object = CONFIG, mac: str = "") -> LeaseRequest:
    """Ask as the host 192.0.2.<number>, 2001:db8::<number> does."""
    read = parse_network_config(json.dumps(config), "test", check_pools=False)
    data = {"VNI": 1, "VtepMAC": mac or f"02:00:00:00:01:{number:02x}"}
    vxlan = read.backend.type == "vxlan"
    attrs = LeaseAttrs(
        IPv4Address(f"192.0.2.{number}") if read.ipv4 else None,
        IPv6Address(f"2001:db8::{number}") if read.ipv6 else None,
        read.backend.type if read.backend.type != "alloc" else "",
        data if vxlan and read.ipv4 else None,
        data if vxlan and read.ipv6 else None,
    )
    return LeaseRequest(attrs, read)


class KubeNode(Node):
    manager: KubeManager
    path: Path

    @property
    def this(self) -> ThisNode | None:
        told = self.all(ThisNode)
        return told[-1] if told else None

    def write_config(self, config: object) -> None:
        self.path.write_text(config if isinstance(config, str) else json.dumps(config))


@contextmanager
def kube_node(api: KubeApi | str, directory: Path, config: object = CONFIG, **settings: Any) -> Iterator[KubeNode]:
    path = directory / "net-conf.json"
    url = api if isinstance(api, str) else api.url
    given = {"api_url": url, "node_name": "n1", "net_config_path": str(path), **settings}
    node = KubeNode(KubeManager(KubeSettings(**given)))
    node.path = path
    if config is not None:
        node.write_config(config)
    node.manager.start(node.post)
    try:
        yield node
    finally:
        node.manager.close()
