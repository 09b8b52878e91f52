"""A subnet manager and what it has told so far."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from typing import TypeVar

from subnet.config import parse_network_config
from subnet.etcd.manager import EtcdManager, EtcdSettings
from subnet.manager import (
    ConfigSeen,
    LeaseRequest,
    LeasesChanged,
    LeasesListed,
    OwnLease,
    StoreEvent,
    StoreState,
    SubnetManager,
)
from subnet.model import Lease, LeaseAttrs, Subnets
from tests.support.drawn import CONFIG
from tests.support.etcd import until

T = TypeVar("T")


def request(number: int = 1, config: object = CONFIG, previous: Subnets | None = None, mac: int = 0) -> LeaseRequest:
    """Ask as the host 192.0.2.<number> does."""
    data = {"VNI": 1, "VtepMAC": f"02:00:00:00:01:{mac or number:02x}"}
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number}"), None, "vxlan", data)
    return LeaseRequest(attrs, parse_network_config(json.dumps(config), "test"), previous)


class Node:
    def __init__(self, manager: SubnetManager) -> None:
        self.manager = manager
        self.events: list[StoreEvent] = []
        self.leases: dict[Subnets, Lease] = {}
        self._lock = threading.Lock()

    def post(self, event: StoreEvent) -> None:
        with self._lock:
            self.events.append(event)
            if isinstance(event, LeasesListed):
                self.leases = {lease.subnets: lease for lease in event.leases}
            if isinstance(event, LeasesChanged):
                for change in event.changes:
                    if isinstance(change, Lease):
                        self.leases[change.subnets] = change
                    else:
                        self.leases.pop(change, None)

    def all(self, kind: type[T]) -> list[T]:
        with self._lock:
            return [e for e in self.events if isinstance(e, kind)]

    @property
    def own(self) -> Lease | None:
        told = self.all(OwnLease)
        return told[-1].lease if told else None

    @property
    def config(self) -> ConfigSeen | None:
        told = self.all(ConfigSeen)
        return told[-1] if told else None

    @property
    def state(self) -> StoreState | None:
        told = self.all(StoreState)
        return told[-1] if told else None

    def numbers(self) -> set[int]:
        """Return n of all known leases 10.5.n.0/24 of others."""
        own = self.own
        others = [s.v4 for s in list(self.leases) if own is None or s != own.subnets]
        return {int(v4.network_address) >> 8 & 255 for v4 in others if v4 is not None}

    def acquire(self, wanted: LeaseRequest) -> Lease:
        self.manager.want(wanted)
        until(lambda: self.own is not None, what="own lease")
        assert self.own is not None
        return self.own


@contextmanager
def node(*endpoints: str, **settings: object) -> Iterator[Node]:
    manager = EtcdManager(EtcdSettings(endpoints, **settings))  # type: ignore[arg-type]
    node = Node(manager)
    manager.start(node.post)
    try:
        yield node
    finally:
        manager.close()
