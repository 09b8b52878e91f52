"""Generic netlink: what messages of its protocols have in common, and the protocols' numbers (linux/genetlink.h)."""

from __future__ import annotations

import struct
from typing import Final

from backends.kernel.rtnl import NLM_F_REQUEST, Header, attribute, attributes, message
from backends.kernel.sockets import NetlinkSocket

NETLINK_GENERIC: Final = 16
GENL_ID_CTRL, CTRL_VERSION, CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME = 16, 2, 3, 1, 2

_GENL = struct.Struct("=BBH")
_U16 = struct.Struct("=H")


def request(protocol: int, version: int, flags: int, sequence: int, command: int, body: bytes = b"") -> bytes:  # noqa: PLR0917
    """Return the request for a command of a protocol."""
    return message(protocol, flags, sequence, _GENL.pack(command, version, 0) + body)


def attributes_of(buffer: bytes, header: Header) -> dict[int, bytes]:
    """Return the attributes of a message by type."""
    return attributes(buffer, header.start + _GENL.size, header.end)


def get_family(name: str) -> bytes:
    """Ask for the number of a protocol; the kernel loads the module if it can find it by this name."""
    body = attribute(CTRL_ATTR_FAMILY_NAME, name.encode() + b"\0")
    return request(GENL_ID_CTRL, CTRL_VERSION, NLM_F_REQUEST, 0, CTRL_CMD_GETFAMILY, body)


def decode_family(buffer: bytes, header: Header) -> int:
    """Return the number of the protocol, 0 if the message does not tell."""
    raw = attributes_of(buffer, header).get(CTRL_ATTR_FAMILY_ID)
    return int(_U16.unpack(raw)[0]) if raw else 0


def number_of(channel: NetlinkSocket, name: str) -> int:
    """Return a protocol's number, another when its module is loaded anew; 0: there is none. Raises KernelError."""
    answer = channel.first(get_family(name), f"the number of protocol {name}")
    return decode_family(*answer) if answer is not None else 0
