"""Offloads of a device by their names in ethtool(8) (linux/ethtool.h)."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Mapping

SIOCETHTOOL = 0x8946
GSTRINGS, SFEATURES, FEATURE_SET, NAME_BYTES, MOST = 0x1B, 0x3B, 4, 32, 512

NIC: Mapping[str, bool] = {
    "tx-tcp-segmentation": False,
    "tx-tcp6-segmentation": False,
    "tx-tcp-ecn-segmentation": False,
    "tx-tcp-mangleid-segmentation": False,
    "tx-udp_tnl-segmentation": False,
    "tx-udp_tnl-csum-segmentation": False,
    "tx-udp-segmentation": False,
    "tx-generic-segmentation": True,
    "rx-gro": True,
}
"""What nothing crosses undivided, and what is received as from a NIC."""


def _ask(control: socket.socket, device: str, data: array.array[int]) -> bytes:
    fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", device.encode(), data.buffer_info()[0]))
    return data.tobytes()


def features(control: socket.socket, device: str) -> dict[str, int]:
    """Return the number of each feature by its name."""
    data = array.array("B", struct.pack("=III", GSTRINGS, FEATURE_SET, 0) + bytes(MOST * NAME_BYTES))
    said = _ask(control, device, data)
    count = int(struct.unpack_from("=I", said, 8)[0])
    names = (said[12 + n * NAME_BYTES :][:NAME_BYTES] for n in range(count))
    return {name.split(b"\0", 1)[0].decode(): number for number, name in enumerate(names)}


def switch(device: str, wanted: Mapping[str, bool]) -> None:
    """Switch features of a device of this namespace on or off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        numbers = features(control, device)
        words = [[0, 0] for _ in range(-(-len(numbers) // 32))]
        for name, on in wanted.items():
            bit = 1 << numbers[name] % 32
            words[numbers[name] // 32][0] |= bit
            words[numbers[name] // 32][1] |= bit if on else 0
        body = b"".join(struct.pack("=II", *word) for word in words)
        _ask(control, device, array.array("B", struct.pack("=II", SFEATURES, len(words)) + body))
