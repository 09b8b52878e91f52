"""The Kubernetes subnet manager: a reader, a keeper and a look at the config file, each in its own thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from subnet.clock import Clock, SystemClock
from subnet.kube.client import KubeClient
from subnet.kube.configfile import ConfigFile
from subnet.kube.keeper import Keeper
from subnet.kube.reader import Reader
from subnet.kube.settings import KubeSettings
from subnet.kube.store import NodeStore
from subnet.manager import LeaseRequest, Post, StoreEvent

__all__ = ["KubeManager", "KubeSettings"]

CLOSE_S = 0.8
"""How long close() waits for the threads. One caught in a request dies with the process."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class KubeManager:
    """A SubnetManager (subnet.manager) on node objects. Nothing is loaded or connected before start()."""

    def __init__(
        self,
        settings: KubeSettings,
        clock: Clock | None = None,
        *,
        store: NodeStore | None = None,
        wall: Callable[[], datetime] = _utc_now,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._clock = clock or SystemClock()
        self._stop = threading.Event()
        self._store = store or KubeClient(settings)
        self._post: Post | None = None
        self._keeper = Keeper(self._store, settings, self._forward, self._clock, self._stop, wall, uniform)
        self._config = ConfigFile(settings.net_config_path, self._forward, self._clock, self._stop.wait)
        self._reader = Reader(
            self._store,
            settings,
            self._config,
            self._forward,
            self._keeper,
            self._clock,
            self._stop.wait,
            self._stop,
            uniform,
        )
        self._threads: list[threading.Thread] = []

    def start(self, post: Post) -> None:
        """See SubnetManager."""
        self._post = post
        bodies = {"net-conf": self._config.run, "kube-watch": self._reader.run, "kube-node": self._keeper.run}
        for name, body in bodies.items():
            thread = threading.Thread(target=body, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def want(self, request: LeaseRequest) -> None:
        """See SubnetManager. The previous subnet does not count: the cluster assigns it."""
        self._keeper.want(request)

    def ready(self) -> None:
        """See SubnetManager. Sets the node's condition."""
        self._keeper.ready()

    def underlay_changed(self) -> None:
        """See SubnetManager."""
        self._store.reconnect()

    def close(self) -> None:
        """See SubnetManager."""
        self._stop.set()
        self._keeper.wake()
        self._store.close()
        until = self._clock.now() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock.now()))

    def _forward(self, event: StoreEvent) -> None:
        if self._post is not None and not self._stop.is_set():
            self._post(event)
