"""Messages to the service manager (sd_notify(3)); silent when there is none."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import sdnotify


class Notifier:
    """READY once, STATUS on change, WATCHDOG in time, RELOADING or STOPPING at the end."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._to = sdnotify.SystemdNotifier()
        self._ready = False
        self._status = ""
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(usec) / 1e6 if mine and usec.isdigit() else 0.0
        """Interval in which the manager wants a sign of life, in seconds; 0: none."""

    def ready(self, status: str) -> None:
        """Tell that the service works; repeated calls update the status only."""
        if not self._ready:
            self._ready = True
            self._status = status
            self._to.notify(f"READY=1\nSTATUS={status}")
        else:
            self.status(status)

    def status(self, status: str) -> None:
        """Tell people what is going on, one line."""
        if status != self._status:
            self._status = status
            self._to.notify(f"STATUS={' '.join(status.split())}")

    def alive(self) -> None:
        """Sign of life."""
        if self.watchdog_s:
            self._to.notify("WATCHDOG=1")

    def reloading(self) -> None:
        """Tell that the service starts anew in the same process, and will say READY again."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._to.notify(f"RELOADING=1\nMONOTONIC_USEC={usec}\nSTATUS=restarting")

    def stopping(self) -> None:
        """Tell that the service ends."""
        self._to.notify("STOPPING=1\nSTATUS=stopping")
