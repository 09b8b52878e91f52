"""Which source address is seen, in every way rules are written."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from ipaddress import ip_network
from pathlib import Path

import pytest

from flanneld.traffic.ports import Variant
from flanneld.traffic.rules import Pair, TrafficPolicy
from subnet.model import Family
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.traffic import Keeper, Tables

pytestmark = pytest.mark.kernel

MARKED, MARKED_AND_MORE, PLAIN = 4001, 4002, 4000


@dataclass(frozen=True)
class Plan:
    """Addresses of one family. ``host`` is one of the node's that masquerade never chooses."""

    family: Family
    network: str
    subnet: str
    pod: str
    gateway: str
    remote: str
    node: str
    host: str
    outside: str
    excluded: str
    length: int
    multicast: str


PLANS = {
    "IPv4": Plan(
        4, "10.5.0.0/16", "10.5.7.0/24", "10.5.7.2", "10.5.7.1", "10.5.9.2", "192.0.2.1", "198.51.100.1", "192.0.2.9",
        "203.0.113.9", 24, "239.1.1.1",
    ),
    "IPv6": Plan(
        6, "fc00:5::/48", "fc00:5:0:7::/64", "fc00:5:0:7::2", "fc00:5:0:7::1", "fc00:5:0:9::2", "2001:db8:1::1",
        "2001:db8:2::1", "2001:db8:1::9", "2001:db8:3::9", 64, "ff15::1",
    ),
}  # fmt: skip


class Net:
    """A pod, its node, and behind a cable the outside, which also plays a pod of another node."""

    def __init__(self, plan: Plan, make_namespace: MakeNamespace) -> None:
        self.plan = plan
        self.pod, self.node, self.outside = (make_namespace(label) for label in ("pod", "node", "out"))
        for namespace in (self.pod, self.node, self.outside):
            namespace.sysctl("net.ipv6.conf.default.accept_dad", 0)
        veth(self.pod, self.node, "eth0", "pod0")
        veth(self.node, self.outside)
        for namespace, device, addresses in (
            (self.pod, "eth0", [plan.pod]),
            (self.node, "pod0", [plan.gateway]),
            (self.node, "eth0", [plan.node]),
            (self.outside, "eth0", [plan.outside]),
        ):
            for address in addresses:
                self._address(namespace, device, f"{address}/{plan.length}")
        full = 32 if plan.family == 4 else 128
        self._address(self.node, "lo", f"{plan.host}/{full}")
        for address in (plan.remote, plan.excluded):
            self._address(self.outside, "lo", f"{address}/{full}")
            self.node.ip(f"-{plan.family} route add {address} via {plan.outside}")
        self.pod.ip(f"-{plan.family} route add default via {plan.gateway}")
        self.outside.ip(f"-{plan.family} route add default via {plan.node}")
        self.node.sysctl("net.ipv4.ip_forward", 1)
        self.node.sysctl("net.ipv6.conf.all.forwarding", 1)
        marks = f"udp dport {MARKED} meta mark set 0x4000\nudp dport {MARKED_AND_MORE} meta mark set 0x24000\n}}\n"
        forward, output = "type filter hook forward priority -150", "type route hook output priority -150"
        text = f"table inet marks {{\nchain f {{\n{forward}\n{marks}chain o {{\n{output}\n{marks}}}\n"
        self.node.run("nft", "-f", "-", text=text)

    @staticmethod
    def _address(namespace: Namespace, device: str, address: str) -> None:
        namespace.ip(f"address add {address} dev {device}" + (" nodad" if ":" in address else ""))

    def seen(
        self, source: Namespace, target: Namespace, address: str, *, bind: str = "", port: int = PLAIN, tries: int = 20
    ) -> str:
        """Send until something arrives, and return the source address it had."""
        family = socket.AF_INET if self.plan.family == 4 else socket.AF_INET6
        with closing(target.socket(family)) as receiver, closing(source.socket(family)) as sender:
            receiver.bind((address, port))
            receiver.settimeout(0.3)
            if bind:
                sender.bind((bind, 0))
            for _ in range(tries):
                sender.sendto(b"x", (address, port))
                try:
                    return str(receiver.recvfrom(16)[1][0])
                except TimeoutError:
                    continue
        return "nothing"

    def multicast_seen(self, bind: str) -> str:
        """The same for a datagram of the node to a group on its cable."""
        plan = self.plan
        family = socket.AF_INET if plan.family == 4 else socket.AF_INET6
        index = int(self.outside.run("cat", "/sys/class/net/eth0/ifindex"))
        sender_index = int(self.node.run("cat", "/sys/class/net/eth0/ifindex"))
        with closing(self.outside.socket(family)) as receiver, closing(self.node.socket(family)) as sender:
            receiver.bind((plan.multicast, PLAIN))
            receiver.settimeout(0.3)
            group = socket.inet_pton(family, plan.multicast)
            if plan.family == 4:
                any_and_index = socket.inet_aton("0.0.0.0") + index.to_bytes(4, "little")
                receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + any_and_index)
                out = socket.inet_aton("0.0.0.0") * 2 + sender_index.to_bytes(4, "little")
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, out)
            else:
                member = group + index.to_bytes(4, "little")
                receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
                sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, sender_index)
            sender.bind((bind, 0))
            for _ in range(20):
                sender.sendto(b"x", (plan.multicast, PLAIN))
                try:
                    return str(receiver.recvfrom(16)[1][0])
                except TimeoutError:
                    continue
        return "nothing"


@pytest.fixture(params=PLANS)
def net(request: pytest.FixtureRequest, make_namespace: MakeNamespace) -> Net:
    return Net(PLANS[request.param], make_namespace)


@pytest.fixture(params=["legacy", "nft", "native"])
def keeper(
    request: pytest.FixtureRequest, net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Keeper, TrafficPolicy]]:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    plan = net.plan
    if request.param != "native":
        tables = Tables(net.node, request.param)
        tables.iptables("-N DOCKER-USER", plan.family)
    pair = Pair(ip_network(plan.network), ip_network(plan.subnet))
    policy = TrafficPolicy(
        v4=pair if plan.family == 4 else None,
        v6=pair if plan.family == 6 else None,
        masquerade=True,
        nftables=request.param == "native",
    )
    with Keeper(net.node, 300.0) as running:
        running.want(policy)
        yield running, policy


def test_F11_F12_source_addresses(net: Net, keeper: tuple[Keeper, TrafficPolicy]) -> None:
    p, pod, node, outside = net.plan, net.pod, net.node, net.outside
    seen = {
        "pod to outside": net.seen(pod, outside, p.outside),
        "pod to remote pod": net.seen(pod, outside, p.remote),
        "pod to the node": net.seen(pod, node, p.node),
        "pod to outside, marked by kube-proxy": net.seen(pod, outside, p.outside, port=MARKED),
        "remote pod to pod": net.seen(outside, pod, p.pod, bind=p.remote),
        "outside to pod": net.seen(outside, pod, p.pod, bind=p.outside),
        "node to outside": net.seen(node, outside, p.outside, bind=p.host),
        "node to pod": net.seen(node, pod, p.pod, bind=p.host),
        "node to remote pod": net.seen(node, outside, p.remote, bind=p.host),
        "node to remote pod, marked": net.seen(node, outside, p.remote, bind=p.host, port=MARKED),
        "node to remote pod, marked and more": net.seen(node, outside, p.remote, bind=p.host, port=MARKED_AND_MORE),
        "gateway to a multicast group": net.multicast_seen(p.gateway),
    }
    assert seen == {
        "pod to outside": p.node,
        "pod to remote pod": p.pod,
        "pod to the node": p.pod,
        "pod to outside, marked by kube-proxy": p.pod,
        "remote pod to pod": p.remote,
        "outside to pod": p.outside,
        "node to outside": p.host,
        "node to pod": p.host,
        "node to remote pod": p.node,
        "node to remote pod, marked": p.host,
        "node to remote pod, marked and more": p.host,
        "gateway to a multicast group": p.gateway,
    }


def test_F12_excluded_destinations_see_the_pod(net: Net, keeper: tuple[Keeper, TrafficPolicy]) -> None:
    running, policy = keeper
    p = net.plan
    assert net.seen(net.pod, net.outside, p.excluded) == p.node
    running.want(replace(policy, masq_exclude=(ip_network(p.excluded),)))
    # Another port: the kernel remembers connections for a while.
    assert net.seen(net.pod, net.outside, p.excluded, port=PLAIN + 9) == p.pod
    assert net.seen(net.pod, net.outside, p.outside, port=PLAIN + 9) == p.node


def test_F14_a_rule_behind_ours_is_reached(net: Net, keeper: tuple[Keeper, TrafficPolicy]) -> None:
    p = net.plan
    ip = "ip" if p.family == 4 else "ip6"
    hook = "type nat hook postrouting priority 120"
    text = f"table inet behind {{\nchain c {{\n{hook}\n{ip} daddr {p.remote} counter\n}}\n}}\n"
    net.node.run("nft", "-f", "-", text=text)
    assert net.seen(net.pod, net.outside, p.remote) == p.pod
    assert "packets 0" not in net.node.run("nft", "list", "table", "inet", "behind")


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_F01_a_forward_policy_of_drop_is_opened_for_pods(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: Variant
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    p, there = net.plan, Tables(net.node, variant)
    there.iptables("-N DOCKER-USER", p.family)
    there.iptables("-P FORWARD DROP", p.family)
    assert net.seen(net.pod, net.outside, p.outside, tries=2) == "nothing"
    pair = Pair(ip_network(p.network), ip_network(p.subnet))
    policy = TrafficPolicy(pair if p.family == 4 else None, pair if p.family == 6 else None, masquerade=True)
    with Keeper(net.node, 1.0) as keeper:
        keeper.want(policy)
        for port in (PLAIN, PLAIN + 10, PLAIN + 20):
            assert net.seen(net.pod, net.outside, p.outside, port=port) == p.node
            assert net.seen(net.outside, net.pod, p.pod, bind=p.remote, port=port) == p.remote
            there.iptables("-w -F FORWARD", p.family)
    assert "filter :FORWARD DROP" in there.lines(p.family)
