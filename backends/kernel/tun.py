"""A TUN device: packets that the kernel routes to it are read from a file descriptor, and the reverse.

Sources: Documentation/networking/tuntap.rst, linux/if_tun.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from subnet.errors import KernelError

NODE: Final = Path("/dev/net/tun")

TUNSETIFF: Final = 0x400454CA
TUNGETIFF: Final = 0x800454D2
SIOCSIFTXQLEN: Final = 0x8943
TUNSETOFFLOAD: Final = 0x400454D0
TUNSETPERSIST: Final = 0x400454CB
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN, TUN_F_USO4, TUN_F_USO6 = 0x01, 0x02, 0x04, 0x08, 0x20, 0x40
_SEGMENT_TCP: Final = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN
_SEGMENT_UDP: Final = TUN_F_USO4 | TUN_F_USO6
"""The kernel takes both or none (Linux 6.2)."""

_IFREQ_INT = struct.Struct("16si20x")
_IFREQ = struct.Struct("16sH22x")

_REMEDIES: Final = {
    errno.ENOENT: "the device node is missing; make it with: mkdir -p /dev/net && mknod /dev/net/tun c 10 200, "
    "or pass it to the container",
    errno.ENXIO: "the kernel has no TUN support; load it with: modprobe tun",
    errno.ENODEV: "the kernel has no TUN support; load it with: modprobe tun",
    errno.EPERM: "not permitted; the process needs the capability CAP_NET_ADMIN",
    errno.EACCES: "not permitted; the process needs access to the device node",
    errno.EBUSY: "another process reads from it",
}


@dataclass(frozen=True, slots=True)
class Tun:
    """An open device. It lives as long as its descriptor, unless it is kept: whoever holds it closes it.

    ``vnet_hdr``: a struct virtio_net_hdr (10 bytes, native order) precedes every
    packet. ``tso``, ``uso``: the kernel hands over TCP and UDP packets that are
    still to be cut into segments, and takes such.
    """

    fd: int
    name: str
    vnet_hdr: bool = False
    tso: bool = False
    uso: bool = False

    def index(self) -> int:
        """Return the device's index. Raises KernelError if it is gone."""
        try:
            return socket.if_nametoindex(self.name)
        except OSError as cause:
            raise KernelError("find", f"device {self.name}", errno.ENODEV, "it was removed at once") from cause

    def hold(self, packets: int) -> None:
        """Let so many packets wait for a reader. Raises OSError."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
            fcntl.ioctl(control, SIOCSIFTXQLEN, _IFREQ_INT.pack(self.name.encode(), packets))

    def keep(self, kept: bool) -> None:
        """Let the device outlive its descriptors, or not. Raises KernelError."""
        try:
            fcntl.ioctl(self.fd, TUNSETPERSIST, int(kept))
        except OSError as cause:
            raise _error("keep" if kept else "let go", f"device {self.name}", cause) from cause

    def close(self) -> None:
        """Close the descriptor; device, addresses and routes are gone when this returns.

        Unless the device is kept, or the descriptor has a copy.
        """
        os.close(self.fd)


def open_tun(pattern: str, *, offloads: bool = False) -> Tun:
    """Create a device, down and without address; ``%d`` in ``pattern`` becomes the first free number.

    A device of that name that is kept and that nobody reads from is opened as it
    is. ``offloads`` asks for everything that spares work per packet; the result
    tells what the kernel granted. Raises KernelError with the remedy.
    """
    try:
        fd = os.open(NODE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as cause:
        raise _error("open", NODE, cause) from cause
    try:
        return _attach(fd, pattern, offloads)
    except OSError as cause:
        os.close(fd)
        raise _error("create device", pattern, cause) from cause


def adopt_tun(fd: int, *, offloads: bool = False) -> Tun | None:
    """Return the device behind a descriptor of an earlier process, None if it is gone or has the other header."""
    try:
        name, flags = _IFREQ.unpack(fcntl.ioctl(fd, TUNGETIFF, bytes(_IFREQ.size)))
    except OSError:
        return None
    if not flags & IFF_TUN or bool(flags & IFF_VNET_HDR) is not offloads:
        return None
    os.set_blocking(fd, False)
    return _with_offloads(fd, name.rstrip(b"\0").decode()) if offloads else Tun(fd, name.rstrip(b"\0").decode())


def _attach(fd: int, pattern: str, offloads: bool) -> Tun:
    vnet_hdr = offloads
    try:
        name = _set_interface(fd, pattern, IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if vnet_hdr else 0))
    except OSError as cause:
        if not vnet_hdr or cause.errno != errno.EINVAL:
            raise
        vnet_hdr = False
        name = _set_interface(fd, pattern, IFF_TUN | IFF_NO_PI)
    return _with_offloads(fd, name) if vnet_hdr else Tun(fd, name)


def _with_offloads(fd: int, name: str) -> Tun:
    uso = _offered(fd, _SEGMENT_TCP | _SEGMENT_UDP)
    tso = uso or _offered(fd, _SEGMENT_TCP)
    return Tun(fd, name, True, tso, uso)


def _set_interface(fd: int, pattern: str, flags: int) -> str:
    answer = fcntl.ioctl(fd, TUNSETIFF, _IFREQ.pack(pattern.encode(), flags))
    return str(_IFREQ.unpack(answer)[0].rstrip(b"\0").decode())


def _offered(fd: int, flags: int) -> bool:
    """Ask for offloads; the kernel refuses a set of which it does not know every one."""
    try:
        fcntl.ioctl(fd, TUNSETOFFLOAD, flags)
    except OSError as cause:
        if cause.errno != errno.EINVAL:
            raise
        return False
    return True


def _error(operation: str, target: object, cause: OSError) -> KernelError:
    code = cause.errno or 0
    return KernelError(operation, target, code, _REMEDIES.get(code, os.strerror(code).lower()))
