"""Keeps this node's object: its annotations are the own lease, its condition lets pods come."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from subnet.clock import Backoff, Clock
from subnet.errors import AccessDenied, Closed, DatastoreError
from subnet.kube.annotations import OVERWRITE, changes, wanted, with_prefix
from subnet.kube.decide import CONDITION, annotations_patch, condition_patch, read_operators, this_node
from subnet.kube.faults import Busy
from subnet.kube.nodes import NoSubnet, own_subnets
from subnet.kube.records import OwnNode, decode
from subnet.kube.settings import KubeSettings
from subnet.kube.store import NodeStore
from subnet.manager import LeaseRequest, OwnLease, Post, ThisNode
from subnet.model import Family, Lease
from subnet.report import Reporter

log = logging.getLogger(__name__)

SAY_AGAIN_S = 30.0
REFUSED_RETRY_S = 30.0
LONGEST_SLEEP_S = 600.0
CONDITION_EACH_S = 60.0
STOOD_S = 60.0
"""Annotations that nobody touched for so long are not contended."""
WALL_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass
class Keeper:
    """Posts ThisNode and OwnLease. ``run`` is the body of its thread, ``step`` one round of it.

    Level-triggered: whatever wakes it, it compares the node's object with what
    is wanted and writes what differs.
    """

    store: NodeStore
    settings: KubeSettings
    post: Post
    clock: Clock
    stop: threading.Event
    wall: Callable[[], datetime]
    """The time of day in UTC."""
    uniform: Callable[[float, float], float] = random.uniform
    name: str = ""
    """The node's name, empty until it is known."""
    _node: OwnNode | None = field(default=None, init=False)
    _seen: bool = field(default=False, init=False)
    _wanted: LeaseRequest | None = field(default=None, init=False)
    _ready: bool = field(default=False, init=False)
    _condition_of: str = field(default="", init=False)
    """The uid of the node object whose condition was set in this run."""
    _condition_at: float = field(default=0.0, init=False)
    _overwritten: Mapping[Family, str] = field(default_factory=dict, init=False)
    _last: Mapping[str, str] | None = field(default=None, init=False)
    """Our annotations as they were last found to be right."""
    _patched_at: float = field(default=-STOOD_S, init=False)
    _patch_from: float = field(default=0.0, init=False)
    """When annotations may be written again: later and later while somebody else rewrites them."""
    _hold_off_until: float = field(default=0.0, init=False)
    _posted: OwnLease | None = field(default=None, init=False)
    _told: ThisNode | None = field(default=None, init=False)
    _awake: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.settings.node_name
        self._reporter = Reporter(log, self.clock, again_s=SAY_AGAIN_S)
        self._values_reporter = Reporter(log, self.clock, again_s=3600.0)
        self._backoff = Backoff(first_s=0.3, ceiling_s=5.0, uniform=self.uniform)
        self._contended = Backoff(first_s=0.2, ceiling_s=5.0, uniform=self.uniform)
        self._signal = threading.Condition()

    # -- from other threads -------------------------------------------------------

    @property
    def content(self) -> bool:
        """Whether the own lease is held."""
        return self._posted is not None and self._posted.lease is not None

    def want(self, request: LeaseRequest) -> None:
        """Set what is wanted; the latest counts."""
        with self._signal:
            if request != self._wanted:
                self._wanted = request
                self._hold_off_until = 0.0
                self._wake()

    def ready(self) -> None:
        """Traffic flows: the condition may be set."""
        if not self._ready:
            with self._signal:
                self._ready = True
                self._wake()

    def saw(self, node: OwnNode | None, listed: bool = False) -> None:
        """Take the node's object, None while there is none; an older version than the known one is passed over.

        ``listed``: it is what counts, whatever its version.
        """
        with self._signal:
            if node is not None and not listed and _older(node, self._node):
                return
            if self._seen and node == self._node:
                return
            self._node, self._seen = node, True
            self._wake()
        told, problems = this_node(node, self.settings.prefix)
        for text in problems:
            self._values_reporter.problem(text, f"node {self.name}: {text}")
        self._values_reporter.forget_except(set(problems))
        if told != self._told:
            self._told = told
            self.post(told)

    def wake(self) -> None:
        """Have a look now."""
        with self._signal:
            self._wake()

    def _wake(self) -> None:
        self._awake = True
        self._signal.notify_all()

    # -- the thread ---------------------------------------------------------------

    def run(self) -> None:
        """Keep the node's object until the manager is closed."""
        while not self.stop.is_set():
            try:
                delay_s = self.step()
            except Closed:
                return
            with self._signal:
                if not self._awake and not self.stop.is_set():
                    self._signal.wait(LONGEST_SLEEP_S if delay_s is None else delay_s)
                self._awake = False

    def step(self) -> float | None:
        """Do what is due; returns in how many seconds something is due again, None if nothing is."""
        with self._signal:
            node, seen, request = self._node, self._seen, self._wanted
            hold_off_s = self._hold_off_until - self.clock.now()
        if request is None or not seen:
            return None
        if hold_off_s > 0:
            return hold_off_s
        try:
            return self._act(node, request)
        except NoSubnet as error:
            return self._without_lease(str(error), logging.WARNING if error.waiting else logging.ERROR)
        except AccessDenied as error:
            self._hold_off_until = self.clock.now() + REFUSED_RETRY_S
            self._failed(f"{error}; trying again each {REFUSED_RETRY_S:.0f} s")
            return REFUSED_RETRY_S
        except DatastoreError as error:
            delay_s = max(self._backoff.next_s(), error.retry_after_s if isinstance(error, Busy) else 0.0)
            self._hold_off_until = self.clock.now() + delay_s
            self._failed(str(error))
            return delay_s

    def _act(self, node: OwnNode | None, request: LeaseRequest) -> float | None:
        if node is None:
            return self._without_lease(
                f"node {self.name} does not exist in the Kubernetes API; it is waited for", logging.WARNING
            )
        lease = self._lease(node, request)
        node, delay_s = self._annotate(node, request)
        if delay_s is not None:
            return delay_s
        self._reporter.solved("subnet", f"node {self.name}: has subnet {lease.subnets}")
        self._say(OwnLease(lease))
        self._set_condition(node)
        self._backoff.reset()
        self._reporter.solved("store", f"node {self.name}: could be written")
        return None

    def _lease(self, node: OwnNode, request: LeaseRequest) -> Lease:
        subnets = own_subnets(self.name, node.spec.cidrs, request.config)
        return Lease(subnets, request.attrs, self.name, revision=node.metadata.created_s)

    # -- annotations --------------------------------------------------------------

    def _annotate(self, node: OwnNode, request: LeaseRequest) -> tuple[OwnNode, float | None]:
        """Make the annotations right; returns the node as it then is, or how long to leave it alone."""
        ours = with_prefix(node.annotations, self.settings.prefix)
        overwrite = read_operators(ours).overwrite
        self._say_overwritten(request, overwrite)
        want = wanted(request.attrs, overwrite)
        differing = changes(ours, want)
        now = self.clock.now()
        if not differing:
            self._last = want
            return node, None
        if now < self._patch_from:
            self._hold_off_until = self._patch_from
            return node, self._patch_from - now
        if want == self._last:
            log.warning(
                "node %s: somebody changed or removed %s; written again", self.name, ", ".join(sorted(differing))
            )
        answer = self.store.patch_node(self.name, annotations_patch(differing, self.settings.prefix))
        if now - self._patched_at >= STOOD_S:
            self._contended.reset()
        self._patched_at, self._patch_from = now, now + self._contended.next_s()
        written = ", ".join(f"{k} {'removed' if v is None else v}" for k, v in sorted(differing.items()))
        log.info("node %s: annotations written: %s", self.name, written)
        self._last = want
        return self._patched(answer, node), None

    def _say_overwritten(self, request: LeaseRequest, overwrite: Mapping[Family, str]) -> None:
        if overwrite == self._overwritten:
            return
        self._overwritten = overwrite
        for family, text in overwrite.items():
            public = request.attrs.public(family)
            log.info("node %s: %s: %s is published instead of %s", self.name, OVERWRITE[family], text, public)

    def _patched(self, answer: bytes, before: OwnNode) -> OwnNode:
        node = decode(answer, OwnNode)
        with self._signal:
            # The watch may already have brought a later version.
            if self._node == before or _older(self._node, node):
                self._node = node
        return node

    # -- condition ------------------------------------------------------------------

    def _set_condition(self, node: OwnNode) -> None:
        """Set the condition once per start and node object, and again when it is gone.

        Another's "True" later on is left alone: what sets it has a reason that we do not know.
        """
        if not self._ready or not self.settings.set_network_condition:
            return
        now = self.clock.now()
        if self._condition_of == node.metadata.uid:
            there = node.condition(CONDITION) is not None
            if there or now - self._condition_at < CONDITION_EACH_S:
                return
        answer = self.store.patch_node(self.name, condition_patch(node, self.wall().strftime(WALL_FORMAT)))
        self._condition_of, self._condition_at = node.metadata.uid, now
        log.info("node %s: condition NetworkUnavailable set to False", self.name)
        self._patched(answer, node)

    # -- trouble ----------------------------------------------------------------------

    def _without_lease(self, problem: str, level: int) -> float:
        self._reporter.problem("subnet", problem, level)
        self._say(OwnLease(None, problem))
        return SAY_AGAIN_S

    def _failed(self, problem: str) -> None:
        self._reporter.problem("store", f"node {self.name}: {problem}", logging.WARNING)
        if not self.content:
            self._say(OwnLease(None, problem))

    def _say(self, own: OwnLease) -> None:
        if own != self._posted:
            self._posted = own
            self.post(own)


def _older(node: OwnNode | None, known: OwnNode | None) -> bool:
    """Whether one object is an earlier version of another (Kubernetes "API concepts", resource versions)."""
    if node is None or known is None or node.metadata.uid != known.metadata.uid:
        return False
    ours, theirs = node.metadata.resource_version, known.metadata.resource_version
    return ours.isdecimal() and theirs.isdecimal() and int(ours) < int(theirs)
