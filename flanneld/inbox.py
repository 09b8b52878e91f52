"""Where every thread leaves what it noticed, and the owner thread finds it."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import TypeAlias

from backends.dataplane.ports import KernelEvent
from flanneld.traffic.keeper import TrafficState
from subnet.manager import LeasesChanged, StoreEvent

SETTLE_S = 0.02
"""Wait for so long for more of a burst, but not longer than SETTLE_LIMIT_S in all."""
SETTLE_LIMIT_S = 0.1
QUIET_S = 0.1
"""After so long without leases the next one is taken at once: a burst begins with one, and most are of one."""


@dataclass(frozen=True, slots=True)
class KernelEvents:
    """Notifications of the kernel, in order."""

    events: tuple[KernelEvent, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing happened but the wish that the owner looks (a signal, say)."""


Event: TypeAlias = StoreEvent | KernelEvents | TrafficState | Wake


class Inbox:
    """A queue for many writers and one reader."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._leases_at = float("-inf")

    def post(self, event: Event) -> None:
        """Leave an event; never blocks."""
        self._queue.put(event)

    def drain(self, timeout_s: float) -> list[Event]:
        """Wait for an event and return it with those that follow closely; empty after ``timeout_s``.

        Only what comes in bursts is worth waiting for more: notifications of
        the kernel, and changes of leases but the first one after a quiet time.
        """
        try:
            events = [self._queue.get(timeout=max(timeout_s, 0.001))]
        except queue.Empty:
            return []
        limit = time.monotonic() + SETTLE_LIMIT_S
        urgent = False
        while time.monotonic() < limit:
            urgent = urgent or not self._of_a_burst(events[-1])
            try:
                events.append(self._queue.get_nowait() if urgent else self._queue.get(timeout=SETTLE_S))
            except queue.Empty:
                break
        return events

    def _of_a_burst(self, event: Event) -> bool:
        """Whether more of its kind may follow closely."""
        if not isinstance(event, LeasesChanged):
            return isinstance(event, KernelEvents)
        now, earlier = time.monotonic(), self._leases_at
        self._leases_at = now
        return now - earlier < QUIET_S
