"""The thread that keeps charon running and told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Final

from backends.api import CLOSE_WITHIN_S, Carrier
from backends.dataplane.model import Change
from backends.ipsec.charon import Charon
from backends.ipsec.connections import Connection, Terms, Watch, connections, ours, peer_of, steps
from backends.ipsec.vici import CharonError, RefusedError, Vici
from backends.kernel.sockets import BATCH
from backends.kernel.xfrm import read_policies, remove_associations, request_policies
from subnet.clock import Clock, SystemClock
from subnet.errors import KernelError
from subnet.model import IPAddress, Lease, Subnets

log = logging.getLogger(__name__)

CHECK_S, ALIVE_S = 5.0, 0.5
"""Between looks at what charon has negotiated, and at whether it is there."""
RESTART_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
KEEP_S: Final = 0.2
"""Part of the closing time kept for the thread and the policies."""


class IpsecCarrier(Carrier):
    """Supervises charon. Its methods are called by the owner and do not wait for it."""

    def __init__(
        self, terms: Terms, wake: Callable[[], None], process: Charon | None = None, clock: Clock | None = None
    ) -> None:
        self.terms = terms
        self._wake, self._clock = wake, clock or SystemClock()
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._process = process or Charon(self._stopping.is_set)
        self._own: Subnets | None = None
        self._wanted: dict[str, Connection] = {}
        self._control: Vici | None = None
        self._reason = "charon is being started"
        self._problems: dict[str, str] = {}
        self._watch = Watch()
        self._thread = threading.Thread(target=self._work, name="ipsec", daemon=True)
        self._thread.start()

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """Have a connection to each of these peers; leases of other backends are none of ours."""
        wanted = connections(self.terms, own.v4, peers)
        with self._news:
            self._own, self._wanted = own, wanted
            self._news.notify()

    def unready(self) -> str:
        """Return why charon has not got all connections yet."""
        with self._news:
            return self._reason

    def problems(self) -> Mapping[str, str]:
        """Return the connections that charon refused or that have no association."""
        with self._news:
            return dict(self._problems)

    def close(self) -> None:
        """End charon, which tells the peers, and take the policies away: what they catch nobody would encrypt."""
        with self._news:
            if self._stopping.is_set():
                return
            self._stopping.set()
            control = self._control
            self._news.notify()
        if control is not None:
            control.abort()
        self._process.end(CLOSE_WITHIN_S - KEEP_S)
        self._thread.join(KEEP_S / 2)
        self._process.end(0)  # if the thread was just about to start one
        self._forget()
        try:
            self._remove_policies()
        except KernelError as error:
            log.warning("%s", error)

    def _remove_policies(self) -> None:
        own = self._own.v4 if self._own is not None else None
        mine = [policy for policy in read_policies() if own in {policy.source, policy.destination}]
        for start in range(0, len(mine), BATCH):
            request_policies([(Change("delete", policy), 0) for policy in mine[start : start + BATCH]])

    # -- the thread ---------------------------------------------------------

    def _work(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                with closing(self._process.connect()) as control:
                    self._control = control
                    self._serve(control)
            except (CharonError, RefusedError) as error:
                if self._stopping.is_set():
                    return
                failures = 1 if time.monotonic() - began > RESTART_S[-1] else failures + 1
                delay_s = RESTART_S[min(failures, len(RESTART_S)) - 1]
                if self._say(str(error)):
                    log.warning("%s; next attempt in %g s", error, delay_s)
                with self._news:
                    self._news.wait_for(self._stopping.is_set, delay_s)
            finally:
                self._control = None

    def _serve(self, control: Vici) -> None:
        """Tell charon what is wanted, as long as it lives. Raises CharonError, RefusedError."""
        loaded: dict[str, Connection | None] = {name: None for name in control.names() if ours(name, self.terms)}
        owners: set[str] = set()
        self._watch = Watch()
        told: Mapping[str, Connection] | None = None
        look_at = 0.0
        while not self._stopping.is_set():
            if not self._process.running():
                raise CharonError("charon ended")
            with self._news:
                wanted = self._wanted if self._own is not None else None
            if wanted is not None and (wanted is not told or time.monotonic() >= look_at):
                refused = self._tell(control, loaded, owners, wanted)
                self._look(control, loaded, wanted, refused)
                self._say("")
                told, look_at = wanted, time.monotonic() + CHECK_S
            with self._news:
                if self._wanted is told or self._own is None:
                    self._news.wait(ALIVE_S)

    def _tell(
        self,
        control: Vici,
        loaded: dict[str, Connection | None],
        owners: set[str],
        wanted: Mapping[str, Connection],
    ) -> dict[str, str]:
        """Bring charon's connections to what is wanted; return those it refused, with the reason."""
        refused: dict[str, str] = {}
        todo = steps(loaded, wanted)
        for name in todo.drop:
            control.drop(name)
            del loaded[name]
            # A host may have two subnets for a while. Charon would not notice that the other's associations are gone.
            if peer_of(name) not in {peer_of(other) for other in loaded}:
                self._forget(peer_of(name))
            log.info("connection %s removed", name)
        needed = {str(self.terms.public), *(str(one.peer.address) for one in wanted.values())}
        for owner in sorted(owners - needed):
            control.unload_psk(owner)
            owners.discard(owner)
        for owner in sorted(needed - owners):
            control.load_psk(owner, self.terms.psk)
            owners.add(owner)
        for connection in todo.load:
            try:
                control.load(connection)
            except RefusedError as error:
                refused[connection.name] = str(error)
                continue
            if connection.name not in loaded:
                log.info("connection %s added", connection.name)
            loaded[connection.name] = connection
        return refused

    def _forget(self, peer: IPAddress | None = None) -> None:
        try:
            remove_associations(self.terms.local, peer)
        except (KernelError, OSError) as error:
            log.warning("IPsec associations with %s stay: %s", peer or "all peers", error)

    def _look(
        self,
        control: Vici,
        loaded: Mapping[str, Connection | None],
        wanted: Mapping[str, Connection],
        refused: Mapping[str, str],
    ) -> None:
        """See which connections carry, begin those that nobody negotiates, note those that do not."""
        found, now = control.associations(), self._clock.now()
        fresh = wanted.keys() - self._watch.since.keys()
        for name in self._watch.see(wanted.keys(), found, now):
            # A connection that was just loaded begins by itself.
            if name in loaded and name not in fresh:
                try:
                    control.initiate(wanted[name])
                except RefusedError as error:
                    log.debug("%s", error)
        problems = {name: _silence(wanted[name]) for name in self._watch.silent(now)} | dict(refused)
        with self._news:
            changed, self._problems = problems != self._problems, problems
        if changed:
            self._wake()

    def _say(self, reason: str) -> bool:
        """Set why connections are not there; return whether it is something new."""
        with self._news:
            changed, self._reason = reason != self._reason, reason
        if changed:
            self._wake()
        return changed


def _silence(connection: Connection) -> str:
    peer = connection.peer
    return (
        f"no IPsec association with {peer.address} for {peer.subnet}: PSK or proposals differ, "
        f"or UDP 500, UDP 4500 or ESP do not get through"
    )
