"""Checksum offload of a device through SIOCETHTOOL (linux/ethtool.h, ethtool(8))."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

SIOCETHTOOL = 0x8946
ETHTOOL_GTXCSUM, ETHTOOL_STXCSUM = 0x16, 0x17


def _value(control: socket.socket, name: str, command: int, value: int) -> int:
    """Run one ethtool_value command; returns the value the driver left in it."""
    data = array.array("B", struct.pack("=II", command, value))
    request = struct.pack("16sP", name.encode(), data.buffer_info()[0])
    fcntl.ioctl(control, SIOCETHTOOL, request)
    return int(struct.unpack("=II", data.tobytes())[1])


def set_tx_checksum(name: str, enabled: bool) -> bool:
    """Switch transmit checksumming of ``name``; return whether it is on afterwards. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        if bool(_value(control, name, ETHTOOL_GTXCSUM, 0)) != enabled:
            _value(control, name, ETHTOOL_STXCSUM, int(enabled))
        return bool(_value(control, name, ETHTOOL_GTXCSUM, 0))
