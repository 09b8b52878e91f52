"""The lock that legacy iptables programs share (iptables(8), XTABLES_LOCKFILE)."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from subnet.clock import Clock
from subnet.errors import Closed, RuleError

WAIT_S = 1
"""How long anybody else may hold the lock before an attempt is given up, in seconds: other work has its turn then."""

_POLL_S = 0.05


def default_path() -> str:
    """Return the lock file that the installed programs use too."""
    return os.environ.get("XTABLES_LOCKFILE", "/run/xtables.lock")


class LockHeld(RuleError):
    """Another program holds the lock: to be tried again soon."""


@contextmanager
def xtables_lock(path: str, clock: Clock, closed: threading.Event) -> Iterator[None]:
    """Hold the lock.

    Raises LockHeld if it is not free in time, RuleError if there is none, Closed if told to end.
    """
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise RuleError(f"cannot open {path}: {e.strerror}") from e
    try:
        _acquire(fd, path, clock, closed)
        yield
    finally:
        os.close(fd)


def _acquire(fd: int, path: str, clock: Clock, closed: threading.Event) -> None:
    deadline = clock.now() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as e:
            if clock.now() >= deadline:
                raise LockHeld(f"another program holds {path}") from e
        if closed.wait(_POLL_S):
            raise Closed(f"wait for {path} stopped")
