"""An etcd in memory on a clock set by hand; tests/datastore/test_etcd_store.py holds it to the real one's behaviour."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from subnet.errors import Closed, Compacted, Conflict, FlannelError
from subnet.etcd.store import Batch, KeyEvent, KeyValue, LeaseInfo, Put, Snapshot, Watched


@dataclass
class ManualClock:
    at: float = 1000.0

    def now(self) -> float:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += seconds


@dataclass
class FakeEtcd:
    clock: ManualClock = field(default_factory=ManualClock)
    revision: int = 1
    keys: dict[str, KeyValue] = field(default_factory=dict)
    leases: dict[int, tuple[int, float]] = field(default_factory=dict)
    history: list[KeyEvent] = field(default_factory=list)
    compacted: int = 0
    failure: FlannelError | None = None
    """Raised by every call while set."""
    calls: list[str] = field(default_factory=list)
    closed: bool = False
    _watchers: list[queue.SimpleQueue[KeyEvent | None]] = field(default_factory=list)
    _next_lease: int = 100

    def _called(self, name: str) -> None:
        if self.closed:
            raise Closed("fake etcd")
        self.calls.append(name)
        if self.failure is not None:
            raise self.failure
        self.expire()

    def expire(self) -> None:
        for lease_id in [i for i, (_, at) in self.leases.items() if at <= self.clock.at]:
            self._end(lease_id)

    def _end(self, lease_id: int) -> None:
        del self.leases[lease_id]
        attached = [k for k, kv in self.keys.items() if kv.lease_id == lease_id]
        if attached:
            self.revision += 1
        for key in attached:
            self._delete(key)

    def _delete(self, key: str) -> None:
        del self.keys[key]
        self._happened(KeyEvent(key, None, self.revision))

    def _put(self, put: Put) -> None:
        old = self.keys.get(put.key)
        created = old.create_revision if old else self.revision
        kv = KeyValue(put.key, put.value, created, self.revision, put.lease_id)
        self.keys[put.key] = kv
        self._happened(KeyEvent(put.key, kv, self.revision))

    def _happened(self, event: KeyEvent) -> None:
        self.history.append(event)
        for watcher in self._watchers:
            watcher.put(event)

    # -- what others do, without leaving a trace in ``calls`` --------------------------

    def put(self, key: str, value: bytes, ttl_s: int = 0) -> None:
        lease_id = self._grant(ttl_s) if ttl_s else 0
        self.revision += 1
        self._put(Put(key, value, lease_id))

    def delete(self, key: str) -> None:
        self.revision += 1
        self._delete(key)

    def compact(self) -> None:
        self.compacted = self.revision

    def _grant(self, ttl_s: int) -> int:
        self._next_lease += 1
        self.leases[self._next_lease] = (ttl_s, self.clock.at + ttl_s)
        return self._next_lease

    # -- Store -----------------------------------------------------------------------------

    def snapshot(self, config_key: str, leases_prefix: str, known: Snapshot | None = None) -> Snapshot:
        if known is not None:
            self._called("revision")
            if known.revision == self.revision:
                return known
        self._called("snapshot")
        leases = tuple(self.keys[k] for k in sorted(self.keys) if k.startswith(leases_prefix))
        return Snapshot(self.keys.get(config_key), leases, self.revision)

    def get(self, key: str) -> KeyValue | None:
        self._called("get")
        return self.keys.get(key)

    def names(self, prefix: str, limit: int) -> tuple[str, ...]:
        self._called("names")
        return tuple(k for k in sorted(self.keys) if k.startswith(prefix))[:limit]

    def txn(self, expect: Mapping[str, int], put: Put | None = None, delete: Sequence[str] = ()) -> int:
        self._called("txn")
        if any((self.keys[k].mod_revision if k in self.keys else 0) != rev for k, rev in expect.items()):
            raise Conflict("changed")
        if put is not None and put.lease_id and put.lease_id not in self.leases:
            raise Conflict("lease not found")
        self.revision += 1
        for key in delete:
            self._delete(key)
        if put is not None:
            self._put(put)
        return self.revision

    def grant(self, ttl_s: int) -> int:
        self._called("grant")
        return self._grant(ttl_s)

    def keepalive_once(self, lease_id: int) -> int:
        self._called("keepalive")
        if lease_id not in self.leases:
            return 0
        ttl_s = self.leases[lease_id][0]
        self.leases[lease_id] = (ttl_s, self.clock.at + ttl_s)
        return ttl_s

    def revoke(self, lease_id: int) -> None:
        self._called("revoke")
        if lease_id in self.leases:
            self._end(lease_id)

    def time_to_live(self, lease_id: int) -> LeaseInfo | None:
        self._called("ttl")
        if lease_id not in self.leases:
            return None
        granted_s, at = self.leases[lease_id]
        attached = frozenset(k for k, kv in self.keys.items() if kv.lease_id == lease_id)
        return LeaseInfo(granted_s, int(at - self.clock.at), attached)

    def watch(self, targets: Sequence[Watched]) -> Iterator[Batch]:
        self._called("watch")
        inbox: queue.SimpleQueue[KeyEvent | None] = queue.SimpleQueue()
        for target in targets:
            if target.from_revision <= self.compacted:
                raise Compacted("compacted")
            if target.from_revision > self.revision + 1:
                raise Compacted("went back")
        for past in self.history:
            inbox.put(past)
        self._watchers.append(inbox)
        yield Batch(-1, (), self.revision)
        while (event := inbox.get()) is not None:
            for index, t in enumerate(targets):
                wanted = event.key.startswith(t.key) if t.prefix else event.key == t.key
                if wanted and event.revision >= t.from_revision:
                    yield Batch(index, (event,), event.revision)
        raise Closed("fake etcd")

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        for watcher in self._watchers:
            watcher.put(None)
