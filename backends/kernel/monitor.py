"""Listens to the kernel's notifications and hands them on.

Changes made through our own bulk socket are skipped by its port id where the
kernel tells it; the others are recognised by the reader's record.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from backends.dataplane.ports import KernelEvent, Overflow
from backends.kernel import rtnl

log = logging.getLogger(__name__)

RTMGRP_LINK, RTMGRP_NEIGH = 0x1, 0x4
RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE = 0x10, 0x40
RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE = 0x100, 0x400
GROUPS = RTMGRP_LINK | RTMGRP_NEIGH | RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 8 << 20
"""Room for about ten thousand notifications of 832 bytes each."""

Deliver = Callable[[Sequence[KernelEvent]], None]


class Monitor:
    """A thread that delivers kernel events in the order in which they happened."""

    def __init__(self, deliver: Deliver, own_ports: frozenset[int] = frozenset()) -> None:
        self._deliver, self._own_ports = deliver, own_ports
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.bind((0, GROUPS))
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.thread = threading.Thread(target=self._run, name="kernel-monitor", daemon=True)

    def start(self) -> None:
        """Begin to listen. The socket is bound already: what happens meanwhile is not lost."""
        self.thread.start()

    def close(self) -> None:
        """End the thread."""
        with suppress(OSError):
            os.write(self._wake_write, b"x")
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(1)

    def _run(self) -> None:
        with self._socket:
            while True:
                readable, _, _ = select.select([self._socket.fileno(), self._wake_read], [], [])
                if self._wake_read in readable:
                    return
                events = self._read()
                if events:
                    self._deliver(events)

    def _read(self) -> list[KernelEvent]:
        """Take everything that waits, so that a burst is delivered as one."""
        events: list[KernelEvent] = []
        while True:
            try:
                buffer = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return events
            except OSError as cause:
                if cause.errno != errno.ENOBUFS:
                    raise
                log.debug("kernel notifications were lost")
                events.append(Overflow())
                continue
            for header in rtnl.messages(buffer):
                if header.port and header.port in self._own_ports:
                    continue
                event = rtnl.decode_event(buffer, header)
                if event is not None:
                    events.append(event)
