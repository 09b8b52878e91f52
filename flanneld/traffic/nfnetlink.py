"""Talk with the kernel's nf_tables in its own words.

Source: linux/netfilter/nf_tables.h, linux/netfilter/nfnetlink.h, netlink(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator

from subnet.errors import KernelError

NEW_TABLE, GET_TABLE, DEL_TABLE = 0, 1, 2
NEW_CHAIN, GET_CHAIN, DEL_CHAIN = 3, 4, 5
NEW_RULE, GET_RULE, DEL_RULE = 6, 7, 8
NEW_GENERATION, GET_GENERATION = 15, 16

RECEIVE_BYTES = 1 << 18

_NETLINK_NETFILTER = 12
_SUBSYSTEM_NFTABLES = 10
_ERROR, _DONE = 2, 3
_REQUEST, _DUMP = 1, 0x300
_HEADER = struct.Struct("=IHHII")
_NFGEN = struct.Struct("=BBH")
_ATTR = struct.Struct("=HH")
_ATTR_TYPE_MASK = 0x3FFF
_ATTR_GENERATION = 1
_ANSWER_TIMEOUT_S = 2.0


def messages(data: bytes) -> Iterator[tuple[int, dict[int, bytes]]]:
    """Yield (nf_tables message type, attributes) of each nf_tables message in a datagram."""
    for kind, _, body in _netlink_messages(data):
        if kind >> 8 == _SUBSYSTEM_NFTABLES:
            yield kind & 0xFF, attributes(body[_NFGEN.size :])


def attributes(data: bytes) -> dict[int, bytes]:
    """Return the attributes by type, values without their padding."""
    return dict(attribute_list(data))


def attribute_list(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, value without its padding) of each attribute in order."""
    at = 0
    while len(data) - at >= _ATTR.size:
        length, kind = _ATTR.unpack_from(data, at)
        if length < _ATTR.size:
            return
        yield kind & _ATTR_TYPE_MASK, data[at + _ATTR.size : at + length]
        at += _aligned(length)


def text_attribute(kind: int, text: str) -> bytes:
    """Return an attribute that holds a name."""
    value = text.encode() + b"\0"
    return (_ATTR.pack(_ATTR.size + len(value), kind) + value).ljust(_aligned(_ATTR.size + len(value)), b"\0")


def open_socket(groups: int = 0) -> socket.socket:
    """Return a socket of the thread's network namespace. Raises KernelError."""
    sock = None
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        sock.bind((0, groups))
    except OSError as e:
        if sock is not None:
            sock.close()
        raise KernelError("open", "nf_tables", e.errno or 0, os.strerror(e.errno or 0)) from e
    return sock


class Questions:
    """Asks the kernel, over a socket of the network namespace of the thread that makes this object. Raises KernelError.

    Used from one thread; ``close`` gives the socket back.
    """

    def __init__(self) -> None:
        self._sequence = 0
        self._socket = open_socket()
        self._socket.settimeout(_ANSWER_TIMEOUT_S)

    def ask(self, kind: int, family: int, body: bytes = b"", *, dump: bool = False) -> list[dict[int, bytes]]:
        """Return the attributes of each message of the answer, none if there is no such thing. Raises KernelError."""
        self._sequence += 1
        flags = _REQUEST | (_DUMP if dump else 0)
        payload = _NFGEN.pack(family, 0, 0) + body
        head = _HEADER.pack(_HEADER.size + len(payload), _SUBSYSTEM_NFTABLES << 8 | kind, flags, self._sequence, 0)
        found: list[dict[int, bytes]] = []
        try:
            self._socket.send(head + payload)
            while not self._take(self._socket.recv(RECEIVE_BYTES), found, dump):
                pass
        except OSError as e:
            raise KernelError("read", "nf_tables", e.errno or 0, str(e)) from e
        return found

    def _take(self, data: bytes, found: list[dict[int, bytes]], dump: bool) -> bool:
        """Collect what a datagram says; return whether the answer is complete."""
        for kind, sequence, body in _netlink_messages(data):
            # An answer that came too late for its own question is not the one to this.
            if sequence != self._sequence:
                continue
            if kind == _DONE:
                return True
            if kind == _ERROR:
                code = -int.from_bytes(body[:4], sys.byteorder, signed=True)
                if code in {0, errno.ENOENT}:
                    return True
                raise KernelError("read", "nf_tables", code, os.strerror(code))
            found.append(attributes(body[_NFGEN.size :]))
            if not dump:
                return True
        return False

    def generation(self) -> int | None:
        """Return the number the kernel increments with every committed change, None if it does not say."""
        try:
            (answer,) = self.ask(GET_GENERATION, socket.AF_UNSPEC)
            return int.from_bytes(answer[_ATTR_GENERATION], "big")
        except (KernelError, KeyError, ValueError):
            return None

    def close(self) -> None:
        """Give back the socket."""
        self._socket.close()


def _netlink_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (type, sequence number, body) of each message in a datagram."""
    at = 0
    while len(data) - at >= _HEADER.size:
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, sequence, data[at + _HEADER.size : at + length]
        at += _aligned(length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
