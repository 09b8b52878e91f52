"""Remembers what the datastore says and keeps the state file up to date, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from subnet import statefile
from subnet.clock import Clock
from subnet.leaseset import LeaseSet
from subnet.manager import ConfigSeen, LeasesChanged, LeasesListed, OwnLease, StoreEvent, StoreState
from subnet.model import Lease
from subnet.report import Reporter
from subnet.state import State, StateError

log = logging.getLogger(__name__)

PEERS_EACH_S = 30.0
"""Changed peers are written no more often than this; config and own lease at once."""
REFRESH_EACH_S = 3600.0
"""An unchanged state is written so often while the store answers, so that its age is known after a power cut."""
RETRY_S = 30.0


class Recorder:
    """Applies events to what is remembered and writes it when due. ``wall`` is Unix time in seconds.

    All methods but ``note`` and ``close`` belong to the thread.
    """

    def __init__(
        self, path: Path, datastore: str, earlier: State | None, clock: Clock, wall: Callable[[], float]
    ) -> None:
        self._path, self._datastore, self._clock, self._wall = path, datastore, clock, wall
        self._reporter = Reporter(log, clock, again_s=3600.0)
        self._config = earlier.config if earlier else ""
        self._own = earlier.own if earlier else None
        self._peers = earlier.peers if earlier else ()
        self._seen_at_s = earlier.seen_at_s if earlier else 0
        self._leases = LeaseSet()
        self._reachable = False
        self._written_at = -REFRESH_EACH_S
        self._due_at: float | None = None
        self._queue: queue.SimpleQueue[StoreEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self.run, name="state", daemon=True)

    # -- from other threads -----------------------------------------------

    def start(self) -> None:
        """Begin to write, in a thread."""
        self._thread.start()

    def note(self, event: StoreEvent) -> None:
        """Leave an event to be remembered; never blocks."""
        self._queue.put(event)

    def close(self) -> None:
        """Let the thread write what it knows, and end."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- the thread -------------------------------------------------------

    def run(self) -> None:
        """Remember and write until closed."""
        ended = False
        while not ended:
            ended = self._drain()
            due_s = self.due_in_s()
            if due_s is not None and (ended or due_s <= 0):
                self.write()

    def _drain(self) -> bool:
        """Wait until something happens or is due, and apply all that has happened; return whether it was the end."""
        timeout_s = self.due_in_s()
        try:
            event = self._queue.get(timeout=timeout_s)
            while event is not None:
                self.take(event)
                event = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def take(self, event: StoreEvent) -> None:
        """Remember what an event says."""
        match event:
            case StoreState():
                self._take_state(event.reachable)
            case ConfigSeen() if event.config is not None and event.text != self._config:
                self._config = event.text
                self._write_in(0)
            case OwnLease():
                self._take_own(event)
            case LeasesListed():
                self._leases.listed(event)
                self._peers_moved()
            case LeasesChanged():
                self._leases.changed(event)
                self._peers_moved()
            case _:
                pass

    def due_in_s(self) -> float | None:
        """Return in how many seconds the file is to be written, None if it is not. A state without config is none."""
        if self._due_at is None or not self._config:
            return None
        return max(0.0, self._due_at - self._clock.now())

    def write(self) -> None:
        """Write the file now."""
        now = self._clock.now()
        self._note_time()
        try:
            statefile.write(self._path, self.state())
        except StateError as error:
            self._reporter.problem("write", f"{error}; trying again")
            self._due_at = now + RETRY_S
            return
        self._reporter.solved("write", f"cached state {self._path} is written again")
        self._written_at, self._due_at = now, None
        if self._follows:
            self._due_at = now + REFRESH_EACH_S

    def state(self) -> State:
        """Return what is remembered."""
        peers = self._leases.all() if self._leases.synced else self._peers
        own = self._own
        others = peers if own is None else tuple(lease for lease in peers if lease.subnets != own.subnets)
        return State(self._datastore, self._seen_at_s, self._config, own, others)

    @property
    def _follows(self) -> bool:
        """Whether what is remembered is what the store says now."""
        return self._reachable and self._leases.synced

    def _take_state(self, reachable: bool) -> None:
        self._note_time()
        self._reachable = reachable
        if self._follows:
            self._write_in(self._written_at + REFRESH_EACH_S - self._clock.now())

    def _take_own(self, event: OwnLease) -> None:
        lease: Lease | None = event.lease
        if lease is None and not (self._reachable or event.fatal):
            return  # not lost: it cannot be asked for
        if lease != self._own:
            self._own = lease
            self._write_in(0)

    def _peers_moved(self) -> None:
        self._write_in(self._written_at + PEERS_EACH_S - self._clock.now())

    def _note_time(self) -> None:
        if self._follows:
            self._seen_at_s = max(0, int(self._wall()))

    def _write_in(self, seconds: float) -> None:
        at = self._clock.now() + max(0.0, seconds)
        self._due_at = at if self._due_at is None else min(self._due_at, at)
