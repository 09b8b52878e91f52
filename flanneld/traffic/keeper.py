"""The thread that keeps the host's traffic rules as wanted."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from flanneld.traffic.detect import Host, open_host
from flanneld.traffic.hostcheck import host_problems
from flanneld.traffic.ports import Watch
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.runner import Runner
from flanneld.traffic.settle import Settler, families_on
from subnet.clock import Backoff, Clock
from subnet.errors import Closed, KernelError, RuleError
from subnet.report import Reporter

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_RETRY_FIRST_S, _RETRY_CEILING_S = 0.2, 10.0
_QUIET_S = 0.25
"""A change is answered once there was no further one for so long.

Who flushes chains one command after the other removes them next; a jump that
came back in between would make that fail.
"""
_QUIET_AT_LAST_S = 0.8
"""Changes that never pause are answered after this long."""


@dataclass(frozen=True, slots=True)
class TrafficState:
    """Whether the rules of ``policy`` are in force; ``problem`` says why they are not."""

    policy: TrafficPolicy
    ok: bool
    problem: str = ""


Post = Callable[[TrafficState], None]
OpenHost = Callable[[Runner, Clock], Host]


class TrafficKeeper:
    """Repairs rules on notification where the kernel gives any, and looks every ``resync_s`` seconds.

    ``find_host`` tells how rules are written on this host. It is called in the
    keeper's thread, and all rules are those of that thread's network namespace.
    """

    def __init__(
        self, clock: Clock, resync_s: float, *, runner: Runner | None = None, find_host: OpenHost = open_host
    ) -> None:
        self.clock = clock
        self.resync_s = max(resync_s, 1.0)
        self.runner = runner or Runner()
        self._find_host = find_host
        self._reporter = Reporter(log, clock)
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_CEILING_S)
        self._wanted: TrafficPolicy | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._post: Post | None = None
        self._posted: TrafficState | None = None
        self._settler: Settler | None = None

    def start(self, post: Post) -> None:
        """Start the thread; every change of state goes to ``post``, called from it."""
        self._post = post
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def want(self, policy: TrafficPolicy) -> None:
        """Declare the wanted policy; the latest wins. Returns at once."""
        self._wanted = policy
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and any program it runs, within a second. The rules stay."""
        self.runner.close()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        timeout_s: float | None = None
        listen = False
        try:
            while True:
                self._pause(timeout_s, listen)
                if self.runner.closed.is_set():
                    return
                timeout_s, listen = self._attempt()
        except Closed:
            log.debug("stopped in the middle of a program")
        finally:
            if (watch := self._watch()) is not None:
                watch.close()

    def _attempt(self) -> tuple[float | None, bool]:
        """Do what is due; return how long to wait, and whether to listen for changes meanwhile."""
        policy = self._wanted
        if policy is None:
            return None, False
        try:
            if self._settler is None:
                self._settler = self._begin(policy)
            self._settler.settle(policy)
        except (RuleError, KernelError) as e:
            self._reporter.problem("rules", f"traffic rules: {e}; trying again")
            self._tell(TrafficState(policy, False, f"traffic rules: {e}"))
            # Only time helps: another program that fights for the rules must not set the pace.
            return self._retry.next_s(), False
        self._retry.reset()
        self._reporter.solved("rules", "traffic rules are in place")
        self._tell(TrafficState(policy, True))
        return self.resync_s, True

    def _begin(self, policy: TrafficPolicy) -> Settler:
        host = self._find_host(self.runner, self.clock)
        for problem in host_problems(families_on(policy), self.runner):
            log.warning("%s", problem)
        return Settler(host, self.runner, self._reporter)

    def _tell(self, state: TrafficState) -> None:
        if state != self._posted and self._post is not None:
            self._posted = state
            self._post(state)

    def _pause(self, timeout_s: float | None, listen: bool) -> None:
        """Return at a wake-up, at news about our rules, or when the time is over."""
        until = None if timeout_s is None else self.clock.now() + timeout_s
        watch = self._watch() if listen else None
        while True:
            left_s = None if until is None else until - self.clock.now()
            if (left_s is not None and left_s <= 0) or self._woken(left_s, watch):
                return
            if watch is not None and self._news(watch):
                self._await_quiet()
                return

    def _await_quiet(self) -> None:
        at_last = self.clock.now() + _QUIET_AT_LAST_S
        quiet_at = self.clock.now() + _QUIET_S
        while (left_s := min(quiet_at, at_last) - self.clock.now()) > 0:
            watch = self._watch()
            if self._woken(left_s, watch):
                return
            if watch is not None and self._news(watch):
                quiet_at = self.clock.now() + _QUIET_S

    def _woken(self, timeout_s: float | None, watch: Watch | None) -> bool:
        """Wait for a wake-up, true, or for the time or the watch."""
        poll = select.poll()
        for fd in (self._wake, *([watch.fileno()] if watch is not None else [])):
            poll.register(fd, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return False
        return True

    def _news(self, watch: Watch) -> bool:
        try:
            return watch.drain(self._wanted.chain_prefix if self._wanted is not None else "")
        except KernelError as e:
            self._lose_watch(e)
            return True

    def _lose_watch(self, error: KernelError) -> None:
        log.warning("no more notification of rule changes, looking at the rules periodically instead: %s", error)
        assert self._settler is not None
        host = self._settler.host
        assert host.watch is not None
        host.watch.close()
        self._settler.host = replace(host, watch=None)

    def _watch(self) -> Watch | None:
        return self._settler.host.watch if self._settler is not None else None
