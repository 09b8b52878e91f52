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
M_ARENA_MAX = -8
"""mallopt(3)."""


def begin() -> None:
    """After loading: modules, classes and functions are never garbage. To be called before other threads run.

    By default each thread would take its memory from a heap of its own, and
    keep there what it freed.
    """
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()
    _call("mallopt", M_ARENA_MAX, 1)


def settle() -> None:
    """Once the start is over: neither are the leases and entries known by then. Free memory goes back.

    Not before the kernel's answer to the first convergence, a notification per
    entry, was heard: that takes memory of its own.
    """
    gc.collect()
    gc.freeze()
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function that glibc has and other C libraries need not have."""
    with suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*arguments)
