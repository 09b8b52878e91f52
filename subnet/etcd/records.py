"""Lease keys and values of one listing or watch, read one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from subnet.errors import LeaseDataError
from subnet.etcd.layout import Layout
from subnet.etcd.store import KeyEvent, KeyValue
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.report import Reporter
from subnet.wire import decode_attrs, parse_subnet_key

log = logging.getLogger(__name__)


def read_lease(layout: Layout, kv: KeyValue) -> Lease:
    """Return the lease that a key holds. Raises LeaseDataError naming the key."""
    try:
        subnets, attrs = parse_subnet_key(layout.name(kv.key)), decode_attrs(kv.value)
    except LeaseDataError as e:
        raise LeaseDataError(f"{kv.key!r} is skipped: {e}") from e
    return Lease(subnets, attrs, kv.key, kv.lease_id, kv.mod_revision)


def unchanged(lease: Lease, kv: KeyValue) -> bool:
    """Whether a key is in the very state that the lease was read from.

    A store that lost everything counts its revisions from the beginning, but
    hands out no etcd lease twice.
    """
    return (kv.key, kv.mod_revision, kv.lease_id) == (lease.key, lease.revision, lease.lease_id)


def occupied(
    layout: Layout, kvs: Iterable[KeyValue], known: Callable[[KeyValue], Lease | None] = lambda _: None
) -> tuple[Lease, ...]:
    """Return all leases for allocation. What ``known`` returns need not be decoded once more.

    A key with an unusable value still takes its subnet: it is listed with
    empty attributes. Keys that name no subnet are left out.
    """
    leases = []
    for kv in kvs:
        try:
            leases.append(known(kv) or read_lease(layout, kv))
        except LeaseDataError:
            subnets = _subnets(layout, kv.key)
            if subnets is not None:
                leases.append(Lease(subnets, LeaseAttrs(), kv.key, kv.lease_id, kv.mod_revision))
    return tuple(leases)


def _subnets(layout: Layout, key: str) -> Subnets | None:
    try:
        return parse_subnet_key(layout.name(key))
    except LeaseDataError:
        return None


class Records:
    """The usable leases among the keys, known by key.

    A key that becomes unusable keeps its last usable content for as long as it
    exists: its owner most likely still runs, and a slip in one record must not
    cut off a peer. It is reported once per content.
    """

    def __init__(self, layout: Layout, reporter: Reporter) -> None:
        self._layout, self._reporter = layout, reporter
        self._known: dict[str, Lease] = {}
        self._rewritten: dict[str, int] = {}
        """When keys were created, of those written again since."""
        self._unusable: set[str] = set()

    def replace(self, kvs: Iterable[KeyValue]) -> tuple[Lease, ...]:
        """Take over a listing and return its leases, in key order."""
        before, created = self._known, self._rewritten
        self._known, self._rewritten = {}, {}
        present = set()
        for kv in kvs:
            present.add(kv.key)
            lease = self._read(kv)
            if lease is None and (known := before.get(kv.key)) is not None:
                lease = known if created.get(kv.key, known.revision) == kv.create_revision else None
            if lease is not None:
                self._keep(kv, lease)
        for key in self._unusable - present:
            self._readable(key)
        return tuple(self._known.values())

    def lease(self, kv: KeyValue) -> Lease | None:
        """Return the lease that was read from this very state of a key, None if it was not; from any thread."""
        known = self._known.get(kv.key)
        return known if known is not None and unchanged(known, kv) else None

    def change(self, events: Iterable[KeyEvent]) -> tuple[Lease | Subnets, ...]:
        """Take over events and return what they change, in order."""
        changes: list[Lease | Subnets] = []
        for event in events:
            if event.kv is None:
                self._readable(event.key)
                self._rewritten.pop(event.key, None)
                known = self._known.pop(event.key, None)
                if known is not None:
                    changes.append(known.subnets)
                continue
            lease = self._read(event.kv)
            if lease is not None:
                self._keep(event.kv, lease)
                changes.append(lease)
        return tuple(changes)

    def _keep(self, kv: KeyValue, lease: Lease) -> None:
        self._known[kv.key] = lease
        if kv.create_revision == lease.revision:
            self._rewritten.pop(kv.key, None)
        else:
            self._rewritten[kv.key] = kv.create_revision

    def _read(self, kv: KeyValue) -> Lease | None:
        try:
            lease = read_lease(self._layout, kv)
        except LeaseDataError as e:
            self._unusable.add(kv.key)
            self._reporter.problem(kv.key, str(e))
            return None
        self._readable(kv.key)
        return lease

    def _readable(self, key: str) -> None:
        if key in self._unusable:
            self._unusable.discard(key)
            self._reporter.solved(key, f"{key!r} is no longer skipped")
