"""Running tools and waiting, in one place."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from flanneld.ctl.lab.errors import CommandError, LabError

T = TypeVar("T")

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def environment(**extra: str) -> dict[str, str]:
    """Return the caller's environment without what would steer a daemon, with the system's directories on PATH."""
    steering = (
        "FLANNELD_",
        "NOTIFY_",
        "WATCHDOG_",
        "LISTEN_",
        "FDSTORE",
        "SYSTEMD_EXEC_PID",
        "STATE_DIRECTORY",
        "ETCD",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
    kept["PATH"] = f"{kept['PATH']}:{SYSTEM_PATH}" if kept.get("PATH") else SYSTEM_PATH
    return kept | extra


def run(*argv: str, check: bool = True, stdin: str | None = None, timeout_s: float = 30.0) -> str:
    """Run a tool and return its standard output.

    Raises CommandError for a non-zero exit, unless ``check`` is False, and
    LabError if the tool is missing or does not end in time.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment(),
        )
    except FileNotFoundError as e:
        raise LabError(f"{argv[0]} is not installed") from e
    except subprocess.TimeoutExpired as e:
        raise LabError(f"{' '.join(argv)}: not done after {timeout_s:g} s") from e
    if check and done.returncode != 0:
        raise CommandError(argv, done.returncode, done.stderr or done.stdout)
    return done.stdout


def poll(what: str, probe: Callable[[], T | None], timeout_s: float, every_s: float = 0.05) -> T:
    """Call ``probe`` until it returns something other than None or False, and return that.

    Raises LabError after ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value is not None and value is not False:
            return value
        if time.monotonic() >= end:
            raise LabError(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)
