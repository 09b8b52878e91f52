"""The other end of NOTIFY_SOCKET, see sd_notify(3): what a service manager hears, and the descriptors it keeps."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path


class NotifyListener:
    """Receives a service's notifications. A thread drains the socket: a full one would block the service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.kept: dict[str, int] = {}
        """Descriptors that the service wants to have back after a restart, by name."""
        self._changed = threading.Condition()
        self._messages: list[tuple[float, dict[str, str]]] = []
        self._thread = threading.Thread(target=self._receive, name=f"notify-{path.parent.name}", daemon=True)
        self._thread.start()

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return everything received since the last ``clear``, in order, as assignments."""
        with self._changed:
            return [m for _, m in self._messages]

    @property
    def ready(self) -> bool:
        """Whether READY=1 was received."""
        return any(m.get("READY") == "1" for m in self.messages)

    @property
    def status(self) -> str:
        """Return the last STATUS text, empty if there was none."""
        return next((m["STATUS"] for m in reversed(self.messages) if "STATUS" in m), "")

    def clear(self) -> None:
        """Forget what was received."""
        with self._changed:
            self._messages.clear()

    def wait(self, name: str, value: str, timeout_s: float) -> float | None:
        """Return the monotonic time at which ``name=value`` arrived, None if it did not within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._first(name, value) is not None, timeout_s)
            return self._first(name, value)

    def close(self) -> None:
        """Stop receiving and remove the socket."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
        self.path.unlink(missing_ok=True)

    def _first(self, name: str, value: str) -> float | None:
        return next((at for at, m in self._messages if m.get(name) == value), None)

    def _receive(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, 8192, 16)
            if not data:
                return
            text = data.decode(errors="replace")
            assignments = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            self._keep(assignments, fds)
            with self._changed:
                self._messages.append((time.monotonic(), assignments))
                self._changed.notify_all()

    def _keep(self, assignments: dict[str, str], fds: list[int]) -> None:
        name = assignments.get("FDNAME", "")
        if "FDSTOREREMOVE" in assignments and name in self.kept:
            os.close(self.kept.pop(name))
        for fd in fds:
            if "FDSTORE" in assignments and name not in self.kept:
                self.kept[name] = fd
            else:
                os.close(fd)
