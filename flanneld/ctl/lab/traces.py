"""What labs leave on a machine, whose it is, and how it is removed.

Everything a lab owns carries its prefix: namespaces ``<prefix>-...`` and one
directory of the same beginning. The prefix names the owner's process id.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flanneld.ctl.lab import netns

STEM = "fl-lab-"
_NAME = re.compile(r"(?P<prefix>fl-lab-(?P<pid>\d+)(\.\d+)?)-")
_OWNER, _KEPT = "owner", "kept"


@dataclass(frozen=True, slots=True)
class Trace:
    """One lab as seen from outside. ``alive``: its owner still runs; ``kept``: it was left up on purpose."""

    prefix: str
    namespaces: tuple[str, ...]
    directories: tuple[Path, ...]
    alive: bool
    kept: bool

    def remove(self) -> None:
        """End its processes, delete its namespaces and its directory."""
        for name in self.namespaces:
            netns.remove(name)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def claim(prefix: str) -> Path:
    """Make and return the directory of a new lab of this process."""
    directory = Path(tempfile.mkdtemp(prefix=f"{prefix}-"))
    (directory / _OWNER).write_text(f"{os.getpid()} {_started(os.getpid())}\n")
    return directory


def mark_kept(directory: Path) -> None:
    """Note that the lab shall outlive its owner."""
    (directory / _KEPT).touch()


def find(prefix: str = STEM) -> list[Trace]:
    """Return the labs of this machine whose names start with ``prefix``."""
    found: dict[str, tuple[list[str], list[Path]]] = {}
    for name in netns.names(prefix):
        if match := _NAME.match(name):
            found.setdefault(match["prefix"], ([], []))[0].append(name)
    for directory in _directories(prefix):
        if match := _NAME.match(directory.name):
            found.setdefault(match["prefix"], ([], []))[1].append(directory)
    return [
        Trace(
            lab,
            tuple(namespaces),
            tuple(directories),
            alive=_owner_lives(lab, directories),
            kept=any((d / _KEPT).exists() for d in directories),
        )
        for lab, (namespaces, directories) in sorted(found.items())
    ]


def remove(prefix: str) -> None:
    """Remove the lab of exactly this prefix, whoever owns it."""
    for trace in find(prefix):
        if trace.prefix == prefix:
            trace.remove()


def sweep(prefix: str = STEM, *, kept: bool = False) -> list[str]:
    """Remove the labs of dead owners, those kept on purpose only if ``kept``; return their prefixes."""
    removed = []
    for trace in find(prefix):
        if not trace.alive and (kept or not trace.kept):
            trace.remove()
            removed.append(trace.prefix)
    return removed


def _directories(prefix: str) -> list[Path]:
    # Anybody may make directories there: only this user's own count.
    there = Path(tempfile.gettempdir()).glob(f"{prefix}*")
    return sorted(d for d in there if d.is_dir() and not d.is_symlink() and d.stat().st_uid == os.geteuid())


def _owner_lives(prefix: str, directories: list[Path]) -> bool:
    match = _NAME.match(f"{prefix}-")
    pid = int(match["pid"]) if match else 0
    started = _started(pid)
    noted = [(d / _OWNER).read_text().split() for d in directories if (d / _OWNER).exists()]
    # Process ids are used again; the start time tells the owner from a namesake.
    return bool(started) and all(words[-1:] == [started] for words in noted)


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, empty if there is none (proc(5), field 22)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
