"""The UDP socket of the overlay: one plain packet per datagram (upstream pkg/backend/udp).

Sources: udp(7), socket(7), ip(7), linux/udp.h.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from subnet.errors import KernelError
from subnet.model import Family, IPAddress

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

    @property
    def family(self) -> Family:
        """Return the address family, which the packets inside have, too."""
        return 6 if self.socket.family == socket.AF_INET6 else 4


def open_wire(address: IPAddress, port: int, *, gro: bool = True) -> Wire:
    """Bind the interface's own address, so that packets come from and arrive at no other. Raises KernelError.

    Without ``gro`` every datagram arrives by itself, also where the kernel could put them together.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        for forced, plain in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                sock.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
            except PermissionError:
                sock.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
        if address.version == 6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((str(address), port))
    except OSError as cause:
        sock.close()
        code = cause.errno or 0
        raise KernelError(
            "bind", f"UDP {shown(address, port)}", code, _REASONS.get(code, os.strerror(code).lower())
        ) from cause
    return Wire(sock, _has(sock, UDP_SEGMENT), _switched(sock, UDP_GRO, gro))


def adopt_wire(fd: int, address: IPAddress, port: int, *, gro: bool = True) -> Wire | None:
    """Return the socket behind a descriptor of an earlier process, None if it is bound to anything else."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        return None
    if sock.type != socket.SOCK_DGRAM or sock.getsockname()[:2] != (str(address), port):
        sock.detach()
        return None
    sock.setblocking(False)
    return Wire(sock, _has(sock, UDP_SEGMENT), _switched(sock, UDP_GRO, gro))


def shown(address: IPAddress, port: int) -> str:
    """Return both as they are written together (RFC 3986 s3.2.2)."""
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def _has(sock: socket.socket, option: int) -> bool:
    with suppress(OSError):
        sock.getsockopt(SOL_UDP, option)
        return True
    return False


def _switched(sock: socket.socket, option: int, on: bool) -> bool:
    """Switch an option; return whether it is on."""
    with suppress(OSError):
        sock.setsockopt(SOL_UDP, option, int(on))
        return on
    return False
