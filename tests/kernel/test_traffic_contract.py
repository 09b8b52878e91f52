"""What holds for every way to write rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import TypeVar

import pytest

from flanneld.traffic.detect import open_host
from flanneld.traffic.ports import Enforcer
from flanneld.traffic.rules import Pair, TrafficPolicy
from flanneld.traffic.runner import Runner
from subnet.clock import SystemClock
from subnet.model import FAMILIES, Family
from tests.support.netns import Namespace
from tests.support.traffic import GOLDEN, GOLDEN_NATIVE, POLICY, SEED, V4, NativeTables, Tables

pytestmark = pytest.mark.kernel

T = TypeVar("T")
JUMP = '-m comment --comment "flanneld masq" -j FLANNEL-POSTRTG'


@dataclass
class Way:
    """One way, its tables as other programs see them, and how to damage them."""

    kind: str
    namespace: Namespace
    runner: Runner = field(default_factory=Runner)

    def __post_init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, initializer=self.namespace.enter)
        self.tables: Tables | NativeTables
        if self.kind == "native":
            self.tables = NativeTables(self.namespace)
            self.tables.nft(FOREIGN)
        else:
            self.tables = Tables(self.namespace, "nft" if self.kind == "nft" else "legacy")
            self.tables.iptables(SEED)
        self.foreign = self.others()
        self.start()

    def start(self) -> None:
        """Look at the host anew, as a daemon does that starts."""
        host = self.call(lambda: open_host(self.kind == "native", self.runner, SystemClock()))
        if host.watch is not None:
            host.watch.close()
        self.enforcer: Enforcer = host.enforcer

    def call(self, function: Callable[[], T]) -> T:
        return self.thread.submit(function).result()

    def converge(self, policy: TrafficPolicy) -> list[bool]:
        return self.call(lambda: [self.enforcer.converge(policy, family) for family in FAMILIES])

    def golden(self, family: Family) -> list[str]:
        return GOLDEN_NATIVE[family] if self.kind == "native" else GOLDEN[family]

    def others(self) -> list[str]:
        if isinstance(self.tables, NativeTables):
            return self.namespace.run("nft", "-s", "list", "table", "inet", "mine").splitlines()
        return [line for line in self.tables.rules() if "flannel" not in line.lower()]

    def damage(self, script: str) -> None:
        for command in script.split(";"):
            if isinstance(self.tables, NativeTables):
                self.tables.nft(command)
            else:
                self.tables.iptables(command)


FOREIGN = """
table inet mine {
    chain c { type filter hook forward priority 5; policy accept; ip saddr 172.16.0.0/12 drop; }
}
"""


@pytest.fixture(params=["legacy", "nft", "native"])
def way(
    request: pytest.FixtureRequest, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Way]:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    made = Way(request.param, namespace)
    yield made
    made.thread.shutdown()


def test_rules_are_exact_and_stay(way: Way) -> None:
    assert way.converge(POLICY) == [True, True]
    for family in FAMILIES:
        assert way.tables.ours(family) == way.golden(family)
    assert way.converge(POLICY) == [False, False]
    assert way.others() == way.foreign


DAMAGE = {
    "iptables": [
        "-t nat -F FLANNEL-POSTRTG",
        "-t nat -F POSTROUTING",
        "-F FLANNEL-FWD",
        "-t nat -D FLANNEL-POSTRTG 3",
        "-t nat -I FLANNEL-POSTRTG -j ACCEPT",
        "-F FORWARD;-F FLANNEL-FWD;-X FLANNEL-FWD",
    ],
    "native": [
        "flush chain ip flannel-ipv4 postrtg",
        "delete chain ip flannel-ipv4 hostrtg",
        "insert rule ip flannel-ipv4 forward ip saddr 10.0.0.1 drop",
        "add rule ip flannel-ipv4 postrtg counter",
        "add chain ip flannel-ipv4 stray; add rule ip flannel-ipv4 forward jump stray",
        "add set ip flannel-ipv4 stray { type ipv4_addr\n}",
        "add table ip flannel-ipv4 { flags dormant\n}",
        "add chain ip flannel-ipv4 forward { policy drop\n}",
        "delete chain ip flannel-ipv4 forward"
        "\nadd chain ip flannel-ipv4 forward { type filter hook forward priority 7\n}",
        "delete table ip flannel-ipv4",
    ],
}


def test_F02_F05_whatever_is_damaged_is_as_before(way: Way) -> None:
    way.converge(POLICY)
    for script in DAMAGE["native" if way.kind == "native" else "iptables"]:
        way.damage(script)
        assert way.converge(POLICY) == [True, False], script
        assert way.tables.ours() == way.golden(4), script
        assert way.converge(POLICY) == [False, False], script


def test_what_is_switched_off_goes(way: Way) -> None:
    way.converge(POLICY)
    way.converge(replace(POLICY, masquerade=False, v6=None))
    assert way.tables.ours() == [line for line in way.golden(4) if "forward" in line.lower() or "FWD" in line]
    assert way.tables.ours(6) == []
    way.converge(replace(POLICY, forward=False))
    assert way.tables.ours(6) == [line for line in way.golden(6) if "forward" not in line.lower()]
    assert way.converge(POLICY.nothing()) == [True, True]
    assert way.converge(POLICY.nothing()) == [False, False]
    assert way.tables.ours() == way.tables.ours(6) == []
    assert way.others() == way.foreign


@pytest.mark.parametrize(
    "moved",
    [Pair(V4.network, ip_network("10.5.8.0/24")), Pair(ip_network("10.6.0.0/16"), ip_network("10.6.8.0/24"))],
    ids=["subnet", "network"],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_F16_C10_subnet_or_network_move(way: Way, moved: Pair, restarted: bool) -> None:
    way.converge(POLICY)
    if restarted:
        way.start()
    # One call per family: what was before is gone with it.
    assert way.converge(replace(POLICY, v4=moved, previous=(V4,))) == [True, False]
    moves = ((str(V4.subnet), str(moved.subnet)), (str(V4.network), str(moved.network)))
    expected = way.golden(4)
    for before, after in moves:
        expected = [line.replace(before, after) for line in expected]
    assert way.tables.ours() == expected
    assert way.tables.ours(6) == way.golden(6)
    assert way.others() == way.foreign


def test_F10_random_ports_can_be_switched_off(way: Way) -> None:
    way.converge(replace(POLICY, random_fully=False))
    suffixes = (" --random-fully", " fully-random")
    expected = [line.removesuffix(suffixes[0]).removesuffix(suffixes[1]) for line in way.golden(4)]
    assert way.tables.ours() == expected


def test_F12_excluded_destinations_come_before_masquerade(way: Way) -> None:
    policy = replace(POLICY, masq_exclude=(ip_network("10.8.0.0/16"),))
    way.converge(policy)
    (new,) = set(way.tables.ours()) - set(way.golden(4))
    assert "10.8.0.0/16" in new
    after = way.tables.ours()[way.tables.ours().index(new) + 1]
    assert "224.0.0.0/4" in after
    assert way.converge(policy) == [False, False]
    assert way.tables.ours(6) == way.golden(6)


def test_L47_two_daemons_with_prefixes_of_their_own(way: Way) -> None:
    pair = Pair(ip_network("10.6.0.0/16"), ip_network("10.6.1.0/24"))
    second = TrafficPolicy(pair, masquerade=True, chain_prefix="BLUE", table_prefix="blue")
    way.converge(POLICY)
    way.converge(second)
    assert way.converge(POLICY) == way.converge(second) == [False, False]
    way.converge(second.nothing())
    assert way.tables.ours() == way.golden(4)


def test_so_many_programs_run_for_a_repair(way: Way) -> None:
    way.converge(POLICY)
    way.damage("delete chain ip flannel-ipv4 hostrtg" if way.kind == "native" else "-t nat -F FLANNEL-POSTRTG")
    before = way.runner.forks
    way.call(lambda: way.enforcer.converge(POLICY, 4))
    assert way.runner.forks - before == {"legacy": 0, "nft": 1, "native": 2}[way.kind]
