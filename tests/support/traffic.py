"""A keeper of traffic rules in a namespace, and how its rules look from outside."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

from flanneld.traffic.detect import Host, open_host
from flanneld.traffic.keeper import TrafficKeeper, TrafficState
from flanneld.traffic.ports import Variant
from flanneld.traffic.rules import Pair, TrafficPolicy
from flanneld.traffic.runner import Runner
from subnet.clock import Clock, SystemClock
from subnet.model import Family
from tests.support.netns import Namespace

V4 = Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24"))
V6 = Pair(ip_network("fc00:5::/48"), ip_network("fc00:5:0:7::/64"))
POLICY = TrafficPolicy(V4, V6, masquerade=True)

SEED = "-t nat -A POSTROUTING -s 10.9.0.0/16 -j MASQUERADE"
SEEDED = "nat -A POSTROUTING -s 10.9.0.0/16 -j MASQUERADE"
DEADLINE_S = 15.0


def golden(network: str, subnet: str, multicast: str) -> list[str]:
    masq, forward = '-m comment --comment "flanneld masq"', '-m comment --comment "flanneld forward"'
    return [
        f"filter -A FORWARD {forward} -j FLANNEL-FWD",
        f"filter -A FLANNEL-FWD -s {network} {forward} -j ACCEPT",
        f"filter -A FLANNEL-FWD -d {network} {forward} -j ACCEPT",
        f"nat -A POSTROUTING {masq} -j FLANNEL-POSTRTG",
        f"nat -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 {masq} -j RETURN",
        f"nat -A FLANNEL-POSTRTG -s {subnet} -d {network} {masq} -j RETURN",
        f"nat -A FLANNEL-POSTRTG -s {network} -d {subnet} {masq} -j RETURN",
        f"nat -A FLANNEL-POSTRTG ! -s {network} -d {subnet} {masq} -j RETURN",
        f"nat -A FLANNEL-POSTRTG -s {network} ! -d {multicast} {masq} -j MASQUERADE --random-fully",
        f"nat -A FLANNEL-POSTRTG ! -s {network} -d {network} {masq} -j MASQUERADE --random-fully",
    ]


GOLDEN: dict[Family, list[str]] = {
    4: golden("10.5.0.0/16", "10.5.7.0/24", "224.0.0.0/4"),
    6: golden("fc00:5::/48", "fc00:5:0:7::/64", "ff00::/8"),
}


class Tables:
    """One variant's rules in a namespace, written and read with its own programs."""

    def __init__(self, namespace: Namespace, variant: Variant) -> None:
        self.namespace, self.variant = namespace, variant

    def iptables(self, arguments: str, family: Family = 4, check: bool = True) -> None:
        """Run iptables; ``arguments`` is split at blanks."""
        program = f"{'ip6' if family == 6 else 'ip'}tables-{self.variant}"
        self.namespace.run(program, *arguments.split(), check=check)

    def lines(self, family: Family = 4) -> list[str]:
        """Return ``TABLE -A ...`` and ``TABLE :CHAIN POLICY`` of iptables-save, sorted by table."""
        found: dict[str, list[str]] = {}
        current: list[str] = []
        for line in self.namespace.run(f"{'ip6' if family == 6 else 'ip'}tables-{self.variant}-save").splitlines():
            if line.startswith("*"):
                current = found.setdefault(line[1:], [])
            elif line.startswith("-A"):
                current.append(line)
            elif line.startswith(":"):
                current.append(" ".join(line.split()[:2]))
        return [f"{table} {line}" for table in sorted(found) for line in found[table]]

    def rules(self, family: Family = 4) -> list[str]:
        """Return the rules, sorted by table."""
        return [line for line in self.lines(family) if " -A " in line]

    def ours(self, family: Family = 4) -> list[str]:
        """Return the rules that name flannel."""
        return [rule for rule in self.rules(family) if "flannel" in rule.lower()]


def golden_native(ip: str, network: str, subnet: str, multicast: str) -> list[str]:
    return [
        "forward type filter hook forward priority filter; policy accept;",
        f"forward {ip} saddr {network} accept",
        f"forward {ip} daddr {network} accept",
        "hostrtg type nat hook postrouting priority srcnat + 1; policy accept;",
        "hostrtg meta mark & 0x00004000 == 0x00004000 return",
        f"hostrtg {ip} daddr {subnet} return",
        f"hostrtg {ip} saddr != {network} {ip} daddr {network} masquerade fully-random",
        "postrtg type nat hook postrouting priority srcnat; policy accept;",
        "postrtg meta mark 0x00004000 return",
        f"postrtg {ip} saddr {subnet} {ip} daddr {network} return",
        f"postrtg {ip} saddr {network} {ip} daddr {subnet} return",
        f"postrtg {ip} saddr != {subnet} {ip} daddr {network} return",
        f"postrtg {ip} saddr {network} {ip} daddr != {multicast} masquerade fully-random",
        f"postrtg {ip} saddr != {network} {ip} daddr {network} masquerade fully-random",
    ]


GOLDEN_NATIVE: dict[Family, list[str]] = {
    4: golden_native("ip", "10.5.0.0/16", "10.5.7.0/24", "224.0.0.0/4"),
    6: golden_native("ip6", "fc00:5::/48", "fc00:5:0:7::/64", "ff00::/8"),
}


class NativeTables:
    """The tables of nftables mode in a namespace, as nft prints them."""

    def __init__(self, namespace: Namespace, prefix: str = "flannel") -> None:
        self.namespace, self.prefix = namespace, prefix

    def nft(self, command: str, check: bool = True) -> None:
        """Run nft with a script."""
        self.namespace.run("nft", "-f", "-", text=command, check=check)

    def ours(self, family: Family = 4) -> list[str]:
        """Return ``CHAIN`` and the line for each line of a chain, sorted by chain; none if there is no table."""
        name = ["ip" if family == 4 else "ip6", f"{self.prefix}-ipv{family}"]
        listing = self.namespace.run("nft", "-s", "list", "table", *name, check=False)
        found: dict[str, list[str]] = {}
        chain = ""
        for line in map(str.strip, listing.splitlines()):
            if line.startswith("chain "):
                chain = line.split()[1]
            elif chain and line == "}":
                chain = ""
            elif chain and not line.startswith("comment "):
                found.setdefault(chain, []).append(line)
        return [f"{name} {line}" for name in sorted(found) for line in found[name]]


class Keeper:
    """A running keeper. A context manager."""

    def __init__(self, namespace: Namespace, resync_s: float, **settings: Any) -> None:
        self.states: queue.Queue[TrafficState] = queue.Queue()
        self.hosts: list[Host] = []

        def find_host(nftables: bool, runner: Runner, clock: Clock) -> Host:
            self.hosts.append(open_host(nftables, runner, clock))
            return self.hosts[-1]

        self.keeper = TrafficKeeper(SystemClock(), resync_s, find_host=find_host, **settings)
        # Its thread is where its maker is.
        with namespace.inside():
            self.keeper.start(self.states.put)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.keeper.close()

    def want(self, policy: TrafficPolicy) -> None:
        """Declare a policy and wait until it is in force."""
        self.keeper.want(policy)
        end = time.monotonic() + DEADLINE_S
        while True:
            state = self.states.get(timeout=max(end - time.monotonic(), 0.01))
            if state.policy == policy and state.ok:
                return


def until(probe: Callable[[], object], expected: object) -> None:
    """Wait until ``probe`` returns what is expected; fails with what it returned last."""
    end = time.monotonic() + DEADLINE_S
    while (seen := probe()) != expected:
        assert time.monotonic() < end, f"still {seen!r}"
        time.sleep(0.02)


def in_time(seconds: float, probe: Callable[[], object], expected: object) -> None:
    """Wait like ``until``, but for a promised time; a probe that began within it still counts."""
    end = time.monotonic() + seconds
    last = False
    while (seen := probe()) != expected:
        assert not last, f"after {seconds} s still {seen!r}"
        last = time.monotonic() >= end
