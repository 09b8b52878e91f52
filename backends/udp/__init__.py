"""Backend ``udp``: one plain IPv4 packet per UDP datagram.

Through a process or through the kernel (``DataPath``), which the wire does not
show. The first needs nothing of the kernel beyond TUN; it is what upstream
takes when a config names no backend.
"""

from __future__ import annotations

from typing import Final

from backends.api import Backend, Setting
from backends.udp.fou import FouBackend
from backends.udp.options import data_path
from backends.udp.user import UdpBackend

TYPE: Final = "udp"


def backend(setting: Setting) -> Backend:
    """Return the backend of the data path that the config asks for. Raises ConfigError."""
    match data_path(setting):
        case "bpf":
            from backends.udp.bpf import BpfBackend  # noqa: PLC0415 - byte code that most starts do without

            return BpfBackend(setting)
        case "fou":
            return FouBackend(setting)
        case _:
            return UdpBackend(setting)


BACKEND = backend
