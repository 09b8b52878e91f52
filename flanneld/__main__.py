"""Entry point: ready for signals before anything heavy is loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def run() -> int:
    """Run the daemon and return its exit code (console script ``flanneld``)."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it asks for a start, and here is one
    from flanneld.cli import main  # noqa: PLC0415 - signals count from here on, loading takes a while

    return main(sys.argv[1:], os.environ)


def _leave(_number: int, _frame: FrameType | None) -> None:
    # Nothing has been done yet that would have to be undone; the daemon sets its own handlers.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(run())
