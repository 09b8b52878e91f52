from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from flanneld.traffic.runner import Runner
from flanneld.traffic.vtep import VtepGuard
from flanneld.traffic.vtep_rules import VtepFilter
from subnet.errors import RuleError
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.traffic import POLICY, Keeper, until

pytestmark = pytest.mark.kernel

PORT = 8472
TABLE = "flannel-vtep"
KNOWN = frozenset(map(ip_address, ("192.0.2.2", "192.0.2.3", "2001:db8:1::2")))
FILTER = VtepFilter("eth1", PORT, KNOWN)


class Net:
    """A node; behind eth1 the private network of its peers, behind eth0 the public one."""

    def __init__(self, make_namespace: MakeNamespace) -> None:
        self.node, self.private, self.public = (make_namespace(label) for label in ("node", "priv", "pub"))
        veth(self.node, self.private, "eth1", "eth1")
        veth(self.node, self.public, "eth0", "eth0")
        self.node.ip("addr add 192.0.2.1/24 dev eth1")
        self.node.ip("addr add 2001:db8:1::1/64 dev eth1 nodad")
        self.node.ip("addr add 203.0.113.1/24 dev eth0")
        for address in ("192.0.2.2/24", "192.0.2.9/24"):
            self.private.ip(f"addr add {address} dev eth1")
        for address in ("2001:db8:1::2/64", "2001:db8:1::9/64"):
            self.private.ip(f"addr add {address} dev eth1 nodad")
        self.public.ip("addr add 203.0.113.2/24 dev eth0")
        self.public.ip("addr add 192.0.2.3/32 dev lo")
        self.node.ip("route add 192.0.2.3/32 via 203.0.113.2")
        self.runner = Runner()
        self.guard = VtepGuard(self.runner, TABLE)
        self.thread = ThreadPoolExecutor(1, initializer=self.node.enter)

    def settle(self, wanted: VtepFilter | None) -> None:
        self.thread.submit(self.guard.settle, wanted).result()

    def passes(self, source: Namespace, bind: str, target: str, port: int = PORT) -> bool:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with closing(self.node.socket(family)) as receiver, closing(source.socket(family)) as sender:
            receiver.bind(("", port))
            receiver.settimeout(2)
            sender.bind((bind, 0))
            sender.sendto(b"x", (target, port))
            self._later(source, bind, target)
            receiver.setblocking(False)
            try:
                receiver.recv(16)
            except BlockingIOError:
                return False
            return True

    def _later(self, source: Namespace, bind: str, target: str) -> None:
        """Wait for a datagram to an open port: what was sent before it on the same way is here or never will be."""
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with closing(self.node.socket(family)) as back, closing(source.socket(family)) as probe:
            back.bind(("", 4000))
            back.settimeout(2)
            probe.bind((bind, 0))
            probe.sendto(b"x", (target, 4000))
            back.recv(16)

    def passes_inside(self, source: Namespace, bind: str, target: str) -> bool:
        """Whether a packet inside a packet arrives; a raw socket gets it after the filter, as a tunnel would."""
        family, protocol = (socket.AF_INET6, 41) if ":" in target else (socket.AF_INET, 4)
        raw = socket.SOCK_RAW
        with (
            closing(self.node.socket(family, raw, protocol)) as receiver,
            closing(source.socket(family, raw, protocol)) as sender,
        ):
            sender.bind((bind, 0))
            sender.sendto(b"E" + b"\0" * 39, (target, 0))
            self._later(source, bind, target)
            receiver.setblocking(False)
            try:
                receiver.recv(100)
            except BlockingIOError:
                return False
            return True

    def listed(self) -> str:
        return self.node.run("nft", "-s", "list", "table", "inet", TABLE, check=False)


@pytest.fixture
def net(make_namespace: MakeNamespace) -> Iterator[Net]:
    made = Net(make_namespace)
    yield made
    made.guard.close()
    made.thread.shutdown()


def test_S15_the_port_is_open_to_known_hosts_on_the_interface_only(net: Net) -> None:
    ways: list[tuple[Namespace, str, str]] = [
        (net.private, "192.0.2.2", "192.0.2.1"),
        (net.private, "2001:db8:1::2", "2001:db8:1::1"),
        (net.private, "192.0.2.9", "192.0.2.1"),
        (net.private, "2001:db8:1::9", "2001:db8:1::1"),
        (net.public, "203.0.113.2", "203.0.113.1"),
        (net.public, "192.0.2.3", "203.0.113.1"),
    ]
    assert [net.passes(*way) for way in ways] == [True] * 6
    net.settle(FILTER)
    assert [net.passes(*way) for way in ways] == [True, True, False, False, False, False]
    assert net.passes(net.public, "203.0.113.2", "203.0.113.1", 8473)
    net.settle(replace(FILTER, peers=frozenset({ip_address("192.0.2.9")})))
    assert [net.passes(*way) for way in ways] == [False, False, True, False, False, False]
    net.settle(None)
    assert [net.passes(*way) for way in ways] == [True] * 6
    assert net.listed() == ""


def test_W09_packets_inside_packets_come_from_known_hosts_on_the_interface_only(net: Net) -> None:
    ways: list[tuple[Namespace, str, str]] = [
        (net.private, "192.0.2.2", "192.0.2.1"),
        (net.private, "2001:db8:1::2", "2001:db8:1::1"),
        (net.private, "192.0.2.9", "192.0.2.1"),
        (net.private, "2001:db8:1::9", "2001:db8:1::1"),
        (net.public, "203.0.113.2", "203.0.113.1"),
        (net.public, "192.0.2.3", "203.0.113.1"),
    ]
    assert [net.passes_inside(*way) for way in ways] == [True] * 6
    net.settle(replace(FILTER, port=0, ip_in_ip=(4, 6)))
    assert [net.passes_inside(*way) for way in ways] == [True, True, False, False, False, False]
    assert net.passes(net.public, "203.0.113.2", "203.0.113.1")
    # A family that is off keeps its tunnels, whoever they belong to.
    net.settle(replace(FILTER, port=0, ip_in_ip=(4,)))
    assert [net.passes_inside(*way) for way in ways] == [True, True, False, True, False, False]
    before = net.listed()
    forks = net.runner.forks
    net.settle(replace(FILTER, port=0, ip_in_ip=(4,)))
    assert (net.listed(), net.runner.forks) == (before, forks)


def test_S15_it_follows_the_leases_address_by_address(net: Net) -> None:
    net.settle(FILTER)
    handles = net.node.run("nft", "-a", "list", "chain", "inet", TABLE, "input")
    net.settle(replace(FILTER, peers=KNOWN | {ip_address("192.0.2.77")}))
    assert "192.0.2.77" in net.listed()
    net.settle(FILTER)
    assert "192.0.2.77" not in net.listed()
    assert net.node.run("nft", "-a", "list", "chain", "inet", TABLE, "input") == handles


@pytest.mark.parametrize(
    "damage",
    [
        "flush ruleset",
        f"flush set inet {TABLE} peers4",
        f"add element inet {TABLE} peers4 {{ 192.0.2.66 }}",
        f"insert rule inet {TABLE} input accept",
        f"flush chain inet {TABLE} input",
        f"add chain inet {TABLE} stray",
    ],
)
def test_S15_what_others_change_is_repaired(net: Net, damage: str) -> None:
    net.settle(FILTER)
    before = net.listed()
    net.node.run("nft", damage)
    assert net.listed() != before
    net.settle(FILTER)
    assert net.listed() == before


def test_S15_at_rest_no_program_runs(net: Net) -> None:
    net.settle(FILTER)
    before = net.runner.forks
    net.settle(FILTER)
    assert net.runner.forks == before
    net.settle(None)
    removed = net.runner.forks
    net.settle(None)
    assert net.runner.forks == removed


def test_S15_without_nft_it_is_a_problem_only_if_asked_for(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    net.settle(None)
    with pytest.raises(RuleError, match="--vtep-filter needs nft"):
        net.settle(FILTER)


@pytest.mark.parametrize(
    ("switched_on", "wanted", "present"),
    [(False, None, False), (True, None, True), (True, lambda k: k.keeper.want_filter(None), False)],
    ids=["off", "not known yet", "no port to protect"],
)
def test_S15_the_table_of_an_earlier_run(
    net: Net, switched_on: bool, wanted: Callable[[Keeper], None] | None, present: bool
) -> None:
    net.settle(FILTER)
    with Keeper(net.node, 300.0, vtep_filter=switched_on) as keeper:
        if wanted is not None:
            wanted(keeper)
        keeper.want(POLICY)
        assert bool(net.listed()) is present


@pytest.mark.parametrize("nftables", [False, True], ids=["iptables", "nftables"])
def test_S15_the_keeper_keeps_it_on_notification(net: Net, nftables: bool) -> None:
    with Keeper(net.node, 300.0, vtep_filter=True, cleanup_on_exit=True) as keeper:
        keeper.keeper.want_filter(FILTER)
        keeper.want(replace(POLICY, nftables=nftables))
        before = net.listed()
        assert "192.0.2.2" in before
        net.node.run("nft", "flush", "ruleset")
        until(net.listed, before)
        keeper.keeper.want_filter(replace(FILTER, peers=KNOWN | {ip_address("192.0.2.50")}))
        until(lambda: "192.0.2.50" in net.listed(), True)
    assert net.listed() == ""
