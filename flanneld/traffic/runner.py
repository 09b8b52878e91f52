"""Child processes with an end: a time limit each, and all of them stopped by ``close``."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from subnet.errors import Closed, RuleError


@dataclass(frozen=True, slots=True)
class Finished:
    """How a child process ended. ``rc`` is negative if a signal ended it."""

    rc: int
    out: str
    err: str


class Runner:
    """Runs one program at a time. ``close`` may be called from any thread."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.forks = 0
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def find(self, *names: str) -> str | None:
        """Return the path of the first of these programs that exists."""
        places = os.get_exec_path()
        paths = (f"{place}/{name}" for name in names for place in places)
        return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), None)

    def run(self, argv: Sequence[str], text: str = "") -> Finished:
        """Run a program with ``text`` as its input.

        Raises RuleError when it takes too long or cannot be started, Closed
        after ``close``.
        """
        child = self._start(argv)
        try:
            out, err = child.communicate(text, timeout=self.timeout_s)
        except subprocess.TimeoutExpired as e:
            raise RuleError(f"{os.path.basename(argv[0])} did not end within {self.timeout_s:.0f} s") from e
        finally:
            self._end(child)
        if self.closed.is_set():
            raise Closed(f"{argv[0]} stopped")
        return Finished(child.returncode, out, err)

    def close(self) -> None:
        """Stop the program that is running, if any, and let none start any more."""
        with self._lock:
            self.closed.set()
            if self._child is not None:
                _kill_group(self._child)

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self.closed.is_set():
                raise Closed(f"{argv[0]} not started")
            self.forks += 1
            try:
                # A session of its own: killing its group also ends helpers that would keep the pipes open.
                self._child = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="surrogateescape",
                    env={**os.environ, "LC_ALL": "C"},
                    start_new_session=True,
                )
            except OSError as e:
                raise RuleError(f"cannot start {argv[0]}: {e.strerror}") from e
            return self._child

    def _end(self, child: subprocess.Popen[str]) -> None:
        with self._lock:
            self._child = None
            if child.returncode is None:
                _kill_group(child)
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _kill_group(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
