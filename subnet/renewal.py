"""When a lease is renewed. Pure: durations in, durations out."""

from __future__ import annotations

from collections.abc import Callable

FLOOR_S = 60.0
"""Least distance of a renewal from grant and from expiry, if the lease is long enough."""
SPREAD = 0.05
"""Renewals come earlier by up to this share, so that nodes started together drift apart."""


def lead_s(granted_s: float, margin_s: float) -> float:
    """Return how long before its expiry a lease of ``granted_s`` is renewed.

    The wanted margin, moved into the lease's life where it is too large or
    too small for it: a third of a short life stays free at either end.
    """
    floor_s = min(FLOOR_S, granted_s / 3)
    return min(max(margin_s, floor_s), granted_s - floor_s)


def renewal_in_s(
    remaining_s: float | None,
    granted_s: float,
    margin_s: float,
    uniform: Callable[[float, float], float],
) -> float | None:
    """Return in how many seconds to renew; None for a reservation, which has no remaining life.

    Always within (0, remaining life): an overdue renewal comes within a second.
    """
    if remaining_s is None:
        return None
    due_s = remaining_s - lead_s(granted_s, margin_s)
    if due_s <= 0:
        return max(0.0, min(1.0, remaining_s / 2))
    return due_s * (1 - uniform(0, SPREAD))


def retry_in_s(backoff_s: float, remaining_s: float) -> float:
    """Return when to try again after a failed renewal.

    The back-off, but several more attempts before the lease expires; none
    of that once it has expired.
    """
    return backoff_s if remaining_s <= 0 else min(backoff_s, max(remaining_s / 4, 1.0))
