from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.renewal import lead_s, renewal_in_s, retry_in_s

pytestmark = pytest.mark.pure

DAY_S, MINUTE_S = 86400.0, 60.0


def exactly(low: float, high: float) -> float:
    return low


@pytest.mark.parametrize(
    ("ttl_s", "margin_min", "due_s"),
    [
        (DAY_S, 60, 23 * 3600),
        (DAY_S, 0, DAY_S - 60),
        (DAY_S, 1, DAY_S - 60),
        (DAY_S, 1439, 60),
        (DAY_S, 1440, 60),
        (DAY_S, 10**6, 60),
        (30, 60, 10),
        (30, 0, 20),
        (3, 60, 1),
    ],
)
def test_E09_renewal_is_due_within_the_life_of_the_lease(ttl_s: float, margin_min: float, due_s: float) -> None:
    assert renewal_in_s(ttl_s, ttl_s, margin_min * MINUTE_S, exactly) == pytest.approx(due_s)


def test_E09_reservation_is_never_renewed() -> None:
    assert renewal_in_s(None, DAY_S, 3600, exactly) is None


@given(
    granted_s=st.floats(1, 10 * DAY_S),
    share=st.floats(0.001, 1),
    margin_s=st.floats(0, 100 * DAY_S),
    spread=st.floats(0, 1),
)
def test_E09_next_renewal_is_always_in_zero_to_remaining_life(
    granted_s: float, share: float, margin_s: float, spread: float
) -> None:
    remaining_s = granted_s * share
    due_s = renewal_in_s(remaining_s, granted_s, margin_s, lambda low, high: low + (high - low) * spread)
    assert due_s is not None
    assert 0 < due_s < remaining_s
    assert 0 < lead_s(granted_s, margin_s) < granted_s


@pytest.mark.parametrize(("margin_min", "low_s", "high_s"), [(60, 0.94 * 82800, 82800), (1439, 56, 60)])
def test_renewals_spread_over_nodes_but_not_before_their_time(margin_min: float, low_s: float, high_s: float) -> None:
    earliest = renewal_in_s(DAY_S, DAY_S, margin_min * MINUTE_S, lambda _low, high: high)
    latest = renewal_in_s(DAY_S, DAY_S, margin_min * MINUTE_S, exactly)
    assert earliest is not None
    assert latest is not None
    assert low_s <= earliest < latest <= high_s


def test_overdue_renewal_comes_at_once() -> None:
    assert renewal_in_s(100, DAY_S, 3600, exactly) == 1.0
    assert renewal_in_s(1, DAY_S, 3600, exactly) == 0.5
    assert renewal_in_s(-5, DAY_S, 3600, exactly) == 0.0


@given(backoff_s=st.floats(0.1, 60), remaining_s=st.floats(-DAY_S, DAY_S))
def test_failed_renewal_is_tried_again_before_the_lease_expires(backoff_s: float, remaining_s: float) -> None:
    retry_s = retry_in_s(backoff_s, remaining_s)
    assert 0 < retry_s <= backoff_s
    if remaining_s > 4:
        assert retry_s <= remaining_s / 4
