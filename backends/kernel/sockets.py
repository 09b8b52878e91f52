"""Netlink sockets for messages by the batch: one send, an answer per message (netlink(7))."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from backends.kernel import rtnl
from backends.kernel.layout import run_of
from subnet.errors import KernelError

log = logging.getLogger(__name__)

SOL_NETLINK = 270
NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK = 10, 11, 12
RECEIVE_BYTES = 1 << 16
"""More than the kernel puts into one datagram of a dump (netlink_dump, 32 KiB)."""
BUFFER_BYTES = 2 << 20
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
TIMEOUT_S = 10
LAST_SEQUENCE = 0x7FFFFFFF
BATCH = 128
"""Messages per send. Each acknowledgement takes 832 bytes of a receive buffer of 212,992 by default."""
LARGE_BATCH = 1024
"""Messages per send where one acknowledgement is asked for; every refusal may be one more."""
ACK_BYTES = 1024
"""Of the receive buffer, per acknowledgement, with the kernel's own words."""
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
        self._large = self._enlarge()
        self.port_id: int = self._socket.getsockname()[0]
        self._sequence = 0
        self._interrupted = False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _enlarge(self) -> int:
        """Have large buffers if that is allowed; return how many messages a send may have."""
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // ACK_BYTES
        return max(1, min(LARGE_BATCH, room))

    def _next_sequence(self) -> int:
        self._sequence = self._sequence % LAST_SEQUENCE + 1
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

    def transact(self, messages: Sequence[bytes]) -> list[Refusal]:
        """Send requests that ask for no acknowledgement, by the datagram, and return those that were refused.

        Only the last of a datagram is made to be acknowledged: the kernel works
        in order, and tells of every refusal whether asked to or not. If its
        word is lost (ENOBUFS), the same is sent once more in small batches, so
        every request has to be one that may be repeated.
        """
        refused: list[Refusal] = []
        for start in range(0, len(messages), self._large):
            part = messages[start : start + self._large]
            try:
                found = self._exchange(part)
            except OSError as cause:
                log.debug("netlink: %s; sent again in small batches", cause)
                self._drain()
                found = self._carefully(part)
            refused += [(start + position, code, text) for position, code, text in found]
        return refused

    def _exchange(self, messages: Sequence[bytes]) -> list[Refusal]:
        first = self._sequence + 1
        if first + len(messages) > LAST_SEQUENCE:
            first = 1
        last = self._sequence = first + len(messages) - 1
        parts = [rtnl.with_sequence(one, sequence) for sequence, one in enumerate(messages, first)]
        parts[-1] = rtnl.acknowledged(parts[-1])
        self._socket.sendto(b"".join(parts), (0, 0))
        refused: list[Refusal] = []
        while True:
            buffer = self._socket.recv(RECEIVE_BYTES)
            for header in rtnl.messages(buffer):
                if header.kind != rtnl.NLMSG_ERROR or not first <= header.sequence <= last:
                    continue
                code, text = rtnl.decode_error(buffer, header)
                if code:
                    refused.append((header.sequence - first, code, text))
                if header.sequence == last:
                    return refused

    def _drain(self) -> None:
        """Drop what waits: the kernel adds nothing to a queue that overflowed until it is empty."""
        while True:
            try:
                self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except OSError as cause:
                if cause.errno != errno.ENOBUFS:
                    return

    def _carefully(self, messages: Sequence[bytes]) -> list[Refusal]:
        """Send small batches with an acknowledgement each."""
        refused: list[Refusal] = []
        for start in range(0, len(messages), BATCH):
            part = messages[start : start + BATCH]
            encoders = [partial(_acknowledged_as, one) for one in part]
            refused += [(start + position, code, text) for position, code, text in self.request(encoders)]
        return refused

    def buffers(self, request: bytes, what: object) -> list[bytes]:
        """Return the datagrams of a dump; an interrupted dump is begun anew, at most five times."""
        for _ in range(DUMP_TRIES):
            found, whole = self._collect(request, what)
            if whole:
                break
        return found

    def _collect(self, request: bytes, what: object) -> tuple[list[bytes], bool]:
        sequence = self._next_sequence()
        found: list[bytes] = []
        interrupted = done = False
        try:
            self._socket.sendto(rtnl.with_sequence(request, sequence), (0, 0))
            while not done:
                buffer = self._socket.recv(RECEIVE_BYTES)
                run = run_of(buffer)
                if run is None or run.kind in (rtnl.NLMSG_ERROR, rtnl.NLMSG_DONE):
                    headers = [h for h in rtnl.messages(buffer) if h.sequence == sequence]
                    if not headers:
                        continue
                    interrupted = interrupted or any(h.flags & rtnl.NLM_F_DUMP_INTR for h in headers)
                    done = any(h.kind == rtnl.NLMSG_DONE for h in headers)
                    if self._absent(buffer, headers, what):
                        return [], True
                elif run.sequence != sequence:
                    continue
                else:
                    interrupted = interrupted or any(flags & rtnl.NLM_F_DUMP_INTR for flags in run.flags)
                    done = run.done
                found.append(buffer)
        except OSError as cause:
            raise kernel_error("read", what, cause.errno or errno.ETIMEDOUT) from cause
        return found, not interrupted

    @staticmethod
    def _absent(buffer: bytes, headers: Sequence[rtnl.Header], what: object) -> bool:
        """Whether the kernel has no such table. Raises KernelError for other refusals."""
        for header in headers:
            if header.kind == rtnl.NLMSG_ERROR:
                code, text = rtnl.decode_error(buffer, header)
                if code in ABSENT:
                    return True
                raise kernel_error("read", what, code, text)
        return False

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


def _acknowledged_as(message: bytes, sequence: int) -> bytes:
    return rtnl.acknowledged(rtnl.with_sequence(message, sequence))
