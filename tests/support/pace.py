"""How soon the daemon mends what others changed, on a machine that an emulator makes slow.

An emulated processor is twenty times slower than the one it runs on, and more
when that one is busy, but a timer takes as long as ever. So a second is not
stretched there. What passes between the first of the kernel's notifications
and the last is split into the time in which a thread of the daemon computed, or
was ready to, and the time in which all of them waited. The former is divided by
the slowdown, which the same work on both sides of the emulator tells; the latter
counts in full.
"""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from flanneld.ctl.lab.hosts import Daemon, Host
from tests.support.site import settle

REFERENCE = "FLANNELD_GUEST_REFERENCE_S"
"""Environment of the guest: what ``work_s`` gave outside."""
TURNS, LOOPS = 5, 20_000
SAMPLE_S = 0.2
MARK = "203.0.113.0"
OURS = re.compile(r"(?!.* dev cni0)(.* (10\.5\.|fd05:)|.*: flannel\S+: <)")
"""Notifications of addresses and routes in the cluster's networks, and of the tunnel devices."""


def work_s() -> float:
    """Return the processor seconds of a fixed piece of work, the least of several turns."""
    least = float("inf")
    for _ in range(TURNS):
        began = time.thread_time()
        total = 0
        for number in range(LOOPS):
            total += number * number % 7
        least = min(least, time.thread_time() - began)
    return least


def slowdown() -> float:
    """Return how many times longer work takes here than outside of the guest; 1 when this is no guest."""
    outside_s = float(os.environ.get(REFERENCE, "0"))
    return max(1.0, work_s() / outside_s) if outside_s else 1.0


class Watch:
    """Follows a host's notifications with their times: ``ip -timestamp monitor``."""

    def __init__(self, host: Host, path: Path) -> None:
        self._host, self._path = host, path
        with path.open("wb") as output:
            self._monitor = host.namespace.spawn(
                *("ip", "-ts", "-o", "monitor", "link", "address", "route"), output=output
            )
        settle("the monitor hears", lambda: self._deaf(0), 60)

    def _deaf(self, offset: int) -> str:
        self._host.namespace.ip(f"route replace {MARK}/24 dev lo table 78", f"route del {MARK}/24 table 78")
        return "" if MARK in self._path.read_text()[offset:] else "nothing"

    def close(self) -> None:
        """End it."""
        self._monitor.kill()
        self._monitor.wait()

    @contextmanager
    def timing(self) -> Iterator[Timing]:
        """Time what happens in the block."""
        timing = Timing(self._host.daemon)
        size = self._path.stat().st_size
        try:
            yield timing
        finally:
            timing.stop()
        settle("the monitor heard all", lambda: self._deaf(size), 60)
        timing.read(self._path.read_text()[size:])


class Timing:
    """What one disturbance and its repair took."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon, self._stop = daemon, threading.Event()
        self._slowdown = slowdown()
        self._at, self._busy = [time.time()], [busy_s(daemon)]
        self._sampler = threading.Thread(target=self._sample, name="pace-sampler", daemon=True)
        self._sampler.start()
        self.elapsed_s = self.computing_s = 0.0

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._note()

    def _note(self) -> None:
        self._at.append(time.time())
        self._busy.append(busy_s(self._daemon))

    def stop(self) -> None:
        """End the sampling."""
        self._stop.set()
        self._sampler.join()
        self._note()

    def read(self, said: str) -> None:
        """Take the notifications of the time."""
        times = [_time_of(line) for line in said.splitlines() if OURS.match(line)]
        if times:
            self.elapsed_s = times[-1] - times[0]
            computing_s = self._busy_at(times[-1]) - self._busy_at(times[0])
            self.computing_s = min(computing_s, self.elapsed_s)

    def _busy_at(self, at: float) -> float:
        """Interpolate between the samples."""
        after = min(max(1, bisect_right(self._at, at)), len(self._at) - 1)
        (began, ended), (first, last) = self._at[after - 1 : after + 1], self._busy[after - 1 : after + 1]
        share = min(max(0.0, (at - began) / (ended - began)), 1.0)
        return first + share * (last - first)

    @property
    def seconds(self) -> float:
        """Return how long it took, as if nothing was emulated."""
        return self.elapsed_s - self.computing_s + self.computing_s / self._slowdown

    def __str__(self) -> str:
        parts = f"{self.elapsed_s:.2f} s, {self.computing_s:.2f} of them computing, {self._slowdown:.0f} times slower"
        return f"{self.seconds:.2f} s ({parts} than outside)"


def busy_s(daemon: Daemon) -> float:
    """Return the seconds that a daemon's threads have run or waited for a processor (proc_pid_schedstat)."""
    total_ns = 0
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
            run_ns, queued_ns, _ = (task / "schedstat").read_text().split()
            total_ns += int(run_ns) + int(queued_ns)
    return total_ns / 1e9


def _time_of(line: str) -> float:
    return datetime.fromisoformat(line[1 : line.index("]")]).timestamp()
