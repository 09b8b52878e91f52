"""Hosts of a laboratory whose daemons take their subnets from an API server on the switch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4
from tests.support.kube import KubeApi
from tests.support.netns import listen_in

API_PORT = 6443


def api_on(lab: Lab, port: int = API_PORT) -> KubeApi:
    """Return an API server, not started, that hosts reach at the switch; while it is stopped, they are refused."""
    return KubeApi(listen=lambda: listen_in(lab.switch.name, SWITCH_V4, port), address=SWITCH_V4)


def config_file(directory: Path, config: object) -> Path:
    path = directory / "net-conf.json"
    path.write_text(json.dumps(config))
    return path


def run_in_kube_mode(host: Host, api: KubeApi, path: Path) -> None:
    """Let the host's daemon, when it is started, be that of a node with the host's name."""
    daemon = host.daemon
    daemon.flags = (*daemon.flags, "--kube-subnet-mgr", f"--kube-api-url={api.url}", f"--net-config-path={path}")
    daemon.env["NODE_NAME"] = host.name
    daemon.env["EVENT_QUEUE_DEPTH"] = "5000"


def cidrs(number: int, config: dict[str, Any]) -> list[str]:
    """Return the pod CIDRs of a node: 10.5.N.0/24, and fd05:0:0:N::/64 where IPv6 is on."""
    return [f"10.5.{number}.0/24", *([f"fd05:0:0:{number:x}::/64"] if config.get("EnableIPv6") else [])]


@contextmanager
def kube_lab(count: int, config: dict[str, Any], **options: Any) -> Iterator[tuple[Lab, KubeApi]]:
    """Yield hosts with a node each, daemons not started, and the API server; ``options`` as of Lab."""
    with Lab(count, family="dual", start=False, **options) as lab, api_on(lab) as api:
        path = config_file(lab.directory, config)
        for number, host in enumerate(lab.hosts, 1):
            api.node(host.name, cidrs(number, config))
            run_in_kube_mode(host, api, path)
        yield lab, api
