"""The thread that keeps the host's traffic rules as wanted."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from flanneld.traffic.detect import Host, Signs, open_host, signs
from flanneld.traffic.hostcheck import TOPICS, HostCheck
from flanneld.traffic.lock import LockHeld
from flanneld.traffic.ports import Watch
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.runner import Runner
from flanneld.traffic.settle import Settler, clear, families_on
from flanneld.traffic.vtep import VtepGuard
from flanneld.traffic.vtep_rules import VtepFilter
from subnet.clock import Backoff, Clock
from subnet.errors import Closed, KernelError, RuleError
from subnet.report import Reporter

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_RETRY_FIRST_S, _RETRY_CEILING_S = 0.2, 10.0
_LOCK_RETRY_S = 0.1
"""Waiting for the lock is the waiting: pauses in between only give other work its turn."""
_CLEANUP_TIMEOUT_S = 1.0
_CHECK_S = 30.0
_QUIET_AT_LAST = 5.0
"""Changes that never pause are answered after this many quiet times."""


@dataclass(frozen=True, slots=True)
class TrafficState:
    """Whether the rules of ``policy`` are in force; ``problem`` says why they are not."""

    policy: TrafficPolicy
    ok: bool
    problem: str = ""


Post = Callable[[TrafficState], None]
OpenHost = Callable[[bool, Runner, Clock], Host]


class TrafficKeeper:
    """Repairs rules on notification where the kernel gives any, and looks every ``resync_s`` seconds.

    ``find_host`` tells how rules are written on this host, in nftables mode or
    not. It is called in the keeper's thread, and all rules are those of that
    thread's network namespace. With ``vtep_filter`` the VXLAN port is filtered
    once ``want_filter`` says how.
    """

    def __init__(
        self,
        clock: Clock,
        resync_s: float,
        *,
        manage_sysctls: bool = False,
        cleanup_on_exit: bool = False,
        vtep_filter: bool = False,
        runner: Runner | None = None,
        find_host: OpenHost = open_host,
    ) -> None:
        self.clock = clock
        self.resync_s = max(resync_s, 1.0)
        self.runner = runner or Runner()
        self._find_host = find_host
        self._cleanup_on_exit = cleanup_on_exit
        self._reporter = Reporter(log, clock)
        self._check = HostCheck(self.runner, manage=manage_sysctls)
        self._checked_for: TrafficPolicy | None = None
        self._check_again_at = 0.0
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_CEILING_S)
        self._wanted: TrafficPolicy | None = None
        self._filter: VtepFilter | None = None
        self._filter_known = not vtep_filter
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._leaving, self._left = threading.Event(), threading.Event()
        self._post: Post | None = None
        self._posted: TrafficState | None = None
        self._settler: Settler | None = None
        self._opened_for: tuple[bool, Signs] | None = None
        self._guard: VtepGuard | None = None

    def start(self, post: Post) -> None:
        """Start the thread; every change of state goes to ``post``, called from it."""
        self._post = post
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def want(self, policy: TrafficPolicy) -> None:
        """Declare the wanted policy; the latest wins. Returns at once."""
        self._wanted = policy
        os.eventfd_write(self._wake, 1)

    def want_filter(self, wanted: VtepFilter | None) -> None:
        """Declare the wanted filter of the VXLAN port, None for none; the latest wins. Returns at once."""
        self._filter, self._filter_known = wanted, True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and any program it runs, within two seconds. The rules stay, unless they are to go."""
        if self._cleanup_on_exit and self._thread is not None and self._thread.is_alive():
            self._leaving.set()
            os.eventfd_write(self._wake, 1)
            if not self._left.wait(_CLEANUP_TIMEOUT_S):
                log.warning("traffic rules stay: they could not be removed within %g s", _CLEANUP_TIMEOUT_S)
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
                if self._leaving.is_set():
                    self._clean_up()
                    return
                if self.runner.closed.is_set():
                    return
                timeout_s, listen = self._attempt()
        except Closed:
            log.debug("stopped in the middle of a program")
        finally:
            self._left.set()
            self._forget_host()
            if self._guard is not None:
                self._guard.close()

    def _attempt(self) -> tuple[float | None, bool]:
        """Do what is due; return how long to wait, and whether to listen for changes meanwhile."""
        policy = self._wanted
        if policy is None:
            return None, False
        problems: list[RuleError | KernelError] = []
        # Who may send tunnelled packets follows the leases, whatever the rules wait for.
        for step in (self._settle_filter, self._settle_rules):
            try:
                step(policy)
            except (RuleError, KernelError) as e:
                problems.append(e)
        if problems:
            said = "; ".join(map(str, problems))
            self._reporter.problem("rules", f"traffic rules: {said}; trying again")
            self._tell(TrafficState(policy, False, said))
            # Only time helps: another program that fights for the rules must not set the pace.
            held = any(isinstance(e, LockHeld) for e in problems)
            return _LOCK_RETRY_S if held else self._retry.next_s(), False
        self._retry.reset()
        self._reporter.solved("rules", "traffic rules are in place")
        self._tell(TrafficState(policy, True))
        return self.resync_s, True

    def _settle_filter(self, policy: TrafficPolicy) -> None:
        if self._filter_known:
            if self._guard is None:
                self._guard = VtepGuard(self.runner, f"{policy.table_prefix}-vtep")
            self._guard.settle(self._filter)

    def _settle_rules(self, policy: TrafficPolicy) -> None:
        settler = self._settler_for(policy)
        self._check_host(policy, settler)
        settler.settle(policy)
        if self._opened_for is None:
            # Only now: rules of our own may have made tables.
            self._opened_for = policy.nftables, signs(self.runner)

    def _settler_for(self, policy: TrafficPolicy) -> Settler:
        """Return what works on this host, looking anew when mode or host have changed."""
        if self._opened_for is not None and self._opened_for != (policy.nftables, signs(self.runner)):
            log.info("traffic rules may have to be written another way now, looking again")
            self._forget_host()
        if self._settler is None:
            self._settler = Settler(self._find_host(policy.nftables, self.runner, self.clock), self._reporter)
        return self._settler

    def _forget_host(self) -> None:
        if (watch := self._watch()) is not None:
            watch.close()
        self._settler = self._opened_for = None

    def _check_host(self, policy: TrafficPolicy, settler: Settler) -> None:
        """Look at the host's settings, at rest less often than at the rules: nobody changes them by the second."""
        if policy == self._checked_for and self.clock.now() < self._check_again_at:
            return
        self._checked_for, self._check_again_at = policy, self.clock.now() + _CHECK_S
        found = self._check.findings(families_on(policy), iptables=not settler.host.own_tables)
        for finding in found:
            self._reporter.problem(finding.name, finding.text)
        for name in set(TOPICS) - {finding.name for finding in found}:
            self._reporter.solved(name, f"{name} is as it should be")

    def _clean_up(self) -> None:
        policy = self._wanted
        if policy is None:
            return
        try:
            clear(self._settler_for(policy).host.enforcer, policy)
            if self._guard is not None:
                self._guard.settle(None)
        except (RuleError, KernelError) as e:
            log.warning("traffic rules stay: %s", e)
        else:
            log.info("traffic rules were removed")

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
        quiet_s = self._settler.host.quiet_s if self._settler is not None else 0.0
        at_last = self.clock.now() + _QUIET_AT_LAST * quiet_s
        quiet_at = self.clock.now() + quiet_s
        while (left_s := min(quiet_at, at_last) - self.clock.now()) > 0:
            watch = self._watch()
            if self._woken(left_s, watch):
                return
            if watch is not None and self._news(watch):
                quiet_at = self.clock.now() + quiet_s

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
            return watch.drain(self._interested)
        except KernelError as e:
            self._lose_watch(e)
            return True

    def _interested(self, table: str, chain: str | None) -> bool:
        if self._guard is not None and table == self._guard.table:
            return True
        policy, settler = self._wanted, self._settler
        return policy is not None and settler is not None and settler.host.enforcer.interested(policy, table, chain)

    def _lose_watch(self, error: KernelError) -> None:
        log.warning("no more notification of rule changes, looking at the rules periodically instead: %s", error)
        assert self._settler is not None
        host = self._settler.host
        assert host.watch is not None
        host.watch.close()
        self._settler.host = replace(host, watch=None)

    def _watch(self) -> Watch | None:
        return self._settler.host.watch if self._settler is not None else None
