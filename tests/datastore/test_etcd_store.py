from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from subnet.clock import SystemClock
from subnet.errors import Closed, Compacted, Conflict
from subnet.etcd import client
from subnet.etcd.client import EtcdClient
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import KeyEvent, Put, Store, Watched
from tests.support.etcd import Etcd
from tests.support.fake_etcd import FakeEtcd

pytestmark = pytest.mark.datastore

A, B, CONFIG, PREFIX = "/n/subnets/a", "/n/subnets/b", "/n/config", "/n/subnets/"


@pytest.fixture(params=["fake", "real"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    store: Store
    if request.param == "fake":
        store = FakeEtcd()
    else:
        etcd: Etcd = request.getfixturevalue("etcd")
        store = EtcdClient(EtcdSettings((etcd.url,)), SystemClock())
    yield store
    store.close()


@pytest.fixture
def compact(store: Store, request: pytest.FixtureRequest) -> Callable[[], None]:
    if isinstance(store, FakeEtcd):
        return store.compact
    etcd: Etcd = request.getfixturevalue("etcd")
    return etcd.compact


def test_snapshot_has_config_and_leases_and_nothing_beside_them(store: Store) -> None:
    empty = store.snapshot(CONFIG, PREFIX)
    assert (empty.config, empty.leases) == (None, ())
    revision = [store.txn({}, Put(key, b"x")) for key in (CONFIG, B, A, "/n/subnets2/c", "/n/subnets")][-1]
    snapshot = store.snapshot(CONFIG, PREFIX)
    assert snapshot.config is not None
    assert snapshot.config.value == b"x"
    assert [kv.key for kv in snapshot.leases] == [A, B]
    assert snapshot.revision == revision


def test_snapshot_that_is_known_is_not_read_again_until_anything_is_written(store: Store) -> None:
    store.txn({}, Put(A, b"x"))
    known = store.snapshot(CONFIG, PREFIX)
    assert store.snapshot(CONFIG, PREFIX, known) is known
    store.txn({}, delete=[A])
    without = store.snapshot(CONFIG, PREFIX, known)
    assert (without.leases, without.revision) == ((), known.revision + 1)
    store.txn({}, Put("/elsewhere", b"x"))
    assert store.snapshot(CONFIG, PREFIX, without) is not without


@pytest.fixture
def paged(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdClient]:
    monkeypatch.setattr(client, "PAGE_KEYS", 3)
    found = EtcdClient(EtcdSettings((etcd.url,)), SystemClock())
    for number in range(10):
        found.txn({}, Put(f"{PREFIX}{number}", b"x"))
    yield found
    found.close()


def _meanwhile(paged: EtcdClient, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Have something happen behind the first page."""
    call = paged._call

    def first(what: str, method: Any, request: Any) -> Any:
        reply = call(what, method, request)
        monkeypatch.setattr(paged, "_call", call)
        happens()
        return reply

    monkeypatch.setattr(paged, "_call", first)


def test_pages_of_a_list_are_of_one_revision(paged: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{PREFIX}{number}" for number in range(10)]
    before = paged.snapshot(CONFIG, PREFIX)
    assert [kv.key for kv in before.leases] == names
    _meanwhile(paged, monkeypatch, lambda: paged.txn({}, Put(f"{PREFIX}95", b"x"), delete=(names[8],)))
    assert paged.snapshot(CONFIG, PREFIX) == before
    after = paged.snapshot(CONFIG, PREFIX)
    assert [kv.key for kv in after.leases] == [*names[:8], names[9], f"{PREFIX}95"]
    assert after.revision == before.revision + 1


def test_compaction_between_pages_is_told(paged: EtcdClient, etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    def happens() -> None:
        paged.txn({}, Put(A, b"x"))
        etcd.compact()

    _meanwhile(paged, monkeypatch, happens)
    with pytest.raises(Compacted):
        paged.snapshot(CONFIG, PREFIX)


def test_txn_writes_only_what_is_as_expected(store: Store) -> None:
    lease = store.grant(60)
    first = store.txn({A: 0}, Put(A, b"1", lease))
    kv = store.get(A)
    assert kv is not None
    assert (kv.value, kv.mod_revision, kv.create_revision, kv.lease_id) == (b"1", first, first, lease)
    for expect in ({A: 0}, {A: first - 1}, {A: first, B: first}):
        with pytest.raises(Conflict):
            store.txn(expect, Put(A, b"2"))
    second = store.txn({A: first}, Put(A, b"2"))
    changed = store.get(A)
    assert changed is not None
    assert (changed.mod_revision, changed.create_revision, changed.lease_id) == (second, first, 0)


def test_txn_moves_a_record_to_another_key_at_one_revision(store: Store) -> None:
    first = store.txn({A: 0}, Put(A, b"1"))
    moved = store.txn({B: 0, A: first}, Put(B, b"1"), delete=[A])
    assert store.get(A) is None
    kv = store.get(B)
    assert kv is not None
    assert kv.mod_revision == moved


def test_put_under_a_vanished_lease_is_a_conflict(store: Store) -> None:
    lease = store.grant(60)
    store.revoke(lease)
    with pytest.raises(Conflict):
        store.txn({A: 0}, Put(A, b"1", lease))


def test_lease_objects(store: Store) -> None:
    lease = store.grant(600)
    store.txn({A: 0}, Put(A, b"1", lease))
    info = store.time_to_live(lease)
    assert info is not None
    assert info.granted_s == 600
    assert 590 < info.remaining_s <= 600
    assert info.keys == {A}
    assert store.keepalive_once(lease) == 600
    store.revoke(lease)
    store.revoke(lease)
    assert store.get(A) is None
    assert store.time_to_live(lease) is None
    assert store.keepalive_once(lease) == 0


def test_names(store: Store) -> None:
    for key in (A, B, CONFIG):
        store.txn({}, Put(key, b"x"))
    assert store.names("/n/", 10) == (CONFIG, A, B)
    assert store.names(PREFIX, 1) == (A,)


def test_watch_yields_what_happens_from_a_revision_on(store: Store) -> None:
    store.txn({}, Put(A, b"old"))
    at = store.snapshot(CONFIG, PREFIX).revision
    revisions = [store.txn({}, Put(A, b"1")), store.txn({}, delete=[A]), store.txn({}, Put(CONFIG, b"c"))]
    targets = (Watched(CONFIG, False, at + 1), Watched(PREFIX, True, at + 1))
    events: dict[int, list[KeyEvent]] = {0: [], 1: []}
    alive = 0
    for batch in store.watch(targets):
        if batch.index < 0:
            assert batch.events == ()
            alive += 1
        else:
            events[batch.index] += batch.events
            assert batch.revision == batch.events[-1].revision
        if alive and sum(map(len, events.values())) == 3:
            break
    assert alive == 1
    seen = [(e.key, e.kv and e.kv.value, e.revision) for e in events[1] + events[0]]
    assert seen == [(A, b"1", revisions[0]), (A, None, revisions[1]), (CONFIG, b"c", revisions[2])]


def test_E01_watch_of_a_compacted_revision_says_so(store: Store, compact: Callable[[], None]) -> None:
    first = store.txn({}, Put(A, b"1"))
    store.txn({}, Put(A, b"2"))
    compact()
    with pytest.raises(Compacted):
        list(store.watch([Watched(PREFIX, True, first)]))


def test_E15_watch_from_a_revision_that_the_store_never_had_says_so(store: Store) -> None:
    revision = store.txn({}, Put(A, b"1"))
    with pytest.raises(Compacted):
        list(store.watch([Watched(PREFIX, True, revision + 100)]))


def test_close_ends_a_watch_at_once_and_every_later_call(store: Store) -> None:
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            for _ in store.watch([Watched(PREFIX, True, store.snapshot(CONFIG, PREFIX).revision + 1)]):
                started.set()
        except Closed as e:
            ended.append(e)

    started = threading.Event()
    thread = threading.Thread(target=follow)
    thread.start()
    assert started.wait(10)
    began = time.monotonic()
    store.close()
    thread.join(10)
    assert time.monotonic() - began < 1
    assert len(ended) == 1
    for call in (
        lambda: store.get(A),
        lambda: store.grant(60),
        lambda: store.keepalive_once(1),
        lambda: next(store.watch([Watched(PREFIX, True, 1)])),
    ):
        with pytest.raises(Closed):
            call()
