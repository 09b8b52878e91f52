"""What the daemon knows of its own health."""

from __future__ import annotations

from dataclasses import dataclass, field

from subnet.clock import Clock

STUCK_S = 60.0
"""A loop that has not come round for so long is taken for stuck."""


@dataclass
class Health:
    """What the endpoints tell; written by the owner thread, read by any.

    ``reason`` says why the daemon is not ready or, while it is, what is wrong nevertheless.
    """

    clock: Clock
    ready: bool = False
    reason: str = "starting"
    beat_at: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.beat()

    def beat(self) -> None:
        """Sign of life of the owner thread."""
        self.beat_at = self.clock.now()

    @property
    def stuck(self) -> bool:
        """Whether the owner thread has stopped coming round."""
        return self.clock.now() - self.beat_at > STUCK_S
