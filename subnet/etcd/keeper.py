"""Keeps the own lease: acquires it, renews it, and brings it back when it is lost."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from subnet.allocate import Create, Pick, Reuse, plan
from subnet.clock import Backoff, Clock
from subnet.errors import Closed, Conflict, DatastoreError, NoFreeSubnet, Unavailable
from subnet.etcd.claims import Claims, Held, by_key
from subnet.etcd.decide import FlipGuard, Verdict, as_own, identity, judge, readable
from subnet.etcd.layout import Layout
from subnet.etcd.records import occupied, unchanged
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import KeyEvent, KeyValue, Snapshot, Store
from subnet.manager import LeaseRequest, OwnLease, Post
from subnet.model import LEASE_TTL_S, Lease
from subnet.renewal import renewal_in_s, retry_in_s
from subnet.report import Reporter

log = logging.getLogger(__name__)

LONGEST_SLEEP_S = 600.0
"""Waits do not count time spent suspended; after this long the clock is looked at again."""
CONFLICT_STEP_S = 0.05
MANY_CONFLICTS = 20


@dataclass
class Keeper:
    """Posts OwnLease. ``run`` is the body of its thread, ``step`` one round of it.

    Level-triggered: whatever wakes it, it looks at the own key (or at all
    leases) afresh and writes only what differs.
    """

    store: Store
    settings: EtcdSettings
    post: Post
    clock: Clock
    stop: threading.Event
    pick: Pick = random.choice
    uniform: Callable[[float, float], float] = random.uniform
    known: Callable[[KeyValue], Lease | None] = lambda _: None
    """Returns the lease that was read from this state of a key already."""
    _held: Held | None = field(default=None, init=False)
    _last: Held | None = field(default=None, init=False)
    """What was held last, also after it was lost."""
    _done: LeaseRequest | None = field(default=None, init=False)
    """The request that ``_held`` answers in full."""
    _renew_at: float | None = field(default=None, init=False)
    _leave_until: float | None = field(default=None, init=False)
    """Until when another node's record is left in the own key."""
    _taken: str = field(default="", init=False)
    _ended: bool = field(default=False, init=False)
    _conflicts: int = field(default=0, init=False)
    _unavailable: int = field(default=0, init=False)
    _posted: OwnLease | None = field(default=None, init=False)
    _wanted: LeaseRequest | None = field(default=None, init=False)
    _doubt: bool = field(default=False, init=False)
    """Something may have happened to the own key."""
    _awake: bool = field(default=False, init=False)
    _busy: bool = field(default=False, init=False)
    _listing: Snapshot | None = field(default=None, init=False)
    """What the reader listed while no own key was held: not to be fetched twice at the start."""
    _heard: dict[str, int] = field(default_factory=dict, init=False)
    """Revisions of the keys that changed during a step."""

    def __post_init__(self) -> None:
        self._layout = Layout(self.settings.prefix)
        self._claims = Claims(self.store, self._layout, self.clock)
        self._flips = FlipGuard()
        self._reporter = Reporter(log, self.clock)
        self._backoff = Backoff(first_s=0.5, ceiling_s=30.0, uniform=self.uniform)
        self._full = Backoff(first_s=2.0, ceiling_s=30.0, uniform=self.uniform)
        self._signal = threading.Condition()

    # -- from other threads ---------------------------------------------------------

    def want(self, request: LeaseRequest) -> None:
        """Set what is wanted; the latest counts."""
        with self._signal:
            if request != self._wanted:
                self._wanted = request
                self._wake()

    def listed(self, snapshot: Snapshot) -> None:
        """Compare the own key with a fresh listing (Listener)."""
        with self._signal:
            held = self._held
            if held is None or self._busy:
                self._doubt = True
                self._listing = snapshot if held is None else None
            elif any(kv.key == held.lease.key and unchanged(held.lease, kv) for kv in snapshot.leases):
                return
            self._doubt = True
            self._wake()

    def changed(self, events: tuple[KeyEvent, ...]) -> None:
        """Notice what happens to the own key, and freed subnets while there is none (Listener)."""
        with self._signal:
            held = self._held
            if held is None or self._busy:
                self._doubt = True
                if self._busy:
                    self._heard.update((e.key, e.revision) for e in events)
                if held is None and any(e.kv is None for e in events):
                    self._wake()
            elif any(e.key == held.lease.key and e.revision > held.lease.revision for e in events):
                self._doubt = True
                self._wake()

    def reconnected(self) -> None:
        """Look after the own key, which may have fared badly meanwhile (Listener)."""
        self.wake()

    def wake(self) -> None:
        """Have a look now."""
        with self._signal:
            self._doubt = True
            self._wake()

    def _wake(self) -> None:
        self._awake = True
        self._signal.notify_all()

    # -- the thread -------------------------------------------------------------------

    def run(self) -> None:
        """Keep the lease until the store is closed."""
        while not self.stop.is_set():
            try:
                delay_s = self.step()
            except Closed:
                return
            with self._signal:
                if not self._awake and not self.stop.is_set():
                    self._signal.wait(LONGEST_SLEEP_S if delay_s is None else min(delay_s, LONGEST_SLEEP_S))
                self._awake = False

    def step(self) -> float | None:
        """Do what is due; returns in how many seconds something is due again, None if nothing is."""
        with self._signal:
            request, doubt = self._wanted, self._doubt
            self._doubt, self._busy, self._heard = False, True, {}
        try:
            if request is None or self._ended:
                return None
            return self._step(request, doubt)
        finally:
            with self._signal:
                self._busy = False
                held = self._held and self._held.lease
                if held and self._heard.get(held.key, 0) > held.revision:
                    self._wake()

    def _step(self, request: LeaseRequest, doubt: bool) -> float | None:
        try:
            self._act(request, doubt)
        except Conflict as e:
            self._doubt = True
            self._conflicts += 1
            if self._conflicts % MANY_CONFLICTS == 0:
                log.warning("own lease: lost %d races in a row: %s", self._conflicts, e)
            return self.uniform(0, CONFLICT_STEP_S * min(self._conflicts, MANY_CONFLICTS))
        except NoFreeSubnet as e:
            return self._pool_exhausted(str(e))
        except Unavailable as e:
            self._doubt = True
            self._unavailable += 1
            if self._unavailable == 1:  # a connection that has just ended is opened again without a word
                log.debug("own lease: %s; trying again", e)
                return self._backoff.next_s()
            return self._failed(str(e))
        except DatastoreError as e:
            self._doubt = True
            return self._failed(str(e))
        self._conflicts = self._unavailable = 0
        self._backoff.reset()
        self._full.reset()
        for topic in ("pool", "store"):
            self._reporter.solved(topic, "own lease: in order again")
        return self._next_s()

    def _act(self, request: LeaseRequest, doubt: bool) -> None:
        if self._held is None or request != self._done:
            self._acquire(request)
        elif doubt or self._due(self._leave_until):
            self._check(request, self._held)
        if not self._ended and self._held is not None and self._due(self._renew_at):
            self._renew(request, self._held)

    def _due(self, at: float | None) -> bool:
        return at is not None and self.clock.now() >= at

    def _next_s(self) -> float | None:
        now = self.clock.now()
        due = [max(0.0, at - now) for at in (self._renew_at, self._leave_until) if at is not None]
        return min(due, default=None)

    # -- acquiring ----------------------------------------------------------------------

    def _acquire(self, request: LeaseRequest) -> None:
        """Find out which subnet to hold, take it, and let go of the others."""
        with self._signal:
            known, self._listing = self._listing, None
        kvs = by_key(self.store.snapshot(self._layout.config, self._layout.subnets, known).leases)
        held = self._held.lease if self._held else None
        wish = replace(request, previous=self._last.lease.subnets) if self._last else request
        leases = as_own(occupied(self._layout, kvs.values(), self.known), held, kvs, request.attrs)
        decision = plan(wish, leases, self.pick)
        match decision:
            case Reuse(lease=lease):
                taken, how = self._claims.reuse(decision, kvs[lease.key], request.attrs), "reused"
            case Create(drop=drop):
                kept = next((kvs[d.key].value for d in drop), self._last.value if self._last else None)
                taken, how = self._claims.create(decision, kept, request.attrs), "created"
        replaced = {d.key for d in decision.replaces} if isinstance(decision, Create) else set()
        before = self._last
        self._hold(taken, how)
        if before is not None and before.lease.lease_id != taken.lease.lease_id:
            self._claims.release(before.lease.lease_id)
        self._claims.drop(d for d in decision.drop if d.key not in replaced)
        self._done = request

    def _hold(self, held: Held, how: str) -> None:
        lease = held.lease
        if self._held is None or self._held.lease.key != lease.key:
            log.info("lease %s %s%s", lease.subnets, how, ", a reservation" if lease.reserved else "")
        with self._signal:
            self._held = self._last = held
            self._listing = None
        self._taken, self._leave_until = "", None
        self._schedule(held)
        self._say(OwnLease(lease))

    def _schedule(self, held: Held) -> None:
        now = self.clock.now()
        remaining_s = None if held.expires_at is None else held.expires_at - now
        in_s = renewal_in_s(remaining_s, LEASE_TTL_S, self.settings.renew_margin_s, self.uniform)
        self._renew_at = None if in_s is None else now + in_s

    # -- keeping ------------------------------------------------------------------------

    def _check(self, request: LeaseRequest, held: Held, expired: bool = False) -> None:
        """Look at the own key. ``expired``: its etcd lease is known to be gone."""
        found = self.store.get(held.lease.key)
        now_there = None if found is None else readable(found.value)
        match judge(held.lease, found):
            case Verdict.KEPT if not expired:
                return
            case Verdict.REWRITTEN if self._is_left(identity(held.lease.attrs), identity(now_there), held):
                return
            case Verdict.GONE:
                self._lost(held, f"lease {held.lease.subnets} ({held.lease.key}) was deleted or has expired")
            case Verdict.TAKEN:
                self._taken = (
                    f"lease {held.lease.subnets} ({held.lease.key}) of {identity(held.lease.attrs)}"
                    f" was taken by {identity(now_there)}"
                )
                self._lost(held, self._taken)
        if not self._ended:
            self._acquire(request)

    def _is_left(self, ours: str, theirs: str, held: Held) -> bool:
        """Whether to leave another node's record in the own key for now."""
        now = self.clock.now()
        if self._leave_until is not None:
            if now < self._leave_until:
                return True
            self._leave_until = None
            return False
        hold_s = self._flips.flipped(now)
        if hold_s == 0:
            log.warning("own key %s was rewritten to %s; writing %s again", held.lease.key, theirs, ours)
            return False
        log.error(
            "two live nodes use the public IP of lease %s (%s): this one is %s, the other one is %s;"
            " leaving the key alone for %.0f s",
            *(held.lease.subnets, held.lease.key, ours, theirs, hold_s),
        )
        self._leave_until = now + hold_s
        return True

    def _lost(self, held: Held, reason: str) -> None:
        with self._signal:
            self._held = None
        self._renew_at = self._leave_until = None
        if self.settings.on_lease_lost == "exit":
            self._ended = True
            log.error("%s; ending, as told", reason)
            self._say(OwnLease(None, reason, fatal=True))
        elif self._taken:
            log.error("%s; taking another subnet", reason)
        else:
            log.warning("%s; taking it again", reason)

    def _renew(self, request: LeaseRequest, held: Held) -> None:
        now = self.clock.now()
        ttl_s = self.store.keepalive_once(held.lease.lease_id)
        if ttl_s == 0:
            self._check(request, held, expired=True)
            return
        log.debug("lease %s renewed for %d s", held.lease.subnets, ttl_s)
        with self._signal:
            self._held = self._last = Held(held.lease, held.value, now + ttl_s)
        self._schedule(self._held)

    # -- trouble -------------------------------------------------------------------------

    def _pool_exhausted(self, problem: str) -> float:
        self._doubt = True
        self._reporter.problem("pool", f"own lease: {problem}; waiting for a subnet to become free", logging.ERROR)
        if self._held is None:
            self._say(OwnLease(None, problem))
        return self._full.next_s()

    def _failed(self, problem: str) -> float:
        backoff_s = self._backoff.next_s()
        self._reporter.problem("store", f"own lease: {problem}; retrying")
        if self._held is None:
            if self._taken or self._posted is None or self._posted.lease is None:
                self._say(OwnLease(None, self._taken or problem))
            return backoff_s
        if self._held.expires_at is None:
            return backoff_s
        remaining_s = self._held.expires_at - self.clock.now()
        if remaining_s <= 0:
            text = f"lease {self._held.lease.subnets} has expired unrenewed: another node may take the subnet"
            self._reporter.problem("expired", text, logging.ERROR)
        return retry_in_s(backoff_s, remaining_s)

    def _say(self, own: OwnLease) -> None:
        if own != self._posted:
            self._posted = own
            self.post(own)
