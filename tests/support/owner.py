"""The owner loop with everything around it faked: kernel, store, clock, systemd."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from flanneld.extiface import Wish
from flanneld.healthz import Health
from flanneld.inbox import Event, KernelEvents
from flanneld.loop import Owner
from flanneld.plan import Plan
from flanneld.traffic.keeper import TrafficState
from flanneld.traffic.rules import TrafficPolicy
from subnet.config import parse_network_config
from subnet.manager import ConfigSeen, LeaseRequest, LeasesListed, OwnLease, StoreState
from subnet.model import Lease, LeaseAttrs, Subnets
from tests.support.clock import ManualClock
from tests.support.fake_kernel import FakeKernel

CONFIG = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'
OWN = Subnets(ip_network("10.5.1.0/24"))  # type: ignore[arg-type]


class FakeManager:
    def __init__(self) -> None:
        self.requests: list[LeaseRequest] = []
        self.reconnected = self.told_ready = 0

    def start(self, post: object) -> None: ...

    def want(self, request: LeaseRequest) -> None:
        self.requests.append(request)

    def ready(self) -> None:
        self.told_ready += 1

    def underlay_changed(self) -> None:
        self.reconnected += 1

    def close(self) -> None: ...


class FakeNotifier:
    watchdog_s = 0.0

    def __init__(self) -> None:
        self.said: list[str] = []

    def ready(self, status: str) -> None:
        self.said.append(f"READY {status}")

    def status(self, status: str) -> None:
        self.said.append(status)

    def alive(self) -> None: ...

    def stopping(self) -> None: ...


class Script:
    """An inbox that plays events, one batch a round, and then tells the loop to stop."""

    def __init__(self, stop: threading.Event, clock: ManualClock) -> None:
        self.batches: list[Callable[[], list[Event]]] = []
        self.sleeps: list[float] = []
        self._stop, self._clock = stop, clock

    def post(self, event: Event) -> None: ...

    def drain(self, timeout_s: float) -> list[Event]:
        self.sleeps.append(timeout_s)
        if not self.batches:
            self._stop.set()
            return []
        return self.batches.pop(0)()


class Node:
    """An owner on a fake host; ``play`` runs one round for each step."""

    def __init__(self, tmp_path: Path, kernel: FakeKernel | None = None, **plan: Any) -> None:
        self.clock, self.kernel, self.manager = ManualClock(), kernel or FakeKernel(), FakeManager()
        self.notifier, self.health = FakeNotifier(), Health(self.clock)
        self.stop = threading.Event()
        self.script = Script(self.stop, self.clock)
        self.policies: list[TrafficPolicy] = []
        self.filters: list[object] = []
        self.settled_at: list[float] = []
        self.env = tmp_path / "subnet.env"
        self.owner = Owner(
            Plan(Wish(iface=("eth0",)), str(self.env), **plan),
            kernel=self.kernel,
            manager=self.manager,
            traffic_want=self.policies.append,
            filter_want=self.filters.append,
            inbox=self.script,  # type: ignore[arg-type]
            health=self.health,
            notifier=self.notifier,  # type: ignore[arg-type]
            clock=self.clock,
            settled=lambda: self.settled_at.append(self.clock.now()),
        )

    def play(self, *steps: Event | Callable[[], object] | float) -> Node:
        """Events arrive, calls happen, numbers are seconds that pass; a round follows each."""
        self.stop.clear()
        self.script.batches = [lambda step=step: self._do(step) for step in steps]  # type: ignore[misc]
        self.owner.run(self.stop)
        return self

    def _do(self, step: Event | Callable[[], object] | float) -> list[Event]:
        if isinstance(step, (int, float)):
            self.clock.pass_s(step)
            return []
        if callable(step):
            found = step()
            return found if isinstance(found, list) else []
        return [step]

    def rules_ok(self) -> list[Event]:
        return [TrafficState(self.policies[-1], True)]

    def kernel_says(self, *events: Any) -> KernelEvents:
        return KernelEvents(tuple(events))

    def started(self, *peers: Lease, own: Subnets = OWN, config: str = CONFIG) -> Node:
        return self.play(
            StoreState(True), config_seen(config), LeasesListed(peers, 5), lambda: [self.own(own)], self.rules_ok
        )

    def own(self, subnets: Subnets = OWN) -> OwnLease:
        return OwnLease(Lease(subnets, self.manager.requests[-1].attrs, "/n/subnets/own", 7, 6))

    def is_ready(self) -> bool:
        return self.health.ready

    @property
    def routes(self) -> set[str]:
        return {str(r.destination) for r in self.kernel.state.routes}


def config_seen(text: str) -> ConfigSeen:
    return ConfigSeen(parse_network_config(text, "/coreos.com/network/config"))


def peer(n: int, mac: str = "", revision: int = 1) -> Lease:
    data = {"VNI": 1, "VtepMAC": mac or f"02:00:00:00:00:{n:02x}"}
    attrs = LeaseAttrs(ip_address(f"192.0.2.{n}"), None, "vxlan", data)  # type: ignore[arg-type]
    return Lease(Subnets(ip_network(f"10.5.{n}.0/24")), attrs, f"/n/subnets/10.5.{n}.0-24", 9, revision)  # type: ignore[arg-type]
