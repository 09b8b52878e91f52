"""Follows config and leases: list, watch, resume where it broke off, list anew after compaction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from subnet.clock import Backoff, Clock
from subnet.config import parse_network_config
from subnet.errors import Closed, Compacted, ConfigError, DatastoreError
from subnet.etcd.layout import Layout
from subnet.etcd.records import Records
from subnet.etcd.store import Batch, KeyEvent, KeyValue, Snapshot, Store, Watched
from subnet.manager import ConfigSeen, LeasesChanged, LeasesListed, Post, StoreState
from subnet.model import Lease
from subnet.report import Reporter

log = logging.getLogger(__name__)

CONFIG, LEASES = 0, 1
"""Targets of the watch, by index."""
HINTS_EACH_S = 60.0
HINTS_LIMIT = 1000
STEADY_S = 5.0
"""A watch that lasted this long was a good one; its end does not count as a repeated failure."""


class Listener(Protocol):
    """Who else wants to know what happens to lease keys (the keeper of the own one)."""

    def listed(self, snapshot: Snapshot) -> None:
        """All keys were read anew."""
        ...

    def changed(self, events: tuple[KeyEvent, ...]) -> None:
        """Keys were written or removed."""
        ...

    def reconnected(self) -> None:
        """The store answers again after an outage."""
        ...


@dataclass
class Reader:
    """Posts ConfigSeen, LeasesListed, LeasesChanged and StoreState. ``run`` is the body of its thread.

    ``wait`` sleeps for some seconds, less if the manager is closed meanwhile.
    """

    store: Store
    layout: Layout
    post: Post
    listener: Listener
    clock: Clock
    wait: Callable[[float], object]
    stop: threading.Event
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.1, ceiling_s=4.0))
    relist_backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.1, ceiling_s=4.0))
    _next: list[int] | None = field(default=None, init=False)
    """First revision not yet seen, per target; None: a listing is due."""
    _config: bytes | None = field(default=None, init=False)
    _config_seen: bool = field(default=False, init=False)
    _hints: tuple[float, str] | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    _reached: bool = field(default=False, init=False)
    _state: StoreState | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._reporter = Reporter(log, self.clock, again_s=30.0)
        self._records = Records(self.layout, Reporter(log, self.clock, again_s=3600.0))

    def lease(self, kv: KeyValue) -> Lease | None:
        """Return the lease that was read from this very state of a key, None if it was not; from any thread."""
        return self._records.lease(kv)

    def run(self) -> None:
        """Follow the store until it is closed."""
        while not self.stop.is_set():
            try:
                if self._next is None:
                    self._list()
                self._follow()
            except Closed:
                return
            except Compacted as e:
                log.info("%s; reading everything anew", e)
                self._next = None
                self.wait(self.relist_backoff.next_s())
            except DatastoreError as e:
                self._failed(str(e))
                self.wait(self.backoff.next_s())

    # -- state of the connection ----------------------------------------------

    def _failed(self, problem: str) -> None:
        # A connection that ends is opened again without a word; only if that fails is it an outage.
        self._failures += 1
        if self._failures == 1 and self._reached:
            log.debug("etcd: %s; connecting again", problem)
            return
        self._reporter.problem("etcd", f"etcd: {problem}; retrying")
        self._say(StoreState(False, problem))

    def _answered(self) -> None:
        outage = self._failures > 1
        self._failures, self._reached = 0, True
        self._reporter.solved("etcd", "etcd: answers again")
        self._say(StoreState(True))
        if outage:
            self.listener.reconnected()

    def _say(self, state: StoreState) -> None:
        if state != self._state:
            self._state = state
            self.post(state)

    # -- listing ----------------------------------------------------------------

    def _list(self) -> None:
        snapshot = self.store.snapshot(self.layout.config, self.layout.subnets)
        self._answered()
        self._see_config(snapshot.config)
        leases = self._records.replace(snapshot.leases)
        # The listener first: the own lease is asked for as soon as all leases are known.
        self.listener.listed(snapshot)
        self.post(LeasesListed(leases, snapshot.revision))
        self._next = [snapshot.revision + 1] * 2

    # -- watching -----------------------------------------------------------------

    def _follow(self) -> None:
        assert self._next is not None
        targets = (
            Watched(self.layout.config, prefix=False, from_revision=self._next[CONFIG]),
            Watched(self.layout.subnets, prefix=True, from_revision=self._next[LEASES]),
        )
        began = self.clock.now()
        try:
            for batch in self.store.watch(targets):
                self._take(batch)
        finally:
            if self.clock.now() - began >= STEADY_S:
                self.backoff.reset()
                self.relist_backoff.reset()

    def _take(self, batch: Batch) -> None:
        assert self._next is not None
        if batch.index < 0:
            self._answered()
            return
        if batch.events and batch.index == CONFIG:
            self._see_config(batch.events[-1].kv)
        elif batch.events:
            changes = self._records.change(batch.events)
            if changes:
                self.post(LeasesChanged(changes, batch.revision))
            self.listener.changed(batch.events)
        self._next[batch.index] = batch.revision + 1

    # -- config ---------------------------------------------------------------------

    def _see_config(self, kv: KeyValue | None) -> None:
        value = None if kv is None else kv.value
        if self._config_seen and value == self._config:
            return
        self._config_seen, self._config = True, value
        if value is None:
            self._no_config(self._missing())
            return
        try:
            config = parse_network_config(value, self.layout.config)
        except ConfigError as e:
            self._no_config(str(e))
            return
        self.post(ConfigSeen(config, text=value.decode(errors="replace")))

    def _no_config(self, problem: str) -> None:
        # Whether it matters, and so whether people are told, is for the owner of the config in force to say.
        log.debug("%s", problem)
        self.post(ConfigSeen(None, problem))

    def _missing(self) -> str:
        text = f"no network config: key {self.layout.config} does not exist (etcd API v3; keys of API v2 are not seen)"
        near = self._near_misses()
        return f"{text}; there is {near}: a slip?" if near else text

    def _near_misses(self) -> str:
        now = self.clock.now()
        if self._hints is None or now - self._hints[0] >= HINTS_EACH_S:
            self._hints = (now, ", ".join(repr(k) for k in self._look_around()))
        return self._hints[1]

    def _look_around(self) -> list[str]:
        places = {self.layout.parent, self.layout.config.lstrip("/"), "/" + self.layout.config.lstrip("/")}
        try:
            names = {n for place in places if place for n in self.store.names(place, HINTS_LIMIT)}
        except DatastoreError as e:
            log.debug("looking for keys like the config: %s", e)
            return []
        return sorted(n for n in names if self.layout.resembles_config(n))
