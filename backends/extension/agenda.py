"""Which command is due next. Pure: told of time, wishes and outcomes, it neither waits nor runs anything."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from subnet.clock import Backoff
from subnet.model import Lease, Subnets

log = logging.getLogger(__name__)

Name: TypeAlias = Literal["PreStartupCommand", "PostStartupCommand", "SubnetAddCommand", "SubnetRemoveCommand"]

REMOVE_TRIES = 5
"""A peer that is gone is not cleaned up after for ever."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run now; about the peer ``lease``, or about this node and its subnets ``own``."""

    name: Name
    own: Subnets | None = None
    lease: Lease | None = None

    def __str__(self) -> str:
        return self.name if self.lease is None else f"{self.name} for {self.lease.subnets}"


@dataclass
class _Attempts:
    """How often something was tried, what went wrong last, and when it is due again."""

    due_s: float = 0.0
    tries: int = 0
    problem: str = ""
    done: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, ceiling_s=60.0))

    def failed(self, problem: str, now_s: float) -> None:
        self.tries += 1
        self.problem = problem
        self.due_s = now_s + self.backoff.next_s()

    def succeeded(self, job: Job) -> None:
        self.tries += 1
        if self.problem:
            log.info("%s succeeded", job)
        self.problem, self.done = "", True


@dataclass
class _Peer:
    """``wanted`` None: it is to go. ``told``: the lease of the last SubnetAddCommand, None if there was none."""

    wanted: Lease | None
    told: Lease | None = None
    attempts: _Attempts = field(default_factory=_Attempts)

    def job(self) -> Job | None:
        if self.told is not None and (self.wanted is None or self.wanted.attrs != self.told.attrs):
            return Job("SubnetRemoveCommand", lease=self.told)
        return Job("SubnetAddCommand", lease=self.wanted) if self.wanted is not None else None


class Agenda:
    """Pre, then Post once the own subnet is known, then one command per change of a peer.

    A failed command is due again after a growing delay; what was never tried
    goes first, so that one peer in trouble does not hold up the others. A peer
    whose attributes changed is removed with the old ones and added with the new.
    """

    def __init__(self) -> None:
        self._pre, self._post = _Attempts(), _Attempts()
        self._own: Subnets | None = None
        self._peers: dict[Subnets, _Peer] = {}
        self._everybody_tried = False

    def want(self, own: Subnets, leases: Collection[Lease]) -> None:
        """Take the own subnets and the peers. With other own subnets everything after Pre begins anew."""
        if own != self._own:
            self._own, self._post = own, _Attempts()
            self._peers, self._everybody_tried = {}, False
        wanted = {lease.subnets: lease for lease in leases}
        for subnets, lease in wanted.items():
            peer = self._peers.get(subnets)
            if peer is None:
                self._peers[subnets] = _Peer(lease)
            elif peer.wanted is None or peer.wanted.attrs != lease.attrs:
                peer.wanted, peer.attempts = lease, _Attempts()
        for subnets in [s for s in self._peers if s not in wanted]:
            self._drop(subnets)

    def _drop(self, subnets: Subnets) -> None:
        peer = self._peers[subnets]
        if peer.told is None:
            del self._peers[subnets]
        elif peer.wanted is not None:
            peer.wanted, peer.attempts = None, _Attempts()

    def next(self, now_s: float) -> Job | None:
        """Return the command to run now, None if none is due."""
        if not self._pre.done:
            return Job("PreStartupCommand") if self._pre.due_s <= now_s else None
        if self._own is None:
            return None
        if not self._post.done:
            return Job("PostStartupCommand", self._own) if self._post.due_s <= now_s else None
        due = [peer for peer in self._open() if peer.attempts.due_s <= now_s]
        return min(due, key=lambda peer: (peer.attempts.tries > 0, peer.attempts.due_s)).job() if due else None

    def due_in_s(self, now_s: float) -> float | None:
        """Return how long nothing is due, None if nothing will be without news."""
        if not self._pre.done:
            waiting = [self._pre]
        elif self._own is None:
            waiting = []
        elif not self._post.done:
            waiting = [self._post]
        else:
            waiting = [peer.attempts for peer in self._open()]
        return max(0.0, min(a.due_s for a in waiting) - now_s) if waiting else None

    def _open(self) -> Iterator[_Peer]:
        return (peer for peer in self._peers.values() if not peer.attempts.done)

    def finished(self, job: Job, problem: str, now_s: float) -> None:
        """Take the outcome of a command; ``problem`` is empty for success."""
        if job.lease is None:
            self._node_finished(job, problem, now_s)
        else:
            self._peer_finished(job, job.lease, problem, now_s)

    def _node_finished(self, job: Job, problem: str, now_s: float) -> None:
        if job.name == "PostStartupCommand" and job.own != self._own:
            return  # the subnet changed meanwhile
        attempts = self._pre if job.name == "PreStartupCommand" else self._post
        if problem:
            attempts.failed(problem, now_s)
        else:
            attempts.succeeded(job)

    def _peer_finished(self, job: Job, lease: Lease, problem: str, now_s: float) -> None:
        peer = self._peers.get(lease.subnets)
        if peer is None:
            if job.name == "SubnetAddCommand" and self._own is not None:
                # It went while it was being added.
                self._peers[lease.subnets] = _Peer(None, lease)
            return
        if job.name == "SubnetAddCommand":
            self._added(peer, job, lease, problem, now_s)
        else:
            self._removed(peer, lease, problem, now_s)

    def _added(self, peer: _Peer, job: Job, lease: Lease, problem: str, now_s: float) -> None:
        peer.told = lease
        if peer.wanted is None or peer.wanted.attrs != lease.attrs:
            return  # it changed meanwhile: the next job undoes this one
        if problem:
            peer.attempts.failed(problem, now_s)
        else:
            peer.attempts.succeeded(job)

    def _removed(self, peer: _Peer, lease: Lease, problem: str, now_s: float) -> None:
        if peer.wanted is not None:
            peer.told = None  # whatever came of it, the new attributes are next
        elif problem and peer.attempts.tries + 1 < REMOVE_TRIES:
            peer.attempts.failed(problem, now_s)
        else:
            del self._peers[lease.subnets]

    def unprepared(self) -> str:
        """Return why the lease cannot be asked for yet; empty: it can."""
        return "" if self._pre.done else self._pre.problem or "PreStartupCommand is running"

    def unready(self) -> str:
        """Return why packets do not flow yet; empty: every peer known at first was tried."""
        if not self._post.done:
            return self.unprepared() or self._post.problem or "PostStartupCommand is running"
        if not self._everybody_tried:
            untried = sum(peer.attempts.tries == 0 and not peer.attempts.done for peer in self._peers.values())
            if untried:
                return f"SubnetAddCommand has yet to run for {untried} peers"
            self._everybody_tried = True
        return ""

    def problems(self) -> dict[str, str]:
        """Return the peers in trouble, by lease key."""
        found = {}
        for peer in self._peers.values():
            lease = peer.wanted or peer.told
            if peer.attempts.problem and lease is not None:
                found[lease.key] = peer.attempts.problem
        return found
