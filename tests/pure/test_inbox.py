from __future__ import annotations

import pytest

from flanneld import inbox as module
from flanneld.inbox import Event, Inbox, KernelEvents, Wake
from subnet.manager import LeasesChanged, StoreState

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly a test goes on, what it posts one after the other is a burst."""
    monkeypatch.setattr(module, "SETTLE_LIMIT_S", 60.0)
    monkeypatch.setattr(module, "QUIET_S", 60.0)


def _change(revision: int) -> LeasesChanged:
    return LeasesChanged((), revision)


def test_events_that_follow_closely_come_together() -> None:
    inbox = Inbox()
    for event in (KernelEvents(()), _change(1), _change(2), Wake()):
        inbox.post(event)
    assert inbox.drain(1.0) == [KernelEvents(()), _change(1), _change(2), Wake()]
    assert inbox.drain(0.0) == []


@pytest.mark.parametrize("event", [Wake(), StoreState(True), _change(1)])
def test_what_comes_alone_is_not_held_up(monkeypatch: pytest.MonkeyPatch, event: Event) -> None:
    monkeypatch.setattr(module, "SETTLE_S", -1.0)  # to wait is an error
    inbox = Inbox()
    inbox.post(event)
    assert inbox.drain(1.0) == [event]


def test_first_change_of_leases_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    inbox.post(_change(1))
    assert inbox.drain(1.0) == [_change(1)]
    monkeypatch.setattr(module, "SETTLE_S", -1.0)
    inbox.post(_change(2))
    with pytest.raises(ValueError, match="non-negative"):
        inbox.drain(1.0)  # a burst, perhaps: worth a moment


def test_nothing_happens() -> None:
    assert Inbox().drain(0.0) == []
