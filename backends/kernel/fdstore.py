"""Descriptors that the service manager keeps while the daemon restarts (sd_notify(3), sd_listen_fds(3))."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

log = logging.getLogger(__name__)

FIRST_FD: Final = 3
"""Where the passed ones begin (SD_LISTEN_FDS_START)."""


class FdStore:
    """Keeps descriptors by name, and returns those of the run before. Does nothing where nobody keeps them.

    systemd says from version 254 on how many it keeps (``FDSTORE``); earlier
    ones are told by being the process's manager.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        mine = str(os.getpid() if pid is None else pid)
        keeps = environ.get("FDSTORE", "0") not in ("", "0") or environ.get("SYSTEMD_EXEC_PID") == mine
        self._manager = environ.get("NOTIFY_SOCKET", "") if keeps else ""
        self._passed: dict[str, int] = {}
        self._in_use: dict[str, int] = {}
        if environ.get("LISTEN_PID") == mine:
            names = environ.get("LISTEN_FDNAMES", "").split(":")
            for fd in range(FIRST_FD, FIRST_FD + int(environ.get("LISTEN_FDS", "0"))):
                os.set_inheritable(fd, False)
                name = names[fd - FIRST_FD] if fd - FIRST_FD < len(names) else ""
                self._passed[name] = fd

    def take(self, name: str) -> int | None:
        """Return what was kept under a name; the caller owns it now."""
        return self._passed.pop(name, None)

    def keep(self, name: str, fd: int) -> bool:
        """Have a copy of a descriptor kept, now or when the process is replaced; return whether the manager does."""
        self._in_use[name] = fd
        # Without polling: a TUN whose device is down would be taken for a dead one.
        return self._tell(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", (fd,))

    def forget(self, name: str) -> None:
        """Have nothing kept under that name any more."""
        self._in_use.pop(name, None)
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def forget_untaken(self) -> None:
        """Close what nobody took, here and there: it belongs to an earlier configuration."""
        for name, fd in self._passed.items():
            log.info("descriptor %s of an earlier configuration is closed", name)
            self.forget(name)
            os.close(fd)
        self._passed.clear()

    def copies(self) -> dict[str, int]:
        """Return copies of what is to be kept, to be passed on with ``passing_on``."""
        return {name: os.dup(fd) for name, fd in self._in_use.items()}

    def _tell(self, text: str, fds: Sequence[int] = ()) -> bool:
        if not self._manager:
            return False
        address = "\0" + self._manager[1:] if self._manager.startswith("@") else self._manager
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            socket.send_fds(sock, [text.encode()], list(fds))
            return True
        return False


def passing_on(copies: Mapping[str, int]) -> dict[str, str]:
    """Put descriptors where the program that replaces this one looks for them; return what it has to be told.

    What was in their places is lost: nothing but execve(2) may follow.
    """
    above = FIRST_FD + len(copies)
    safe = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in copies.values()]
    for place, fd in enumerate(safe, FIRST_FD):
        os.dup2(fd, place)
        os.close(fd)
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(copies)), "LISTEN_FDNAMES": ":".join(copies)}


@lru_cache(maxsize=1)
def process_store() -> FdStore:
    """Return the store of this process."""
    return FdStore()
