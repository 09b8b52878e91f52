"""Notice changes of nf_tables rules without asking a program.

Source: linux/netfilter/nf_tables.h, linux/netfilter/nfnetlink.h, netlink(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from flanneld.traffic.ports import Interest
from subnet.errors import KernelError

_NETLINK_NETFILTER = 12
_GROUP_NFTABLES = 7
_SUBSYSTEM_NFTABLES = 10

_NEW_TABLE, _DEL_TABLE = 0, 2
_NEW_CHAIN, _DEL_CHAIN = 3, 5
_NEW_RULE, _DEL_RULE = 6, 8
_NEW_GENERATION, _GET_GENERATION = 15, 16
_TABLES = frozenset({_NEW_TABLE, _DEL_TABLE})
_GENERATIONS = frozenset({_NEW_GENERATION, _GET_GENERATION})

_ATTR_GENERATION = 1
_ATTR_TABLE = 1
_ATTR_NAME_OF_CHAIN: dict[int, int] = {_NEW_CHAIN: 3, _DEL_CHAIN: 3, _NEW_RULE: 2, _DEL_RULE: 2}

_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_NFGEN = struct.Struct("=BBH")
_ATTR = struct.Struct("=HH")
_ATTR_TYPE_MASK = 0x3FFF

_RECEIVE_BYTES = 1 << 18
_ANSWER_TIMEOUT_S = 2.0


def messages(data: bytes) -> Iterator[tuple[int, dict[int, bytes]]]:
    """Yield (nf_tables message type, attributes) of each nf_tables message in a datagram."""
    while len(data) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        if kind >> 8 == _SUBSYSTEM_NFTABLES:
            yield kind & 0xFF, attributes(data[_HEADER.size + _NFGEN.size : length])
        data = data[_aligned(length) :]


def attributes(data: bytes) -> dict[int, bytes]:
    """Return the top-level attributes by type, values without their padding."""
    found: dict[int, bytes] = {}
    while len(data) >= _ATTR.size:
        length, kind = _ATTR.unpack_from(data)
        if length < _ATTR.size:
            break
        found[kind & _ATTR_TYPE_MASK] = data[_ATTR.size : length]
        data = data[_aligned(length) :]
    return found


def subject(kind: int, attrs: dict[int, bytes]) -> tuple[str, str | None] | None:
    """Return table and chain that a message is about, as ``Interest`` takes them; None if about none."""
    if kind in _GENERATIONS:
        return None
    if kind in _ATTR_NAME_OF_CHAIN:
        chain: str | None = _text(attrs, _ATTR_NAME_OF_CHAIN[kind])
    else:
        chain = "" if kind in _TABLES else None
    return _text(attrs, _ATTR_TABLE), chain


def _text(attrs: dict[int, bytes], kind: int) -> str:
    return attrs.get(kind, b"").rstrip(b"\0").decode(errors="replace")


def _aligned(length: int) -> int:
    return (length + 3) & ~3


class Generations:
    """The number of the current rule set, of the network namespace of the thread that makes this object.

    Raises KernelError where the kernel has no nf_tables.
    """

    def __init__(self) -> None:
        self._sequence = 0
        self._socket = _open(0)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        if self.number() is None:
            self.close()
            raise KernelError("watch", "nf_tables", errno.EOPNOTSUPP, "the kernel does not answer")

    def number(self) -> int | None:
        """Return the number the kernel increments with every committed change, None if it does not say."""
        kind = _SUBSYSTEM_NFTABLES << 8 | _GET_GENERATION
        self._sequence += 1
        request = _HEADER.pack(_HEADER.size + _NFGEN.size, kind, _REQUEST, self._sequence, 0)
        try:
            self._socket.send(request + _NFGEN.pack(socket.AF_UNSPEC, 0, 0))
            answer = self._socket.recv(_RECEIVE_BYTES)
            # An answer that came too late for its own question is not the one to this.
            while _HEADER.unpack_from(answer)[3] != self._sequence:
                answer = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            return None
        found = [attrs[_ATTR_GENERATION] for kind, attrs in messages(answer) if kind == _NEW_GENERATION]
        return int.from_bytes(found[0], "big") if found else None

    def close(self) -> None:
        """Give back the socket."""
        self._socket.close()


class NftWatch:
    """Notifications of rule changes in the network namespace of the thread that makes this object.

    Raises KernelError where the kernel has no nf_tables.
    """

    def __init__(self) -> None:
        self._events = _open(1 << (_GROUP_NFTABLES - 1))
        try:
            self._generations = Generations()
        except KernelError:
            self._events.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that is readable when rules changed."""
        return self._events.fileno()

    def drain(self, interest: Interest) -> bool:
        """Take all notifications; return whether one is of interest, or some were lost."""
        concerned = False
        while True:
            try:
                data = self._events.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return concerned
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise KernelError("read notifications of", "nf_tables", e.errno or 0, str(e)) from e
                concerned = True
                continue
            subjects = (subject(kind, attrs) for kind, attrs in messages(data))
            concerned = concerned or any(about is not None and interest(*about) for about in subjects)

    def generation(self) -> int | None:
        """Return the number the kernel increments with every committed change, None if it does not say."""
        return self._generations.number()

    def close(self) -> None:
        """Give back both sockets."""
        self._events.close()
        self._generations.close()


def _open(groups: int) -> socket.socket:
    sock = None
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        sock.bind((0, groups))
    except OSError as e:
        if sock is not None:
            sock.close()
        raise KernelError("watch", "nf_tables", e.errno or 0, os.strerror(e.errno or 0)) from e
    return sock
