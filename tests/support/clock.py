"""Time that only moves when told to."""

from __future__ import annotations


class ManualClock:
    """A Clock for tests."""

    def __init__(self, at_s: float = 1000.0) -> None:
        self.at_s = at_s

    def now(self) -> float:
        return self.at_s

    def pass_s(self, seconds: float) -> None:
        self.at_s += seconds
