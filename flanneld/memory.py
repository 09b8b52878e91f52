"""How the garbage collector is set, and why.

What this daemon builds is freed by reference counts; cycles are few (an
exception with its frames, say). What it knows of the cluster lives as long as
the process, and each full collection would walk all of it.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

THRESHOLDS = (20_000, 10, 10)
"""Objects that come to be before the youngest are looked through: by default 700, passed ten times in a list of
a hundred leases."""


def begin() -> None:
    """After loading: modules, classes and functions are never garbage."""
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()


def settle() -> None:
    """After the first convergence: neither are the leases and entries known by then. Free memory goes back."""
    gc.collect()
    gc.freeze()
    # glibc keeps what the list of leases took; other C libraries have no such call.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
