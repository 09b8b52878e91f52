from __future__ import annotations

import pytest

from subnet.clock import Backoff, Throttle

pytestmark = pytest.mark.pure


def test_a_few_runs_follow_at_once_then_each_waits_by_its_cost() -> None:
    throttle = Throttle(burst=3, window_s=3.0, rest=4.0)
    now = 100.0
    for _ in range(3):
        assert throttle.next_at() <= now
        throttle.ran(now, now + 0.1)
        now += 0.1
    throttle.ran(now, now + 0.2)
    assert throttle.next_at() == pytest.approx(now + 0.2 + 0.8)


def test_after_a_quiet_time_runs_are_free_again() -> None:
    throttle = Throttle(burst=1, window_s=3.0)
    throttle.ran(0.0, 1.0)
    throttle.ran(1.0, 2.0)
    assert throttle.next_at() == pytest.approx(6.0)
    throttle.ran(6.0, 6.5)
    assert throttle.next_at() == pytest.approx(6.5)


def test_backoff_doubles_up_to_its_ceiling_and_starts_anew() -> None:
    backoff = Backoff(first_s=0.5, ceiling_s=3.0, uniform=lambda low, high: (low + high) / 2)
    assert [backoff.next_s() for _ in range(5)] == pytest.approx([0.5, 1.0, 2.0, 3.0, 3.0])
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.5)


def test_backoff_never_waits_longer_than_its_ceiling() -> None:
    backoff = Backoff(first_s=2.0, ceiling_s=2.0, jitter=0.5, uniform=lambda low, high: high)
    assert backoff.next_s() == 2.0
