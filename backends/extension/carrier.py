"""The thread that runs the commands, one after the other as upstream does."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping

from backends.api import CLOSE_WITHIN_S, Carrier
from backends.extension.agenda import Agenda, Job
from backends.extension.commands import CommandPlan, peer_env, peer_input
from backends.extension.runner import Result, Runner
from subnet.clock import Clock, SystemClock
from subnet.errors import LeaseDataError
from subnet.model import Lease, Subnets

log = logging.getLogger(__name__)

KEEP_S = 0.1
"""Part of the closing time kept for the thread itself."""


class ExtensionCarrier(Carrier):
    """Runs what the agenda says is due. Its methods are called by the owner, and do not wait for commands."""

    def __init__(self, plan: CommandPlan, wake: Callable[[], None], clock: Clock | None = None) -> None:
        self.plan = plan
        self.output: str | None = None
        """What PreStartupCommand printed, None without such a command."""
        self._wake, self._clock = wake, clock or SystemClock()
        self._agenda = Agenda()
        self._news = threading.Condition()
        self._own: Subnets | None = None
        self._stopping = False
        self._runner = Runner()
        self._thread = threading.Thread(target=self._work, name="extension", daemon=True)
        self._thread.start()

    def unprepared(self) -> str:
        """Return why PreStartupCommand has not succeeded yet."""
        with self._news:
            return self._agenda.unprepared()

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """Have the commands run that these peers need; leases of other backends are none of ours."""
        mine = [lease for lease in peers if lease.attrs.backend_type == "extension"]
        with self._news:
            self._own = own
            self._agenda.want(own, mine)
            self._news.notify()

    def unready(self) -> str:
        """Return why PostStartupCommand has not succeeded yet, or that peers are still to come."""
        with self._news:
            return self._agenda.unready()

    def problems(self) -> Mapping[str, str]:
        """Return the peers whose command failed."""
        with self._news:
            return self._agenda.problems()

    def close(self) -> None:
        """Kill what runs, then run ShutdownCommand; it is killed when the time is over. Once is enough."""
        ends = time.monotonic() + CLOSE_WITHIN_S
        with self._news:
            if self._stopping:
                return
            self._stopping = True
            self._news.notify()
        self._runner.abort()
        self._thread.join(KEEP_S)
        result = self._run(Runner(), "ShutdownCommand", self.plan.own_env(self._own), "\n", ends - time.monotonic())
        if result.problem:
            log.error("ShutdownCommand %s", result.problem)

    def _work(self) -> None:
        while True:
            with self._news:
                job = None
                while job is None:
                    if self._stopping:
                        return
                    now_s = self._clock.now()
                    job = self._agenda.next(now_s)
                    if job is None:
                        self._news.wait(self._agenda.due_in_s(now_s))
            result = self._perform(job)
            with self._news:
                if self._stopping:
                    return
                if job.name == "PreStartupCommand" and not result.problem and self.plan.commands[job.name]:
                    self.output = result.output
                self._agenda.finished(job, f"{job} {result.problem}" if result.problem else "", self._clock.now())
            self._wake()

    def _perform(self, job: Job) -> Result:
        if job.lease is None:
            return self._run(self._runner, job.name, self.plan.own_env(job.own), "\n", self.plan.timeout_s)
        try:
            text = peer_input(job.lease)
        except LeaseDataError as error:
            return Result("", f"cannot run: {error}")
        return self._run(self._runner, job.name, peer_env(job.lease), text, self.plan.timeout_s)

    def _run(self, runner: Runner, name: str, env: Mapping[str, str], text: str, timeout_s: float) -> Result:
        argv = self.plan.argv(name, {**os.environ, **env})
        if not argv:
            return Result("")
        result = runner.run(argv, env, text, timeout_s)
        log.debug("%s%s: %s", name, f" {env['SUBNET']}" if env else "", result.problem or "succeeded")
        return result
