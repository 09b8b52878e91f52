"""Say a lasting problem once, not once a second."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from subnet.clock import Clock


@dataclass
class Reporter:
    """Logs each topic's problem when it starts, when its text changes, each ``again_s``, and when it ends."""

    log: logging.Logger
    clock: Clock
    again_s: float = 60.0
    _open: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)

    def problem(self, topic: str, text: str, level: int = logging.WARNING) -> None:
        """Report that ``topic`` is in trouble, for the reason ``text``."""
        known, said_at = self._open.get(topic, ("", 0.0))
        now = self.clock.now()
        if known == text and now - said_at < self.again_s:
            return
        self._open[topic] = (text, now)
        self.log.log(level, "%s", text)

    def solved(self, topic: str, text: str) -> None:
        """Report that ``topic`` works again; silent if it was not in trouble."""
        if self._open.pop(topic, None) is not None:
            self.log.info("%s", text)

    def forget(self, topic: str) -> None:
        """Drop a topic without a word: somebody else tells that it works again."""
        self._open.pop(topic, None)

    def forget_except(self, topics: Collection[str]) -> None:
        """Drop, without a word, every topic that no longer exists."""
        for gone in [topic for topic in self._open if topic not in topics]:
            del self._open[gone]
