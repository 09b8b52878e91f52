"""Refuses links that hand packets on unfinished to a data path that leaves finishing to the link."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from subnet.errors import KernelError

Unfinished: TypeAlias = Callable[[str], str]
"""Returns why packets may leave a device without checksum and undivided, empty if they do not. Raises OSError."""


def refuse_unfinished(path: str, interface: str, unfinished: Unfinished) -> None:
    """Raise KernelError where packets of a data path would not arrive whole through an interface."""
    try:
        reason = unfinished(interface)
    except OSError as cause:
        raise KernelError("read", f"offloads of {interface}", cause.errno or 0, str(cause)) from cause
    if reason:
        text = (
            f"{reason}, and peers that read them in user space would lose all but pings; "
            f"switch that off with: ethtool -K {interface} tx off, or set DataPath to user"
        )
        raise KernelError("use", f"DataPath {path} on {interface}", 0, text)
