"""etcd v3 over gRPC: failover, deadlines, authentication, and our errors.

The stubs are those of the etcd3 distribution; its client class is not used: it
has no deadline on watches, fails over at random and never refreshes a token.
API: etcd Documentation, dev-guide/api_reference_v3.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from subnet.clock import Clock
from subnet.errors import AccessDenied, Closed, Compacted, Conflict, Unavailable
from subnet.etcd.endpoint import TlsFiles, parse_endpoints
from subnet.etcd.faults import SERVER, Kind, kind, translate
from subnet.etcd.layout import range_end
from subnet.etcd.link import Link
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import Batch, KeyEvent, KeyValue, LeaseInfo, Put, Snapshot, Watched
from subnet.etcd.stubs import etcdrpc, kv_pb2

CALL_DEADLINE_S = 5.0
PAGE_KEYS = 1000
"""Of a list: what one call brings in time, and the memory that it takes meanwhile."""
NEED_LEADER = ("hasleader", "true")
"""Ends a stream on a member that has lost its cluster (etcd rpctypes/metadatafields.go)."""

log = logging.getLogger(__name__)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


class EtcdClient:
    """A Store on real servers. Sticks to the endpoint that works, tries the others when it fails."""

    def __init__(self, settings: EtcdSettings, clock: Clock) -> None:
        tls = TlsFiles.read(settings)
        self._links = [Link(endpoint, tls, clock) for endpoint in parse_endpoints(settings.endpoints)]
        plain = [str(link.endpoint) for link in self._links if not link.endpoint.tls]
        if plain and (settings.cafile or settings.certfile):
            log.info("the TLS files are not used for %s: their scheme is http", ", ".join(plain))
        self._at = 0
        self._user = settings.username if settings.username and settings.password else ""
        self._password = settings.password
        self._token = ""
        self._token_lock = threading.Lock()
        self._closed = threading.Event()

    # -- reading and writing -------------------------------------------------

    def snapshot(self, config_key: str, leases_prefix: str, known: Snapshot | None = None) -> Snapshot:
        """See Store. Long lists come in pages, all as they were at the revision of the first."""
        what = f"read {config_key} and {leases_prefix}"
        if known is not None and self._revision(config_key) == known.revision:
            return known
        page = _range(leases_prefix, prefix=True)
        page.limit = PAGE_KEYS
        ranges = [_range(config_key), page]
        request = etcdrpc.TxnRequest(success=[etcdrpc.RequestOp(request_range=r) for r in ranges])
        reply = self._call(what, lambda link: link.kv.Txn, request)
        revision = page.revision = int(reply.header.revision)
        config, found = (r.response_range for r in reply.responses)
        leases = [_key_value(kv) for kv in found.kvs]
        while found.more:
            page.key = _raw(leases[-1].key) + b"\0"
            found = self._call(what, lambda link: link.kv.Range, page)
            leases += [_key_value(kv) for kv in found.kvs]
        return Snapshot(_key_value(config.kvs[0]) if config.kvs else None, tuple(leases), revision)

    def _revision(self, key: str) -> int:
        """Return the store's revision, which every write to any key raises."""
        request = _range(key)
        request.count_only = True
        return int(self._call("read the store's revision", lambda link: link.kv.Range, request).header.revision)

    def get(self, key: str) -> KeyValue | None:
        """See Store."""
        reply = self._call(f"read {key}", lambda link: link.kv.Range, _range(key))
        return _key_value(reply.kvs[0]) if reply.kvs else None

    def names(self, prefix: str, limit: int) -> tuple[str, ...]:
        """See Store."""
        request = _range(prefix, prefix=True)
        request.limit, request.keys_only = limit, True
        reply = self._call(f"list keys below {prefix}", lambda link: link.kv.Range, request)
        return tuple(_text(kv.key) for kv in reply.kvs)

    def txn(self, expect: Mapping[str, int], put: Put | None = None, delete: Sequence[str] = ()) -> int:
        """See Store."""
        success = [etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=_raw(k))) for k in delete]
        if put is not None:
            write = etcdrpc.PutRequest(key=_raw(put.key), value=put.value, lease=put.lease_id)
            success.append(etcdrpc.RequestOp(request_put=write))
        compare = [
            etcdrpc.Compare(
                result=etcdrpc.Compare.EQUAL, target=etcdrpc.Compare.MOD, key=_raw(key), mod_revision=revision
            )
            for key, revision in expect.items()
        ]
        names = ", ".join([*delete, *([put.key] if put else [])])
        request = etcdrpc.TxnRequest(compare=compare, success=success)
        reply = self._call(f"write {names}", lambda link: link.kv.Txn, request)
        if not reply.succeeded:
            raise Conflict(f"{', '.join(expect)}: changed since it was read")
        return int(reply.header.revision)

    # -- etcd leases ---------------------------------------------------------

    def grant(self, ttl_s: int) -> int:
        """See Store."""
        reply = self._call("grant a lease", lambda link: link.lease.LeaseGrant, etcdrpc.LeaseGrantRequest(TTL=ttl_s))
        return int(reply.ID)

    def keepalive_once(self, lease_id: int) -> int:
        """See Store."""
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)

        def once(link: Link, metadata: Metadata) -> int:
            call = link.lease.LeaseKeepAlive(
                iter([request]), timeout=CALL_DEADLINE_S, metadata=(*metadata, NEED_LEADER)
            )
            try:
                return max(0, int(next(call).TTL))
            except StopIteration as e:
                raise Unavailable(f"{link.endpoint}: the server ended the call without an answer") from e
            finally:
                call.cancel()

        return self._anywhere("renew the lease", once)

    def revoke(self, lease_id: int) -> None:
        """See Store."""
        request = etcdrpc.LeaseRevokeRequest(ID=lease_id)
        try:
            self._call("revoke a lease", lambda link: link.lease.LeaseRevoke, request)
        except Conflict:
            return  # it does not exist: that is what was wanted

    def time_to_live(self, lease_id: int) -> LeaseInfo | None:
        """See Store."""
        request = etcdrpc.LeaseTimeToLiveRequest(ID=lease_id, keys=True)
        try:
            reply = self._call("query the lease", lambda link: link.lease.LeaseTimeToLive, request)
        except Conflict:
            return None
        if reply.TTL <= 0:
            return None
        return LeaseInfo(int(reply.grantedTTL), int(reply.TTL), frozenset(_text(k) for k in reply.keys))

    # -- watching ------------------------------------------------------------

    def watch(self, targets: Sequence[Watched]) -> Iterator[Batch]:
        """See Store."""
        failures = []
        for _ in self._links:
            link, connected = self._links[self._at], False
            try:
                for batch in self._watch_at(link, targets):
                    connected = True
                    yield batch
            except Unavailable as e:
                self._leave(link)
                if connected:
                    raise
                failures.append(str(e))
        raise Unavailable("; ".join(sorted(failures)))

    def _watch_at(self, link: Link, targets: Sequence[Watched]) -> Iterator[Batch]:
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for target in targets:
            requests.put(_watch_request(target))
        call, connected = None, False
        try:
            token = self._valid_token(link)
            metadata = (*_token_metadata(token), NEED_LEADER)
            call = link.watch.Watch(iter(requests.get, None), metadata=metadata)
            for batch in self._batches(link, call, targets, token):
                connected = True
                yield batch
            raise Unavailable(f"{link.endpoint}: the server ended the watch")
        except grpc.RpcError as e:
            raise self._failure(e, link, "watch", connected) from e
        except ValueError as e:  # grpc's word for a closed channel
            raise self._channel_closed(link) from e
        finally:
            requests.put(None)
            if call is not None:
                call.cancel()

    def _batches(self, link: Link, call: Any, targets: Sequence[Watched], token: str) -> Iterator[Batch]:
        # Creations are answered in the order of the requests, each before the first event of its target.
        index_of: dict[int, int] = {}
        for reply in call:
            if reply.canceled:
                raise self._watch_end(link, reply, targets, token)
            revision = int(reply.header.revision)
            if reply.created:
                index_of[reply.watch_id] = len(index_of)
                if revision < targets[len(index_of) - 1].from_revision - 1:
                    raise Compacted(f"{link.endpoint}: the store is at revision {revision}, it went back")
                if len(index_of) == len(targets):
                    yield Batch(-1, (), revision)
                continue
            events = tuple(_key_event(e) for e in reply.events)
            # A reply without events is a progress notification: nothing is missing up to its revision.
            yield Batch(index_of[reply.watch_id], events, events[-1].revision if events else revision)

    def _watch_end(self, link: Link, reply: Any, targets: Sequence[Watched], token: str) -> Exception:
        if reply.compact_revision:
            return Compacted(f"{link.endpoint}: history before revision {reply.compact_revision} is compacted")
        reason = str(reply.cancel_reason) or "no reason given"
        if "permission denied" in reason or "auth token" in reason:
            # etcd says so for an expired token as well.
            self._forget_token(token)
            keys = ", ".join(t.key for t in targets)
            return AccessDenied(f"{link.endpoint}: permission denied to watch {keys} (user {self._user!r})")
        return Unavailable(f"{link.endpoint}: watch cancelled: {reason}")

    def reconnect(self) -> None:
        """See Store."""
        for link in self._links:
            link.reset()

    def close(self) -> None:
        """See Store."""
        self._closed.set()
        for link in self._links:
            link.close()

    # -- calls, failover, authentication --------------------------------------

    def _call(self, what: str, method: Callable[[Link], Any], request: Any) -> Any:
        def once(link: Link, metadata: Metadata) -> Any:
            return method(link)(request, timeout=CALL_DEADLINE_S, metadata=metadata)

        return self._anywhere(what, once)

    def _anywhere(self, what: str, once: Callable[[Link, Metadata], T]) -> T:
        """Try the endpoint in use, then the others."""
        failures = []
        for _ in self._links:
            link = self._links[self._at]
            try:
                return self._authenticated(link, what, once)
            except Unavailable as e:
                failures.append(str(e))
                self._leave(link)
        raise Unavailable("; ".join(sorted(failures)))

    def _authenticated(self, link: Link, what: str, once: Callable[[Link, Metadata], T]) -> T:
        """Call with a token; once more with a new one if the store does not know it (any more)."""
        try:
            token = self._valid_token(link)
            try:
                return once(link, _token_metadata(token))
            except grpc.RpcError as e:
                if not self._user or kind(*_status(e)) is not Kind.TOKEN:
                    raise
            self._forget_token(token)
            return once(link, _token_metadata(self._valid_token(link)))
        except grpc.RpcError as e:
            raise self._failure(e, link, what) from e
        except ValueError as e:  # grpc's word for a closed channel
            raise self._channel_closed(link) from e

    def _valid_token(self, link: Link) -> str:
        """Return the token, fetched if there is none; empty if the store wants none."""
        if not self._user:
            return ""
        with self._token_lock:
            if not self._token:
                request = etcdrpc.AuthenticateRequest(name=self._user, password=self._password)
                try:
                    self._token = str(link.auth.Authenticate(request, timeout=CALL_DEADLINE_S).token)
                except grpc.RpcError as e:
                    if "authentication is not enabled" not in _status(e)[1]:
                        raise
            return self._token

    def _forget_token(self, token: str) -> None:
        with self._token_lock:
            if self._token == token:
                self._token = ""

    def _leave(self, link: Link) -> None:
        """Use the next endpoint from now on, unless that has happened already."""
        if self._links[self._at] is link:
            self._at = (self._at + 1) % len(self._links)

    def _channel_closed(self, link: Link) -> Exception:
        return Closed("etcd client") if self._closed.is_set() else Unavailable(f"{link.endpoint}: reconnecting")

    def _failure(self, error: Any, link: Link, what: str, connected: bool = False) -> Exception:
        """Translate a gRPC error. ``connected``: there was an answer before, connecting is not the problem."""
        if self._closed.is_set():
            return Closed("etcd client")
        code, text = _status(error)
        if code == "CANCELLED":
            return self._channel_closed(link)
        if kind(code, text) is Kind.TRANSPORT:
            text = text if connected or text.startswith(SERVER) else link.why(text)
        return translate(code, text, str(link.endpoint), what, self._user)


def _status(error: Any) -> tuple[str, str]:
    return error.code().name, error.details() or ""


def _token_metadata(token: str) -> Metadata:
    return (("token", token),) if token else ()


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _range(key: str, prefix: bool = False) -> Any:
    return etcdrpc.RangeRequest(key=_raw(key), range_end=range_end(key) if prefix else b"")


def _watch_request(target: Watched) -> Any:
    # Progress notifications move the point of resumption on while nothing happens,
    # so that a compaction finds an idle watch up to date.
    create = etcdrpc.WatchCreateRequest(
        key=_raw(target.key),
        range_end=range_end(target.key) if target.prefix else b"",
        start_revision=target.from_revision,
        progress_notify=True,
    )
    return etcdrpc.WatchRequest(create_request=create)


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(_text(kv.key), bytes(kv.value), int(kv.create_revision), int(kv.mod_revision), int(kv.lease))


def _key_event(event: Any) -> KeyEvent:
    kv = event.kv
    written = None if event.type == kv_pb2.Event.DELETE else _key_value(kv)
    return KeyEvent(_text(kv.key), written, int(kv.mod_revision))
