"""The UDP socket of the overlay: one plain IPv4 packet per datagram (upstream pkg/backend/udp).

Sources: udp(7), socket(7), ip(7), linux/udp.h.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

from subnet.errors import KernelError

SOL_UDP: Final = 17
UDP_SEGMENT: Final = 103
UDP_GRO: Final = 104
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER_BYTES: Final = 8 << 20
"""Bursts of a whole TCP window arrive at once; the usual 208 KiB lose them."""

_REASONS: Final = {
    errno.EADDRINUSE: "the port is taken, perhaps by another flanneld",
    errno.EADDRNOTAVAIL: "the address is not one of this host",
    errno.EACCES: "not permitted; the process needs CAP_NET_BIND_SERVICE for ports below 1024",
}


@dataclass(frozen=True, slots=True)
class Wire:
    """The bound socket. ``gso``: one message carries many equal datagrams; ``gro``: so does one reception."""

    socket: socket.socket
    gso: bool
    gro: bool


def open_wire(address: IPv4Address, port: int) -> Wire:
    """Bind the interface's own address, so that packets come from and arrive at no other. Raises KernelError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        for forced, plain in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                sock.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
            except PermissionError:
                sock.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
        sock.bind((str(address), port))
    except OSError as cause:
        sock.close()
        code = cause.errno or 0
        raise KernelError(
            "bind", f"UDP {address}:{port}", code, _REASONS.get(code, os.strerror(code).lower())
        ) from cause
    return Wire(sock, _has(sock, UDP_SEGMENT), _switched_on(sock, UDP_GRO))


def _has(sock: socket.socket, option: int) -> bool:
    with suppress(OSError):
        sock.getsockopt(SOL_UDP, option)
        return True
    return False


def _switched_on(sock: socket.socket, option: int) -> bool:
    with suppress(OSError):
        sock.setsockopt(SOL_UDP, option, 1)
        return True
    return False
