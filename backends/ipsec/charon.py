"""The process charon: found, started, taken over from an earlier run, ended."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from backends.ipsec.vici import CharonError, Vici

log = logging.getLogger(__name__)

DIRECTORIES: Final = (
    "/usr/lib/strongswan",
    "/usr/lib/ipsec",
    "/usr/libexec/strongswan",
    "/usr/libexec/ipsec",
)
"""Where distributions put it, searched after PATH; upstream's list."""
PID_FILE: Final = Path("/var/run/charon.pid")
MARK: Final = "FLANNELD_CHARON"
"""A variable in the environment of those that we start."""
START_S: Final = 10.0
POLL_S: Final = 0.05


def find() -> str | None:
    """Return the program, None if it is not installed."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *DIRECTORIES))
    return shutil.which("charon", path=path)


class Charon:
    """At most one process. Its methods belong to one thread, but for ``end``."""

    def __init__(self, ending: Callable[[], bool]) -> None:
        self._ending = ending
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1

    def __del__(self) -> None:
        self._forget()

    def connect(self) -> Vici:
        """Return a connection to a charon that runs, started if need be. Raises CharonError."""
        if not self.running():
            self._take_over_or_start()
        end = time.monotonic() + START_S
        while True:
            try:
                return Vici()
            except CharonError:
                if not self.running():
                    raise CharonError(f"charon ended at once ({self._how()})") from None
                if self._ending() or time.monotonic() >= end:
                    raise
            time.sleep(POLL_S)

    def running(self) -> bool:
        """Whether the process is there; a child that ended is buried."""
        if self._pidfd < 0:
            return False
        if self._child is not None:
            alive = self._child.poll() is None
        else:
            alive = not select.select([self._pidfd], [], [], 0)[0]
        return alive

    def end(self, within_s: float) -> None:
        """Ask it to end, which closes all associations, and kill it if it does not in time."""
        end = time.monotonic() + within_s
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.running():
                break
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
            select.select([self._pidfd], [], [], max(0.0, end - time.monotonic()))

    def _take_over_or_start(self) -> None:
        self._forget()
        if self._ending():
            raise CharonError("the daemon ends")
        pid = _running_pid()
        if pid:
            if not _is_ours(pid):
                raise CharonError(f"another charon runs here (process {pid}); stop strongSwan's own service")
            self._pidfd = _watched(pid)
            log.info("charon of an earlier run goes on (process %d)", pid)
            return
        program = find()
        if program is None:
            raise CharonError(f"charon (strongSwan) is neither in PATH nor in {', '.join(DIRECTORIES)}")
        try:
            self._child = subprocess.Popen(
                [program], stdin=subprocess.DEVNULL, env={**os.environ, MARK: "1"}, start_new_session=True
            )
        except OSError as cause:
            raise CharonError(f"{program} cannot be started: {cause.strerror or cause}") from cause
        self._pidfd = _watched(self._child.pid)
        log.info("%s started (process %d)", program, self._child.pid)

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd, self._child = -1, None

    def _how(self) -> str:
        code = self._child.returncode if self._child is not None else None
        return "exit code unknown" if code is None else f"exit code {code}"


def _watched(pid: int) -> int:
    """Return a descriptor that tells of the end of a process. Raises CharonError, as for one that is gone already."""
    try:
        return os.pidfd_open(pid)
    except OSError as cause:
        raise CharonError(f"charon (process {pid}) cannot be watched: {cause.strerror}") from cause


def _running_pid() -> int:
    """Return the process that charon's own file names, 0 for none.

    A file of another program's process, left behind and misread after a reboot
    of a container, would keep charon from starting for ever; it is removed.
    """
    try:
        pid = int(PID_FILE.read_text())
        start, _, state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except (OSError, ValueError):
        return 0
    if start.endswith("(charon") and not state.startswith("Z"):
        return pid
    with suppress(OSError):
        PID_FILE.unlink()
    return 0


def _is_ours(pid: int) -> bool:
    """Whether we, or a run before, started a process, in this network namespace."""
    try:
        marked = f"{MARK}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return marked and os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return False
