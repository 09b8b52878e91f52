"""Follows the nodes: list, watch, resume where it broke off, list anew when the server has forgotten."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Raw

from subnet.clock import Backoff, Clock
from subnet.errors import AccessDenied, Closed, Compacted, DatastoreError, Unavailable
from subnet.kube.configfile import ConfigFile
from subnet.kube.faults import Busy, NotFound, Request, stream_error
from subnet.kube.nodes import Change, NodeBook, lease_of
from subnet.kube.records import Node, NodePage, OwnNode, Pod, Status, WatchEvent, decode, lines, name_of
from subnet.kube.settings import KubeSettings
from subnet.kube.store import NodeStore
from subnet.manager import LeasesChanged, LeasesListed, Post, StoreState
from subnet.model import Family, Lease
from subnet.report import Reporter

log = logging.getLogger(__name__)

PAGE = 500
WATCH_S = (300, 600)
"""The server ends a watch after a time from this range, so that watches spread over its instances."""
STEADY_S = 5.0
"""A watch that lasted this long was a good one; its end does not count as a repeated failure."""
REFUSED_RETRY_S = 30.0
CONFIG_WAIT_S = 0.5
ALLOC = "alloc"
"""The backend type that has no peers."""
OWN_POLL_S = 8.0
OWN_POLL_WAITING_S = 2.0
_WATCH = Request("watch", "nodes")


class Listener(Protocol):
    """Who keeps this node's own object."""

    name: str

    @property
    def content(self) -> bool:
        """Whether the own lease is held."""
        ...

    def saw(self, node: OwnNode | None, listed: bool = False) -> None:
        """Take the node's object, None while there is none. ``listed``: it is what counts, whatever its version."""
        ...


@dataclass
class Reader:
    """Posts LeasesListed, LeasesChanged and StoreState. ``run`` is the body of its thread.

    The own node goes to the keeper and is no lease among the others.
    ``wait`` sleeps for some seconds and returns true once the manager is closed.
    """

    store: NodeStore
    settings: KubeSettings
    config: ConfigFile
    post: Post
    keeper: Listener
    clock: Clock
    wait: Callable[[float], bool]
    stop: threading.Event
    uniform: Callable[[float, float], float] = random.uniform
    _version: str = field(default="", init=False)
    """Resource version of the last thing seen; empty: a listing is due."""
    _book: NodeBook = field(default_factory=NodeBook, init=False)
    _listing: _Listing | None = field(default=None, init=False)
    _expired: int = field(default=0, init=False)
    """How many listings in a row the server forgot half-way."""
    _revision: int = field(default=0, init=False)
    _families: tuple[Family, ...] = field(default=(), init=False)
    _failures: int = field(default=0, init=False)
    _reached: bool = field(default=False, init=False)
    _state: StoreState | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._reporter = Reporter(log, self.clock, again_s=30.0)
        self._nodes_reporter = Reporter(log, self.clock, again_s=3600.0)
        self._backoff = Backoff(first_s=0.1, ceiling_s=2.5, uniform=self.uniform)
        self._relist_backoff = Backoff(first_s=0.1, ceiling_s=10.0, uniform=self.uniform)
        self._rewatch_backoff = Backoff(first_s=0.05, ceiling_s=1.0, uniform=self.uniform)

    def run(self) -> None:
        """Follow the nodes until the manager is closed."""
        while not self.stop.is_set():
            try:
                self._step()
            except Closed:
                return
            except Compacted as error:
                log.info("%s; listing all nodes anew", error)
                self._version, self._listing = "", None
                self.wait(self._relist_backoff.next_s())
            except AccessDenied as error:
                self._reporter.problem("api", f"Kubernetes API: {error}; trying again each {REFUSED_RETRY_S:.0f} s")
                self._say(StoreState(False, str(error)))
                self.wait(REFUSED_RETRY_S)
            except DatastoreError as error:
                self._failed(str(error))
                self.wait(max(self._backoff.next_s(), error.retry_after_s if isinstance(error, Busy) else 0.0))

    def _step(self) -> None:
        if not self.keeper.name:
            self.keeper.name = self._look_up_name()
        config = self.config.first(CONFIG_WAIT_S)
        if config is None:
            return
        self._families = config.families
        if config.backend.type == ALLOC:
            self._poll_own()
            return
        if not self._version:
            self._list()
        self._follow()

    def _look_up_name(self) -> str:
        namespace, pod_name = self.settings.pod_namespace, self.settings.pod_name
        name = decode(self.store.pod(namespace, pod_name), Pod).spec.node_name
        if not name:
            raise DatastoreError(f"pod {namespace}/{pod_name} is on no node")
        log.info("this node is %s, where pod %s/%s runs", name, namespace, pod_name)
        return name

    # -- state of the connection ----------------------------------------------

    def _failed(self, problem: str) -> None:
        # A watch that ends is taken up again without a word; only if that fails is it an outage.
        self._failures += 1
        if self._failures == 1 and self._reached:
            log.debug("Kubernetes API: %s; asking again", problem)
            return
        self._reporter.problem("api", f"Kubernetes API: {problem}; retrying")
        self._say(StoreState(False, problem))

    def _answered(self) -> None:
        self._failures, self._reached = 0, True
        self._reporter.solved("api", "Kubernetes API: answers again")
        self._say(StoreState(True))

    def _say(self, state: StoreState) -> None:
        if state != self._state:
            self._state = state
            self.post(state)

    # -- one node only -----------------------------------------------------------

    def _poll_own(self) -> None:
        try:
            node = decode(self.store.node(self.keeper.name), OwnNode)
        except NotFound:
            node = None
        self._answered()
        self._backoff.reset()
        self.keeper.saw(node)
        self.config.release()
        if not self._revision:
            self._revision = 1
            self.post(LeasesListed((), self._revision))
        self.wait(OWN_POLL_S if self.keeper.content else OWN_POLL_WAITING_S)

    # -- listing ----------------------------------------------------------------

    def _list(self) -> None:
        """Read page by page; after a failure go on with the page that failed."""
        listing = self._listing = self._listing or _Listing()
        while True:
            # A server that forgets before the last page was read has to give all at once.
            limit = PAGE if self._expired < 2 else 0
            try:
                page = decode(self.store.list_nodes(listing.token, limit), NodePage)
            except Compacted:
                self._expired += 1
                raise
            self._answered()
            for item in page.items or ():
                self._take_item(item, listing)
            listing.token = page.metadata.continue_ or ""
            if not listing.token:
                break
        self._listing, self._expired = None, 0
        self._nodes_reporter.forget_except(listing.names)
        self._revision += 1
        self.keeper.saw(listing.own, listed=True)
        self.config.release()
        self.post(LeasesListed(self._book.replace(listing.leases), self._revision))
        self._version = page.metadata.resource_version

    def _take_item(self, item: Raw, listing: _Listing) -> None:
        try:
            node = decode(item, Node)
            if node.metadata.name == self.keeper.name:
                listing.own = decode(item, OwnNode)
                return
        except DatastoreError as error:
            self._skip(name_of(item), str(error))
            return
        listing.names.add(node.metadata.name)
        lease = self._lease_of(node)
        if lease is not None:
            listing.leases.append(lease)

    # -- watching -----------------------------------------------------------------

    def _follow(self) -> None:
        """Watch from the last thing seen until the stream ends."""
        began = self.clock.now()
        try:
            for line in lines(self._heard(self.store.watch_nodes(self._version, int(self.uniform(*WATCH_S))))):
                changes = self._take_event(decode(line, WatchEvent))
                if changes:
                    self._revision += 1
                    self.post(LeasesChanged(changes, self._revision))
        except (Unavailable, AccessDenied, Closed):
            raise
        except DatastoreError:
            # A stream that makes no sense would make none the next time: begin anew.
            self._version = ""
            raise
        finally:
            if self.clock.now() - began >= STEADY_S:
                for backoff in (self._backoff, self._relist_backoff, self._rewatch_backoff):
                    backoff.reset()
        if self.clock.now() - began < STEADY_S:
            self.wait(self._rewatch_backoff.next_s())

    def _heard(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._answered()
            yield block

    def _take_event(self, event: WatchEvent) -> tuple[Change, ...]:
        if event.type == "ERROR":
            raise stream_error(_WATCH, decode(event.object, Status))
        try:
            node = decode(event.object, Node)
        except DatastoreError as error:
            self._skip(name_of(event.object), str(error))
            return ()
        self._version = node.metadata.resource_version or self._version
        name = node.metadata.name
        if event.type == "BOOKMARK":
            return ()
        deleted = event.type == "DELETED"
        if name == self.keeper.name:
            self.keeper.saw(None if deleted else decode(event.object, OwnNode), listed=deleted)
            return ()
        if deleted:
            self._nodes_reporter.forget(name)
            return self._book.put(name, None)
        return self._book.put(name, self._lease_of(node))

    def _lease_of(self, node: Node) -> Lease | None:
        name = node.metadata.name
        lease, problem = lease_of(node, self.settings.prefix, self._families)
        if not problem:
            self._nodes_reporter.solved(name, f"node {name} is in order now")
        elif lease is None:
            self._skip(name, problem)
        else:
            self._nodes_reporter.problem(name, f"node {name} is a peer for {lease.subnets} alone: {problem}")
        return lease

    def _skip(self, name: str, problem: str) -> None:
        self._nodes_reporter.problem(name, f"node {name} skipped: {problem}")


@dataclass
class _Listing:
    """How far a listing got: its state survives a failed page."""

    token: str = ""
    leases: list[Lease] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    own: OwnNode | None = None
