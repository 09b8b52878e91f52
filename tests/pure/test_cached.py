from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from subnet import statefile
from subnet.cached import CachedManager
from subnet.config import parse_network_config
from subnet.manager import (
    ConfigSeen,
    LeaseRequest,
    LeasesChanged,
    LeasesListed,
    OwnLease,
    Post,
    StoreEvent,
    StoreState,
)
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.recorder import Recorder
from subnet.state import State
from tests.support.clock import ManualClock

pytestmark = pytest.mark.pure

STORE = "etcd /coreos.com/network"
CONFIG = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'
SEEN_AT_S = 1796000000  # 2026-11-30T00:53:20Z
HOUR_S, DAY_S = 3600, 86400
DOWN = StoreState(False, "etcd does not answer")
DEGRADED = StoreState(False, "started from cached state of 2026-11-30T00:53:20Z; datastore: etcd does not answer")


def lease(n: int, revision: int = 1, lease_id: int = 7) -> Lease:
    subnets = Subnets(IPv4Network(f"10.5.{n}.0/24"))
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{n}"), None, "vxlan", {"VNI": 1, "VtepMAC": f"02:00:00:00:00:{n:02x}"})
    return Lease(subnets, attrs, f"/coreos.com/network/subnets/10.5.{n}.0-24", lease_id, revision)


def seen(text: str = CONFIG) -> ConfigSeen:
    return ConfigSeen(parse_network_config(text, "test"), text=text)


OWN = lease(1)
STATE = State(STORE, SEEN_AT_S, CONFIG, OWN, (lease(2), lease(3)))
REQUEST = LeaseRequest(OWN.attrs, parse_network_config(CONFIG, "test"), Subnets())


class Inner:
    def __init__(self) -> None:
        self.post: Post = lambda _: None
        self.requests: list[LeaseRequest] = []
        self.calls: list[str] = []

    def start(self, post: Post) -> None:
        self.post = post

    def want(self, request: LeaseRequest) -> None:
        self.requests.append(request)

    def ready(self) -> None:
        self.calls.append("ready")

    def underlay_changed(self) -> None:
        self.calls.append("underlay_changed")

    def close(self) -> None:
        self.calls.append("close")


class Site:
    def __init__(self, path: Path, age_s: float = HOUR_S, **options: Any) -> None:
        self.path, self.inner, self.told = path, Inner(), list[StoreEvent]()
        self.clock, self.wall_s = ManualClock(), SEEN_AT_S + age_s
        settings = {"offline_start": True} | options
        self.manager = CachedManager(self.inner, path, STORE, clock=self.clock, wall=lambda: self.wall_s, **settings)
        self.manager.start(self.told.append)

    def hear(self, *events: StoreEvent) -> list[StoreEvent]:
        """Return what is passed on."""
        before = len(self.told)
        for event in events:
            self.inner.post(event)
        return self.told[before:]

    def want(self, request: LeaseRequest = REQUEST) -> list[StoreEvent]:
        before = len(self.told)
        self.manager.want(request)
        return self.told[before:]


Make = Callable[..., Site]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    sites: list[Site] = []
    path = tmp_path / "state.json"

    def make(state: State | None = STATE, **options: Any) -> Site:
        if state is not None:
            statefile.write(path, state)
        sites.append(Site(path, **options))
        return sites[-1]

    yield make
    for site in sites:
        site.manager.close()
    assert "state" not in {thread.name for thread in threading.enumerate()}


# -- forwarding ---------------------------------------------------------------


def test_everything_is_passed_on_in_order(make: Make) -> None:
    site = make(None)
    events: list[StoreEvent] = [
        DOWN, StoreState(True), seen(), LeasesListed((lease(2),), 5), OwnLease(OWN), LeasesChanged((lease(3),), 6), DOWN
    ]  # fmt: skip
    assert site.hear(*events) == events
    site.manager.underlay_changed()
    site.manager.close()
    assert site.inner.calls == ["underlay_changed", "close"]
    assert site.want() == []
    assert site.inner.requests == [REQUEST]


# -- the start without the store ----------------------------------------------


def test_the_cached_state_stands_in_for_a_store_that_does_not_answer(make: Make) -> None:
    site = make()
    assert site.hear(DOWN) == [DEGRADED, seen(), LeasesListed((OWN, lease(2), lease(3)), 0, complete=False)]
    assert site.want() == [OwnLease(OWN)]
    assert site.inner.requests == [replace(REQUEST, previous=OWN.subnets)]
    assert site.want() == []


def test_it_stands_in_once_and_the_state_goes_on_to_tell(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    site = make()
    site.hear(DOWN)
    assert site.hear(StoreState(False, "no route")) == [
        StoreState(False, "started from cached state of 2026-11-30T00:53:20Z; datastore: no route")
    ]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == [
        "starting from cached state of 2026-11-30T00:53:20Z, 60 min old, with 2 peers and our lease 10.5.1.0/24,"
        " as the datastore does not answer: etcd does not answer"
    ]


def test_the_store_that_comes_back_replaces_everything(make: Make) -> None:
    site = make()
    site.hear(DOWN)
    site.want()
    events: list[StoreEvent] = [StoreState(True), seen(), LeasesListed((lease(2),), 9), OwnLease(lease(4)), DOWN]
    assert site.hear(*events) == events


def test_without_the_flag_nothing_is_told(make: Make) -> None:
    site = make(offline_start=False)
    assert site.hear(DOWN) == [DOWN]
    assert site.want() == []
    assert site.inner.requests == [replace(REQUEST, previous=OWN.subnets)]


def test_a_store_that_was_read_already_needs_no_stand_in(make: Make) -> None:
    site = make()
    site.hear(StoreState(True), seen(), LeasesListed((), 5))
    assert site.hear(DOWN) == [DOWN]
    assert site.want() == []


def test_a_config_from_elsewhere_is_kept(make: Make) -> None:
    site = make()
    assert site.hear(seen('{"Network":"10.5.0.0/16"}'), DOWN)[1:] == [
        DEGRADED,
        LeasesListed((OWN, lease(2), lease(3)), 0, complete=False),
    ]


@pytest.mark.parametrize(
    ("age_s", "lease_id", "told"),
    [
        (DAY_S - 1, 7, "23 h old, with 2 peers and our lease 10.5.1.0/24, as"),
        (DAY_S, 7, "24 h old, with 2 peers and our lease 10.5.1.0/24, which has expired meanwhile"),
        (3 * DAY_S, 0, "3 d old, with 2 peers and our lease 10.5.1.0/24, as"),
        (-HOUR_S, 7, "which is later than this host's clock, with 2 peers"),
    ],
    ids=["alive", "expired", "reservation", "clock behind"],
)
def test_an_old_lease_is_used_and_its_age_is_told(
    make: Make, caplog: pytest.LogCaptureFixture, age_s: float, lease_id: int, told: str
) -> None:
    own = lease(1, lease_id=lease_id)
    site = make(replace(STATE, own=own), age_s=age_s)
    site.hear(DOWN)
    assert site.want() == [OwnLease(own)]
    assert told in caplog.text


OTHER_HOST = replace(REQUEST, attrs=lease(9).attrs)
OTHER_NETWORK = replace(REQUEST, config=parse_network_config('{"Network":"10.6.0.0/16"}', "test"))
DUAL_CONFIG = '{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"}'
DUAL = replace(REQUEST, config=parse_network_config(DUAL_CONFIG, "test"))
OTHER_SUBNET = replace(REQUEST, previous=Subnets(IPv4Network("10.5.8.0/24")))


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (OTHER_HOST, "its public IPv4 address is 192.0.2.1, ours is 192.0.2.9"),
        (OTHER_NETWORK, "it is outside 10.6.0.0/16"),
        (DUAL, "IPv6 was off"),
        (OTHER_SUBNET, "the subnet file, which containers follow, has 10.5.8.0/24"),
    ],
    ids=["address", "network", "family", "subnet file"],
)
def test_a_lease_that_is_not_ours_is_not_used(
    make: Make, caplog: pytest.LogCaptureFixture, request_: LeaseRequest, told: str
) -> None:
    site = make()
    site.hear(DOWN)
    assert site.want(request_) == []
    assert site.inner.requests == [request_]
    assert f"cached lease 10.5.1.0/24 is not used: {told}" in caplog.text
    assert site.want() == [OwnLease(OWN)]


def test_the_subnet_of_the_subnet_file_agrees(make: Make) -> None:
    site = make()
    site.hear(DOWN)
    assert site.want(replace(REQUEST, previous=OWN.subnets)) == [OwnLease(OWN)]


def test_a_state_without_own_lease_starts_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    site = make(replace(STATE, own=None))
    assert site.hear(DOWN) == [DOWN]
    assert "holds no lease of this node" in caplog.text


def test_a_lease_from_the_store_is_not_overridden(make: Make) -> None:
    site = make()
    site.hear(DOWN)
    assert site.hear(OwnLease(lease(4))) == [OwnLease(lease(4))]
    assert site.want() == []


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (replace(STATE, datastore="etcd /other"), "belongs to etcd /other, not to etcd /coreos.com/network"),
        (replace(STATE, config="{}"), "config: Network is missing"),
    ],
    ids=["network", "config"],
)
def test_a_foreign_state_is_not_used(make: Make, caplog: pytest.LogCaptureFixture, state: State, told: str) -> None:
    site = make(state)
    assert told in caplog.text
    assert site.hear(DOWN) == [DOWN]
    site.want()
    assert site.inner.requests == [REQUEST]


def test_a_broken_file_counts_as_absent_and_is_replaced(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    site = make()
    site.manager.close()
    site.path.write_bytes(site.path.read_bytes()[:50])
    site = make(None)
    assert "invalid JSON" in caplog.text
    assert site.hear(DOWN) == [DOWN]
    site.hear(StoreState(True), seen(), LeasesListed((OWN, lease(2)), 5), OwnLease(OWN))
    site.manager.close()
    assert statefile.read(site.path) == replace(STATE, seen_at_s=SEEN_AT_S + HOUR_S, peers=(lease(2),))


def test_a_pool_that_is_the_whole_network_is_taken_so(make: Make) -> None:
    # As with Kubernetes: a range that etcd's allocation could not use.
    text = '{"Network":"10.5.0.0/16","SubnetLen":30,"SubnetMin":"10.9.0.0"}'
    site = make(replace(STATE, config=text), check_pools=False)
    told = site.hear(DOWN)[1]
    assert isinstance(told, ConfigSeen)
    assert told.config == parse_network_config(text, "test", check_pools=False)


# -- what is remembered -------------------------------------------------------


class Book:
    def __init__(self, tmp_path: Path, earlier: State | None = None) -> None:
        self.clock, self.wall_s = ManualClock(), SEEN_AT_S + 0.5
        self.path = tmp_path / "state.json"
        self.recorder = Recorder(self.path, STORE, earlier, self.clock, lambda: self.wall_s)

    def take(self, *events: StoreEvent) -> Book:
        for event in events:
            self.recorder.take(event)
        return self

    def pass_s(self, seconds: float) -> Book:
        self.clock.pass_s(seconds)
        self.wall_s += seconds
        return self

    @property
    def due_s(self) -> float | None:
        return self.recorder.due_in_s()

    @property
    def remembered(self) -> State:
        return self.recorder.state()

    def written(self) -> State | None:
        self.recorder.write()
        return statefile.read(self.path)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path).take(StoreState(True), seen(), LeasesListed((OWN, lease(2), lease(3)), 5), OwnLease(OWN))
    assert book.due_s == 0
    assert book.written() == STATE
    return book


def test_config_and_own_lease_are_due_at_once_and_peers_after_30_s(book: Book) -> None:
    assert book.due_s == HOUR_S
    book.pass_s(10).take(LeasesChanged((lease(4), lease(2).subnets), 6))
    assert book.due_s == 20
    book.pass_s(5).take(LeasesChanged((lease(5),), 7))
    assert book.due_s == 15
    book.take(OwnLease(OWN), seen())
    assert book.due_s == 15
    book.take(OwnLease(replace(OWN, revision=8)))
    assert book.due_s == 0
    assert book.written() == State(
        STORE, SEEN_AT_S + 15, CONFIG, replace(OWN, revision=8), (lease(3), lease(4), lease(5))
    )
    book.take(seen('{"Network":"10.5.0.0/16"}'))
    assert book.due_s == 0


def test_peers_that_changed_long_after_the_last_write_are_due_at_once(book: Book) -> None:
    assert book.pass_s(31).take(LeasesChanged((lease(4),), 6)).due_s == 0


def test_unchanged_state_is_confirmed_each_hour_while_the_store_answers(book: Book) -> None:
    assert book.pass_s(HOUR_S).due_s == 0
    assert book.written() == replace(STATE, seen_at_s=SEEN_AT_S + HOUR_S)
    book.take(DOWN).pass_s(HOUR_S)
    assert book.written() == replace(STATE, seen_at_s=SEEN_AT_S + HOUR_S)
    assert book.due_s is None
    assert book.take(StoreState(True)).due_s == HOUR_S
    assert book.written() == replace(STATE, seen_at_s=SEEN_AT_S + 2 * HOUR_S)


def test_a_usable_config_is_kept_beside_a_broken_one(book: Book) -> None:
    book.take(ConfigSeen(None, "broken"))
    assert book.due_s == HOUR_S
    assert book.written() == STATE


def test_a_lost_lease_is_forgotten_but_not_one_that_cannot_be_asked_for(book: Book) -> None:
    assert book.take(DOWN, OwnLease(None, "etcd does not answer")).remembered.own == OWN
    assert book.take(StoreState(True), OwnLease(None, "no free subnet")).remembered.own is None
    assert book.due_s == 0


def test_a_lease_whose_loss_ends_the_daemon_is_forgotten(book: Book) -> None:
    assert book.take(DOWN, OwnLease(None, "lost", fatal=True)).remembered.own is None


def test_the_earlier_state_stays_until_the_store_says_more(tmp_path: Path) -> None:
    book = Book(tmp_path, STATE).pass_s(DAY_S).take(DOWN, OwnLease(None, "etcd does not answer"), StoreState(True))
    assert book.due_s is None
    assert book.written() == STATE
    book.take(seen('{"Network":"10.5.0.0/16"}'))
    assert book.written() == replace(STATE, config='{"Network":"10.5.0.0/16"}')
    book.take(LeasesListed((lease(7),), 50))
    assert book.written() == State(STORE, SEEN_AT_S + DAY_S, '{"Network":"10.5.0.0/16"}', OWN, (lease(7),))


def test_without_a_config_there_is_nothing_to_write(tmp_path: Path) -> None:
    assert Book(tmp_path).take(StoreState(True), ConfigSeen(None, "none"), LeasesListed((), 5)).due_s is None


def test_a_file_that_cannot_be_written_is_told_once_and_tried_again(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    book.path.unlink()
    book.path.mkdir()
    for _ in range(3):
        book.recorder.write()
        assert book.due_s == 30
        book.pass_s(30)
    book.path.rmdir()
    book.recorder.write()
    assert statefile.read(book.path) is not None
    assert [r.getMessage() for r in caplog.records if r.name == "subnet.recorder"] == [
        f"cached state {book.path}: is no regular file; trying again",
        f"cached state {book.path} is written again",
    ]


def test_the_thread_writes_by_itself_and_at_the_end(tmp_path: Path) -> None:
    site = Site(tmp_path / "state.json")
    site.hear(StoreState(True), seen(), LeasesListed((OWN, lease(2)), 5), OwnLease(OWN))
    for _ in range(1000):
        if site.path.exists() and json.loads(site.path.read_bytes())["own"] is not None:
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail("nothing is written")
    site.hear(LeasesChanged((lease(3),), 6))
    site.manager.close()
    assert statefile.read(site.path) == replace(STATE, seen_at_s=SEEN_AT_S + HOUR_S)
