"""Offloads of a device through SIOCETHTOOL (linux/ethtool.h, ethtool(8))."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct

SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO, ETHTOOL_GTXCSUM, ETHTOOL_STXCSUM = 0x03, 0x16, 0x17

VIRTUAL = frozenset({"virtio_net", "vmxnet3", "vif", "xen_netfront", "hv_netvsc"})
"""Drivers of devices whose other end is software, although they show themselves on a bus."""

_DRIVER = struct.Struct("=I32s32s32s32s32s12sIIIII")
"""struct ethtool_drvinfo: command, driver, version, firmware, bus address, and what does not matter here."""


def _ask(control: socket.socket, name: str, request: bytes) -> bytes:
    """Run one command; returns the request as the driver filled it in."""
    data = array.array("B", request)
    fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", name.encode(), data.buffer_info()[0]))
    return data.tobytes()


def _value(control: socket.socket, name: str, command: int, value: int) -> int:
    """Run one ethtool_value command; returns the value the driver left in it."""
    return int(struct.unpack("=II", _ask(control, name, struct.pack("=II", command, value)))[1])


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def _driver(control: socket.socket, name: str) -> tuple[str, str]:
    """Return the driver and the address of its bus; a device without hardware has none."""
    try:
        request = _DRIVER.pack(ETHTOOL_GDRVINFO, *(b"",) * 6, *(0,) * 5)
        fields = _DRIVER.unpack(_ask(control, name, request))
    except OSError as cause:
        if cause.errno != errno.EOPNOTSUPP:
            raise
        return "", ""
    return _text(fields[1]), _text(fields[4])


def unfinished(name: str) -> str:
    """Return why packets may leave a device without checksum and undivided; empty: they do not.

    A device that offers to compute checksums is handed packets without, and
    larger than its MTU. A NIC keeps the promise; the devices between
    containers, and between guests of one host, hand them on as they are.
    Raises OSError.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        if not _value(control, name, ETHTOOL_GTXCSUM, 0):
            return ""
        driver, bus = _driver(control, name)
    if bus and driver not in VIRTUAL:
        return ""
    return f"{name} ({driver or 'no driver'}) hands packets on with unfinished checksums"


def set_tx_checksum(name: str, enabled: bool) -> bool:
    """Switch transmit checksumming of ``name``; return whether it is on afterwards. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        if bool(_value(control, name, ETHTOOL_GTXCSUM, 0)) != enabled:
            _value(control, name, ETHTOOL_STXCSUM, int(enabled))
        return bool(_value(control, name, ETHTOOL_GTXCSUM, 0))
