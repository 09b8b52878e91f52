from __future__ import annotations

import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from flanneld.traffic.detect import open_host
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.runner import Runner
from subnet.clock import SystemClock
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.traffic import POLICY, SEED, Keeper, Tables

pytestmark = pytest.mark.kernel

POD, NODE, OUTSIDE = "10.5.7.2", "192.0.2.1", "192.0.2.9"
REPAIRS = 200


class Topology:
    """A pod, its node, and something outside."""

    def __init__(self, make_namespace: MakeNamespace) -> None:
        self.pod, self.node, self.outside = (make_namespace(label) for label in ("pod", "node", "out"))
        veth(self.pod, self.node, "eth0", "pod0")
        veth(self.node, self.outside, "eth0", "eth0")
        self.pod.ip(f"address add {POD}/24 dev eth0")
        self.node.ip("address add 10.5.7.1/24 dev pod0")
        self.node.ip(f"address add {NODE}/24 dev eth0")
        self.outside.ip(f"address add {OUTSIDE}/24 dev eth0")
        self.pod.ip("route add default via 10.5.7.1")
        self.outside.ip(f"route add 10.5.0.0/16 via {NODE}")
        self.node.sysctl("net.ipv4.ip_forward", 1)

    def flow(self, port: int) -> Flow:
        return Flow(self.pod, self.outside, port)


class Flow:
    """Datagrams from the pod, each a connection of its own; counts the source addresses seen outside."""

    def __init__(self, pod: Namespace, outside: Namespace, port: int) -> None:
        self.pod, self.port = pod, port
        self.receiver = outside.socket()
        self.receiver.bind((OUTSIDE, port))
        self.receiver.settimeout(0.2)
        self.seen: Counter[str] = Counter()
        self.done = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._send), threading.Thread(target=self._receive)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.done.set()
            for thread in threads:
                thread.join()
            self.receiver.close()

    def _send(self) -> None:
        self.pod.enter()
        while not self.done.wait(0.001):
            with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
                sender.sendto(b"x", (OUTSIDE, self.port))

    def _receive(self) -> None:
        while not self.done.is_set():
            try:
                _, (address, _) = self.receiver.recvfrom(16)
            except TimeoutError:
                continue
            self.seen[address] += 1


def source_seen(path: Topology) -> str:
    flow = path.flow(4040)
    with flow.running():
        while not flow.seen:
            flow.done.wait(0.01)
    (address,) = flow.seen
    return address


def iptables_damage(program: str) -> tuple[str, ...]:
    chain = f"{program} -t nat"
    return (
        f"{chain} -D FLANNEL-POSTRTG 2",
        f"{chain} -I FLANNEL-POSTRTG -s 10.8.0.1 -j RETURN",
        f"{chain} -A POSTROUTING -j FLANNEL-POSTRTG",
        f"{chain} -I POSTROUTING -p tcp -j FLANNEL-POSTRTG",
    )


DAMAGE = {
    "legacy": iptables_damage("iptables-legacy"),
    "nft": iptables_damage("iptables-nft"),
    "native": (
        "nft add rule ip flannel-ipv4 postrtg return",
        "nft insert rule ip flannel-ipv4 postrtg ip saddr 10.8.0.1 return",
        "nft delete chain ip flannel-ipv4 hostrtg",
        # Only a new table is without it.
        "nft add set ip flannel-ipv4 stray { type ipv4_addr; }",
    ),
}


@pytest.mark.parametrize("way", DAMAGE)
def test_no_instant_without_masquerade_during_repairs(make_namespace: MakeNamespace, way: str) -> None:
    path = Topology(make_namespace)
    if way != "native":
        Tables(path.node, "nft" if way == "nft" else "legacy").iptables(SEED)
    policy: TrafficPolicy = replace(POLICY, v6=None, nftables=way == "native")
    assert source_seen(path) == POD
    with Keeper(path.node, 300.0) as keeper:
        keeper.want(policy)
    # Another port: the kernel remembers for a while that connections to the first one are not masqueraded.
    flow = path.flow(4041)

    def repair() -> int:
        path.node.enter()
        enforcer = open_host(policy.nftables, Runner(), SystemClock()).enforcer
        repaired = 0
        for n in range(REPAIRS):
            subprocess.run(DAMAGE[way][n % len(DAMAGE[way])].split(), check=True)
            repaired += enforcer.converge(policy, 4)
        return repaired

    with ThreadPoolExecutor(1) as thread, flow.running():
        assert thread.submit(repair).result() == REPAIRS
    assert set(flow.seen) == {NODE}
    assert flow.seen[NODE] > REPAIRS
