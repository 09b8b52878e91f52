"""A namespace with rules of ours and of others, for each way to write them."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_network

from flanneld.ctl.lab.netns import Namespace
from flanneld.traffic.keeper import TrafficKeeper, TrafficState
from flanneld.traffic.rules import Pair, TrafficPolicy
from subnet.clock import SystemClock

POLICY = TrafficPolicy(
    Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24")),
    Pair(ip_network("fc00:5::/48"), ip_network("fc00:5:0:7::/64")),
    masquerade=True,
)
_DEADLINE_S = 30.0
_POLL_S = 0.002
_PAUSE_S = 0.3


@dataclass(frozen=True, slots=True)
class Way:
    """Programs of one way: what damages the rules, what shows them, and what reads all."""

    title: str
    nftables: bool
    variant: str
    damage: str
    show: str
    read: str


WAYS = (
    Way(
        "nftables mode",
        True,
        "nft",
        "nft flush chain ip flannel-ipv4 postrtg",
        "nft list chain ip flannel-ipv4 postrtg",
        "nft -j list table ip flannel-ipv4",
    ),
    *(
        Way(
            f"iptables, {variant}",
            False,
            variant,
            f"iptables-{variant} -w -t nat -F FLANNEL-POSTRTG",
            f"iptables-{variant} -w -t nat -S FLANNEL-POSTRTG",
            f"iptables-{variant}-save",
        )
        for variant in ("nft", "legacy")
    ),
)


class Place:
    """A namespace in which a keeper works. ``foreign``: how many rules of others there are."""

    def __init__(self, way: Way, foreign: int, resync_s: float) -> None:
        self.way = way
        self.namespace = Namespace(f"flb-{os.getpid()}-{way.variant}{'n' if way.nftables else ''}{foreign}")
        self._ready = threading.Event()
        self._fill(foreign)
        self.keeper = TrafficKeeper(SystemClock(), resync_s)

    def start(self) -> None:
        """Start the keeper and wait until the rules are there."""
        # The keeper's thread is where its maker was.
        self.namespace.call(lambda: self.keeper.start(self._heard))
        self.keeper.want(replace(POLICY, nftables=self.way.nftables))
        if not self._ready.wait(_DEADLINE_S):
            raise TimeoutError(f"{self.way.title}: no rules within {_DEADLINE_S:g} s")

    def close(self) -> None:
        """End the keeper and remove the namespace."""
        self.keeper.close()
        self.namespace.delete()

    def run(self, command: str, text: str = "") -> str:
        """Run a program inside and return what it printed."""
        argv = ["ip", "netns", "exec", self.namespace.name, *command.split()]
        return subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout

    def repair_s(self) -> float:
        """Damage the rules; return the seconds until another program shows them whole again."""
        # The keeper has looked at its last repair by then: who damages it before fights with it.
        time.sleep(_PAUSE_S)
        whole = self.run(self.way.show)
        self.run(self.way.damage)
        began = time.monotonic()
        while self.run(self.way.show) != whole:
            if time.monotonic() - began > _DEADLINE_S:
                raise TimeoutError(f"{self.way.title}: not repaired within {_DEADLINE_S:g} s")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def _heard(self, state: TrafficState) -> None:
        if state.ok:
            self._ready.set()

    def _fill(self, foreign: int) -> None:
        addresses = (f"10.{16 + n // 65536}.{n // 256 % 256}.{n % 256}" for n in range(foreign))
        rules = "".join(f"-A OTHERS -s {address} -j ACCEPT\n" for address in addresses)
        program = f"iptables-{self.way.variant}-restore"
        # One rule at least: an empty legacy table would be no reason to take that variant.
        text = f"*filter\n:OTHERS - [0:0]\n-A OTHERS -j RETURN\n-A INPUT -s 10.9.0.0/16 -j OTHERS\n{rules}COMMIT\n"
        self.run(f"{program} --noflush", text)


@contextmanager
def place(way: Way, foreign: int, resync_s: float) -> Iterator[Place]:
    """Make a place, start its keeper, and remove both at the end."""
    made = Place(way, foreign, resync_s)
    try:
        made.start()
        yield made
    finally:
        made.close()
