"""The etcd subnet manager: a reader and a keeper, each in its own thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from subnet.allocate import Pick
from subnet.clock import Clock, SystemClock
from subnet.etcd.client import EtcdClient
from subnet.etcd.keeper import Keeper
from subnet.etcd.layout import Layout
from subnet.etcd.reader import Reader
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import Store
from subnet.manager import LeaseRequest, Post, StoreEvent

__all__ = ["EtcdManager", "EtcdSettings"]

CLOSE_S = 0.8
"""How long close() waits for the threads. One caught in a name look-up dies with the process."""


class EtcdManager:
    """A SubnetManager (subnet.manager) on etcd v3.

    Raises UsageError for endpoints or TLS files that cannot be used. Nothing
    is connected before start().
    """

    def __init__(
        self,
        settings: EtcdSettings,
        clock: Clock | None = None,
        *,
        store: Store | None = None,
        pick: Pick = random.choice,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        clock = clock or SystemClock()
        self._settings, self._clock = settings, clock
        self._stop = threading.Event()
        self._store = store or EtcdClient(settings, clock)
        self._post: Post | None = None
        self._keeper = Keeper(self._store, settings, self._forward, clock, self._stop, pick, uniform)
        self._threads: list[threading.Thread] = []

    def start(self, post: Post) -> None:
        """See SubnetManager."""
        self._post = post
        reader = Reader(
            self._store,
            Layout(self._settings.prefix),
            self._forward,
            self._keeper,
            self._clock,
            wait=self._stop.wait,
            stop=self._stop,
        )
        self._keeper.known = reader.lease
        for name, body in (("etcd-watch", reader.run), ("etcd-lease", self._keeper.run)):
            thread = threading.Thread(target=body, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def want(self, request: LeaseRequest) -> None:
        """See SubnetManager."""
        self._keeper.want(request)

    def ready(self) -> None:
        """See SubnetManager. Nobody looks into etcd for it."""

    def underlay_changed(self) -> None:
        """See SubnetManager."""
        self._store.reconnect()

    def close(self) -> None:
        """See SubnetManager."""
        self._stop.set()
        self._store.close()
        self._keeper.wake()
        until = self._clock.now() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock.now()))

    def _forward(self, event: StoreEvent) -> None:
        if self._post is not None and not self._stop.is_set():
            self._post(event)
