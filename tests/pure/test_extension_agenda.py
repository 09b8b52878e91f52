from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.extension.agenda import REMOVE_TRIES, Agenda, Job
from subnet.model import Lease, LeaseAttrs, Subnets

pytestmark = pytest.mark.pure

OWN = Subnets(ip_network("10.5.1.0/24"))  # type: ignore[arg-type]
OTHER_OWN = Subnets(ip_network("10.5.77.0/24"))  # type: ignore[arg-type]
PRE = Job("PreStartupCommand")
POST = Job("PostStartupCommand", OWN)


def peer(n: int, data: str = "") -> Lease:
    attrs = LeaseAttrs(ip_address(f"192.0.2.{n}"), None, "extension", data)  # type: ignore[arg-type]
    return Lease(Subnets(ip_network(f"10.5.{n}.0/24")), attrs, f"/n/10.5.{n}.0-24")  # type: ignore[arg-type]


def add(lease: Lease) -> Job:
    return Job("SubnetAddCommand", lease=lease)


def remove(lease: Lease) -> Job:
    return Job("SubnetRemoveCommand", lease=lease)


def settle(agenda: Agenda, now_s: float = 0.0) -> list[Job]:
    """Let everything that is due succeed; return it in order."""
    done = []
    while (job := agenda.next(now_s)) is not None:
        agenda.finished(job, "", now_s)
        done.append(job)
    return done


def running(*peers: Lease) -> Agenda:
    agenda = Agenda()
    agenda.want(OWN, peers)
    settle(agenda)
    return agenda


def test_order_is_pre_post_then_peers() -> None:
    agenda = Agenda()
    assert agenda.unprepared()
    assert agenda.next(0) == PRE
    agenda.finished(PRE, "", 0)
    assert agenda.unprepared() == ""
    assert agenda.next(0) is None
    assert agenda.due_in_s(0) is None
    agenda.want(OWN, [peer(2), peer(3)])
    assert agenda.unready()
    assert settle(agenda) == [POST, add(peer(2)), add(peer(3))]
    assert agenda.unready() == ""
    assert agenda.due_in_s(0) is None


def test_failed_startup_commands_are_tried_again_ever_more_slowly() -> None:
    agenda = Agenda()
    waits, now_s = [], 0.0
    for _ in range(10):
        assert agenda.next(now_s) == PRE
        agenda.finished(PRE, "PreStartupCommand ended with exit code 1", now_s)
        assert agenda.next(now_s) is None
        assert agenda.unprepared() == "PreStartupCommand ended with exit code 1"
        wait_s = agenda.due_in_s(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        now_s += wait_s
    assert 0.5 < waits[0] < 2
    assert max(waits) <= 60.001  # differences of floats
    assert waits[9] > 30
    agenda.finished(PRE, "", now_s)
    agenda.want(OWN, [])
    agenda.finished(POST, "PostStartupCommand was killed after 30 s", now_s)
    assert agenda.unready() == "PostStartupCommand was killed after 30 s"
    assert agenda.next(now_s) is None
    assert agenda.next(now_s + 2) == POST


def test_one_peer_in_trouble_does_not_hold_up_the_others() -> None:
    agenda = Agenda()
    agenda.finished(PRE, "", 0)
    agenda.want(OWN, [peer(2), peer(3), peer(4)])
    agenda.finished(POST, "", 0)
    assert agenda.next(0) == add(peer(2))
    agenda.finished(add(peer(2)), "SubnetAddCommand for 10.5.2.0/24 ended with exit code 2", 0)
    assert agenda.unready()
    # Even when the failed one is due again, those that were never tried go first.
    assert settle(agenda, 100.0) == [add(peer(3)), add(peer(4)), add(peer(2))]
    assert agenda.problems() == {}


def test_ready_once_every_peer_was_tried_and_the_failed_one_is_named() -> None:
    agenda = Agenda()
    agenda.finished(PRE, "", 0)
    agenda.want(OWN, [peer(2), peer(3)])
    agenda.finished(POST, "", 0)
    agenda.finished(add(peer(2)), "no", 0)
    agenda.finished(add(peer(3)), "", 0)
    assert agenda.unready() == ""
    assert agenda.problems() == {"/n/10.5.2.0-24": "no"}
    agenda.want(OWN, [peer(2), peer(3), peer(4)])
    assert agenda.unready() == ""


def test_unchanged_peers_cost_nothing_and_revisions_are_no_change() -> None:
    agenda = running(peer(2))
    agenda.want(OWN, [replace(peer(2), revision=99)])
    assert agenda.next(0) is None


def test_removal_gets_the_attributes_it_was_added_with() -> None:
    agenda = running(peer(2, "old"))
    agenda.want(OWN, [])
    assert settle(agenda) == [remove(peer(2, "old"))]
    assert agenda.next(1e9) is None


def test_changed_peer_is_removed_as_it_was_and_added_as_it_is() -> None:
    agenda = running(peer(2, "old"))
    agenda.want(OWN, [peer(2, "new")])
    assert agenda.next(0) == remove(peer(2, "old"))
    agenda.finished(remove(peer(2, "old")), "exit code 1", 0)
    assert settle(agenda) == [add(peer(2, "new"))]
    agenda.want(OWN, [])
    assert settle(agenda) == [remove(peer(2, "new"))]


def test_peer_never_added_is_never_removed_but_a_failed_addition_is_undone() -> None:
    agenda = Agenda()
    agenda.finished(PRE, "", 0)
    agenda.want(OWN, [peer(2), peer(3)])
    agenda.finished(POST, "", 0)
    agenda.finished(add(peer(2)), "no", 0)
    agenda.want(OWN, [])
    assert settle(agenda) == [remove(peer(2))]


def test_removal_is_given_up_after_some_tries() -> None:
    agenda = running(peer(2))
    agenda.want(OWN, [])
    tries, now_s = 0, 0.0
    while (job := agenda.next(now_s)) is not None:
        assert job == remove(peer(2))
        tries += 1
        agenda.finished(job, "no such route", now_s)
        now_s += 1000
    assert tries == REMOVE_TRIES
    assert agenda.problems() == {}


def test_peer_that_goes_while_it_is_added_is_removed_and_one_that_returns_is_added_again() -> None:
    agenda = Agenda()
    agenda.finished(PRE, "", 0)
    agenda.want(OWN, [peer(2)])
    agenda.finished(POST, "", 0)
    job = agenda.next(0)
    assert job == add(peer(2))
    agenda.want(OWN, [])
    agenda.finished(job, "", 0)
    assert agenda.next(0) == remove(peer(2))
    agenda.want(OWN, [peer(2)])
    agenda.finished(remove(peer(2)), "", 0)
    assert settle(agenda) == [add(peer(2))]


def test_other_own_subnets_begin_anew_after_pre() -> None:
    agenda = running(peer(2))
    agenda.want(OTHER_OWN, [peer(2)])
    assert agenda.unready()
    assert settle(agenda) == [Job("PostStartupCommand", OTHER_OWN), add(peer(2))]
    agenda.want(OWN, [peer(2)])
    agenda.finished(Job("PostStartupCommand", OTHER_OWN), "", 0)
    assert agenda.next(0) == POST


STEPS = st.lists(
    st.tuples(st.dictionaries(st.integers(2, 5), st.sampled_from("ab")), st.integers(0, 4), st.booleans()), max_size=12
)


@given(STEPS)
def test_in_the_end_exactly_the_wanted_peers_are_there(steps: list[tuple[dict[int, str], int, bool]]) -> None:
    agenda = running()
    there: dict[Subnets, LeaseAttrs] = {}
    now_s = 0.0

    def play(fail: bool) -> bool:
        nonlocal now_s
        job = agenda.next(now_s)
        if job is None or job.lease is None:
            return False
        if job.name == "SubnetAddCommand":
            assert job.lease.subnets not in there or there[job.lease.subnets] == job.lease.attrs
            there[job.lease.subnets] = job.lease.attrs
        else:
            assert there.pop(job.lease.subnets, job.lease.attrs) == job.lease.attrs
        agenda.finished(job, "no" if fail and job.name == "SubnetAddCommand" else "", now_s)
        return True

    wanted: dict[int, str] = {}
    for wanted, count, fail in steps:
        agenda.want(OWN, [peer(n, data) for n, data in wanted.items()])
        for _ in range(count):
            play(fail)
        now_s += 1
    now_s += 1000
    while play(False):
        now_s += 1000
    assert there == {peer(n).subnets: peer(n, data).attrs for n, data in wanted.items()}
    assert agenda.problems() == {}
