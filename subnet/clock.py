"""Time as a parameter: nothing else in the project asks the system for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start; never steps, counts suspended time."""

    def now(self) -> float:
        """Return the current reading in seconds."""
        ...


class SystemClock:
    """CLOCK_BOOTTIME (clock_gettime(2)): wall-clock steps do not touch it, suspend counts.

    Leases go on ageing while a host sleeps, so suspended time has to count.
    """

    def now(self) -> float:
        """Return seconds since boot."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Backoff:
    """Delays for repeated failures: doubling, with jitter and a ceiling, reset by success."""

    first_s: float = 0.1
    ceiling_s: float = 10.0
    jitter: float = 0.2
    """Each delay is spread by this share of itself, upwards and downwards."""
    uniform: Callable[[float, float], float] = random.uniform
    _next_s: float = field(default=0.0, init=False)

    def next_s(self) -> float:
        """Return how long to wait now, in seconds; the following wait is longer."""
        base = self._next_s or self.first_s
        self._next_s = min(base * 2, self.ceiling_s)
        return min(base * self.uniform(1 - self.jitter, 1 + self.jitter), self.ceiling_s)

    def reset(self) -> None:
        """Start from the first delay again."""
        self._next_s = 0.0


@dataclass
class Throttle:
    """Keeps costly work from eating the host: a few runs may follow at once, then each waits by its own cost.

    Of more than ``burst`` runs within ``window_s`` the next waits for ``rest``
    times what the last one took.
    """

    burst: int = 4
    window_s: float = 3.0
    rest: float = 4.0
    _began: list[float] = field(default_factory=list, init=False)
    _next_at: float = field(default=0.0, init=False)

    def ran(self, began: float, ended: float) -> None:
        """Note a run, by clock readings in seconds."""
        self._began = [at for at in self._began if ended - at < self.window_s] + [began]
        self._next_at = ended + self.rest * (ended - began) if len(self._began) > self.burst else ended

    def next_at(self) -> float:
        """Return when the next run may begin."""
        return self._next_at
