"""Threads of which none may die unnoticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Crash:
    """Remembers the first thread that died of an unexpected error, and tells the main thread."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.name = ""
        """The thread's name; empty while all is well."""

    def install(self) -> None:
        """Watch every thread of the process (threading.excepthook)."""
        threading.excepthook = self._hook

    def _hook(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "unknown"
        error = args.exc_value or args.exc_type()
        log.critical("thread %s died", name, exc_info=error)
        self.name = self.name or name
        self._tell()
