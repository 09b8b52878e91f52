"""Taking, changing and dropping lease keys: compare-and-swap transactions, and their etcd leases."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from subnet.allocate import Create, Reuse
from subnet.clock import Clock
from subnet.errors import AccessDenied, Conflict, DatastoreError
from subnet.etcd.decide import own_value
from subnet.etcd.layout import Layout
from subnet.etcd.store import KeyValue, LeaseInfo, Put, Store
from subnet.model import LEASE_TTL_S, Lease, LeaseAttrs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """The own key as last written or read. ``expires_at`` is a clock reading, None for a reservation."""

    lease: Lease
    value: bytes
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Claims:
    """Writes to lease keys. Every method raises Conflict if a key is no longer as it was read."""

    store: Store
    layout: Layout
    clock: Clock

    def reuse(self, plan: Reuse, kv: KeyValue, attrs: LeaseAttrs) -> Held:
        """Take an existing key. Nothing is written if it has the right value and etcd lease already."""
        value = own_value(attrs, kv.value)
        lease_id, expires_at = kv.lease_id, None
        if kv.lease_id:
            lease_id, expires_at = self._renewed(kv)
        if value == kv.value and lease_id == kv.lease_id:
            revision = kv.mod_revision
        else:
            with self._undone_on_conflict(lease_id if lease_id != kv.lease_id else 0):
                revision = self.store.txn({kv.key: kv.mod_revision}, Put(kv.key, value, lease_id))
        if lease_id != kv.lease_id:
            self.release(kv.lease_id)
        return Held(Lease(plan.subnets, attrs, kv.key, lease_id, revision), value, expires_at)

    def create(self, plan: Create, kept: bytes | None, attrs: LeaseAttrs) -> Held:
        """Create a key, and delete the own ones that it replaces in the same transaction.

        ``kept`` is an earlier own value; members of it that are not ours to know survive.
        """
        key, value = self.layout.key(plan.subnets), own_value(attrs, kept)
        lease_id, expires_at = (0, None) if plan.reserved else self._granted()
        gone = {lease.key: lease.revision for lease in plan.replaces}
        with self._undone_on_conflict(lease_id):
            revision = self.store.txn({key: 0} | gone, Put(key, value, lease_id), delete=tuple(gone))
        for lease in plan.replaces:
            self.release(lease.lease_id)
        return Held(Lease(plan.subnets, attrs, key, lease_id, revision), value, expires_at)

    def drop(self, leases: Iterable[Lease]) -> None:
        """Delete own keys that are no longer needed."""
        for lease in leases:
            self.store.txn({lease.key: lease.revision}, delete=(lease.key,))
            log.info("lease %s (%s) dropped: this node holds another one", lease.subnets, lease.key)
            self.release(lease.lease_id)

    def release(self, lease_id: int) -> None:
        """Revoke an etcd lease that is out of use; one with keys attached is left alone."""
        try:
            info = self.store.time_to_live(lease_id) if lease_id else None
            if info is not None and not info.keys:
                self.store.revoke(lease_id)
        except DatastoreError as e:
            log.debug("superseded etcd lease %x is left to expire: %s", lease_id, e)

    def _renewed(self, kv: KeyValue) -> tuple[int, float]:
        """Give an existing key its full life: by its own etcd lease if that fits, else by a new one."""
        info = self._info(kv.lease_id)
        if info is not None and info.granted_s == LEASE_TTL_S and info.keys == {kv.key}:
            now = self.clock.now()
            ttl_s = self.store.keepalive_once(kv.lease_id)
            if ttl_s:
                return kv.lease_id, now + ttl_s
        return self._granted()

    def _info(self, lease_id: int) -> LeaseInfo | None:
        try:
            return self.store.time_to_live(lease_id)
        except AccessDenied as e:  # it holds keys of others, too
            log.debug("etcd lease %x: %s", lease_id, e)
            return None

    def _granted(self) -> tuple[int, float]:
        now = self.clock.now()
        return self.store.grant(LEASE_TTL_S), now + LEASE_TTL_S

    @contextlib.contextmanager
    def _undone_on_conflict(self, lease_id: int) -> Iterator[None]:
        """Revoke a new etcd lease (0: none) if the key it was made for is lost to someone else."""
        try:
            yield
        except Conflict:
            if lease_id:
                self.release(lease_id)
            raise


def by_key(kvs: Iterable[KeyValue]) -> Mapping[str, KeyValue]:
    """Index a listing."""
    return {kv.key: kv for kv in kvs}
