"""A subnet manager that remembers, and can start the node while its datastore is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from subnet import statefile
from subnet.clock import Clock, SystemClock
from subnet.config import parse_network_config
from subnet.errors import ConfigError
from subnet.manager import (
    ConfigSeen,
    LeaseRequest,
    LeasesListed,
    OwnLease,
    Post,
    StoreEvent,
    StoreState,
    SubnetManager,
)
from subnet.model import FAMILIES, LEASE_TTL_S, Lease, NetworkConfig, Subnets
from subnet.recorder import Recorder
from subnet.report import Reporter
from subnet.state import State, StateError

log = logging.getLogger(__name__)

CLOSE_S = 0.9
"""How long close() waits in all."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A cached state whose config can be used."""

    state: State
    config: NetworkConfig

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Return all leases, own one first."""
        own = self.state.own
        return self.state.peers if own is None else (own, *self.state.peers)


class CachedManager:
    """A SubnetManager (subnet.manager) around another one, whose events it passes on and writes to a file.

    ``datastore`` names the network, see State. With ``offline_start``, a store
    that does not answer before its first list is stood in for by the file:
    config, leases and, if the public addresses are those of that time, the own
    lease. Until the first list the store's state says so. The own lease is
    used beyond its life too: without it the node is cut off for certain, while
    another node seldom has its subnet; but the warning names it.

    ``check_pools`` is that of parse_network_config, ``wall`` Unix time in seconds.
    """

    def __init__(
        self,
        inner: SubnetManager,
        path: Path,
        datastore: str,
        *,
        offline_start: bool = False,
        check_pools: bool = True,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._inner, self._clock, self._wall = inner, clock or SystemClock(), wall
        self._reporter = Reporter(log, self._clock)
        self._memory = _recall(path, datastore, check_pools)
        self._offline_start = offline_start
        earlier = self._memory.state if self._memory else None
        self._recorder = Recorder(path, datastore, earlier, self._clock, wall)
        self._post: Post | None = None
        self._lock = threading.Lock()
        self._listed = self._config_seen = self._offline = self._own_told = False

    def start(self, post: Post) -> None:
        """See SubnetManager."""
        self._post = post
        if self._offline_start and self._memory is None:
            log.info("there is no cached state yet; this start waits for the datastore")
        self._recorder.start()
        self._inner.start(self._hear)

    def want(self, request: LeaseRequest) -> None:
        """See SubnetManager. An earlier subnet that the request does not know is filled in."""
        own = self._memory.state.own if self._memory else None
        if own is not None:
            reason = reason_against(own, request)
            with self._lock:
                self._tell_own(own, reason)
            if not reason:
                request = replace(request, previous=own.subnets)
        self._inner.want(request)

    def ready(self) -> None:
        """See SubnetManager."""
        self._inner.ready()

    def underlay_changed(self) -> None:
        """See SubnetManager."""
        self._inner.underlay_changed()

    def close(self) -> None:
        """See SubnetManager."""
        until = self._clock.now() + CLOSE_S
        self._recorder.close()
        self._inner.close()
        self._recorder.join(max(0.0, until - self._clock.now()))

    def _hear(self, event: StoreEvent) -> None:
        self._recorder.note(event)
        with self._lock:
            self._take(event)

    def _take(self, event: StoreEvent) -> None:
        match event:
            case LeasesListed():
                if self._offline and not self._listed:
                    log.info("the datastore answers; what it says replaces the cached state")
                self._listed = True
            case ConfigSeen() if event.config is not None:
                self._config_seen = True
            case OwnLease() if event.lease is not None:
                self._own_told = True
            case StoreState(reachable=False) if not self._listed and self._offline_start and self._memory is not None:
                self._stand_in(event.problem, self._memory)
                return
            case _:
                pass
        self._say(event)

    def _stand_in(self, problem: str, memory: Memory) -> None:
        """Say what the store would; its state tells that it did not."""
        own = memory.state.own
        if own is None:
            self._reporter.problem("own", "the cached state holds no lease of this node; waiting for the datastore")
            self._say(StoreState(False, problem))
            return
        self._say(StoreState(False, f"started from cached state of {_date(memory.state)}; datastore: {problem}"))
        if self._offline:
            return
        self._offline = True
        log.warning("%s: %s", describe(memory, self._wall()), problem)
        if not self._config_seen:
            self._say(ConfigSeen(memory.config, text=memory.state.config))
        self._say(LeasesListed(memory.leases, 0, complete=False))

    def _tell_own(self, own: Lease, reason: str) -> None:
        if not self._offline or self._listed or self._own_told:
            return
        if reason:
            self._reporter.problem("own", f"cached lease {own.subnets} is not used: {reason}")
            return
        self._own_told = True
        self._say(OwnLease(own))

    def _say(self, event: StoreEvent) -> None:
        if self._post is not None:
            self._post(event)


def reason_against(own: Lease, request: LeaseRequest) -> str:
    """Return why the cached lease is not the one that is asked for; empty: it is. Pure."""
    for family in FAMILIES:
        then, now = own.attrs.public(family), request.attrs.public(family)
        if then != now:
            return f"its public IPv{family} address is {then or 'unset'}, ours is {now or 'unset'}"
        subnet, pool = own.subnets.of(family), request.config.pool(family)
        if (subnet is None) != (pool is None):
            return f"IPv{family} was {'off' if subnet is None else 'on'}"
        if subnet is not None and pool is not None and subnet.network_address not in pool.network:
            return f"it is outside {pool.network}"
    if request.previous not in (None, Subnets(), own.subnets):
        return f"the subnet file, which containers follow, has {request.previous}"
    return ""


def describe(memory: Memory, now_s: float) -> str:
    """Return what is started from, for people. ``now_s`` is Unix time in seconds, which may be wrong at boot."""
    state = memory.state
    own = state.own
    age_s = now_s - state.seen_at_s
    text = f"starting from cached state of {_date(state)}"
    text += f", {_span(age_s)} old" if age_s >= 0 else ", which is later than this host's clock"
    text += f", with {len(state.peers)} peer{'' if len(state.peers) == 1 else 's'}"
    if own is not None:
        text += f" and our lease {own.subnets}"
        if not own.reserved and age_s >= LEASE_TTL_S:
            text += ", which has expired meanwhile: another node may hold the subnet"
    return f"{text}, as the datastore does not answer"


def _recall(path: Path, datastore: str, check_pools: bool) -> Memory | None:
    try:
        state = statefile.read(path)
        if state is None:
            return None
        if state.datastore != datastore:
            raise StateError(f"cached state {path}: belongs to {state.datastore}, not to {datastore}")
        return Memory(
            state, parse_network_config(state.config, f"cached state {path}: config", check_pools=check_pools)
        )
    except (StateError, ConfigError) as error:
        log.warning("%s; it is not used, and will be replaced", error)
        return None


def _date(state: State) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.seen_at_s))


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} d"
