"""What the rest of the package needs of etcd, in plain values: no gRPC in sight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key. ``lease_id`` is 0 without an etcd lease; revisions are store-wide."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Put:
    """A write inside a transaction."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The config key and all lease keys, as they were together at ``revision``."""

    config: KeyValue | None
    leases: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """An etcd lease: life in seconds as granted and as left, and the keys attached to it."""

    granted_s: int
    remaining_s: int
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Watched:
    """A key, or all keys that start with it, and the first revision to hear of."""

    key: str
    prefix: bool
    from_revision: int


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """A key was written (``kv`` is its new state) or removed (``kv`` is None)."""

    key: str
    kv: KeyValue | None
    revision: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one target (its index), complete up to ``revision``.

    ``index`` is -1, without events, once when all targets are being watched;
    old events of the first targets may come before that.
    """

    index: int
    events: tuple[KeyEvent, ...]
    revision: int


class Store(Protocol):
    """An etcd cluster.

    Every method raises Unavailable, AccessDenied or DatastoreError, and Closed
    after close(). They may be called from several threads.
    """

    def snapshot(self, config_key: str, leases_prefix: str, known: Snapshot | None = None) -> Snapshot:
        """Return config and leases in one transaction: ``known`` itself if nothing was written since that was read."""
        ...

    def get(self, key: str) -> KeyValue | None:
        """Return one key, None if it does not exist."""
        ...

    def names(self, prefix: str, limit: int) -> tuple[str, ...]:
        """Return at most ``limit`` keys that start with ``prefix``."""
        ...

    def txn(self, expect: Mapping[str, int], put: Put | None = None, delete: Sequence[str] = ()) -> int:
        """Write if every key has the expected modification revision (0: does not exist).

        Returns the revision of the write. Raises Conflict if an expectation
        does not hold or the etcd lease of ``put`` is gone.
        """
        ...

    def grant(self, ttl_s: int) -> int:
        """Make an etcd lease and return its id."""
        ...

    def keepalive_once(self, lease_id: int) -> int:
        """Renew an etcd lease; returns its new life in seconds, 0 if it does not exist."""
        ...

    def revoke(self, lease_id: int) -> None:
        """End an etcd lease and all keys attached to it; a lease already gone is fine."""
        ...

    def time_to_live(self, lease_id: int) -> LeaseInfo | None:
        """Return an etcd lease, None if it does not exist."""
        ...

    def watch(self, targets: Sequence[Watched]) -> Iterator[Batch]:
        """Yield events as they come, in the store's order per target.

        Ends by raising only. Raises Compacted if a first revision is no longer
        in the store's history, or ahead of it.
        """
        ...

    def reconnect(self) -> None:
        """Drop all connections, dead ones included; calls in flight raise Unavailable."""
        ...

    def close(self) -> None:
        """Cancel every call in flight; they and all later ones raise Closed."""
        ...
