"""Netlink sockets for messages by the batch: one send, an answer per message (netlink(7))."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

from backends.kernel import rtnl
from subnet.errors import KernelError

SOL_NETLINK = 270
NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK = 10, 11, 12
RECEIVE_BYTES = 1 << 20
TIMEOUT_S = 10
BATCH = 128
"""Messages per send. Each acknowledgement takes 832 bytes of a receive buffer of 212,992 by default."""
DUMP_TRIES = 5
ABSENT = frozenset({errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP})
"""Answers of a kernel that has no such table, or no such address family: nothing is there."""

Encode: TypeAlias = Callable[[int], bytes]
"""Returns a request under the sequence number given."""
Refusal: TypeAlias = tuple[int, int, str]
"""Position of a refused request, errno, and the kernel's own words if it gave any."""


def kernel_error(operation: str, target: object, code: int, text: str = "") -> KernelError:
    """Return the error for an errno, with the kernel's own words."""
    reason = os.strerror(code).lower() if code else "failed"
    return KernelError(operation, target, code, f"{reason} ({text})" if text else reason)


class NetlinkSocket:
    """A socket of one netlink protocol, in the network namespace of the thread that makes it."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        # Missing on old kernels: then errors carry no text, and dumps are filtered here.
        for option in (NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK):
            with suppress(OSError):
                self._socket.setsockopt(SOL_NETLINK, option, 1)
        self._socket.bind((0, 0))
        self._socket.settimeout(TIMEOUT_S)
        self.port_id: int = self._socket.getsockname()[0]
        self._sequence = 0
        self._interrupted = False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _next_sequence(self) -> int:
        self._sequence = self._sequence % 0x7FFFFFFF + 1
        return self._sequence

    def request(self, encoders: Sequence[Encode]) -> list[Refusal]:
        """Send the requests, at most BATCH, as one datagram; return those that were refused."""
        if not encoders:
            return []
        pending: dict[int, int] = {}
        parts: list[bytes] = []
        for position, encode in enumerate(encoders):
            sequence = self._next_sequence()
            pending[sequence] = position
            parts.append(encode(sequence))
        refused: list[Refusal] = []
        try:
            self._socket.sendto(b"".join(parts), (0, 0))
            while pending:
                buffer = self._socket.recv(RECEIVE_BYTES)
                for header in rtnl.messages(buffer):
                    position_seen = pending.pop(header.sequence, None)
                    if position_seen is None or header.kind != rtnl.NLMSG_ERROR:
                        continue
                    code, text = rtnl.decode_error(buffer, header)
                    if code:
                        refused.append((position_seen, code, text))
        except OSError as cause:
            # Acknowledgements were lost: the caller observes again, so calling all of them refused is safe.
            code = cause.errno or errno.ETIMEDOUT
            refused += [(position, code, "no acknowledgement") for position in pending.values()]
        return refused

    def first(self, request: bytes, what: object, operation: str = "read") -> tuple[bytes, rtnl.Header] | None:
        """Return the first message of an answer, None if there is no such thing. What follows stays unread."""
        return next(self._answers(request, what, operation), None)

    def dump(self, request: bytes, what: str) -> list[tuple[bytes, rtnl.Header]]:
        """Return the messages of a dump; an interrupted dump is begun anew, at most five times."""
        for _ in range(DUMP_TRIES):
            self._interrupted = False
            found = list(self._answers(request, what))
            if not self._interrupted:
                break
        return found

    def _answers(self, request: bytes, what: object, operation: str = "read") -> Iterator[tuple[bytes, rtnl.Header]]:
        sequence = self._next_sequence()
        try:
            self._socket.sendto(rtnl.with_sequence(request, sequence), (0, 0))
            while True:
                buffer = self._socket.recv(RECEIVE_BYTES)
                for header in rtnl.messages(buffer):
                    if header.sequence != sequence:
                        continue
                    self._interrupted = self._interrupted or bool(header.flags & rtnl.NLM_F_DUMP_INTR)
                    if header.kind == rtnl.NLMSG_ERROR:
                        code, text = rtnl.decode_error(buffer, header)
                        if code in ABSENT:
                            return
                        raise kernel_error(operation, what, code, text)
                    if header.kind == rtnl.NLMSG_DONE:
                        return
                    yield buffer, header
        except OSError as cause:
            raise kernel_error(operation, what, cause.errno or errno.ETIMEDOUT) from cause
