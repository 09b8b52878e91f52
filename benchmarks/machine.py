"""The machine that a result was taken on, and what a process uses of it."""

from __future__ import annotations

import compileall
import os
import platform
from pathlib import Path

import flanneld


def describe() -> str:
    """Return processor, number of cores, kernel and interpreter, one line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    kernel, python = platform.release(), platform.python_version()
    return f"{model}, {os.cpu_count()} cores, Linux {kernel}, CPython {python}"


def compile_daemon() -> None:
    """Have the daemon's byte code beside its sources, as after an installation; a source tree may have none."""
    root = Path(flanneld.__file__).parent.parent
    for package in ("subnet", "backends", "flanneld"):
        compileall.compile_dir(root / package, quiet=2)


def rss_mib(pid: int, field: str = "VmRSS") -> float:
    """Return the resident memory of a process in MiB; ``VmHWM`` is the greatest so far (proc(5))."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has no memory: it has ended")


def cpu_s(pid: int, *, children: bool = False) -> float:
    """Return the processor seconds that a process has used, to the clock tick (utime and stime, proc(5)).

    With ``children`` those that it has waited for are included.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")
