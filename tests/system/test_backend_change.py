"""From any backend to any other over a restart: nothing of the old one remains, packets go the new way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from tests.support.site import settle

pytestmark = pytest.mark.system

BACKENDS: dict[str, dict[str, Any]] = {
    "vxlan": {"Type": "vxlan"},
    "vxlan-2": {"Type": "vxlan", "VNI": 2},
    "direct": {"Type": "vxlan", "DirectRouting": True},
    "host-gw": {"Type": "host-gw"},
    "udp": {"Type": "udp"},
    "alloc": {"Type": "alloc"},
}
DEVICES = {"vxlan": {"flannel.1"}, "vxlan-2": {"flannel.2"}, "direct": {"flannel.1"}, "udp": {"flannel0"}}


class Change:
    """Two hosts with a container each; ``now`` is the backend they run."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.now = lab, ""

    def run(self, name: str) -> None:
        """Have the hosts run a backend, by a restart if it is another one."""
        if name == self.now:
            return
        self.lab.etcd.configure({"Network": "10.5.0.0/16", "Backend": BACKENDS[name]})
        for host in self.lab.hosts:
            if host.daemon.pid is not None:
                host.daemon.stop()
        for host in self.lab.hosts:
            host.daemon.start()
        for host in self.lab.hosts:
            host.daemon.wait_ready()
            if not host.pods:
                self.lab.add_pod(host)
        self.now = name
        settle(f"state of {name}", self.difference, 15)

    def difference(self) -> list[str]:
        """Return what the hosts hold that they should not, or lack, or cannot reach."""
        first, second = self.lab.hosts
        wrong = [text for host, peer in ((first, second), (second, first)) for text in self._kernel(host, peer)]
        if self.now != "alloc" and not wrong:
            for source, target in ((first, second), (second, first)):
                if source.pod.namespace.ping(target.pod.address(), count=1)[0] != 1:
                    wrong.append(f"{source} gets no answer of {target}")
        return wrong

    def _kernel(self, host: Host, peer: Host) -> list[str]:
        wanted = DEVICES.get(self.now, set())
        devices = {name for name in host.namespace.links() if name.startswith("flannel")}
        wrong = [] if devices == wanted else [f"{host} has {sorted(devices)}"]
        subnet = str(peer.gateways()[0].network)
        routes = [
            f"{r['dst']} via {r.get('gateway', '-')} dev {r['dev']}"
            for r in host.namespace.routes(4)
            if str(r.get("dst", "")).startswith("10.5.") and r["dev"] != "cni0"
        ]
        base = subnet.partition("/")[0]
        tunnel = next(iter(wanted), "")
        expected = {
            "vxlan": [f"{subnet} via {base} dev {tunnel}"],
            "vxlan-2": [f"{subnet} via {base} dev {tunnel}"],
            "direct": [f"{subnet} via {peer.address} dev eth0"],
            "host-gw": [f"{subnet} via {peer.address} dev eth0"],
            "udp": ["10.5.0.0/16 via - dev flannel0"],
            "alloc": [],
        }[self.now]
        return wrong if routes == expected else [*wrong, f"{host} has {routes}, not {expected}"]


@pytest.fixture(scope="module")
def change() -> Iterator[Change]:
    with Lab(2, start=False) as lab:
        yield Change(lab)


@pytest.mark.parametrize(
    ("old", "new"),
    list(itertools.permutations(BACKENDS, 2)),
    ids=[f"{a}-to-{b}" for a, b in itertools.permutations(BACKENDS, 2)],
)
def test_C11_nothing_of_the_former_backend_remains(change: Change, old: str, new: str) -> None:
    change.run(old)
    change.run(new)
